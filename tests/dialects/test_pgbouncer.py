"""The promise behind a PgBouncer in transaction mode, where every transaction may be on another server connection.

Each driver with the arguments that docs/production.md names for it; then what those arguments are needed for.
"""

import contextlib
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from projector_dedup.cli.main import main
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from cancellation import cancel_at_every_await
from contract import ConcurrencyContract, Subject
from cut_proxy import Cut, CutProxy
from databases import DRIVERS, USUAL_DRIVERS, Database, Driver
from kit import Harness
from pgbouncer import UNNAMED, PgBouncer, recipe
from projector_dedup import Outcome
from projector_dedup.errors import CommitOutcomeUnknown, RetriesExhaustedError, UnsupportedDatabaseError
from projector_dedup.options import RetryPolicy
from races import LostUpdateContract
from reach import reach
from ready import ready
from rig import NOTHING, ONCE, Counting, Durable, Outside, Rig, RigOn, add

POSTGRESQL = [driver for driver in DRIVERS if driver.engine == "postgresql"]
USUAL = [driver for driver in POSTGRESQL if driver in USUAL_DRIVERS]
NAMING = [driver for driver in POSTGRESQL if recipe(driver)]
on_postgresql = pytest.mark.parametrize("driver", POSTGRESQL, ids=str)
Bouncer = Callable[..., PgBouncer]


@pytest.fixture
def server(outsides: dict[str, Outside | str]) -> Database:
    """The PostgreSQL database of the rigs."""
    outside = outsides["postgresql"]
    if isinstance(outside, str):
        pytest.skip(outside)
    return outside.database


@contextlib.contextmanager
def plain_client(bouncer: PgBouncer, database: Database, *, autocommit: bool) -> Iterator[psycopg.Connection[Any]]:
    """Somebody else behind the same PgBouncer."""
    dsn = Database("postgresql", bouncer.through(database.url())).dsn
    with psycopg.connect(dsn, autocommit=autocommit, prepare_threshold=None) as client:
        yield client


def server_process(client: psycopg.Connection[Any]) -> int:
    """Which server connection the client has now."""
    ((pid,),) = client.execute("select pg_backend_pid()").fetchall()
    return int(pid)


# The contract ------------------------------------------------------------------------------------------------------


def behind(request: pytest.FixtureRequest, driver: Driver, pool_size: int) -> Subject:
    """The database of this test, through the driver and a PgBouncer."""
    direct = reach(request, driver)
    bouncer = request.getfixturevalue("pgbouncer")(direct.url, pool_size=pool_size)
    return Subject(bouncer.through(direct.url), engine_arguments=recipe(driver))


class TestThroughPgBouncer(ConcurrencyContract):
    """All that meets, with more clients than server connections."""

    note = "PgBouncer"

    @pytest.fixture(params=USUAL, ids=str)
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        """The contract needs a winner, five rivals that wait for it, and somebody who looks: seven connections."""
        return behind(request, request.param, 7)


@pytest.mark.contract
class TestFewServerConnections(LostUpdateContract):
    """I6 with eight workers on three server connections, which change hands with every transaction."""

    @pytest.fixture(params=USUAL, ids=str)
    def harness(self, request: pytest.FixtureRequest) -> Iterator[Harness]:
        """Two who meet on a row, and somebody who looks."""
        with ready(behind(request, request.param, 3)) as harness:
            yield harness
            harness.drop_tables()


# What a session has of its own ---------------------------------------------------------------------------------------

SESSION = """
    select pg_backend_pid(), (select jsonb_object_agg(name, setting) from pg_settings),
        (select array_agg(name) from pg_prepared_statements), (select array_agg(name) from pg_cursors),
        (select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()),
        (select count(*) from pg_listening_channels())
"""
IN_TRANSACTION = "select pg_backend_pid(), current_setting('transaction_isolation'), current_setting('lock_timeout')"


@on_postgresql
@pytest.mark.parametrize("level", [None, "SERIALIZABLE"])
def test_no_state_of_a_session_is_left_to_the_next_client(
    driver: Driver, level: str | None, request: pytest.FixtureRequest, postgresql: Database, pgbouncer: Bouncer
) -> None:
    """Isolation level and lock timeout end with the transaction; no setting, statement or lock stays behind."""
    bouncer = pgbouncer(postgresql.url(), pool_size=1)
    arguments = {**recipe(driver), "pool_pre_ping": True}
    subject = Subject(bouncer.through(reach(request, driver).url), level, engine_arguments=arguments)
    seen: list[Any] = []

    def body(_happened: object, session: Session) -> None:
        seen.extend(session.execute(text(IN_TRANSACTION)).all())

    with Harness(subject) as harness, plain_client(bouncer, postgresql, autocommit=True) as neighbour:
        harness.create_tables()
        before = neighbour.execute(SESSION).fetchall()
        dispatcher = harness.dispatcher(harness.handler(body), claim_timeout=5.0)
        outcomes = [harness.deliver(dispatcher, message_id=message_id).outcome for message_id in ("m1", "m2", "m1")]
        assert neighbour.execute(SESSION).fetchall() == before
    assert outcomes == [Outcome.APPLIED, Outcome.APPLIED, Outcome.DUPLICATE]
    assert [tuple(row) for row in seen] == [(before[0][0], (level or "REPEATABLE READ").lower(), "5s")] * 2


@on_postgresql
def test_the_level_is_asked_for_in_every_transaction(
    driver: Driver, request: pytest.FixtureRequest, postgresql: Database, pgbouncer: Bouncer
) -> None:
    """What another client left on the server connection that was seen first is not taken for the server's default."""
    bouncer = pgbouncer(postgresql.url(), pool_size=2)
    subject = Subject(bouncer.through(reach(request, driver).url), engine_arguments=recipe(driver))
    seen: list[Any] = []

    def body(_happened: object, session: Session) -> None:
        seen.extend(session.execute(text(IN_TRANSACTION)).all())

    with plain_client(bouncer, postgresql, autocommit=True) as rude, Harness(subject) as harness:
        rude.execute("set session characteristics as transaction isolation level serializable")
        harness.create_tables()
        assert harness.engine.dialect.default_isolation_level == "SERIALIZABLE"
        with plain_client(bouncer, postgresql, autocommit=False) as holder:
            held = server_process(holder)
            harness.deliver(harness.dispatcher(harness.handler(body)))
    ((process, level, _),) = seen
    assert process != held
    assert level == "serializable"


# COMMIT, and the connection's loss -----------------------------------------------------------------------------------


@on_postgresql
@pytest.mark.parametrize("line", ["to PgBouncer", "to the server"])
@pytest.mark.parametrize(("cut", "outcome"), [("before", Outcome.APPLIED), ("after", Outcome.DUPLICATE)])
def test_a_cut_commit_is_asked_for_on_either_line(
    driver: Driver, line: str, cut: Cut, outcome: Outcome, server: Database, pgbouncer: Bouncer, rig_on: RigOn
) -> None:
    """I5: whichever line is cut at COMMIT, the outcome is unknown; a retry asks by claiming, and it counts once."""
    url = server.url()
    with contextlib.ExitStack() as stack:
        if line == "to the server":
            proxy = stack.enter_context(CutProxy(url))
            way = pgbouncer(proxy.through(url), pool_size=2).through(url)
        else:
            proxy = stack.enter_context(CutProxy(pgbouncer(url, pool_size=2).through(url)))
            way = proxy.through(url)
        rig = rig_on(driver, url=way, **recipe(driver))
        proxy.cut_commit(cut)
        assert rig.deliver(add).outcome is outcome
        proxy.cut_commit(cut)
        with pytest.raises(CommitOutcomeUnknown):
            rig.deliver(add, "m-2", retry=RetryPolicy(attempts=1))
        assert rig.deliver(add, "m-2").outcome is outcome
        assert proxy.cuts == 2
        rig.assert_settled(Durable(2, 2))


@on_postgresql
def test_a_server_connection_that_dies_in_the_handler_is_retried(
    driver: Driver, server: Database, pgbouncer: Bouncer, rig_on: RigOn
) -> None:
    """PgBouncer reports the loss in words of its own; the whole unit runs again, on another connection."""
    rig = rig_on(driver, url=pgbouncer(server.url(), pool_size=2).through(server.url()), **recipe(driver))

    def is_killed(session: Session) -> None:
        pid = session.execute(text("select pg_backend_pid()")).scalar_one()
        rig.outside.execute(f"select pg_terminate_backend({pid}, 5000)")
        session.execute(text("select 1"))

    handler = Counting(is_killed)
    assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert handler.runs == 2
    rig.assert_settled(ONCE)


@pytest.mark.filterwarnings("ignore:<psycopg.AsyncServerCursor:ResourceWarning")  # the stream that was cut off
@pytest.mark.parametrize("driver", [driver for driver in POSTGRESQL if driver.is_async], ids=str)
def test_a_delivery_cancelled_at_any_await_leaves_nothing_behind(
    driver: Driver, server: Database, pgbouncer: Bouncer, rig_on: RigOn
) -> None:
    """A cancellation ends the statement and the transaction behind PgBouncer too."""
    url = pgbouncer(server.url(), pool_size=2).through(server.url())

    def through(driver: Driver, **options: Any) -> Rig:
        return rig_on(driver, url=url, **recipe(driver), **options)

    cancel_at_every_await(through(driver), late=False, warm=True)


# The command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", [driver for driver in POSTGRESQL if not driver.is_async], ids=str)
def test_the_command_prunes_through_it(driver: Driver, server: Database, pgbouncer: Bouncer, rig: Rig) -> None:
    """`idempotency cleanup` needs no arguments for it, however many batches there are."""
    rig.outside.execute(
        "insert into processed_message (message_id, handler, processed_at) "
        "select n::text, 'h', now() - interval '1 year' from generate_series(1, 9) n"
    )
    url = pgbouncer(server.url(), pool_size=2).through(server.url(driver.drivername))
    options = ["--database-url", url.render_as_string(hide_password=False), "--batch-size", "1"]
    answer = CliRunner().invoke(main, ["cleanup", *options])
    assert answer.exit_code == 0, answer.output
    assert rig.durable() == NOTHING


# What docs/production.md says ----------------------------------------------------------------------------------------


def test_the_page_names_the_arguments_that_are_tested() -> None:
    """Each `connect_args` of docs/production.md is one that the tests of this file give."""
    page = (Path(__file__).parents[2] / "docs" / "production.md").read_text(encoding="utf-8")
    named = re.findall(r"connect_args=(\{.*?\})", page, re.DOTALL)
    assert [eval(arguments) for arguments in named] == list(UNNAMED.values())


# Without what docs/production.md says --------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", NAMING, ids=str)
def test_numbered_statements_are_refused(driver: Driver, server: Database, pgbouncer: Bouncer, rig_on: RigOn) -> None:
    """Before anything is claimed, with the arguments that mend it."""
    rig = rig_on(driver, url=pgbouncer(server.url(), pool_size=2).through(server.url()))
    remedy = str(recipe(driver)["connect_args"]).replace("<class 'str'>", "str")
    for _ in range(2):  # also when the driver has its statements in its cache
        with pytest.raises(UnsupportedDatabaseError, match=re.escape(remedy)):
            rig.deliver(add)
    rig.assert_settled(NOTHING)


def test_numbered_statements_would_be_mixed_up_in_silence(server: Database, pgbouncer: Bouncer) -> None:
    """Why they are refused: two clients number their statements alike, and one gets what the other asked for."""
    dsn = Database("postgresql", pgbouncer(server.url(), pool_size=2).through(server.url())).dsn
    with psycopg.connect(dsn) as one, psycopg.connect(dsn) as other:
        for _ in range(6):
            one.execute("select 'one' where %s", (True,))
            other.execute("select 'other' where %s", (True,))
        theirs = server_process(one)
        one.commit()
        assert server_process(other) != theirs
        with psycopg.connect(dsn) as holder:
            other.commit()
            while server_process(holder) == theirs:
                holder.commit()
            assert other.execute("select 'other' where %s", (True,)).fetchall() == [("one",)]


@pytest.mark.parametrize("driver", [driver for driver in NAMING if driver.module == "asyncpg"], ids=str)
def test_statements_of_unique_names_that_are_cached_are_an_error(
    driver: Driver, server: Database, pgbouncer: Bouncer, rig_on: RigOn
) -> None:
    """A statement that the other server connection has never heard of is tried again, and is an error in the end."""
    bouncer = pgbouncer(server.url(), pool_size=2)
    unique = {"statement_cache_size": 0, "prepared_statement_name_func": lambda: f"mine_{uuid.uuid4()}"}
    rig = rig_on(driver, url=bouncer.through(server.url()), connect_args=unique, pool_size=1)
    assert rig.deliver(add).outcome is Outcome.APPLIED
    with plain_client(bouncer, server, autocommit=False) as holder:
        server_process(holder)
        with pytest.raises(RetriesExhaustedError, match="does not exist"):
            rig.deliver(add, "m-2")
    rig.assert_settled(ONCE)


@on_postgresql
def test_statement_mode_is_an_error(driver: Driver, server: Database, pgbouncer: Bouncer, rig_on: RigOn) -> None:
    """A PgBouncer that has no transactions says so, and nothing is applied."""
    bouncer = pgbouncer(server.url(), pool_size=2, pool_mode="statement")
    rig = rig_on(driver, url=bouncer.through(server.url()), **recipe(driver))
    with pytest.raises((RetriesExhaustedError, DBAPIError)):
        rig.deliver(add, retry=RetryPolicy(attempts=2))
    rig.assert_settled(NOTHING)


@pytest.mark.parametrize("driver", NAMING, ids=str)
@pytest.mark.parametrize("known", [False, True], ids=["new", "redelivered"])
def test_an_address_that_moves_to_a_pooler(
    driver: Driver, known: bool, rig_on: RigOn, server: Database, pgbouncer: Bouncer
) -> None:
    """The first connection reached the server itself, the next one does not: it is refused, before it sends anything.

    Also where the message may be one more redelivery, and is looked for without a transaction.
    """
    rig, bouncer = rig_on(driver), pgbouncer(server.url(), pool_size=2)
    for message_id in ["m-1", *["m-1"] * 3 * known]:
        rig.deliver(add, message_id)
    moved = bouncer.through(server.url())

    @event.listens_for(rig.sync_engine, "do_connect")
    def _connect(_dialect: Any, _record: Any, _arguments: Any, parameters: dict[str, Any]) -> None:
        parameters.update(host=moved.host, port=moved.port)

    rig.dispose()
    for message_id in ("m-1" if known else "m-2", "m-3"):
        with pytest.raises(UnsupportedDatabaseError, match="through a pooler"):
            rig.deliver(add, message_id)
    assert rig.durable() == ONCE
