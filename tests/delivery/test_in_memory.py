"""An in-memory SQLite database lives in its connection, and its engine gives a thread the same one again.

So a session of the handler's own is the handler's transaction: refused with words, and the data is never thrown away.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, select, text
from sqlalchemy.exc import ResourceClosedError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import AssertionPool, QueuePool, SingletonThreadPool, StaticPool

from projector_dedup import (
    Dispatcher,
    Message,
    Outcome,
    RetryPolicy,
    TransactionViolatedError,
    UnitOfWork,
    UnsafeSessionError,
    UnsupportedDatabaseError,
    claim,
    on,
    projector,
)
from projector_dedup.tables import default_metadata, default_tables
from projector_dedup.testing import external_transaction
from rig import Base, Total, add

REFUSED = "same connection"
ONE_ATTEMPT = RetryPolicy(attempts=1)
IN_A_THREAD = {
    "nothing": "sqlite://",
    "empty": "sqlite:///",
    "memory": "sqlite:///:memory:",
    "named": "sqlite:///file:named?mode=memory&cache=shared&uri=true",
}
pytestmark = pytest.mark.filterwarnings("ignore:.*pool.*:sqlalchemy.exc.SADeprecationWarning")


def filled(url: str, **options: Any) -> Engine:
    """An engine whose database has the tables, and 5 in account `b`."""
    engine = create_engine(url, **options)
    with engine.begin() as connection:
        default_metadata.create_all(connection)
        Base.metadata.create_all(connection)
        connection.execute(text("insert into total values ('b', 5)"))
    return engine


@pytest.fixture(params=IN_A_THREAD)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each way to say "in memory" that gives a thread one connection."""
    engine = filled(IN_A_THREAD[request.param], poolclass=SingletonThreadPool)
    yield engine
    engine.dispose()


def dispatcher_of(engine: Engine | Connection, body: Callable[[Session], object], **options: Any) -> Dispatcher:
    """A dispatcher whose handler is ``body``."""

    def handler(_event: object, session: Session) -> None:
        body(session)

    options = {"retry": ONE_ATTEMPT, **options}
    return Dispatcher(sessionmaker(engine), projector(idempotent=True, name="totals")(on("added")(handler)), **options)


def deliver(engine: Engine, body: Callable[[Session], object], message_id: str = "m-1", **options: Any) -> Outcome:
    """Deliver one message to ``body``."""
    return dispatcher_of(engine, body, **options).deliver(Message(message_id, {}, type="added")).outcome


def contents(engine: Engine) -> tuple[dict[str, int], list[str]]:
    """The read model and the ids of the markers."""
    with engine.connect() as connection:
        totals = connection.execute(select(Total.account, Total.amount)).mappings().all()
        markers = connection.execute(select(default_tables.marker.c.message_id)).scalars().all()
        return {row["account"]: row["amount"] for row in totals}, sorted(markers)


UNTOUCHED: tuple[dict[str, int], list[str]] = ({"b": 5}, [])
APPLIED = ({"a": 1, "b": 5}, ["m-1"])


def commits(own: Session) -> None:
    """A session of the handler's own that writes."""
    own.execute(text("insert into total values ('own', 7)"))
    own.commit()


def rolls_back(own: Session) -> None:
    """One that changes its mind."""
    own.execute(text("insert into total values ('own', 7)"))
    own.rollback()


def reads(own: Session) -> None:
    """One that only reads: that it is closed ends the transaction too."""
    assert own.scalar(select(Total.amount).where(Total.account == "b")) == 5


@pytest.mark.parametrize("strict", [False, True], ids=["usual", "strict"])
@pytest.mark.parametrize("use", [commits, rolls_back, reads])
def test_a_session_of_the_handlers_own_is_refused(engine: Engine, use: Callable[[Session], None], strict: bool) -> None:
    """It would end the handler's transaction. Nothing of the message is left, and the database is what it was."""

    def handler(session: Session) -> None:
        add(session)
        with Session(engine) as own:
            use(own)

    for _ in range(2):
        with pytest.raises(UnsafeSessionError, match=REFUSED):
            deliver(engine, handler, strict=strict)
        assert contents(engine) == UNTOUCHED
    assert deliver(engine, add) is Outcome.APPLIED
    assert contents(engine) == APPLIED


def test_a_connection_of_the_handlers_own_is_refused(engine: Engine) -> None:
    """As a session is, on whatever copy of the engine."""

    def handler(session: Session) -> None:
        add(session)
        with engine.execution_options(logging_token="own").begin() as own:
            own.execute(text("insert into total values ('own', 7)"))

    with pytest.raises(UnsafeSessionError, match=REFUSED):
        deliver(engine.execution_options(logging_token="dispatcher"), handler)
    assert contents(engine) == UNTOUCHED


def test_a_refused_connection_is_given_back(engine: Engine) -> None:
    """The pool counts its users, and gets the connection back from the last one: the unit of work."""
    returned: list[object] = []
    event.listen(engine, "checkin", lambda connection, _record: returned.append(connection))

    def handler(session: Session) -> None:
        add(session)
        engine.connect()

    with pytest.raises(UnsafeSessionError, match=REFUSED):
        deliver(engine, handler)
    returned.clear()
    with pytest.raises(UnsafeSessionError, match=REFUSED) as raised:
        deliver(engine, handler)
    assert len(returned) == 1
    assert raised.traceback  # which would keep a connection that nobody had closed


def test_an_outer_transaction_of_a_test_is_the_tests(engine: Engine) -> None:
    """When the delivery is over, the test that owns the transaction may take the connection again and look."""
    with engine.connect() as connection:
        with external_transaction(dispatcher_of(connection, add)) as dispatcher:
            assert not dispatcher.deliver(Message("m-1", {}, type="added")).durable
        assert contents(engine) == APPLIED
        connection.rollback()


def test_a_refusal_that_the_handler_swallows_leaves_its_own_work_whole(engine: Engine) -> None:
    """The other session did nothing, and the handler's transaction is as it was."""

    def handler(session: Session) -> None:
        add(session)
        with pytest.raises(UnsafeSessionError, match=REFUSED), Session(engine) as own:
            commits(own)

    assert deliver(engine, handler) is Outcome.APPLIED
    assert contents(engine) == APPLIED


@pytest.mark.parametrize("end", [Session.commit, Session.rollback, Session.close])
def test_a_session_that_was_open_before_ends_nothing(engine: Engine, end: Callable[[Session], None]) -> None:
    """A session that was in the midst of reading has the connection already; it may not commit or roll back on it."""
    with Session(engine) as earlier:
        reads(earlier)

        def handler(session: Session) -> None:
            add(session)
            end(earlier)

        with pytest.raises(UnsafeSessionError, match=REFUSED):
            deliver(engine, handler)
    assert contents(engine) == UNTOUCHED
    assert deliver(engine, add) is Outcome.APPLIED
    assert contents(engine) == APPLIED


def test_a_session_that_was_open_before_may_load_lazily(engine: Engine) -> None:
    """What it reads is read on the connection that it has, and it ends nothing."""
    with Session(engine) as earlier:
        total = earlier.get_one(Total, "b")
        earlier.expire(total)

        def handler(session: Session) -> None:
            add(session, total.amount)

        assert deliver(engine, handler) is Outcome.APPLIED
    assert contents(engine) == ({"a": 5, "b": 5}, ["m-1"])


def test_a_session_between_messages_is_free(engine: Engine) -> None:
    """Before and after a delivery, and after a failed one, a session of the caller's does as it likes."""
    with Session(engine) as session:
        reads(session)
        assert deliver(engine, add) is Outcome.APPLIED
        reads(session)
        session.commit()
    with pytest.raises(ZeroDivisionError):
        deliver(engine, lambda session: add(session, 1 // 0), "m-2")
    with Session(engine) as session:
        commits(session)
    assert contents(engine) == ({"a": 1, "b": 5, "own": 7}, ["m-1"])


def test_two_units_of_work_of_one_thread_are_refused(engine: Engine) -> None:
    """The second one's COMMIT would commit the first one's marker."""
    factory = sessionmaker(engine)
    with UnitOfWork(factory) as one:
        assert one.claim("m-1", "totals")
        with pytest.raises(UnsafeSessionError, match=REFUSED), UnitOfWork(factory) as two:
            two.claim("m-2", "totals")
    assert contents(engine) == UNTOUCHED


def test_the_connection_is_free_after_the_commit(engine: Engine) -> None:
    """Inside the block of a unit of work that has committed, and in ``after_commit``, others may use it."""
    heard: list[tuple[dict[str, int], list[str]]] = []
    factory = sessionmaker(engine)
    event.listen(factory, "after_commit", lambda _session: heard.append(contents(engine)))
    with UnitOfWork(factory) as uow:
        assert uow.claim("m-1", "totals")
        add(uow.session)
        uow.commit()
        assert contents(engine) == APPLIED
    assert heard == [APPLIED]


def test_a_claim_by_hand_in_the_handler_is_no_second_user(engine: Engine) -> None:
    """On the handler's session it is the same transaction."""

    def handler(session: Session) -> None:
        add(session)
        assert claim(session, "part", "totals")

    assert deliver(engine, handler) is Outcome.APPLIED
    assert contents(engine) == ({"a": 1, "b": 5}, ["m-1", "part"])


# Below SQLAlchemy, nothing can be refused; the database is kept all the same ---------------------------------------


@pytest.fixture(params=[*IN_A_THREAD, "queue", "shared", "memdb"])
def any_engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """And those with a pool in which a database in memory lives as long as one of its connections."""
    one = {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0}
    engines: dict[str, Callable[[], Engine]] = {
        "queue": lambda: filled("sqlite://", **one),
        "shared": lambda: filled("sqlite:///file::memory:?cache=shared&uri=true", **one),
        "memdb": lambda: filled("sqlite:///file:/kept?vfs=memdb&uri=true", **one),
    }
    named = lambda: filled(IN_A_THREAD[request.param], poolclass=SingletonThreadPool)  # noqa: E731
    engine = engines.get(request.param, named)()
    yield engine
    engine.dispose()


def test_delivering_keeps_what_was_in_memory(any_engine: Engine) -> None:
    """The first delivery prepares the engine; connections that are older than that stay."""
    assert deliver(any_engine, add) is Outcome.APPLIED
    assert contents(any_engine) == APPLIED


@pytest.mark.parametrize("strict", [False, True], ids=["usual", "strict"])
def test_a_commit_on_the_drivers_connection_is_reported_and_loses_nothing(any_engine: Engine, strict: bool) -> None:
    """What the handler had written by then is committed with the marker, and the error says so."""

    def handler(session: Session) -> None:
        add(session)
        session.connection().connection.commit()
        session.execute(text("insert into total values ('late', 7)"))

    with pytest.raises(TransactionViolatedError) as raised:
        deliver(any_engine, handler, strict=strict)
    assert raised.value.durable
    assert contents(any_engine) == APPLIED
    assert deliver(any_engine, add) is Outcome.DUPLICATE


@pytest.mark.parametrize("strict", [False, True], ids=["usual", "strict"])
def test_a_rollback_on_the_drivers_connection_loses_nothing(any_engine: Engine, strict: bool) -> None:
    """Nothing of the message is left, and a redelivery applies it."""

    def handler(session: Session) -> None:
        add(session)
        session.connection().connection.rollback()
        session.execute(text("insert into total values ('late', 7)"))

    with pytest.raises(TransactionViolatedError) as raised:
        deliver(any_engine, handler, strict=strict)
    assert not raised.value.durable
    assert contents(any_engine) == UNTOUCHED
    assert deliver(any_engine, add) is Outcome.APPLIED
    assert contents(any_engine) == APPLIED


def test_another_transaction_on_the_drivers_connection_is_rolled_back(any_engine: Engine) -> None:
    """What a handler began after it had ended ours is not left open for the next message to commit."""

    def handler(session: Session) -> None:
        add(session)
        driver = session.connection().connection
        driver.rollback()
        driver.cursor().execute("BEGIN")
        driver.cursor().execute("insert into total values ('late', 7)")

    with pytest.raises(TransactionViolatedError):
        deliver(any_engine, handler)
    assert contents(any_engine) == UNTOUCHED
    assert deliver(any_engine, add) is Outcome.APPLIED
    assert contents(any_engine) == APPLIED


def test_a_connection_below_sqlalchemys_is_noticed(engine: Engine) -> None:
    """``engine.raw_connection()`` tells nobody; its commit is the handler's own, and reported as such."""

    def handler(session: Session) -> None:
        add(session)
        raw = engine.raw_connection()
        raw.commit()
        raw.close()
        session.execute(text("insert into total values ('late', 7)"))

    with pytest.raises(TransactionViolatedError) as raised:
        deliver(engine, handler)
    assert raised.value.durable
    assert contents(engine) == APPLIED


@pytest.mark.parametrize("misbehave", [Session.commit, Session.rollback, Session.close, Session.reset])
def test_what_a_handler_does_to_its_own_session_loses_nothing(
    any_engine: Engine, misbehave: Callable[[Session], None]
) -> None:
    """Refused or noticed as on any database, and everything else is there."""

    def handler(session: Session) -> None:
        add(session)
        misbehave(session)

    with pytest.raises((TransactionViolatedError, ResourceClosedError)):
        deliver(any_engine, handler)
    assert contents(any_engine) == UNTOUCHED


# Other pools ------------------------------------------------------------------------------------------------------


def test_one_connection_for_all_threads_is_refused_before_anything() -> None:
    """StaticPool, as ever."""
    engine = filled("sqlite://", poolclass=StaticPool)
    with pytest.raises(UnsupportedDatabaseError, match="StaticPool"):
        deliver(engine, add)
    assert contents(engine) == UNTOUCHED


def test_a_pool_that_gives_nothing_twice_fails_with_its_own_words() -> None:
    """AssertionPool refuses the handler's own session itself; nothing is left of the message."""
    engine = filled("sqlite://", poolclass=AssertionPool)

    def handler(session: Session) -> None:
        add(session)
        with Session(engine) as own:
            commits(own)

    with pytest.raises(AssertionError):
        deliver(engine, handler)
    assert contents(engine) == UNTOUCHED


def test_a_second_connection_to_a_shared_cache_meets_the_lock() -> None:
    """With ``cache=shared`` and a queue of connections a session of the handler's own waits for the handler."""
    engine = filled("sqlite:///file::memory:?cache=shared&uri=true")

    def handler(session: Session) -> None:
        add(session)
        with Session(engine) as own:
            commits(own)

    with pytest.raises(Exception, match="locked"):
        deliver(engine, handler)
    assert contents(engine) == UNTOUCHED
    engine.dispose()
