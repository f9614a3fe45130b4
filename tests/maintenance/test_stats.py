"""`stats` tells what is in the marker table."""

import json
import re
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, MetaData, create_engine, insert, text

from command import idempotency, on_a_terminal
from databases import Database
from marked import fill, metadata, on_one_database, one_of_each_engine, tables, url_of  # noqa: F401  # a fixture
from projector_dedup import MissingTableError, make_tables
from projector_dedup.late import PRUNED_UNTIL, REDELIVERY_HORIZON
from projector_dedup.maintenance.state import CLEANED_AT, RETENTION, SCHEMA_VERSION, write_state
from projector_dedup.maintenance.stats import stats

CLOSE = timedelta(minutes=2)  # between this machine's clock and the database's


def analyze(engine: Engine) -> None:
    """Bring the catalogue up to date."""
    with engine.begin() as connection:
        connection.execute(text("ANALYZE TABLE processed_message" if engine.name == "mariadb" else "ANALYZE"))


def test_markers_are_counted(engine: Engine) -> None:
    """Markers, oldest, newest and what cleanup would delete, by handler, biggest first."""
    now = fill(engine, {"a.add": [1, 200, 300], "b.add": [2], "c.add": [100, 167]})
    found = stats(engine, tables=tables)
    assert (found.markers, found.expired, found.retention_hours) == (6, 2, 168)
    assert [(each.handler, each.markers) for each in found.handlers] == [("a.add", 3), ("c.add", 2), ("b.add", 1)]
    assert found.oldest == found.handlers[0].oldest
    assert found.newest == found.handlers[0].newest
    for each, (newest, oldest) in zip(found.handlers, [(1, 300), (100, 167), (2, 2)], strict=True):
        assert each.oldest is not None
        assert each.newest is not None
        assert abs(each.oldest - now + timedelta(hours=oldest)) < CLOSE
        assert abs(each.newest - now + timedelta(hours=newest)) < CLOSE
    assert abs(found.at - now) < CLOSE


def test_an_empty_table(engine: Engine) -> None:
    """Nothing, of nobody, never; and nothing is known of cleanups."""
    fill(engine, {})
    found = stats(engine, tables=tables)
    assert (found.markers, found.expired, found.handlers, found.oldest, found.newest) == (0, 0, (), None, None)
    assert set(vars(found.state).values()) == {None}


def test_the_retention_is_that_of_the_last_cleanup(engine: Engine) -> None:
    """Unless another is asked for."""
    fill(engine, {"a.add": [1, 30, 200]})
    with engine.begin() as connection:
        write_state(connection, tables, {RETENTION: "24"})
    assert stats(engine, tables=tables).expired == 2
    assert stats(engine, tables=tables, retention_hours=100).expired == 1


def test_what_the_deployment_knows_of_itself(engine: Engine) -> None:
    """The state table, read; what cannot be read is as if it was never told."""
    fill(engine, {})
    told = {
        SCHEMA_VERSION: "1",
        REDELIVERY_HORIZON: "240",
        RETENTION: "336.5",
        CLEANED_AT: "2026-01-02T03:04:05+00:00",
        PRUNED_UNTIL: "long ago",
    }
    with engine.begin() as connection:
        write_state(connection, tables, told)
    state = stats(engine, tables=tables).state
    assert (state.schema_version, state.horizon_hours, state.retention_hours) == ("1", 240, 336.5)
    assert (state.cleaned_at, state.pruned_until) == (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), None)


def test_the_size_is_that_of_table_and_indexes(engine: Engine) -> None:
    """A few thousand markers of some hundred bytes, each in the table and in two indexes. SQLite's is the file's."""
    fill(engine, {"a" * 200: [1.0] * 3000})
    analyze(engine)
    size = stats(engine, tables=tables).bytes
    if engine.name == "sqlite":
        assert size is None
        return
    assert size is not None
    assert 3000 * 200 < size < 3000 * 2000


def test_a_table_of_another_name_and_schema(postgresql: Database) -> None:
    """Also one whose names have to be quoted, or are moved by a schema_translate_map."""
    engine = create_engine(postgresql.url())
    quoted = make_tables(reading := MetaData(), name="In box", schema="Reading")
    with engine.begin() as connection:
        connection.execute(text('CREATE SCHEMA "Reading"'))
        reading.create_all(connection)
        connection.execute(insert(quoted.marker), [{"message_id": str(n), "handler": "h"} for n in range(2000)])
    analyze(engine)
    found = stats(engine, tables=quoted)
    assert found.markers == 2000
    assert (found.bytes or 0) > 100_000
    moved = engine.execution_options(schema_translate_map={"per_tenant": "Reading"})
    assert stats(moved, tables=make_tables(MetaData(), "In box", "per_tenant")).bytes == found.bytes
    engine.dispose()


def test_a_missing_table_is_named(engine: Engine) -> None:
    """With what creates it, instead of a driver's error."""
    with pytest.raises(MissingTableError, match=r"processed_message is missing.*make_tables"):
        stats(engine, tables=tables)


# The command -----------------------------------------------------------------------------------------------------


@on_one_database
def test_the_command_prints_plain_columns_in_a_pipe(engine: Engine) -> None:
    """Numbers with commas, moments in UTC, names with control characters escaped."""
    fill(engine, {"a.add": [1.0] * 1200, "b\n.add": [1.0, 200]})
    done = idempotency("stats", PROJECTOR_DEDUP_DATABASE_URL=engine.url.render_as_string(hide_password=False))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "  markers                 1,202" in lines
    assert "  cleanup would delete    1, older than 168 hours" in lines
    assert "  last complete cleanup   never" in lines
    header, first, second, _empty, _next_step = lines[-5:]
    assert header.split() == ["handler", "markers", "oldest", "(UTC)", "newest", "(UTC)"]
    assert first.split()[:2] == ["a.add", "1,200"]
    assert second.split()[:2] == [r"b\n.add", "2"]
    assert header.index("oldest") == first.index(first.split()[2])


@on_one_database
def test_the_command_prints_json(engine: Engine) -> None:
    """One object; what failed is on stderr, and no password is in either."""
    fill(engine, {"a.add": [1, 200]})
    done = idempotency("stats", "--json", "--database-url", engine.url.render_as_string(hide_password=False))
    assert (done.returncode, done.stderr) == (0, "")
    one = json.loads(done.stdout)
    assert (one["table"], one["markers"], one["expired"]) == ("processed_message", 2, 1)
    assert one["handlers"][0]["handler"] == "a.add"
    assert datetime.fromisoformat(one["oldest"]).tzinfo is not None
    done = idempotency("stats", "--json", PROJECTOR_DEDUP_DATABASE_URL="postgresql://app:s3cret@127.0.0.1:1/orders")
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot connect to postgresql+psycopg://app:***@127.0.0.1:1/orders" in done.stderr


def test_a_terminal_of_80_columns(sqlite: Database) -> None:
    """No line is longer, whatever the handlers are called, and nothing of the names is cut off."""
    engine = create_engine(sqlite.url())
    name = "".join(f"part{number}." for number in range(20))
    fill(engine, {name: [1, 200], "a.add": [1]})
    engine.dispose()
    code, seen = on_a_terminal("stats", "--database-url", sqlite.url().render_as_string(), NO_COLOR="1")
    assert code == 0
    seen = re.sub(r"\x1b\[\d*m", "", seen)
    drawn = seen[seen.index(" handler") : seen.index("\nNext: ")].splitlines()
    assert max(map(len, drawn)) <= 80
    width = drawn[0].index("markers")
    assert "".join(line[:width].strip() for line in drawn[2:-1]).replace("a.add", "") == name
