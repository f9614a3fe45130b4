"""`applied` waits for a marker: what it returns, whom it waits for, and what it holds meanwhile."""

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, MetaData, create_engine, event, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker

from cancellation import CancelledAtAwait, assert_others_can_write
from databases import Database, Driver, each_driver, until
from projector_dedup import AsyncDispatcher, Dispatcher, Message, Outcome, make_tables, on, projector
from projector_dedup.building import building
from projector_dedup.dialects import configure_sqlite
from projector_dedup.errors import (
    DeliveryFailed,
    HandlerDefinitionError,
    InvalidMessageIdError,
    MissingTableError,
    UnsafeSessionError,
    UnsupportedDatabaseError,
)
from projector_dedup.message import stored_id
from projector_dedup.tables import default_tables
from projector_dedup.testing import external_transaction
from rig import (
    NOTHING,
    ONCE,
    ONE_ATTEMPT,
    Outside,
    Rig,
    RigOn,
    Total,
    add,
    added,
    create_tables,
    dispatcher_on,
    done,
    handler_of,
)

LONG = 60.0  # seconds; no test waits as long
BOUNDS = {"mariadb": "set innodb_lock_wait_timeout = 1"}
"""A look that waits for a lock fails, instead of a test that does not end."""


def adds(_event: Any, session: Session) -> None:
    """Add 1."""
    add(session)


def fails(_event: Any, _session: Session) -> None:
    """Fail."""
    raise ZeroDivisionError


def dispatcher_of(rig: Rig, *projectors: Any, **options: Any) -> Any:
    """Return a dispatcher of the rig's kind."""
    kind: Any = AsyncDispatcher if rig.driver.is_async else Dispatcher
    return kind(rig.factory, *projectors, retry=ONE_ATTEMPT, **options)


def method(rig: Rig, body: Callable[..., Any], event_name: str = "added") -> Any:
    """Return a method with ``@on`` that calls ``body``."""

    async def awaited(_self: Any, happened: Any, session: AsyncSession) -> None:
        await session.run_sync(lambda inner: body(happened, inner))

    def direct(_self: Any, happened: Any, session: Session) -> None:
        body(happened, session)

    return on(event_name)(awaited if rig.driver.is_async else direct)


def class_of(rig: Rig, name: str, body: Callable[..., Any] = adds, **settings: Any) -> Any:
    """Return a projector class with one handler, ``add``, that calls ``body``."""
    return projector(idempotent=True, name=name, **settings)(type("Made", (), {"add": method(rig, body)}))


def totals_of(rig: Rig, **options: Any) -> Any:
    """Return a dispatcher of the rig's kind, whose handler ``totals`` adds 1."""
    return dispatcher_of(rig, handler_of(rig.factory, adds, "totals"), **options)


def looked(rig: Rig, dispatcher: Any, message_id: str = "m-1", by: Any = "totals", **options: Any) -> bool:
    """Return what one look finds, or what ``applied`` returns after a wait of ``timeout``."""
    found: bool = rig.result(dispatcher.applied(message_id, by=by, **{"timeout": 0, **options}))
    return found


class Pausing:
    """Waits as the dispatcher does, notes each pause, and does something in it."""

    def __init__(self, dispatcher: Any, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.pauses: list[float] = []
        self._meanwhile = meanwhile
        self._waiting = dispatcher._waiting
        dispatcher._waiting = self

    def sleep(self, seconds: float) -> None:
        """Note the pause."""
        self.pauses.append(seconds)
        self._meanwhile()
        self._waiting.sleep(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._waiting, name)


@contextlib.contextmanager
def held_delivery(rig: Rig) -> Iterator[tuple[Future[Any], Event]]:
    """A delivery of m-1 to ``totals``, on another engine: it has written, and does not commit before the event."""
    has_written, may_commit = Event(), Event()

    def holds(_event: Any, session: Session) -> None:
        add(session)
        has_written.set()
        assert may_commit.wait(LONG)

    engine = create_engine(rig.outside.database.url())
    factory = sessionmaker(engine)
    with ThreadPoolExecutor(1) as threads:
        try:
            delivery = threads.submit(Dispatcher(factory, handler_of(factory, holds, "totals")).deliver, added("m-1"))
            until(lambda: has_written.is_set() or delivery.done())
            assert has_written.is_set(), delivery.exception()
            yield delivery, may_commit
        finally:
            may_commit.set()
    engine.dispose()


# The result ---------------------------------------------------------------------------------------------------------


@each_driver()
def test_a_message_is_applied_when_its_delivery_has_returned(rig: Rig) -> None:
    """One look is enough; another message, and another handler, are not applied."""
    totals, other = (handler_of(rig.factory, adds, name) for name in ("totals", "other"))
    rig.result(dispatcher_of(rig, totals).deliver(added("m-1")))
    dispatcher = dispatcher_of(rig, totals, other)
    assert looked(rig, dispatcher)
    assert not looked(rig, dispatcher, "m-2", timeout=0.02)
    assert not looked(rig, dispatcher, by="other", timeout=0.02)
    rig.assert_nothing_is_left()


@each_driver()
def test_a_marker_without_its_commit_is_not_seen_and_not_waited_for(driver: Driver, rig_on: RigOn) -> None:
    """A look beside a delivery that has written returns False; the wait that saw nothing ends behind its COMMIT."""
    rig = rig_on(driver)
    if driver.engine in BOUNDS:
        event.listen(rig.sync_engine, "connect", _bounded)
    dispatcher = totals_of(rig)
    with held_delivery(rig) as (delivery, may_commit):
        assert not looked(rig, dispatcher)
        pausing = Pausing(dispatcher, may_commit.set)
        assert looked(rig, dispatcher, timeout=LONG)
        assert pausing.pauses, "it has seen the marker before the COMMIT"
        assert delivery.result().outcome is Outcome.APPLIED
    assert rig.durable() == ONCE


@each_driver("sqlite")
def test_a_look_beside_a_writer_in_wal_mode(driver: Driver, sqlite: Database) -> None:
    """Readers neither wait for the writer nor see its writes, as with a rollback journal."""
    create_tables(sqlite.url())
    with Rig(driver, Outside(sqlite)) as rig:
        configure_sqlite(rig.engine)
        dispatcher = totals_of(rig)
        assert not looked(rig, dispatcher)  # chooses the mode
        with held_delivery(rig):
            assert not looked(rig, dispatcher)
            assert rig.outside.execute("pragma journal_mode") == [("wal",)]
        assert looked(rig, dispatcher)


@each_driver()
def test_a_look_at_serializable_waits_for_no_delivery(driver: Driver, rig_on: RigOn) -> None:
    """MariaDB locks what a SELECT at SERIALIZABLE reads. A look locks nothing, and the next user has that level."""
    rig = rig_on(driver, isolation_level="SERIALIZABLE", pool_size=1, max_overflow=0)
    if driver.engine in BOUNDS:
        event.listen(rig.sync_engine, "connect", _bounded)
    dispatcher = totals_of(rig)
    with held_delivery(rig):
        assert not looked(rig, dispatcher)
    assert looked(rig, dispatcher)
    assert rig.in_one_task(lambda: _level(rig)) == "SERIALIZABLE"


def _bounded(dbapi_connection: Any, _record: object) -> None:
    cursor = dbapi_connection.cursor()
    cursor.execute(BOUNDS["mariadb"])
    cursor.close()


def _level(rig: Rig) -> str:
    """The isolation level that the server reports to another user of the pool."""
    connection = done(rig.engine.connect())
    level: str = done(connection.get_isolation_level())
    done(connection.close())
    return level


@each_driver("postgresql", "mariadb", usual=True)
def test_an_engine_in_autocommit_can_look(driver: Driver, rig_on: RigOn) -> None:
    """A look writes nothing, so nothing must commit together."""
    rig = rig_on(driver, isolation_level="AUTOCOMMIT")
    dispatcher = totals_of(rig)
    with held_delivery(rig):
        assert not looked(rig, dispatcher)
    assert looked(rig, dispatcher)


@each_driver(usual=True)
def test_a_former_name_counts(rig: Rig) -> None:
    """Old code has a marker under its own name only, and new code that declares this name finds it."""
    old, new = class_of(rig, "old"), class_of(rig, "new", formerly=["old"])
    rig.result(dispatcher_of(rig, old()).deliver(added("m-1")))
    assert looked(rig, dispatcher_of(rig, new()), by=new)
    unrelated = class_of(rig, "new")
    assert not looked(rig, dispatcher_of(rig, unrelated()), by=unrelated)


@each_driver(usual=True)
def test_of_several_entries_all_must_have_applied_the_message(rig: Rig) -> None:
    """One handler applies the message, and the other one fails until it is mended."""
    one, two, mended = class_of(rig, "one"), class_of(rig, "two", fails), class_of(rig, "two")
    dispatcher = dispatcher_of(rig, one(), two())
    with pytest.raises(DeliveryFailed):
        rig.result(dispatcher.deliver(added("m-1")))
    assert looked(rig, dispatcher, by=one)
    assert not looked(rig, dispatcher, by=two)
    assert not looked(rig, dispatcher, by=[one, two])
    dispatcher = dispatcher_of(rig, one(), mended())
    rig.result(dispatcher.deliver(added("m-1")))
    assert looked(rig, dispatcher, by=[one, mended])
    assert looked(rig, dispatcher, by=("one", "two.add"))


@each_driver(usual=True)
def test_a_projector_stands_for_that_of_its_handlers_which_takes_the_message(rig: Rig) -> None:
    """Each event of the class has one handler."""
    handlers = {"add": method(rig, adds), "remove": method(rig, adds, "removed")}
    both = projector(idempotent=True, name="both")(type("Both", (), handlers))
    dispatcher = dispatcher_of(rig, both())
    rig.result(dispatcher.deliver(Message("m-1", {}, type="removed")))
    assert looked(rig, dispatcher, by=both)
    assert looked(rig, dispatcher, by="both")
    assert looked(rig, dispatcher, by="both.remove")
    assert not looked(rig, dispatcher, by="both.add")


@each_driver(usual=True)
def test_a_generation_that_is_building_is_waited_for_by_its_own_name(rig: Rig) -> None:
    """The old generation has applied a message on which the new one fails."""
    old, new, mended = class_of(rig, "old"), class_of(rig, "new", fails), class_of(rig, "new")
    dispatcher = dispatcher_of(rig, old(), building(new(), beside="old"))
    rig.result(dispatcher.deliver(added("m-1")))
    assert looked(rig, dispatcher, by=old)
    assert not looked(rig, dispatcher, by=new)
    dispatcher = dispatcher_of(rig, old(), building(mended(), beside="old"))
    rig.result(dispatcher.deliver(added("m-1")))
    assert looked(rig, dispatcher, by=[old, mended])


@each_driver(usual=True)
def test_an_id_with_its_source_is_another_id(rig: Rig) -> None:
    """The consumer's source belongs to the id, as in the marker."""
    dispatcher = totals_of(rig)
    rig.result(dispatcher.deliver(Message("m-1", {}, type="added", source="shop")))
    assert looked(rig, dispatcher, source="shop")
    assert looked(rig, dispatcher, stored_id("m-1", "shop"))
    assert not looked(rig, dispatcher)
    assert not looked(rig, dispatcher, source="mail")


@each_driver("postgresql", "mariadb", is_async=False, usual=True)
def test_a_transaction_that_is_older_than_the_answer_keeps_its_snapshot(rig: Rig) -> None:
    """At REPEATABLE READ it shows the old amount after ``applied`` returned True, and a new transaction the new one."""
    dispatcher = totals_of(rig)
    rig.deliver(add, "m-0")
    with Session(rig.sync_engine.execution_options(isolation_level="REPEATABLE READ")) as older:
        assert older.scalar(select(Total.amount)) == 1
        dispatcher.deliver(added("m-1"))
        assert looked(rig, dispatcher)
        assert older.scalar(select(Total.amount)) == 1
    with Session(rig.sync_engine) as newer:
        assert newer.scalar(select(Total.amount)) == 2


KILLED = """
import os, signal, sys
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker
from projector_dedup import Dispatcher, Message, on, projector

@projector(idempotent=True, name="totals")
@on("added")
def totals(event, session):
    session.execute(text("insert into total (account, amount) values ('a', 1)"))
    os.kill(os.getpid(), signal.SIGKILL)

Dispatcher(sessionmaker(create_engine(sys.argv[1])), totals).deliver(Message("m-1", {}, type="added"))
"""


@each_driver(is_async=False, usual=True)
def test_a_delivery_that_is_killed_has_not_applied_its_message(rig: Rig) -> None:
    """SIGKILL before the COMMIT leaves False; the redelivery makes it True."""
    url = rig.sync_engine.url.render_as_string(hide_password=False)
    killed = subprocess.run([sys.executable, "-c", KILLED, url], check=False)
    assert killed.returncode == -signal.SIGKILL
    dispatcher = totals_of(rig)
    assert not looked(rig, dispatcher)
    until(lambda: rig.deliver(add).outcome is Outcome.APPLIED)
    assert looked(rig, dispatcher)
    assert rig.durable() == ONCE


# The wait -----------------------------------------------------------------------------------------------------------


@each_driver()
def test_no_connection_is_held_in_a_pause(driver: Driver, rig_on: RigOn) -> None:
    """The only connection of the pool delivers the message in a pause of the wait; each look takes it once."""
    rig = rig_on(driver, pool_size=1, max_overflow=0, pool_timeout=1)
    dispatcher, delivering = totals_of(rig), totals_of(rig)
    assert not looked(rig, dispatcher)  # what an engine is asked once is asked now
    looks: list[object] = []
    event.listen(rig.sync_engine, "checkout", lambda *_: looks.append(None))
    before: list[int] = []

    def delivers() -> None:
        assert rig.sync_engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
        before.append(len(looks))
        if len(before) == 2:
            done(delivering.deliver(added("m-1")))

    Pausing(dispatcher, delivers)
    assert looked(rig, dispatcher, timeout=LONG)
    assert before == [1, 2]
    rig.assert_settled(ONCE)


@each_driver("sqlite")
def test_the_pauses_grow_and_the_last_look_is_at_the_deadline(rig: Rig) -> None:
    """Each pause is twice the one before, at most a quarter of a second, and none lasts longer than the wait."""
    dispatcher, delivering = totals_of(rig), totals_of(rig)
    pausing = Pausing(dispatcher)
    assert not looked(rig, dispatcher, timeout=1.2)
    full = [0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.25, 0.25]
    assert pausing.pauses[:6] == full[:6]
    assert max(pausing.pauses) == 0.25
    assert sum(pausing.pauses) <= 1.2

    dispatcher = totals_of(rig)
    last = Pausing(dispatcher, lambda: last.pauses[-1] in full or done(delivering.deliver(added("m-1"))))
    assert looked(rig, dispatcher, timeout=1.0), "nobody has looked at the end"


@each_driver(is_async=True)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_wait_can_be_cancelled_at_each_await(rig: Rig, warm: bool, late: bool) -> None:
    """No connection is lost, nothing stays open, and the next delivery and the next look find what they should."""
    dispatcher = totals_of(rig)
    assert not looked(rig, dispatcher)  # SQLAlchemy 2.0 keeps an engine's first connection if it is cancelled there
    result: bool | None = None
    for nth in range(200):
        if warm:
            assert not looked(rig, dispatcher)
        else:
            rig.dispose()
        cut = CancelledAtAwait(dispatcher.applied("m-1", by="totals", timeout=0.015), nth, late=late)

        async def waited(cut: CancelledAtAwait = cut) -> bool | None:
            try:
                found: bool = await cut
                return found
            except asyncio.CancelledError:
                return None

        result = rig.run(waited())
        assert result is not True
        if warm and cut.suspended > nth:  # asyncmy may lose a cancellation while it connects
            assert result is None
        rig.assert_nothing_is_left()
        if cut.suspended <= nth:
            break
        assert_others_can_write(rig)
    assert result is False
    assert nth > 3
    rig.result(dispatcher.deliver(added("m-1")))
    assert looked(rig, dispatcher)


# The session --------------------------------------------------------------------------------------------------------


@each_driver(usual=True)
def test_a_wait_inside_a_handler_is_refused(rig: Rig) -> None:
    """It would hold the handler's locks, perhaps against the delivery that it waits for."""
    inner = totals_of(rig)

    def waits(_event: Any, session: Session) -> None:
        add(session)
        done(inner.applied("m-0", by="totals"))

    with pytest.raises(UnsafeSessionError, match=r"applied\(\) was called inside a handler"):
        rig.result(dispatcher_on(rig.factory, waits).deliver(added("m-1")))
    rig.assert_settled(NOTHING)


@each_driver(usual=True)
def test_a_look_in_an_outer_transaction_finds_what_it_has_delivered(rig: Rig) -> None:
    """A test that rolls back sees its own markers, and its transaction stays as it was."""

    def in_an_outer_transaction() -> None:
        connection = rig.engine.connect() if isinstance(rig.engine, Engine) else done(rig.engine.connect().start())
        done(connection.exec_driver_sql("select 1"))  # begins
        with external_transaction(dispatcher_on(type(rig.factory)(connection), adds)) as dispatcher:
            done(dispatcher.deliver(added("m-1")))
            assert done(dispatcher.applied("m-1", by="other-0"))
            assert not done(dispatcher.applied("m-2", by="other-0", timeout=0))
            assert done(dispatcher.deliver(added("m-1"))).outcome is Outcome.DUPLICATE
        done(connection.rollback())
        done(connection.close())

    rig.in_one_task(in_an_outer_transaction)
    rig.assert_settled(NOTHING)


@each_driver(usual=True)
def test_a_missing_marker_table_is_named(rig: Rig) -> None:
    """The error says how to create it."""
    dispatcher = totals_of(rig, tables=make_tables(MetaData(), "elsewhere"))
    with pytest.raises(MissingTableError, match=r"elsewhere is missing.*make_tables"):
        looked(rig, dispatcher)
    rig.assert_nothing_is_left()


@each_driver("postgresql")
def test_a_look_finds_the_markers_of_the_tenant_that_a_listener_chooses(driver: Driver, rig_on: RigOn) -> None:
    """``after_begin`` sets the schema for the transaction, as for a delivery."""
    rig = rig_on(driver)
    rig.outside.execute("create schema tenant_b")
    rig.outside.execute("create table tenant_b.processed_message (like processed_message including all)")
    rig.outside.execute("insert into tenant_b.processed_message (message_id, handler) values ('m-1', 'totals')")
    tenant = "public"

    class Choosing(Session):
        """Sessions of one tenant."""

    def choose(_session: Session, _transaction: object, connection: Any) -> None:
        connection.exec_driver_sql(f"set local search_path to {tenant}")

    event.listen(Choosing, "after_begin", choose)
    rig.session_class = Choosing
    dispatcher = totals_of(rig)
    try:
        assert not looked(rig, dispatcher)
        tenant = "tenant_b"
        assert looked(rig, dispatcher)
        tenant = "public"
        assert not looked(rig, dispatcher)
    finally:
        rig.outside.execute("drop schema tenant_b cascade")


@each_driver("postgresql", usual=True)
def test_a_map_that_moves_the_read_model_alone_is_refused(rig: Rig) -> None:
    """Two tenants would have one marker table, and one would see the messages of the other."""
    engine = rig.engine.execution_options(schema_translate_map={"tenant": "tenant_b"})
    dispatcher = dispatcher_on(type(rig.factory)(engine), adds)
    with pytest.raises(UnsafeSessionError, match="schema_translate_map"):
        looked(rig, dispatcher, by="other-0")
    rig.assert_nothing_is_left()


@each_driver(usual=True)
def test_a_session_that_begins_by_hand_can_look(rig: Rig) -> None:
    """A factory with ``autobegin=False``, and one that names an engine for each table."""
    for factory in (
        type(rig.factory)(rig.engine, autobegin=False),
        type(rig.factory)(binds={Total: rig.engine, default_tables.marker: rig.engine}),
    ):
        assert not looked(rig, dispatcher_on(factory, adds), by="other-0")
    rig.assert_nothing_is_left()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@each_driver("postgresql", "mariadb", is_async=False)
def test_a_look_in_a_forked_process_leaves_the_connection_to_the_parent(rig: Rig) -> None:
    """The child looks on a connection of its own, and the parent's next look has its answer."""
    dispatcher = totals_of(rig)
    rig.deliver(add)
    assert looked(rig, dispatcher)
    parents = rig.sync_engine.pool
    if (child := os.fork()) == 0:
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if looked(rig, dispatcher) and rig.sync_engine.pool is not parents else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert looked(rig, dispatcher)


def test_a_database_in_memory_is_refused() -> None:
    """It is lost with its connection, so the answer would be False for ever."""
    with pytest.raises(UnsupportedDatabaseError, match="in memory"):
        Dispatcher(sessionmaker(create_engine("sqlite://")), alone).applied("m-1", by=alone)


# The arguments ------------------------------------------------------------------------------------------------------


@projector(idempotent=True, name="both")
class Both:
    """Two handlers of one event."""

    @on("added")
    def add(self, event: Any, session: Session) -> None:
        """Do nothing."""

    @on("added", "removed")
    def note(self, event: Any, session: Session) -> None:
        """Do nothing."""


class Derived(Both):
    """A class that inherits from a projector, and has a name of its own."""


@projector(idempotent=True, name="wide")
class Wide:
    """A handler of many events, and one of few."""

    @on(Exception, subclasses=True)
    def every(self, event: Any, session: Session) -> None:
        """Do nothing."""

    @on("removed")
    def one(self, event: Any, session: Session) -> None:
        """Do nothing."""


@projector(name="unmarked")
@on("added")
def unmarked(event: Any, session: Session) -> None:
    """Do nothing."""


@projector(idempotent=True, name="alone")
@on("added")
def alone(event: Any, session: Session) -> None:
    """Do nothing."""


@projector(idempotent=True, name="unknown")
@on("added")
def unknown(event: Any, session: Session) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("by", "says"),
    [
        ("totals", r"by='totals': this dispatcher has no such handler; it has both\.add, both\.note, "),
        (unknown, "by=unknown: this dispatcher has no such handler"),
        (int, "by=int: this dispatcher has no such handler"),
        ([alone, "totals"], "by='totals'"),
        ("unmarked", r"unmarked is not idempotent.*write @projector\(idempotent=True\)"),
        (unmarked, "unmarked is not idempotent"),
        (Both, r"several handlers of Both may take the same message.*by=\['both\.add', 'both\.note'\]"),
        ("both", "several handlers of 'both' may take the same message"),
        (Wide, r"by=\['wide\.every', 'wide\.one'\]"),
        ([], "by is empty"),
        (None, "by takes projector classes"),
        (Both(), "by takes projector classes"),
        (building(Both(), beside="alone"), "by takes projector classes"),
        ({"alone"}, "by takes projector classes"),
    ],
)
def test_a_wrong_by_is_refused(factory: sessionmaker[Session], by: Any, says: str) -> None:
    """The error names what the dispatcher has, or what to write."""
    dispatcher = Dispatcher(factory, Both(), Derived(), Wide(), unmarked, alone)
    with pytest.raises(HandlerDefinitionError, match=says):
        dispatcher.applied("m-1", by=by, timeout=0)


@pytest.mark.parametrize(
    "by",
    [alone, "alone", "both.add", ["both.add", "both.note"], (alone,), f"{__name__}.Derived.add"],
    ids=["function", "its name", "identity", "identities", "tuple", "inherited"],
)
def test_each_way_to_name_a_handler_is_understood(factory: sessionmaker[Session], by: Any) -> None:
    """A function, its name, an identity, a list and a tuple."""
    dispatcher = Dispatcher(factory, Both(), Derived(), alone)
    assert not dispatcher.applied("m-1", by=by, timeout=0)
    dispatcher.deliver(Message("m-1", {}, type="added"))
    assert dispatcher.applied("m-1", by=by, timeout=0)


@pytest.mark.parametrize(
    ("timeout", "error"),
    [
        *((wrong, ValueError) for wrong in (-1, math.inf, math.nan)),
        *((wrong, TypeError) for wrong in ("2", True, None)),
    ],
)
def test_a_timeout_is_a_number_of_seconds(factory: sessionmaker[Session], timeout: Any, error: type[Exception]) -> None:
    """Anything else is refused before a look."""
    with pytest.raises(error, match="timeout must be a"):
        Dispatcher(factory, alone).applied("m-1", by=alone, timeout=timeout)


@pytest.mark.parametrize("message_id", ["", None, b"m-1", "x" * 513])
def test_an_id_that_no_message_can_have_is_refused(factory: sessionmaker[Session], message_id: Any) -> None:
    """A wait for it would never end well."""
    with pytest.raises(InvalidMessageIdError):
        Dispatcher(factory, alone).applied(message_id, by=alone)


def test_an_id_may_be_a_uuid(factory: sessionmaker[Session]) -> None:
    """A UUID is stored as text."""
    message_id = uuid4()
    dispatcher = Dispatcher(factory, alone)
    dispatcher.deliver(Message(message_id, {}, type="added"))
    assert dispatcher.applied(message_id, by=alone)
    assert dispatcher.applied(str(message_id), by=alone)
