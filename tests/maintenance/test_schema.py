"""`check`: the tables that a database has are those that the library expects, or it says what mends them."""

import pytest
from sqlalchemy import Engine, MetaData, create_engine, inspect, text

from databases import Database
from marked import one_of_each_engine  # noqa: F401  # a fixture
from projector_dedup import MissingTableError, make_tables
from projector_dedup.maintenance.check import check, verify
from projector_dedup.tables import default_metadata as metadata


def test_create_all_yields_the_same(engine: Engine) -> None:
    """`make_tables` and `create_all`, under any name, leave nothing for `check` to say that matters."""
    metadata = MetaData()
    tables = make_tables(metadata, name="inbox")
    metadata.create_all(engine)
    assert not [finding for finding in check(engine, tables) if finding.fatal]
    verify(engine, tables)


def test_two_sets_of_tables_live_in_one_database(engine: Engine) -> None:
    """Constraint and index names carry the table's name."""
    metadata = MetaData()
    for name in ("inbox_a", "inbox_b"):
        make_tables(metadata, name=name)
    metadata.create_all(engine)
    assert {"inbox_a", "inbox_b"} < set(inspect(engine).get_table_names())


@pytest.mark.parametrize(
    ("ddl", "problem"),
    [
        ("SELECT 1", "is missing"),
        ("CREATE TABLE processed_message (message_id TEXT, handler TEXT)", "has no column processed_at"),
        (
            "CREATE TABLE processed_message (message_id TEXT, handler TEXT, processed_at TIMESTAMP, "
            "occurred_at TIMESTAMP)",
            "has no unique index over (message_id, handler)",
        ),
    ],
)
def test_check_says_what_is_wrong(engine: Engine, ddl: str, problem: str) -> None:
    """A table that would fail, or worse would let duplicates pass, is found, with the remedy."""
    with engine.begin() as connection:
        connection.execute(text(ddl))
    findings = [finding for finding in check(engine) if problem in finding.problem]
    assert findings
    assert findings[0].fatal
    assert findings[0].remedy
    with pytest.raises(MissingTableError):
        verify(engine)


@pytest.mark.parametrize(
    ("ids", "names", "default", "problem"),
    [
        ("TEXT COLLATE NOCASE", "TEXT", "CURRENT_TIMESTAMP", "treats different message ids or handlers as equal"),
        ("TEXT", "TEXT COLLATE NOCASE", "CURRENT_TIMESTAMP", "treats different message ids or handlers"),
        ("TEXT UNIQUE", "TEXT", "CURRENT_TIMESTAMP", "treats different message ids or handlers"),
        ("TEXT", "TEXT", "(datetime('now', '-3 days'))", "processed_at is not the time"),
    ],
)
def test_check_tries_the_table_out(sqlite: Database, ids: str, names: str, default: str, problem: str) -> None:
    """A table that takes "a" and "A" for one, or whose rows are old at once, would lose or double messages."""
    engine = create_engine(sqlite.url())
    with engine.begin() as connection:
        connection.execute(
            text(
                f"CREATE TABLE processed_message (message_id {ids}, handler {names}, "
                f"processed_at TIMESTAMP DEFAULT {default}, occurred_at TIMESTAMP, "
                "PRIMARY KEY (message_id, handler))"
            )
        )
        connection.execute(text("CREATE TABLE processed_message_state (key TEXT PRIMARY KEY, value TEXT)"))
    assert any(problem in finding.problem for finding in check(engine) if finding.fatal)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM processed_message")) == 0
    engine.dispose()


WRONG = {
    "processed_at timestamptz": "processed_at may be NULL",
    "processed_at timestamp NOT NULL": "processed_at has no time zone",
}


@pytest.mark.parametrize("column", WRONG)
def test_moments_that_could_not_be_compared_are_found(postgresql: Database, column: str) -> None:
    """A marker without a moment is never pruned; one without a zone by whoever's zone it is."""
    engine = create_engine(postgresql.url())
    with engine.begin() as connection:
        metadata.create_all(connection)
        connection.execute(text(f"ALTER TABLE processed_message DROP COLUMN processed_at, ADD COLUMN {column}"))
    assert WRONG[column] in " ".join(finding.problem for finding in check(engine) if finding.fatal)
    engine.dispose()


def test_a_user_who_may_not_write_is_not_ready(postgresql: Database) -> None:
    """Deliveries would fail, so it is a problem, in the server's words."""
    owner = create_engine(postgresql.url())
    metadata.create_all(owner)
    with owner.begin() as connection:
        connection.execute(text("GRANT USAGE ON SCHEMA public TO pg_monitor"))
        connection.execute(text("GRANT SELECT ON processed_message, processed_message_state TO pg_monitor"))
    owner.dispose()
    engine = create_engine(postgresql.url(), connect_args={"options": "-c role=pg_monitor"})
    finding, *others = [each for each in check(engine) if each.fatal]
    assert others == []
    assert "permission denied" in finding.problem
    assert "INSERT" in finding.remedy
    engine.dispose()
