"""The declared redelivery horizon keeps every cleanup from forgetting too early."""

import pickle
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner
from projector_dedup.cli.main import main
from sqlalchemy import URL, Engine, MetaData, create_engine, insert, select, text

from databases import Database
from projector_dedup import MissingTableError, RetentionTooShortError, make_tables
from projector_dedup.maintenance.cleanup import cleanup, declare_horizon, prune, redelivery_horizon
from projector_dedup.maintenance.state import CLEANED_AT, PRUNED_UNTIL, RETENTION, read_state

metadata = MetaData()
tables = make_tables(metadata)


def _markers(engine: Engine, *ages_in_hours: float) -> None:
    metadata.create_all(engine)
    now = datetime.now(UTC)
    rows = [
        {"message_id": f"{age:g}", "handler": "h", "processed_at": now - timedelta(hours=age)} for age in ages_in_hours
    ]
    with engine.begin() as connection:
        connection.execute(insert(tables.marker), rows)


def _left(engine: Engine) -> set[str]:
    with engine.connect() as connection:
        return set(connection.scalars(select(tables.marker.c.message_id)))


def _state(engine: Engine) -> dict[str, str]:
    with engine.connect() as connection:
        return read_state(connection, tables)


def test_a_horizon_is_declared_shown_and_taken_back(engine: Engine) -> None:
    """Before it is declared there is none."""
    metadata.create_all(engine)
    seen = [redelivery_horizon(engine)]
    for hours in (336, 72.5, None):
        declare_horizon(engine, hours)
        seen.append(redelivery_horizon(engine))
    assert seen == [None, 336, 72.5, None]


@pytest.mark.parametrize("hours", [0, -1, float("nan"), float("inf"), 24 * 366 * 101])
def test_a_horizon_that_cannot_be_meant_is_refused(hours: float, database: Database) -> None:
    """And the one that was declared stays."""
    engine = create_engine(database.url())
    metadata.create_all(engine)
    declare_horizon(engine, 24)
    with pytest.raises(ValueError, match="horizon"):
        declare_horizon(engine, hours)
    assert redelivery_horizon(engine) == 24
    engine.dispose()


def test_a_horizon_needs_the_tables(engine: Engine) -> None:
    """Without them the error names what creates them."""
    with pytest.raises(MissingTableError, match="let its owner create it"):
        declare_horizon(engine, 24)


def test_a_shorter_retention_is_refused(engine: Engine) -> None:
    """The error names both numbers, and nothing is deleted; at the horizon itself cleanup goes on."""
    _markers(engine, 400, 340, 300)
    declare_horizon(engine, 336)
    with pytest.raises(RetentionTooShortError, match=r"168 hours.*336 hours"):
        cleanup(engine)
    assert _left(engine) == {"400", "340", "300"}
    assert cleanup(engine, retention_hours=336) == 2
    assert _left(engine) == {"300"}


def test_force_prunes_below_the_horizon(engine: Engine) -> None:
    """Whoever insists gets what was asked for."""
    _markers(engine, 300)
    declare_horizon(engine, 336)
    assert cleanup(engine, retention_hours=200, force=True) == 1


def test_a_finished_run_leaves_word(engine: Engine) -> None:
    """The retention, when it ended, and the moment before which no marker is kept, by the database's clock in UTC."""
    _markers(engine, 400)
    before = datetime.now(UTC) - timedelta(seconds=2)  # SQLite's clock has whole seconds
    cleanup(engine, retention_hours=200)
    after = datetime.now(UTC) + timedelta(seconds=1)
    state = _state(engine)
    assert float(state[RETENTION]) == 200
    assert before <= datetime.fromisoformat(state[CLEANED_AT]) <= after
    until = datetime.fromisoformat(state[PRUNED_UNTIL])
    assert before <= until + timedelta(hours=200) <= after


def test_what_was_pruned_once_stays_known(engine: Engine) -> None:
    """A later run with a longer retention does not move back the moment before which markers are gone."""
    metadata.create_all(engine)
    cleanup(engine, retention_hours=10)
    pruned_until = _state(engine)[PRUNED_UNTIL]
    cleanup(engine, retention_hours=1000)
    state = _state(engine)
    assert (state[PRUNED_UNTIL], float(state[RETENTION])) == (pruned_until, 1000)


@pytest.mark.parametrize("bounds", [{"handler": "h"}, {"max_batches": 1, "batch_size": 1}, {"stop": lambda: True}])
def test_a_run_that_left_markers_claims_nothing(engine: Engine, bounds: dict[str, object]) -> None:
    """One handler's, or stopped early: older markers may be there."""
    _markers(engine, 400, 401)
    cleanup(engine, **bounds)  # type: ignore[arg-type]  # what is given varies
    assert _state(engine) == {}


def test_a_user_who_may_not_write_the_state_can_prune(postgresql: Database, caplog: pytest.LogCaptureFixture) -> None:
    """The markers are deleted and counted; that nobody will know is logged, with the remedy."""
    owner = create_engine(postgresql.url())
    _markers(owner, 400, 1)
    role = f"pruner_{postgresql.url().database}"
    with owner.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN"))
        connection.execute(text(f"GRANT USAGE ON SCHEMA public TO {role}"))
        connection.execute(text(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {tables.marker.name} TO {role}"))
        connection.execute(text(f"GRANT SELECT ON {tables.state.name} TO {role}"))
    engine = create_engine(postgresql.url(), connect_args={"options": f"-c role={role}"})
    try:
        done = prune(engine)
    finally:
        engine.dispose()
        with owner.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))
            connection.execute(text(f"DROP ROLE {role}"))
    assert (done.deleted, done.complete) == (1, True)
    assert _left(owner) == {"1"}
    assert _state(owner) == {}
    assert "processed_message_state could not be written" in caplog.text
    owner.dispose()


def test_the_error_survives_pickling() -> None:
    """A worker process can hand it to its parent."""
    assert str(pickle.loads(pickle.dumps(RetentionTooShortError("both")))) == "both"  # our own


# The command -----------------------------------------------------------------------------------------------------


def test_the_command_declares_and_shows_the_horizon(database: Database) -> None:
    """Raised it is at once, lowered with --yes only; cleanup then refuses what is below, without --force."""
    engine = create_engine(database.url())
    _markers(engine, 400)
    engine.dispose()
    url = database.url().render_as_string(hide_password=False)

    def idempotency(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, [arguments[0], "--database-url", url, *arguments[1:]])
        return done.exit_code, done.output

    assert idempotency("horizon") == (0, "No redelivery horizon is declared.\n")
    assert idempotency("horizon", "336") == (0, "The redelivery horizon is 336 hours.\n")
    assert idempotency("horizon", "100")[0] == 2  # nobody could be asked
    assert idempotency("horizon") == (0, "The redelivery horizon is 336 hours.\n")
    code, refusal = idempotency("cleanup")
    assert (code, "168 hours" in refusal, "336 hours" in refusal, "--force" in refusal) == (1, True, True, True)
    assert idempotency("cleanup", "--force") == (0, "Deleted 1 marker older than 168 hours.\n")
    assert idempotency("horizon", "100", "--yes") == (0, "The redelivery horizon is 100 hours.\n")
    assert [idempotency("horizon", hours)[0] for hours in ("0", "nan", "inf", "a")] == [2] * 4


def test_a_horizon_is_asked_of_tables_that_are_there(sync_url: URL) -> None:
    """Where the state table is missing the error says how to make it."""
    engine = create_engine(sync_url)
    with pytest.raises(MissingTableError, match="idempotency migrate"):
        redelivery_horizon(engine)
    engine.dispose()
