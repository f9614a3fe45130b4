"""A message that comes again after its marker was pruned is late: it is never applied a second time in silence."""

import json
import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import combinations
from typing import Any

import pytest
from click.testing import CliRunner
from projector_dedup.cli.main import main
from sqlalchemy import Connection, Engine, create_engine, event, insert, select, text, update
from sqlalchemy.orm import Session

from databases import USUAL_ASYNC, Database
from kit import Added, Harness, Subject, Total, add
from late_rig import (
    DAY,
    ID,
    MARKER,
    OLD,
    STATE,
    Claims,
    Clock,
    Stepped,
    Worker,
    applied_once,
    meanwhile,
    outcome,
    total,
)
from projector_dedup import Message, Outcome
from projector_dedup.errors import (
    BatchFailed,
    BeyondRetention,
    InProgress,
    InvalidMessageError,
    MissingTableError,
    RefusedError,
)
from projector_dedup.late import MARGIN, PRUNED_UNTIL, REDELIVERY_HORIZON
from projector_dedup.maintenance import cleanup as cleanup_module
from projector_dedup.maintenance.check import advise
from projector_dedup.maintenance.cleanup import count_expired, declare_horizon, prune, redelivery_horizon
from projector_dedup.maintenance.rows import rename
from projector_dedup.maintenance.state import moment_text, write_state
from projector_dedup.maintenance.stats import ages
from projector_dedup.message import from_ulid, from_uuid7
from projector_dedup.observer import Observation
from projector_dedup.tables import DedupTables, default_tables
from projector_dedup.testing import external_transaction
from projector_dedup.verdict import Action, verdict_of
from ready import engine_on, make_contract_tables, ready, role_on

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
        marks=[] if level in (None, "REPEATABLE READ") else [pytest.mark.nightly],
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
    with ready(database.url()) as made:
        yield made


@pytest.fixture
def pruned(harness: Harness, cleaner: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A database where the message was applied long ago, and its marker is pruned."""
    assert harness.totals() == {}
    meanwhile(monkeypatch)
    applied_once(cleaner, horizon=168)
    assert prune(cleaner).deleted == 1
    return cleaner


def again(occurred: datetime | None = OLD, message_id: str = ID) -> Message:
    """The message that was applied, or another one."""
    return Message(message_id, Added(), occurred_at=occurred)


# Every order --------------------------------------------------------------------------------------------------------

RUN = ("announce", "delete")
SCENARIOS: dict[str, tuple[float | None, tuple[str, ...]]] = {
    "first": (None, (*RUN, "hour", *RUN)),
    "raised": (168, ("announce", "raise", "delete", "hour", *RUN)),
    "lowered": (1000, ("lower", *RUN, "hour", *RUN)),
}
"""The horizon that was declared long ago, and what happens beside a worker."""


def orders(steps: tuple[str, ...], engine: str) -> list[tuple[int, ...]]:
    """When the worker does its steps: it knows a late moment; its claim is answered; it ends."""
    of_worker = 2 if engine == "sqlite" else 3
    return list(combinations(range(of_worker + len(steps)), of_worker))


def in_order(
    order: tuple[int, ...],
    scenario: str,
    harness: Harness,
    engine: Engine,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """Deliver the message again, in steps between those of two cleanups, and return what became of it."""
    horizon, steps = SCENARIOS[scenario]
    applied_once(engine, horizon=horizon)
    with monkeypatch.context() as patched:
        meanwhile(patched)
        worker = Worker(harness, Claims(patched)).stepped
        cleanups = iter([Stepped(lambda: prune(engine)) for _ in range(2)])
        others, cleanup = iter(steps), next(cleanups)
        for position in range(len(order) + len(steps)):
            if position in order:
                worker.step()
            elif (step := next(others)) == "hour":
                clock.passes()
            elif step in ("raise", "lower"):
                declare_horizon(engine, 1000 if step == "raise" else 168)
            elif step == "announce":
                cleanup.step()
            else:
                cleanup.finish()
                cleanup = next(cleanups, cleanup)
        return outcome(worker.finish())


@pytest.mark.by_turns
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("database", "level"), EVERY_LEVEL, indirect=["database"])
def test_in_no_order_it_is_applied_twice(
    database: Database,
    level: str | None,
    scenario: str,
    cleaner: Engine,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two cleanups, an hour apart, announce and delete, and the horizon changes; the delivery comes anywhere."""
    every = 1 if level in (None, "REPEATABLE READ") else 6
    with ready(database.url(), dispatcher_isolation=level) as harness:
        found: dict[Any, str] = {}
        for order in orders(SCENARIOS[scenario][1], database.engine)[::every]:
            found[order] = in_order(order, scenario, harness, cleaner, clock, monkeypatch)
            assert total(cleaner) == 1, order
    assert {"duplicate", "BeyondRetention"} <= set(found.values()) <= {"duplicate", "BeyondRetention", "InProgress"}


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "sqlite"], indirect=True)
def test_in_no_order_it_is_applied_twice_by_asyncio(
    database: Database, cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code is the same, so every tenth order does."""
    with ready(database.url(USUAL_ASYNC[database.engine])) as harness:
        found = set()
        for scenario, (_, steps) in SCENARIOS.items():
            for order in orders(steps, database.engine)[::10]:
                found.add(in_order(order, scenario, harness, cleaner, clock, monkeypatch))
                assert total(cleaner) == 1, (scenario, order)
    assert found >= {"duplicate", "BeyondRetention"}


# Which messages are late ------------------------------------------------------------------------------------------


def test_a_late_message_is_rejected_and_nothing_ran(pruned: Engine, harness: Harness) -> None:
    """The error names the message, its time and the remedy; there is no marker; the observer hears of it."""
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


def test_a_message_at_the_late_moment_is_applied(pruned: Engine, harness: Harness) -> None:
    """What occurred before that moment is late, by the microsecond; a message without a time never is."""
    moment = datetime.now(UTC) - 5 * DAY
    with pruned.begin() as connection:
        write_state(connection, default_tables, {PRUNED_UNTIL: moment_text(moment)})
    dispatcher = harness.dispatcher()
    assert harness.deliver(dispatcher, again(moment, "at that moment"), None).outcome is Outcome.APPLIED
    assert harness.deliver(dispatcher, again(None, "has no time"), None).outcome is Outcome.APPLIED
    with pytest.raises(BeyondRetention):
        harness.deliver(dispatcher, again(moment - timedelta(microseconds=1), "before"), None)
    assert total(pruned) == 3


def test_the_horizon_alone_makes_a_message_late(harness: Harness, cleaner: Engine) -> None:
    """By the database's clock, whether anything was ever pruned or not; for every handler."""
    declare_horizon(cleaner, 240)
    dispatcher = harness.dispatcher(harness.handler(), harness.handler(name="newer"), late="skip")
    for minutes, expected in ((5, Outcome.SKIPPED), (-5, Outcome.APPLIED)):
        at = datetime.now(UTC) - timedelta(hours=240, minutes=minutes)
        outcomes = harness.deliver(dispatcher, again(at, f"{minutes}"), None).outcomes
        assert outcomes == {"totals": expected, "newer": expected}


def test_a_new_handler_reads_the_history_of_its_topic(pruned: Engine, harness: Harness) -> None:
    """With `late="apply"`, which the error names; afterwards a usual dispatcher finds duplicates."""
    newer = harness.handler(name="newer")
    with pytest.raises(BeyondRetention, match="if the handler is new and reads the history of a topic, use"):
        harness.deliver(harness.dispatcher(newer), again(), None)
    assert harness.deliver(harness.dispatcher(newer, late="apply"), again(), None).outcome is Outcome.APPLIED
    assert harness.deliver(harness.dispatcher(newer), again(), None).outcome is Outcome.DUPLICATE
    assert total(pruned) == 2


def test_a_handler_that_is_not_idempotent_gets_every_message(pruned: Engine, harness: Harness) -> None:
    """It has no markers, so nothing can be missing."""
    dispatcher = harness.dispatcher(harness.handler(idempotent=False))
    assert harness.deliver(dispatcher, again(), None).outcome is Outcome.APPLIED
    assert total(pruned) == 2


def test_the_name_of_a_handler_does_not_matter(pruned: Engine, harness: Harness) -> None:
    """Its markers were pruned before it was renamed: it is late with `formerly`, and without, and after `rename`."""
    for formerly in (["totals"], []):
        with pytest.raises(BeyondRetention):
            harness.deliver(harness.dispatcher(harness.handler(name="renamed", formerly=formerly)), again(), None)
    with pytest.raises(RefusedError, match="nothing is left to rename: remove `formerly` from the code"):
        rename(pruned, "totals", "renamed")
    with pruned.begin() as connection:
        row = {"message_id": "kept", "handler": "totals", "processed_at": datetime.now(UTC), "occurred_at": None}
        connection.execute(insert(MARKER), row)
    assert rename(pruned, "totals", "renamed").copied == 1
    with pytest.raises(BeyondRetention):
        harness.deliver(harness.dispatcher(harness.handler(name="renamed")), again(), None)
    assert total(pruned) == 1


def test_a_duplicate_is_a_duplicate_whatever_its_time(harness: Harness, cleaner: Engine) -> None:
    """Its marker is there, though the horizon has passed."""
    applied_once(cleaner, horizon=168)
    assert harness.deliver(harness.dispatcher(), again(), None).outcome is Outcome.DUPLICATE


# What a cleanup keeps -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("harness")
def test_a_marker_stays_while_its_message_is_young(
    cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer's clock runs ahead: what was processed long ago stays until its message is older than the horizon."""
    meanwhile(monkeypatch)
    applied_once(cleaner, horizon=168, occurred=datetime.now(UTC) + DAY)
    assert prune(cleaner).deleted == 0
    clock.passes(8 * DAY + timedelta(minutes=59))
    assert prune(cleaner).deleted == 0
    clock.passes(timedelta(minutes=2))
    assert prune(cleaner).deleted == 1


@pytest.mark.parametrize("retention", [None, 168, 200])
def test_a_reading_that_is_not_fresh_does_no_harm(
    retention: float | None, harness: Harness, cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a worker that read 14 minutes ago, a message is young that is late for the cleanup: the margin keeps it."""
    meanwhile(monkeypatch)
    at = datetime.now(UTC) - timedelta(hours=retention or 168) + timedelta(minutes=1)
    applied_once(cleaner, horizon=168, processed=at, occurred=at)
    dispatcher = harness.dispatcher()
    harness.deliver(dispatcher, again(datetime.now(UTC), "reads"), None)
    clock.passes(timedelta(minutes=14))
    assert prune(cleaner, retention_hours=retention).deleted == 0
    assert harness.deliver(dispatcher, again(at), None).outcome is Outcome.DUPLICATE
    clock.passes(timedelta(minutes=48))
    assert prune(cleaner, retention_hours=retention).deleted == 1


@pytest.mark.usefixtures("harness")
def test_the_first_cleanup_declares_its_retention(
    cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers may know for an hour that there is no horizon: until then only markers without a time are deleted."""
    meanwhile(monkeypatch)
    applied_once(cleaner)
    with cleaner.begin() as connection:
        row = {"message_id": "no time", "handler": "totals", "processed_at": OLD, "occurred_at": None}
        connection.execute(insert(MARKER), row)
    assert count_expired(cleaner) == 1
    done = prune(cleaner, retention_hours=100)
    assert (done.deleted, done.declared, redelivery_horizon(cleaner)) == (1, 100, 100)
    clock.passes(timedelta(minutes=59))
    assert (prune(cleaner).deleted, count_expired(cleaner)) == (0, 0)
    clock.passes(timedelta(minutes=2))
    assert count_expired(cleaner) == 1
    assert ages(cleaner).has_expired
    done = prune(cleaner)
    assert (done.deleted, done.declared) == (1, None)


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_a_horizon_that_is_declared_meanwhile_is_kept(
    database: Database, harness: Harness, cleaner: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first cleanup declares nothing if somebody else has done so since it looked."""
    applied_once(cleaner)
    lock_horizon = cleanup_module.lock_horizon

    def looking(connection: Connection, tables: DedupTables) -> bool:
        found = lock_horizon(connection, tables)
        monkeypatch.setattr(cleanup_module, "lock_horizon", lock_horizon)
        declare_horizon(harness.engine, 500)
        return found

    monkeypatch.setattr(cleanup_module, "lock_horizon", looking)
    prune(cleaner)
    assert (redelivery_horizon(cleaner), database.engine in ("postgresql", "mariadb")) == (500, True)


def test_a_lowered_horizon_deletes_an_hour_later(
    harness: Harness, cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may know the longer one until then; lowered twice within the hour, the longest one counts."""
    meanwhile(monkeypatch)
    applied_once(cleaner, horizon=1000)
    dispatcher = harness.dispatcher()
    harness.deliver(dispatcher, again(datetime.now(UTC), "reads"), None)
    declare_horizon(cleaner, 200)
    clock.passes(timedelta(minutes=10))
    declare_horizon(cleaner, 100)
    assert prune(cleaner).deleted == 0
    assert harness.deliver(dispatcher, again(), None).outcome is Outcome.DUPLICATE
    clock.passes(timedelta(minutes=59))
    assert prune(cleaner).deleted == 0
    clock.passes(timedelta(minutes=2))
    assert prune(cleaner).deleted == 1
    with pytest.raises(BeyondRetention):
        harness.deliver(dispatcher, again(), None)


def test_a_raised_horizon_revives_nothing(
    harness: Harness, cleaner: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was pruned stays late, also after cleanups that keep markers longer."""
    meanwhile(monkeypatch)
    applied_once(cleaner, horizon=168)
    assert prune(cleaner).deleted == 1
    declare_horizon(cleaner, 1000)
    with cleaner.begin() as connection:
        older = {"message_id": "2", "handler": "totals", "processed_at": OLD - 40 * DAY, "occurred_at": OLD - 40 * DAY}
        connection.execute(insert(MARKER), older)
    clock.passes()
    assert prune(cleaner).deleted == 1
    with pytest.raises(BeyondRetention):
        harness.deliver(harness.dispatcher(), again(), None)
    assert total(cleaner) == 1


def test_what_a_killed_cleanup_deleted_is_late(
    harness: Harness, cleaner: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has written so before its first batch, so a horizon that is raised afterwards revives nothing."""
    meanwhile(monkeypatch, lambda: None)
    applied_once(cleaner, horizon=168)

    def killed(_deleted: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(cleaner, on_batch=killed)
    declare_horizon(cleaner, 1000)
    with pytest.raises(BeyondRetention):
        harness.deliver(harness.dispatcher(), again(), None)


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_a_horizon_is_not_raised_while_a_cleanup_reads_it(
    database: Database, harness: Harness, cleaner: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a worker would know the longer one, and not yet the moment up to which the shorter one deletes."""
    meanwhile(monkeypatch)
    applied_once(cleaner, horizon=168)
    slow = create_engine(database.url())

    @event.listens_for(slow, "commit")
    def before_the_commit(connection: Any) -> None:
        if not committing and PRUNED_UNTIL in connection.execute(select(STATE.c.key)).scalars().all():
            committing.append(True)
            Stepped.gate_of_thread()

    committing: list[bool] = []
    cleanup = Stepped(lambda: prune(slow))
    cleanup.step()
    raised = harness.start(declare_horizon, harness.engine, 1000)
    harness.waits()
    assert redelivery_horizon(cleaner) == 168
    cleanup.finish()
    raised.result()
    with pytest.raises(BeyondRetention):
        harness.deliver(harness.dispatcher(), again(), None)
    slow.dispose()


@pytest.mark.usefixtures("harness")
def test_markers_that_were_not_announced_are_not_deleted(cleaner: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of one handler found none; meanwhile a rename has written old ones."""
    applied_once(cleaner, horizon=168)
    with monkeypatch.context() as patched:
        meanwhile(patched, lambda: rename(cleaner, "totals", "renamed"))
        assert prune(cleaner, handler="renamed").deleted == 0
    assert prune(cleaner).deleted == 2


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.usefixtures("harness")
def test_the_command_says_that_it_has_declared_a_horizon(cleaner: Engine) -> None:
    """In a sentence, and as a number for machines; once."""
    url = cleaner.url.render_as_string(hide_password=False)
    arguments = ["cleanup", "--database-url", url]
    applied_once(cleaner)
    assert CliRunner().invoke(main, arguments).stdout == (
        "Deleted 0 markers older than 168 hours. Declared 168 hours as the redelivery horizon, because none was "
        "declared. Run it again in an hour: then it also deletes the markers of messages with a time.\n"
    )
    assert CliRunner().invoke(main, arguments).stdout == "Deleted 0 markers older than 168 hours.\n"
    declare_horizon(cleaner, None)
    told = json.loads(CliRunner().invoke(main, [*arguments, "--log-json"]).stdout)
    assert told["declared_horizon_hours"] == 168


def test_without_the_right_to_write_the_state_dated_markers_are_kept(
    postgresql: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are deleted; the log names the table and the rights, each time."""
    grants = f"SELECT, INSERT, UPDATE, DELETE ON {MARKER.name}", f"SELECT ON {STATE.name}"
    with engine_on(postgresql.url()) as owner, role_on(owner, *grants) as role:
        applied_once(owner)
        with owner.begin() as connection:
            row = {"message_id": "no time", "handler": "totals", "processed_at": OLD, "occurred_at": None}
            connection.execute(insert(MARKER), row)
        engine = create_engine(postgresql.url(), connect_args={"options": f"-c role={role}"})
        assert [prune(engine).deleted, prune(engine).deleted] == [1, 0]
        engine.dispose()
        with owner.connect() as connection:
            assert connection.execute(select(MARKER.c.message_id)).scalars().all() == [ID]
    assert caplog.text.count("because it could not write into processed_message_state") == 2


def test_check_names_the_handlers_whose_messages_have_no_time(harness: Harness, cleaner: Engine) -> None:
    """Before anything was pruned, too; among the newest markers only, however many there are."""
    dispatcher = harness.dispatcher(harness.handler(), harness.handler(name="other"))
    harness.deliver(dispatcher, again(None), None)
    assert ages(cleaner).timeless == ("other", "totals")
    (finding,) = advise(ages(cleaner))
    assert (finding.problem, finding.fatal) == (
        "the messages of these handlers have no occurred_at: other, totals",
        False,
    )
    with cleaner.begin() as connection:
        connection.execute(update(MARKER).values(occurred_at=OLD))
    assert advise(ages(cleaner)) == []


# What a worker knows --------------------------------------------------------------------------------------------------


def readings(harness: Harness) -> list[str]:
    """The statements that read the state table, as they are sent."""
    sent: list[str] = []

    @event.listens_for(harness.engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "processed_message_state" in statement:
            sent.append(statement)

    return sent


@pytest.mark.parametrize("reads_before", [False, True])
def test_a_claim_that_was_answered_after_half_an_hour_is_given_back(
    reads_before: bool, harness: Harness, clock: Clock
) -> None:
    """The handler is not called, whether the worker knew a moment before or read it after; a redelivery is applied."""
    entered: list[object] = []

    def handle(happened: Added, session: Session) -> None:
        entered.append(happened)
        add(happened, session)

    slow: list[str] = []

    @event.listens_for(harness.engine, "before_cursor_execute")
    def slowly(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "INSERT INTO processed_message" in statement.replace("`", "").replace("IGNORE ", "") and slow:
            slow.pop()
            clock.passes(MARGIN * 0.51)

    dispatcher = harness.dispatcher(harness.handler(handle))
    if reads_before:
        harness.deliver(dispatcher, again(message_id="before"), None)
        entered.clear()
    slow.append("the next claim")
    with pytest.raises(InProgress, match=r"answered the claim 31 minutes after .* let the broker redeliver") as raised:
        harness.deliver(dispatcher, again(), None)
    assert verdict_of(raised.value).action is Action.RETRY_LATER
    assert entered == []
    assert harness.deliver(dispatcher, again(), None).outcome is Outcome.APPLIED


def test_the_late_moment_is_read_once_in_a_quarter_of_an_hour(harness: Harness, clock: Clock) -> None:
    """No message pays for it; messages without a time, and duplicates, never ask."""
    sent = readings(harness)
    dispatcher = harness.dispatcher()
    seen = []
    for number, span in enumerate([timedelta(), MARGIN / 5, MARGIN / 5]):
        clock.passes(span)
        harness.deliver(dispatcher, again(None, f"none {number}"), None)
        harness.deliver(dispatcher, again(OLD, f"none {number}"), None)
        for some in range(3):
            harness.deliver(dispatcher, again(OLD, f"{number} {some}"), None)
        seen.append(len(sent))
    assert seen == [1, 1, 2]


def test_a_worker_learns_of_a_horizon(harness: Harness, cleaner: Engine, clock: Clock) -> None:
    """Within a quarter of an hour, though it read before that none is declared."""
    dispatcher = harness.dispatcher()
    harness.deliver(dispatcher, again(message_id="reads"), None)
    declare_horizon(cleaner, 168)
    clock.passes(timedelta(minutes=16))
    with pytest.raises(BeyondRetention):
        harness.deliver(dispatcher, again(), None)


def test_a_worker_that_was_suspended_trusts_the_wall_clock(harness: Harness, clock: Clock) -> None:
    """Its monotonic clock stood still; it reads again all the same."""
    sent = readings(harness)
    dispatcher = harness.dispatcher()
    harness.deliver(dispatcher, again(OLD, "before"), None)
    clock.suspended(MARGIN)
    harness.deliver(dispatcher, again(OLD, "after"), None)
    assert len(sent) == 2


def _by_checkout(harness: Harness, choose: Callable[[Any], Any]) -> None:
    def on_checkout(driver: Any, _record: object, _proxy: object) -> None:
        with closing(driver.cursor()) as cursor:
            choose(cursor.execute)

    event.listen(harness.engine, "checkout", on_checkout)


def _by_after_begin(harness: Harness, choose: Callable[[Any], Any]) -> None:
    event.listen(harness.factory, "after_begin", lambda _s, _t, connection: choose(connection.exec_driver_sql))


@pytest.mark.parametrize("listen", [_by_checkout, _by_after_begin])
def test_each_tenant_has_its_own_late_moment(postgresql: Database, listen: Callable[..., None]) -> None:
    """A listener chooses the tenant's schema for each transaction: the message is late for one, new to the other."""
    owner = create_engine(postgresql.url())
    tenants = ("tenant_a", "tenant_b")
    with owner.begin() as connection:
        for tenant in tenants:
            connection.exec_driver_sql(f"CREATE SCHEMA {tenant}")
    make_contract_tables(owner, *tenants)
    with owner.begin() as connection:
        value = {"value": moment_text(OLD + DAY)}
        connection.execute(text(f"INSERT INTO tenant_b.{STATE.name} VALUES ('{PRUNED_UNTIL}', :value)"), value)
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


# When the state cannot be read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [PRUNED_UNTIL, REDELIVERY_HORIZON])
def test_without_the_late_moment_nothing_is_applied(key: str, harness: Harness, cleaner: Engine) -> None:
    """A missing table and a wrong value are refused, with what to do, also in a batch; without a time messages pass."""
    dispatcher = harness.dispatcher()
    for value in ("yesterday", "2026-01-01T00:00:00", "-5", "0", "nan"):
        with cleaner.begin() as connection:
            write_state(connection, default_tables, {key: value})
        with pytest.raises(RefusedError, match="wrong value for redelivery_horizon_hours or pruned_until"):
            harness.deliver(dispatcher, again(), None)
        with cleaner.begin() as connection:
            write_state(connection, default_tables, {REDELIVERY_HORIZON: "1000"})
    STATE.drop(cleaner)
    with pytest.raises(MissingTableError):
        harness.deliver(dispatcher, again(), None)
    with pytest.raises(BatchFailed) as raised:
        harness.run(dispatcher.deliver_batch, [again(message_id=f"{number}") for number in range(4)])
    assert [type(each) for each in raised.value.exceptions] == [MissingTableError]
    assert harness.totals() == {}
    assert harness.deliver(dispatcher, again(None), None).outcome is Outcome.APPLIED


def test_a_user_who_may_not_read_the_state_is_told(postgresql: Database) -> None:
    """The error names the table and the right; `late="apply"` needs neither."""
    grant = f"SELECT, INSERT, UPDATE ON {MARKER.name}, {Total.__tablename__}"
    with engine_on(postgresql.url()) as owner, role_on(owner, grant) as role:
        by_role = {"connect_args": {"options": f"-c role={role}"}}
        with Harness(Subject(postgresql.url(), engine_arguments=by_role)) as harness:
            with pytest.raises(RefusedError, match="grant SELECT on it"):
                harness.deliver(harness.dispatcher(), again(), None)
            assert harness.deliver(harness.dispatcher(late="apply"), again(), None).outcome is Outcome.APPLIED


def test_a_connection_that_is_lost_while_the_state_is_read_costs_an_attempt(postgresql: Database) -> None:
    """The delivery is tried again, and reads again."""
    with ready(postgresql.url()) as harness:
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
    """`external_transaction` reads no state: the transaction is the test's, and is rolled back."""
    with (
        harness.outer_transaction() as factory,
        external_transaction(harness.dispatcher(factory=factory)) as dispatcher,
    ):
        assert dispatcher.deliver(again()).outcome is Outcome.APPLIED
    assert total(pruned) == 1


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
