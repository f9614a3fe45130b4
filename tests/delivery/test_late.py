"""A message that comes again after its marker was pruned is late: it is never applied a second time in silence."""

import json
import logging
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import combinations
from typing import Any

import pytest
from click.testing import CliRunner
from projector_dedup.cli.main import main
from sqlalchemy import Engine, create_engine, event, insert, select, text, update
from sqlalchemy.orm import Session, sessionmaker

from databases import USUAL_ASYNC, Database
from late_rig import (
    DAY,
    ID,
    MARKER,
    OLD,
    STATE,
    Clock,
    Stepped,
    Worker,
    applied_once,
    outcome,
    stop_cleanups,
    total,
)
from projector_dedup import (
    Action,
    BatchFailed,
    BeyondRetention,
    Dispatcher,
    InvalidMessageError,
    Message,
    MissingTableError,
    Observation,
    Outcome,
    RefusedError,
    from_ulid,
    from_uuid7,
    on,
    projector,
    verdict_of,
)
from projector_dedup.late import SETTLE, Line, line_key, read_lines
from projector_dedup.maintenance.check import advise
from projector_dedup.maintenance.cleanup import count_expired, prune
from projector_dedup.maintenance.rows import rename
from projector_dedup.maintenance.stats import ages, stats
from projector_dedup.tables import default_tables
from projector_dedup.testing import external_transaction
from projector_dedup.testing.kit import Added, Harness, Subject, Total, add

LEVELS = {
    "postgresql": ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"),
    "mariadb": ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"),
    "sqlite": (None,),
}
EVERY_LEVEL = [
    pytest.param(
        engine,
        level,
        id=f"{engine}-{level or 'usual'}",
        marks=[] if level in (None, "REPEATABLE READ") else [pytest.mark.slow],
    )
    for engine, levels in LEVELS.items()
    for level in levels
]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that tests set ahead."""
    return Clock(monkeypatch)


@pytest.fixture
def cleaner(database: Database) -> Iterator[Engine]:
    """The engine of whoever cleans up."""
    engine = create_engine(database.url())
    yield engine
    engine.dispose()


@pytest.fixture
def harness(database: Database) -> Iterator[Harness]:
    """A harness on the usual driver of each engine, with its tables."""
    with Harness(Subject(database.url())) as made:
        made.create_tables()
        yield made


@pytest.fixture
def pruned(harness: Harness, cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A database where the message was applied long ago, and its marker is pruned by two cleanups."""
    assert harness.totals() == {}
    stop_cleanups(monkeypatch)
    applied_once(cleaner)
    assert [prune_later(cleaner, clock), prune_later(cleaner, clock)] == [0, 1]
    return cleaner


def prune_later(engine: Engine, clock: Clock) -> int:
    """Prune an hour later, and return the number of markers that were deleted."""
    clock.passes()
    return prune(engine).deleted


def line(engine: Engine) -> Line:
    """The line of `totals`."""
    with engine.connect() as connection:
        return read_lines(connection, default_tables)["line:totals"]


def again(occurred: datetime | None = OLD, message_id: str = ID) -> Message:
    """The message that was applied, or another one."""
    return Message(message_id, Added(), occurred_at=occurred)


# Every order --------------------------------------------------------------------------------------------------------

CLAIM = 2  # steps of a delivery: it knows the lines; its claim is answered
CLEANUP = ("line", "known", "delete")
STEPS = (*CLEANUP, "hour", *CLEANUP, "hour", *CLEANUP)
ORDERS = list(combinations(range(CLAIM + len(STEPS)), CLAIM))


def in_order(
    order: tuple[int, ...], harness: Harness, engine: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Deliver the message again, in steps between those of three cleanups."""
    applied_once(engine)
    with monkeypatch.context() as patched:
        stop_cleanups(patched)
        worker = Worker(harness, patched).stepped
        cleanups = iter([Stepped(lambda: prune(engine)) for _ in range(3)])
        steps, cleanup = iter(STEPS), next(cleanups)
        for position in range(CLAIM + len(STEPS)):
            if position in order:
                worker.step()
            elif (step := next(steps)) == "hour":
                clock.passes()
                cleanup = next(cleanups)
            elif step == "delete":
                cleanup.finish()
            else:
                cleanup.step()
        return outcome(worker.finish())


@pytest.mark.timeout(600)  # 78 orders, and at the levels that are not the usual one every sixth
@pytest.mark.parametrize(("database", "level"), EVERY_LEVEL, indirect=["database"])
def test_in_no_order_it_is_applied_twice(
    database: Database, level: str | None, cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three cleanups, an hour apart, write a line, write that it is known, and delete; the delivery comes anywhere."""
    with Harness(Subject(database.url(), dispatcher_isolation=level)) as harness:
        harness.create_tables()
        found: dict[Any, str] = {}
        for order in ORDERS if level in (None, "REPEATABLE READ") else ORDERS[::6]:
            found[order] = in_order(order, harness, cleaner, clock, monkeypatch)
            assert total(cleaner) == 1, order
    assert set(found.values()) == {"duplicate", "BeyondRetention"}


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "sqlite"], indirect=True)
def test_in_no_order_it_is_applied_twice_by_asyncio(
    database: Database, cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code is the same, so a few orders do: the lines are asked for first, and the claim is answered last."""
    with Harness(Subject(database.url(USUAL_ASYNC[database.engine]))) as harness:
        harness.create_tables()
        found = set()
        for order in ((0, 1), (0, 4), (0, 8), (3, 12), (0, 12), (11, 12)):
            found.add(in_order(order, harness, cleaner, clock, monkeypatch))
            assert total(cleaner) == 1, order
    assert found == {"duplicate", "BeyondRetention"}


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_a_line_whose_transaction_stays_open_is_not_known_before_it_commits(
    database: Database, harness: Harness, cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that asks just before the COMMIT does not see the line; an hour later only nobody relies on that."""
    applied_once(cleaner)
    worker = Worker(harness, monkeypatch).stepped
    stop_cleanups(monkeypatch, after=())
    slow = create_engine(database.url())
    written: list[bool] = []

    @event.listens_for(slow, "commit")
    def before_the_commit(connection: Any) -> None:
        if not written and any("line:" in key for key in connection.execute(select(STATE.c.key)).scalars()):
            written.append(True)
            Stepped.gate_of_thread()

    cleanup = Stepped(lambda: prune(slow))
    cleanup.step()
    clock.passes()
    worker.step()
    cleanup.finish()
    prune(cleaner)
    assert outcome(worker.finish()) == "duplicate"
    assert (total(cleaner), written) == (1, [True])
    slow.dispose()


@pytest.mark.parametrize("killed_at", ["write_lines", "write_known"])
def test_a_cleanup_that_is_killed_leaves_its_line_to_the_next_one(
    killed_at: str, harness: Harness, cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that nobody has called known is known from then on, and not earlier."""
    applied_once(cleaner)
    stop_cleanups(monkeypatch, after=(killed_at,))
    Stepped(lambda: prune(cleaner)).step()  # and it never goes on
    assert prune_later(cleaner, clock) == (0 if killed_at == "write_lines" else 1)
    worker = Worker(harness, monkeypatch).stepped
    worker.step()
    assert prune_later(cleaner, clock) == (1 if killed_at == "write_lines" else 0)
    assert outcome(worker.finish()) == "BeyondRetention"
    assert total(cleaner) == 1


@pytest.mark.usefixtures("harness")
def test_a_run_that_overslept_changes_nothing(cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs find one line of which nobody knows; the slower one must not undo what the other one wrote."""
    applied_once(cleaner)
    stop_cleanups(monkeypatch, after=("unknown_lines",))
    first, slower = Stepped(lambda: prune(cleaner)), Stepped(lambda: prune(cleaner))
    first.step()
    slower.step()
    clock.passes()
    first.finish()
    known = line(cleaner).known
    clock.passes(SETTLE / 2)
    slower.finish()
    assert line(cleaner).known == known
    assert [prune(cleaner).deleted, prune_later(cleaner, clock)] == [0, 1]


@pytest.mark.usefixtures("harness")
def test_a_line_that_has_not_settled_is_not_moved(
    cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Younger markers expire meanwhile; nothing is deleted before the hour is over, and then by the older line."""
    applied_once(cleaner)
    stop_cleanups(monkeypatch)
    assert prune(cleaner).deleted == 0
    written = line(cleaner)
    with cleaner.begin() as connection:
        row = {"message_id": "2", "handler": "totals", "processed_at": OLD + DAY, "occurred_at": OLD + DAY}
        connection.execute(insert(MARKER), row)
    assert prune(cleaner).deleted == 0
    assert line(cleaner) == written
    assert prune_later(cleaner, clock) == 1
    assert (line(cleaner).at, line(cleaner).settled) == (OLD + DAY, OLD)
    assert [prune(cleaner).deleted, prune_later(cleaner, clock)] == [0, 1]


STAGES = 4  # of a cleanup: it writes lines, looks for unknown ones, writes that they are known, deletes


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.usefixtures("harness")
def test_in_no_order_of_two_cleanups_is_a_marker_deleted_before_its_line_was_there_for_an_hour(
    cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour passes between any two steps of both; whoever looks at the lines after each step saw it in time."""
    stop_cleanups(monkeypatch, after=("write_lines", "unknown_lines", "write_known"))
    deleted = 0
    for order in combinations(range(1, 2 * STAGES), STAGES):  # the other run comes first
        for hour in (2, 4, 6):
            applied_once(cleaner)
            runs = [Stepped(lambda: prune(cleaner)) for _ in range(2)]
            seen: timedelta | None = None
            for position in range(2 * STAGES):
                if position == hour:
                    clock.passes()
                runs[position in order].step()
                with cleaner.connect() as connection:
                    there = bool(read_lines(connection, default_tables))
                    gone = connection.execute(select(MARKER.c.message_id)).first() is None
                if there and seen is None:
                    seen = clock.ahead
                assert not gone or (seen is not None and clock.ahead - seen >= SETTLE), (order, hour, position)
                deleted += gone
            for run in runs:
                run.finish()
    assert deleted  # in some order the hour is over when the second one deletes


# Which messages are late ------------------------------------------------------------------------------------------


def test_a_late_message_is_rejected_and_nothing_ran(pruned: Engine, harness: Harness) -> None:
    """The error names the message, its time, the line and the remedy; there is no marker; the observer hears of it."""
    seen: list[Observation] = []
    observer: Any = type("Noting", (), {"observed": lambda _self, observation: seen.append(observation)})()
    with pytest.raises(BeyondRetention, match=r"m1 occurred at .* late='apply'") as raised:
        harness.deliver(harness.dispatcher(observer=observer), again(), None)
    assert verdict_of(raised.value).action is Action.REJECT
    assert [(each.outcome, each.handler, each.error) for each in seen] == [("late", "totals", raised.value)]
    assert (total(pruned), harness.markers()) == (1, [])


def test_a_late_message_may_be_skipped_or_applied(
    pruned: Engine, harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """A skipped one leaves no marker either, so it is skipped again; an applied one is applied for the second time."""
    caplog.set_level(logging.INFO, "projector_dedup")
    seen: list[Observation] = []
    observer: Any = type("Noting", (), {"observed": lambda _self, observation: seen.append(observation)})()
    skipping = harness.dispatcher(late="skip", observer=observer)
    for _ in range(2):
        assert harness.deliver(skipping, again(), None).outcomes == {"totals": Outcome.SKIPPED}
    assert [(each.outcome, each.handler) for each in seen] == 2 * [("skipped", "totals")]
    assert caplog.text.count("skipped: message m1, handler totals") == 2
    assert (total(pruned), harness.markers()) == (1, [])
    assert harness.deliver(harness.dispatcher(late="apply"), again(), None).outcome is Outcome.APPLIED
    assert total(pruned) == 2


def test_a_message_after_the_line_is_applied(pruned: Engine, harness: Harness) -> None:
    """The line is the time of the last marker that may be deleted, not the cutoff: after a downtime all is applied."""
    dispatcher = harness.dispatcher()
    after = OLD + timedelta(microseconds=1)
    assert harness.deliver(dispatcher, again(after, "missed in a downtime"), None).outcome is Outcome.APPLIED
    assert harness.deliver(dispatcher, again(None, "has no time"), None).outcome is Outcome.APPLIED
    with pytest.raises(BeyondRetention):
        harness.deliver(dispatcher, again(OLD, "as old as the line"), None)
    assert total(pruned) == 3


@pytest.mark.usefixtures("pruned")
def test_another_handler_has_a_line_of_its_own(harness: Harness) -> None:
    """A handler that is new, or was down for longer than the retention, applies what it has not applied."""
    dispatcher = harness.dispatcher(harness.handler(), harness.handler(name="newer"), late="skip")
    outcomes = harness.deliver(dispatcher, again(), None).outcomes
    assert outcomes == {"totals": Outcome.SKIPPED, "newer": Outcome.APPLIED}


def test_the_lines_of_former_names_count(pruned: Engine, harness: Harness) -> None:
    """The message was applied, and its marker pruned, before the handler was renamed."""
    with pytest.raises(BeyondRetention):
        harness.deliver(harness.dispatcher(harness.handler(name="renamed", formerly=["totals"])), again(), None)
    assert total(pruned) == 1


def test_a_duplicate_is_a_duplicate_whatever_its_time(
    harness: Harness, cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is written, and the marker is not deleted yet."""
    stop_cleanups(monkeypatch)
    applied_once(cleaner)
    assert prune_later(cleaner, clock) == 0
    assert harness.deliver(harness.dispatcher(), again(), None).outcome is Outcome.DUPLICATE


def test_a_producer_whose_clock_runs_ahead_keeps_its_markers(
    harness: Harness, cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A marker is kept until no message of its time can be taken for a young one, whatever was deleted beside it."""
    stop_cleanups(monkeypatch)
    applied_once(cleaner)
    ahead = datetime.now(UTC) + DAY
    with cleaner.begin() as connection:
        row = {"message_id": "ahead", "handler": "totals", "processed_at": OLD, "occurred_at": ahead}
        connection.execute(insert(MARKER), row)
    assert [prune_later(cleaner, clock) for _ in range(3)] == [0, 1, 0]
    assert harness.deliver(harness.dispatcher(), again(ahead, "ahead"), None).outcome is Outcome.DUPLICATE
    clock.passes(9 * DAY)
    assert [prune_later(cleaner, clock) for _ in range(2)] == [0, 1]
    with pytest.raises(BeyondRetention):
        harness.deliver(harness.dispatcher(), again(ahead, "ahead"), None)
    assert total(cleaner) == 1


@pytest.mark.usefixtures("harness")
def test_a_marker_without_a_time_goes_at_once(cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is promised for it, and no line is written."""
    stop_cleanups(monkeypatch)
    applied_once(cleaner, occurred=None)
    assert (count_expired(cleaner), prune_later(cleaner, clock)) == (1, 1)
    with cleaner.connect() as connection:
        assert read_lines(connection, default_tables) == {}


@pytest.mark.usefixtures("harness")
def test_what_a_run_would_delete_is_counted_and_when_more_follows(
    cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run, the statistics and the result of a run agree on what may be deleted now."""
    stop_cleanups(monkeypatch)
    applied_once(cleaner)
    assert (count_expired(cleaner), stats(cleaner).expired) == (0, 0)
    done = prune(cleaner)
    assert done.complete
    assert done.settles is not None
    assert not ages(cleaner).has_expired
    clock.passes()
    assert ages(cleaner).has_expired
    assert (count_expired(cleaner), stats(cleaner).expired) == (1, 1)
    assert (prune(cleaner).settles, count_expired(cleaner)) == (None, 0)


def test_a_renamed_handler_keeps_its_line(pruned: Engine, harness: Harness) -> None:
    """`rename` copies the line, so that `formerly` may go; a later line of the new name stays."""
    with pruned.begin() as connection:
        row = {"message_id": "kept", "handler": "totals", "processed_at": datetime.now(UTC), "occurred_at": None}
        connection.execute(insert(MARKER), row)
        later = {"key": "line:prompt", "value": Line(OLD + DAY).text}
        connection.execute(insert(STATE), later)
    for new in ("renamed", "prompt"):
        rename(pruned, "totals", new)
        with pytest.raises(BeyondRetention):
            harness.deliver(harness.dispatcher(harness.handler(name=new)), again(), None)
    with pruned.connect() as connection:
        lines = read_lines(connection, default_tables)
    assert {key: line.at for key, line in lines.items()} == {
        "line:totals": OLD,
        "line:renamed": OLD,
        "line:prompt": OLD + DAY,
    }


def test_a_line_that_was_copied_settles_again(pruned: Engine, clock: Clock) -> None:
    """What the new name had before stays; the copy is known when the next cleanup has written that."""
    with pruned.begin() as connection:
        row = {"message_id": "1", "handler": "renamed", "processed_at": OLD, "occurred_at": OLD}
        connection.execute(insert(MARKER), row)
        connection.execute(insert(STATE), {"key": "line:renamed", "value": Line(OLD - DAY, known=OLD).text})
    rename(pruned, "totals", "renamed")
    assert [prune(pruned).deleted, prune_later(pruned, clock)] == [0, 1]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.usefixtures("harness")
def test_the_command_says_when_more_can_be_deleted(cleaner: Engine) -> None:
    """In a sentence, and as a moment for machines; it says nothing of that if no line has to settle."""
    url = cleaner.url.render_as_string(hide_password=False)
    arguments = ["cleanup", "--database-url", url]
    assert CliRunner().invoke(main, arguments).stdout == "Deleted 0 markers older than 168 hours.\n"
    applied_once(cleaner)
    assert re.fullmatch(
        r"Deleted 0 markers older than 168 hours\. Run it again after \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC: then more "
        r"markers can be deleted\.\n",
        CliRunner().invoke(main, arguments).stdout,
    )
    told = json.loads(CliRunner().invoke(main, [*arguments, "--log-json"]).stdout)
    known = line(cleaner).known
    assert known is not None
    assert datetime.fromisoformat(told["settles"]) == known + SETTLE


def test_without_the_right_to_write_lines_dated_markers_are_kept(
    postgresql: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are deleted; the log names the table and the rights, each time."""
    owner = create_engine(postgresql.url())
    with Harness(Subject(postgresql.url())) as harness:
        harness.create_tables()
    applied_once(owner)
    role = f"pruner_{postgresql.url().database}"
    with owner.begin() as connection:
        row = {"message_id": "no time", "handler": "totals", "processed_at": OLD, "occurred_at": None}
        connection.execute(insert(MARKER), row)
        connection.execute(text(f"CREATE ROLE {role} LOGIN"))
        connection.execute(text(f"GRANT USAGE ON SCHEMA public TO {role}"))
        connection.execute(text(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {MARKER.name} TO {role}"))
        connection.execute(text(f"GRANT SELECT ON {STATE.name} TO {role}"))
    engine = create_engine(postgresql.url(), connect_args={"options": f"-c role={role}"})
    try:
        assert [prune(engine).deleted, prune(engine).deleted] == [1, 0]
        with owner.connect() as connection:
            assert connection.execute(select(MARKER.c.message_id)).scalars().all() == [ID]
    finally:
        engine.dispose()
        with owner.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))
            connection.execute(text(f"DROP ROLE {role}"))
        owner.dispose()
    assert caplog.text.count("because it could not write into processed_message_state") == 2


def test_check_names_the_handlers_whose_messages_have_no_time(harness: Harness, cleaner: Engine) -> None:
    """Once something may have been pruned; among the newest markers only, however many there are."""
    dispatcher = harness.dispatcher(harness.handler(), harness.handler(name="other"))
    harness.deliver(dispatcher, again(None), None)
    assert ages(cleaner).timeless == ("other", "totals")
    assert advise(ages(cleaner)) == []
    with cleaner.begin() as connection:
        row = {"message_id": "gone", "handler": "gone", "processed_at": OLD, "occurred_at": None}
        connection.execute(insert(MARKER), row)
    assert prune(cleaner).deleted == 1
    (finding,) = advise(ages(cleaner))
    assert (finding.problem, finding.fatal) == (
        "the messages of these handlers have no occurred_at: other, totals",
        False,
    )
    with cleaner.begin() as connection:
        connection.execute(update(MARKER).values(occurred_at=OLD))
    assert advise(ages(cleaner)) == []


# A claim that takes long --------------------------------------------------------------------------------------------


def test_a_claim_that_was_answered_late_runs_again(harness: Harness, clock: Clock) -> None:
    """It is rolled back before the handler is called, and the next attempt reads the lines again."""
    entered: list[object] = []

    def handle(happened: Added, session: Session) -> None:
        entered.append(happened)
        add(happened, session)

    sent: list[str] = []

    @event.listens_for(harness.engine, "before_cursor_execute")
    def slowly(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)
        if "INSERT INTO processed_message" in statement.replace("`", "").replace("IGNORE ", "") and len(claims()) == 1:
            clock.passes(SETTLE * 0.51)

    def claims() -> list[str]:
        return [each for each in sent if each.lstrip().upper().startswith("INSERT") and "processed_message" in each]

    def readings() -> list[str]:
        return [each for each in sent if "processed_message_state" in each]

    dispatcher = harness.dispatcher(harness.handler(handle))
    assert harness.deliver(dispatcher, again(), None).outcome is Outcome.APPLIED
    assert (len(entered), len(claims()), len(readings())) == (1, 2, 2)


def test_the_lines_are_asked_for_once_in_a_quarter_of_an_hour(harness: Harness, clock: Clock) -> None:
    """No message pays for them, and messages without a time never ask."""
    sent: list[str] = []
    event.listen(harness.engine, "before_cursor_execute", lambda _c, _u, statement, *_: sent.append(statement))

    def readings() -> int:
        return sum("processed_message_state" in each for each in sent)

    dispatcher = harness.dispatcher()
    seen = []
    for number, span in enumerate([timedelta(), SETTLE / 5, SETTLE / 5]):
        clock.passes(span)
        harness.deliver(dispatcher, again(None, f"none {number}"), None)
        for some in range(3):
            harness.deliver(dispatcher, again(OLD, f"{number} {some}"), None)
        seen.append(readings())
    assert seen == [1, 1, 2]


def test_a_worker_that_was_suspended_trusts_the_wall_clock(harness: Harness, clock: Clock) -> None:
    """Its monotonic clock stood still; the lines are read again all the same."""
    sent: list[str] = []
    event.listen(harness.engine, "before_cursor_execute", lambda _c, _u, statement, *_: sent.append(statement))
    dispatcher = harness.dispatcher()
    harness.deliver(dispatcher, again(OLD, "before"), None)
    clock.suspended(SETTLE)
    harness.deliver(dispatcher, again(OLD, "after"), None)
    assert sum("processed_message_state" in each for each in sent) == 2


def _by_checkout(harness: Harness, choose: Callable[[Any], Any]) -> None:
    def on_checkout(driver: Any, _record: object, _proxy: object) -> None:
        with closing(driver.cursor()) as cursor:
            choose(cursor.execute)

    event.listen(harness.engine, "checkout", on_checkout)


def _by_after_begin(harness: Harness, choose: Callable[[Any], Any]) -> None:
    event.listen(harness.factory, "after_begin", lambda _s, _t, connection: choose(connection.exec_driver_sql))


@pytest.mark.parametrize("listen", [_by_checkout, _by_after_begin])
def test_each_tenant_has_its_own_lines(postgresql: Database, listen: Callable[..., None]) -> None:
    """A listener chooses the tenant's schema for each transaction: the message is late for one, new to the other."""
    owner = create_engine(postgresql.url())
    tenants = ("tenant_a", "tenant_b")
    for tenant in tenants:
        mapped = owner.execution_options(schema_translate_map={None: tenant})
        with mapped.begin() as connection:
            connection.exec_driver_sql(f"CREATE SCHEMA {tenant}")
            default_tables.marker.metadata.create_all(connection)
            Total.metadata.create_all(connection)
    with owner.begin() as connection:
        value = Line(OLD).text
        connection.execute(text(f"INSERT INTO tenant_b.{STATE.name} VALUES ('line:totals', :value)"), {"value": value})
    with Harness(Subject(postgresql.url())) as harness:
        now = [tenants[0]]
        listen(harness, lambda execute: execute(f"SET search_path TO {now[0]}") and None)
        dispatcher = harness.dispatcher(late="skip")
        outcomes = []
        for tenant in (*tenants, *tenants):
            now[0] = tenant
            outcomes.append(harness.deliver(dispatcher, again(), None).outcome.value)
    assert outcomes == ["applied", "skipped", "duplicate", "skipped"]
    owner.dispose()


# Batches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"batch": True}], ids=str)
def test_late_messages_of_a_batch_fail_alone(pruned: Engine, harness: Harness, settings: dict[str, Any]) -> None:
    """All others are applied; a late one leaves no marker; with `late="skip"` it is skipped."""

    def add_all(happened: list[Added], session: Session) -> None:
        for each in happened:
            add(each, session)

    handler = harness.handler(add_all if settings.get("batch") else add, **settings)
    young = datetime.now(UTC)
    batch = [again(young, "1"), again(), again(young, "2"), again(OLD, "late too"), again(None, "3")]
    with pytest.raises(BatchFailed) as raised:
        harness.run(harness.dispatcher(handler).deliver_batch, batch)
    assert [each.outcome.value for each in raised.value.deliveries] == [
        *("applied", "failed", "applied", "failed", "applied")
    ]
    assert {type(each) for each in raised.value.exceptions} == {BeyondRetention}
    assert total(pruned) == 4
    deliveries = harness.run(harness.dispatcher(handler, late="skip").deliver_batch, batch)
    assert [each.outcome.value for each in deliveries] == ["duplicate", "skipped", "duplicate", "skipped", "duplicate"]
    assert (total(pruned), len(harness.markers())) == (4, 3)


# When the lines cannot be read ----------------------------------------------------------------------------------------


def test_without_the_lines_nothing_is_applied(harness: Harness, cleaner: Engine) -> None:
    """A missing table and a value that is no line are refused, with what to do; messages without a time pass."""
    dispatcher = harness.dispatcher()
    with cleaner.begin() as connection:
        connection.execute(insert(STATE), {"key": "line:totals", "value": "yesterday"})
    with pytest.raises(RefusedError, match="its value is no line"):
        harness.deliver(dispatcher, again(), None)
    STATE.drop(cleaner)
    with pytest.raises(MissingTableError):
        harness.deliver(dispatcher, again(), None)
    assert harness.totals() == {}
    assert harness.deliver(dispatcher, again(None), None).outcome is Outcome.APPLIED


def test_a_user_who_may_not_read_the_lines_is_told(postgresql: Database) -> None:
    """The error names the table and the right; `late="apply"` needs neither."""
    owner = create_engine(postgresql.url())
    with Harness(Subject(postgresql.url())) as harness:
        harness.create_tables()
    role = f"worker_{postgresql.url().database}"
    with owner.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN"))
        connection.execute(text(f"GRANT USAGE ON SCHEMA public TO {role}"))
        connection.execute(text(f"GRANT SELECT, INSERT, UPDATE ON {MARKER.name}, contract_total TO {role}"))

    def adding(happened: Added, session: Session) -> None:
        add(happened, session)

    engine = create_engine(postgresql.url(), connect_args={"options": f"-c role={role}"})
    handler = projector(idempotent=True, name="totals")(on(Added)(adding))
    try:
        with pytest.raises(RefusedError, match="grant SELECT on it"):
            Dispatcher(sessionmaker(engine), handler).deliver(again())
        assert Dispatcher(sessionmaker(engine), handler, late="apply").deliver(again()).outcome is Outcome.APPLIED
    finally:
        engine.dispose()
        with owner.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))
            connection.execute(text(f"DROP ROLE {role}"))
        owner.dispose()


def test_a_connection_that_is_lost_while_the_lines_are_read_costs_an_attempt(postgresql: Database) -> None:
    """The delivery is tried again, with the lines."""
    with Harness(Subject(postgresql.url())) as harness:
        harness.create_tables()
        admin = create_engine(postgresql.url())
        killed: list[int] = []

        @event.listens_for(harness.engine, "before_cursor_execute")
        def kill(connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if "processed_message_state" in statement and not killed:
                killed.append(connection.connection.driver_connection.info.backend_pid)
                with admin.connect() as other:
                    other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": killed[0]})

        assert harness.deliver(harness.dispatcher(), again(), None).outcome is Outcome.APPLIED
        assert (harness.totals(), len(killed)) == ({"a": 1}, 1)
        admin.dispose()


def test_in_a_transaction_of_a_test_nothing_is_late(pruned: Engine, harness: Harness) -> None:
    """`external_transaction` reads no line: the transaction is the test's, and is rolled back."""
    with (
        harness.outer_transaction() as factory,
        external_transaction(harness.dispatcher(factory=factory)) as dispatcher,
    ):
        assert dispatcher.deliver(again()).outcome is Outcome.APPLIED
    assert total(pruned) == 1


# Lines, as they are written -------------------------------------------------------------------------------------------


def test_a_line_is_read_as_it_was_written() -> None:
    """To the microsecond, in UTC; and what is no line is refused."""
    moment = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    for line in (
        Line(moment),
        Line(moment, moment + DAY),
        Line(moment, moment + DAY, moment - DAY),
        Line(moment, None, moment),
    ):
        assert Line.of(line.text) == line
    for text_ in ("", "x", "- - -", "2026-01-01T00:00:00 - -", moment.isoformat()):
        with pytest.raises(ValueError):  # noqa: PT011  # whichever
            Line.of(text_)


def test_every_handler_has_a_key_that_the_state_table_takes() -> None:
    """The longest name too, and names that differ in their last letter have two keys."""
    names = ["h", "x" * 249 + "a", "x" * 250 + "a", "x" * 250 + "b", "\N{LATIN SMALL LETTER E WITH ACUTE}" * 127, "*"]
    keys = [line_key(name) for name in names]
    assert len(set(keys)) == len(names)
    assert max(len(key.encode()) for key in keys) <= 255


# Times of messages ----------------------------------------------------------------------------------------------------

AT = datetime(2022, 2, 22, 19, 22, 22, tzinfo=UTC)
UUID7 = "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"  # the example of RFC 9562
ULID = "01FWHE4YDGFK1SHH6W1G60EECF"  # the same 128 bits, as that example has them too


@pytest.mark.parametrize(
    ("message_id", "expected"),
    [
        (UUID7, AT),
        (UUID7.upper(), AT),
        (uuid.UUID(UUID7), AT),
        (UUID7.replace("-7cc3", "-4cc3"), None),
        (UUID7.replace("-98c4", "-18c4"), None),
        (UUID7.replace("-", ""), None),
        ("{" + UUID7 + "}", None),
        ("ffffffff-ffff-7cc3-98c4-dc0c0c07398f", None),
        ("an order", None),
    ],
)
def test_the_time_of_a_uuid_of_version_7(message_id: str | uuid.UUID | None, expected: datetime | None) -> None:
    """Version and variant are looked at; a time after the year 9999 is none."""
    assert from_uuid7(Message(message_id, None)) == expected


@pytest.mark.parametrize(
    ("message_id", "expected"),
    [
        (ULID, AT),
        (ULID.lower(), AT),
        (ULID[:-1], None),
        (ULID + "0", None),
        ("8" + ULID[1:], None),
        ("7Z" + ULID[2:], None),
        (ULID[:-1] + "U", None),
        (uuid.UUID(UUID7), None),
    ],
)
def test_the_time_of_a_ulid(message_id: str | uuid.UUID | None, expected: datetime | None) -> None:
    """26 digits of Crockford's alphabet, and 128 bits at most."""
    assert from_ulid(Message(message_id, None)) == expected


def test_a_dispatcher_finds_the_time_of_messages_that_have_none(harness: Harness, cleaner: Engine) -> None:
    """It is stored beside the marker; a time that the message carries wins; an id without a time has none."""
    dispatcher = harness.dispatcher(occurred_at=from_uuid7)
    for message in (again(None, UUID7), again(OLD, "carries one"), again(None, "has none")):
        harness.deliver(dispatcher, message, None)
    with cleaner.connect() as connection:
        found = connection.execute(select(MARKER.c.message_id, MARKER.c.occurred_at)).all()
    times = {row.message_id: row.occurred_at and row.occurred_at.replace(tzinfo=UTC) for row in found}
    assert times == {UUID7: AT, "carries one": OLD, "has none": None}


def test_settings_that_cannot_be_meant_are_refused(harness: Harness) -> None:
    """`late` is one of three words, and `occurred_at` a function whose answer has a time zone."""
    with pytest.raises(ValueError, match="late must be"):
        harness.dispatcher(late="never")
    with pytest.raises(ValueError, match="occurred_at must be"):
        harness.dispatcher(occurred_at="time")
    naive = harness.dispatcher(occurred_at=lambda _message: datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(InvalidMessageError, match="no time zone"):
        harness.deliver(naive, again(None), None)
