"""`rename` gives every marker of the old name a twin, beside running deliveries, and loses nothing on the way."""

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner
from projector_dedup.cli.main import main
from sqlalchemy import URL, create_engine, event, insert, select, text
from sqlalchemy.exc import DBAPIError

from contract import NEW, OLD, deployed
from cut_proxy import CutProxy
from databases import Database
from kit import PATIENCE, Added, Harness, Held, Subject, add
from marked import on_one_database, one_of_each_engine  # noqa: F401  # a fixture
from projector_dedup import Outcome
from projector_dedup.errors import MissingTableError, RefusedError
from projector_dedup.late import REDELIVERY_HORIZON
from projector_dedup.maintenance.cleanup import cleanup
from projector_dedup.maintenance.rows import Renamed, rename
from projector_dedup.maintenance.state import read_state
from projector_dedup.tables import default_tables
from projector_dedup.unit_of_work import UnitOfWork

MARKER = default_tables.marker
MONDAY = datetime(2026, 3, 2, 7, 8, 9, 123456, tzinfo=UTC)


@pytest.fixture
def harness(sync_url: URL) -> Iterator[Harness]:
    """The contract's tables, through each synchronous driver."""
    with Harness(Subject(sync_url)) as harness:
        harness.create_tables()
        yield harness


@pytest.fixture(params=["postgresql", "mariadb"])
def on_server(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """The same where there is a server, whose connections can be lost, and several writers."""
    database: Database = request.getfixturevalue(request.param)
    with Harness(Subject(database.url())) as harness:
        harness.create_tables()
        yield harness


def write(harness: Harness, *markers: tuple[str, str]) -> None:
    """Markers, of moments that tell them apart."""
    rows = [
        {
            "message_id": message_id,
            "handler": handler,
            "processed_at": MONDAY + timedelta(minutes=minute),
            "occurred_at": None if minute % 2 else MONDAY - timedelta(minutes=minute),
        }
        for minute, (message_id, handler) in enumerate(markers)
    ]
    with harness.engine.begin() as connection:
        connection.execute(insert(MARKER), rows)


def times(harness: Harness, handler: str) -> dict[str, Any]:
    """When the messages of a handler were processed and had occurred."""
    with harness.engine.connect() as connection:
        found = connection.execute(
            select(MARKER.c.message_id, MARKER.c.processed_at, MARKER.c.occurred_at).where(MARKER.c.handler == handler)
        )
        return {row.message_id: (row.processed_at, row.occurred_at) for row in found}


def ids(*numbers: int) -> list[str]:
    """Ids whose order is not that of numbers, nor of a dictionary."""
    return [f"{'aA'[number % 2]}{number}" for number in numbers]


@pytest.mark.parametrize("batch_size", [1, 3, 7, 1000])
def test_every_marker_gets_a_twin_with_its_times(harness: Harness, batch_size: int) -> None:
    """However the batches fall; those that have one, and other handlers, are left alone; the old ones stay."""
    written = ids(*range(9))
    write(harness, *((each, OLD) for each in written), ("other", "another"))
    write(harness, (written[2], NEW), (written[5], NEW), ("of its own", NEW))
    before = times(harness, NEW)
    assert rename(harness.engine, OLD, NEW, batch_size=batch_size) == Renamed(copied=7, already=2)
    assert times(harness, NEW) == times(harness, OLD) | before
    assert times(harness, OLD).keys() == set(written)
    assert rename(harness.engine, OLD, NEW, batch_size=batch_size) == Renamed(already=9)


@pytest.mark.parametrize("batch_size", [2, 1000])
def test_the_old_markers_can_be_removed(harness: Harness, batch_size: int) -> None:
    """`remove_old`: what was seen is gone, and nothing else; a second run finds nothing left."""
    written = ids(*range(5))
    write(harness, *((each, OLD) for each in written), (written[1], NEW), ("other", "another"))
    moments = times(harness, OLD)
    assert rename(harness.engine, OLD, NEW, batch_size=batch_size, remove_old=True) == Renamed(4, 1, 5)
    assert harness.markers() == sorted([*((each, NEW) for each in written), ("other", "another")])
    assert {each: moments[each] for each in moments if each != written[1]} == {
        each: moment for each, moment in times(harness, NEW).items() if each != written[1]
    }
    assert rename(harness.engine, OLD, NEW, remove_old=True) == Renamed()


def test_a_dry_run_says_the_same_and_writes_nothing(harness: Harness) -> None:
    """Also of what would be removed."""
    write(harness, *((each, OLD) for each in ids(*range(5))), ("a0", NEW))
    before = harness.markers()
    assert rename(harness.engine, OLD, NEW, remove_old=True, dry_run=True, batch_size=2) == Renamed(4, 1, 5)
    assert harness.markers() == before


def test_names_that_are_wrong_are_refused(harness: Harness) -> None:
    """A name of no marker is a typing error, perhaps: it must not look like success."""
    write(harness, ("m1", OLD))
    with pytest.raises(ValueError, match="give two different names"):
        rename(harness.engine, OLD, OLD)
    with pytest.raises(RefusedError, match="must not be empty"):
        rename(harness.engine, OLD, "")
    with pytest.raises(RefusedError, match="neither Old nor New has a marker"):
        rename(harness.engine, "Old", "New")
    for batch_size in (0, 10_001):
        with pytest.raises(ValueError, match="batch_size"):
            rename(harness.engine, OLD, NEW, batch_size=batch_size)
    assert harness.markers() == [("m1", OLD)]
    harness.drop_tables()
    with pytest.raises(MissingTableError, match="processed_message"):
        rename(harness.engine, OLD, NEW)
    harness.create_tables()


def test_a_run_that_was_interrupted_goes_on(harness: Harness) -> None:
    """Every batch had committed, when `on_batch` was told of it; the next run does the rest."""
    write(harness, *((each, OLD) for each in ids(*range(5))))
    told: list[Renamed] = []

    def interrupt(renamed: Renamed) -> None:
        told.append(renamed)
        if renamed.copied == 4:
            assert len(times(harness, NEW)) == 4
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rename(harness.engine, OLD, NEW, batch_size=2, on_batch=interrupt)
    assert told == [Renamed(2), Renamed(4)]
    assert rename(harness.engine, OLD, NEW, batch_size=2) == Renamed(1, 4)


@pytest.mark.parametrize("statement", ["SELECT", "INSERT", "DELETE"])
def test_a_lost_connection_costs_one_batch_that_is_run_again(on_server: Harness, statement: str) -> None:
    """Wherever it is lost, twice; and what fails for another reason is raised at once."""
    harness = on_server
    write(harness, *((each, OLD) for each in ids(*range(5))))
    lost = iter([True, False, True])

    def lose(connection: Any, _cursor: Any, sql: str, *_: Any) -> None:
        ours = "AS source LEFT OUTER JOIN" in sql if statement == "SELECT" else sql.startswith(statement)
        if ours and next(lost, False):
            kill(harness, connection)

    event.listen(harness.engine, "before_cursor_execute", lose)
    rename(harness.engine, OLD, NEW, batch_size=2, remove_old=True)
    event.remove(harness.engine, "before_cursor_execute", lose)
    assert next(lost, None) is None
    assert harness.markers() == sorted((each, NEW) for each in ids(*range(5)))
    with harness.engine.begin() as connection:
        connection.execute(text("ALTER TABLE processed_message DROP COLUMN occurred_at"))
    with pytest.raises((DBAPIError, MissingTableError)):
        rename(harness.engine, NEW, OLD)


def kill(harness: Harness, connection: Any) -> None:
    """End the connection of another on the server."""
    ours, end = {
        "postgresql": ("SELECT pg_backend_pid()", "SELECT pg_terminate_backend({}, 5000)"),
        "mysql": ("SELECT connection_id()", "KILL {}"),
        "mariadb": ("SELECT connection_id()", "KILL {}"),
    }[harness.engine.dialect.name]
    cursor = connection.connection.cursor()
    cursor.execute(ours)
    (number,) = cursor.fetchone()
    cursor.close()
    admin = create_engine(harness.subject.url)
    with admin.connect() as other:
        other.exec_driver_sql(end.format(number))
    admin.dispose()


# Beside deliveries -----------------------------------------------------------------------------------------------


def test_a_delivery_that_is_open_is_not_waited_for_by_others(on_server: Harness) -> None:
    """What the old code has not committed has no twin; another run, after it, gives it one."""
    harness = on_server
    write(harness, ("m0", OLD), ("m2", OLD))
    held = Held(harness)
    delivery = harness.start(harness.deliver, deployed(harness, OLD, held))
    held.gate.arrival()
    assert rename(harness.engine, OLD, NEW) == Renamed(2)
    held.gate.open()
    delivery.result()
    assert rename(harness.engine, OLD, NEW) == Renamed(1, 2)


def until_blocked(harness: Harness) -> None:
    """Return once the server says that somebody waits for a lock."""
    query = {
        "postgresql": "select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'",
        "mariadb": "select 1 from information_schema.innodb_trx join information_schema.processlist on "
        "id = trx_mysql_thread_id where trx_state = 'LOCK WAIT' and db = database()",
    }[harness.engine.dialect.name]
    deadline = time.monotonic() + PATIENCE
    while harness.transact(lambda session: session.execute(text(query)).first()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.15)  # MariaDB makes no new copy of innodb_trx while it is asked for every 100 ms


def test_a_marker_that_a_delivery_writes_meanwhile_is_no_error(on_server: Harness) -> None:
    """The copy waits for it, meets it, and is made again without it."""
    harness = on_server
    write(harness, ("m0", OLD), ("m1", OLD))
    with UnitOfWork(harness.factory) as uow:
        assert uow.claim("m1", NEW)
        renaming = harness.start(rename, harness.engine, OLD, NEW)
        until_blocked(harness)
        uow.commit()
    assert renaming.result() == Renamed(1, 1)


def test_what_the_old_code_writes_meanwhile_is_not_removed(on_server: Harness) -> None:
    """It has no twin: without its marker the message would be applied again."""
    harness = on_server
    write(harness, ("m1", OLD), ("m3", OLD))
    late = iter(["m2"])

    def deliver(_connection: Any, _cursor: Any, sql: str, *_: Any) -> None:
        if sql.startswith("DELETE") and (message_id := next(late, None)):
            harness.start(harness.deliver, deployed(harness, OLD), message_id=message_id).result()

    event.listen(harness.engine, "before_cursor_execute", deliver)
    rename(harness.engine, OLD, NEW, remove_old=True)
    assert harness.markers() == [("m1", NEW), ("m2", OLD), ("m3", NEW)]
    assert rename(harness.engine, OLD, NEW, remove_old=True) == Renamed(1, 0, 1)


def test_nothing_is_applied_twice_beside_deliveries_and_cleanup(harness: Harness) -> None:
    """New code that names the old one delivers everything again while its markers are renamed, and pruned ones go."""
    messages = [f"m{number}" for number in range(120)]
    dispatcher = deployed(harness, OLD)
    for each in messages[:60]:
        harness.deliver(dispatcher, Added((each,)), each)
    write(harness, *((f"old {number}", OLD) for number in range(50)))
    declared = {"key": REDELIVERY_HORIZON, "value": "168"}
    harness.transact(lambda session: session.execute(insert(default_tables.state), declared))
    begin = threading.Barrier(4)

    def redeliver() -> None:
        newer = deployed(harness, NEW)
        begin.wait()
        for each in messages:
            harness.deliver(newer, Added((each,)), each)

    def rename_meanwhile() -> None:
        begin.wait()
        for _ in range(3):
            rename(harness.engine, OLD, NEW, batch_size=10, remove_old=True)

    def prune() -> None:
        begin.wait()
        cleanup(harness.engine, batch_size=5)

    for running in [harness.start(each) for each in (redeliver, redeliver, rename_meanwhile, prune)]:
        running.result()
    rename(harness.engine, OLD, NEW)
    cleanup(harness.engine)
    without = harness.dispatcher(harness.handler(add, NEW))
    outcomes = {harness.deliver(without, Added((each,)), each).outcome for each in messages}
    assert outcomes == {Outcome.DUPLICATE}
    assert harness.totals() == dict.fromkeys(messages, 1)
    assert {message_id for message_id, _ in harness.markers()} == set(messages)


@pytest.mark.parametrize("remove_old", [True, False])
def test_the_new_name_is_known_to_be_pruned_if_the_old_one_was(harness: Harness, remove_old: bool) -> None:
    """Else a rebuild of the new name would apply the messages again whose markers are gone."""
    write(harness, ("m3", "another"), ("m1", OLD))  # the second has no time, so nothing but its age keeps it
    assert cleanup(harness.engine) == 1
    write(harness, ("m2", OLD))
    rename(harness.engine, OLD, NEW, dry_run=True)
    assert pruned(harness) == {OLD}
    rename(harness.engine, OLD, NEW, remove_old=remove_old)
    assert pruned(harness) == {OLD, NEW}
    rename(harness.engine, "another", NEW)
    rename(harness.engine, NEW, "a third")
    assert pruned(harness) == {OLD, NEW, "a third"}


def pruned(harness: Harness) -> set[str]:
    """The handlers of which the state table says that cleanup may have deleted markers."""
    with harness.engine.connect() as connection:
        return {value for key, value in read_state(connection, default_tables).items() if key.startswith("pruned:")}


# The command -----------------------------------------------------------------------------------------------------


def run(harness: Harness, *arguments: str) -> Any:
    """`idempotency rename`, on the harness's database."""
    url = harness.subject.url.render_as_string(hide_password=False)
    return CliRunner().invoke(main, ["rename", "--database-url", url, *arguments])


@on_one_database
def test_the_command_says_what_it_did(harness: Harness) -> None:
    """One line on stdout, nothing on stderr, as cron wants it."""
    write(harness, *((each, OLD) for each in ids(*range(3))), ("a0", NEW))
    done = run(harness, OLD, NEW, "--dry-run")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == "Would have copied 2 markers of old to new; 1 were there already.\n"
    assert (
        run(harness, OLD, NEW, "--batch-size", "1").stdout == "Copied 2 markers of old to new; 1 were there already.\n"
    )
    done = run(harness, OLD, NEW, "--remove-old", "--yes")
    assert done.stdout == "Copied 0 markers of old to new; 3 were there already. Removed 3 markers of old.\n"
    assert harness.markers() == sorted((each, NEW) for each in ids(*range(3)))
    done = run(harness, OLD, NEW)
    assert (done.exit_code, done.stdout) == (0, "There is no marker of old.\n")


def test_the_command_asks_before_it_removes(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """No is no; a dry run does not ask; where nobody can be asked, it is not done."""
    write(harness, ("m1", OLD))
    assert run(harness, OLD, NEW, "--remove-old").exit_code == 2
    monkeypatch.setattr("projector_dedup.cli.rows.confirmed", lambda _question: False)
    refused = run(harness, OLD, NEW, "--remove-old")
    assert (refused.exit_code, "nothing was renamed" in refused.stderr) == (1, True)
    assert harness.markers() == [("m1", OLD)]
    assert run(harness, OLD, NEW, "--remove-old", "--dry-run").exit_code == 0
    assert harness.markers() == [("m1", OLD)]
    monkeypatch.setattr("projector_dedup.cli.rows.confirmed", lambda _question: True)
    assert run(harness, OLD, NEW, "--remove-old").exit_code == 0
    assert harness.markers() == [("m1", NEW)]


@on_one_database
def test_the_command_fails_in_one_line(harness: Harness) -> None:
    """A name that nobody knows, and a name that is the same."""
    for arguments, says in (((OLD, NEW), "neither old nor new"), ((OLD, OLD), "give two different names")):
        failed = run(harness, *arguments)
        assert failed.exit_code == 1
        assert says in failed.stderr
        assert len(failed.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [(), (OLD,), (OLD, NEW, "--batch-size", "0"), (OLD, NEW, "--batch-size", "10001")]
)
def test_a_wrong_command_line_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    """Before anything is connected to."""
    assert CliRunner().invoke(main, ["rename", "--database-url", "sqlite:///x.db", *arguments]).exit_code == 2


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"], ids=["when it is set", "when it is reset"])
def test_a_connection_that_is_lost_at_the_isolation_level(mariadb: Database, level: str) -> None:
    """The rename goes on with another connection. SQLAlchemy raises the driver's own error there."""
    with Harness(Subject(mariadb.url())) as harness, CutProxy(mariadb.url()) as proxy:
        harness.create_tables()
        write(harness, ("m1", OLD))
        cut: list[list[str]] = []

        def cut_once(where: str, trip: list[str]) -> None:
            if where == "before" and f"SESSION TRANSACTION ISOLATION LEVEL {level}" in trip[0] and not cut:
                cut.append(trip)
                raise EOFError

        proxy.at_trip = cut_once
        engine = create_engine(proxy.through(mariadb.url()))
        assert rename(engine, OLD, NEW) == Renamed(copied=1)
        assert cut
        engine.dispose()
