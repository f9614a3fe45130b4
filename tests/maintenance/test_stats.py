"""What a table tells `check` of its markers: how old the oldest is, whose they are, what is known of cleanups."""

from datetime import UTC, datetime, timedelta

from sqlalchemy import Engine, MetaData, create_engine, insert, text

from databases import Database
from marked import fill, one_of_each_engine, tables  # noqa: F401  # a fixture
from projector_dedup import make_tables
from projector_dedup.late import PRUNED_UNTIL, REDELIVERY_HORIZON
from projector_dedup.maintenance.state import CLEANED_AT, RETENTION, write_state
from projector_dedup.maintenance.stats import ages, handlers_of

CLOSE = timedelta(minutes=2)  # between this machine's clock and the database's


def test_the_oldest_marker_and_the_handlers(engine: Engine) -> None:
    """By the database's clock, of all handlers."""
    now = fill(engine, {"a.add": [1, 200, 300], "b.add": [2], "c.add": [100, 167]})
    found = ages(engine, tables=tables)
    assert found.oldest is not None
    assert abs(found.oldest - now + timedelta(hours=300)) < CLOSE
    assert abs(found.at - now) < CLOSE
    assert handlers_of(engine, tables=tables) == {"a.add", "b.add", "c.add"}


def test_an_empty_table(engine: Engine) -> None:
    """Nothing, of nobody, never; and nothing is known of cleanups."""
    fill(engine, {})
    found = ages(engine, tables=tables)
    assert (found.oldest, found.has_expired, found.retention_hours) == (None, False, 168)
    assert handlers_of(engine, tables=tables) == frozenset()
    assert set(vars(found.state).values()) == {None}


def test_the_retention_is_that_of_the_last_cleanup(engine: Engine) -> None:
    """What is older has expired."""
    fill(engine, {"a.add": [1, 30]})
    assert not ages(engine, tables=tables).has_expired
    with engine.begin() as connection:
        write_state(connection, tables, {RETENTION: "24"})
    assert ages(engine, tables=tables).has_expired


def test_what_the_deployment_knows_of_itself(engine: Engine) -> None:
    """The state table, read; what cannot be read is as if it was never told."""
    fill(engine, {})
    told = {
        REDELIVERY_HORIZON: "240",
        RETENTION: "336.5",
        CLEANED_AT: "2026-01-02T03:04:05+00:00",
        PRUNED_UNTIL: "long ago",
    }
    with engine.begin() as connection:
        write_state(connection, tables, told)
    state = ages(engine, tables=tables).state
    assert (state.horizon_hours, state.retention_hours) == (240, 336.5)
    assert (state.cleaned_at, state.pruned_until) == (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), None)


def test_a_table_of_another_name_and_schema(postgresql: Database) -> None:
    """Also one whose names have to be quoted, or are moved by a schema_translate_map."""
    engine = create_engine(postgresql.url())
    quoted = make_tables(reading := MetaData(), name="In box", schema="Reading")
    with engine.begin() as connection:
        connection.execute(text('CREATE SCHEMA "Reading"'))
        reading.create_all(connection)
        connection.execute(insert(quoted.marker), [{"message_id": "1", "handler": "h"}])
    moved = engine.execution_options(schema_translate_map={"per_tenant": "Reading"})
    for one, where in ((quoted, engine), (make_tables(MetaData(), "In box", "per_tenant"), moved)):
        assert handlers_of(where, tables=one) == {"h"}
        assert ages(where, tables=one).oldest is not None
    engine.dispose()
