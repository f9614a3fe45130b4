"""`check` and the migration: the tables that a database has are those that the library expects."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine, MetaData, create_engine, inspect, text

from databases import Database
from projector_dedup import MissingTableError, make_tables
from projector_dedup.schema import check, verify

ROOT = Path(__file__).parent.parent


def _alembic(database: Database, *arguments: str) -> subprocess.CompletedProcess[str]:
    url = database.url().render_as_string(hide_password=False)
    return subprocess.run(
        [sys.executable, "-m", "alembic", *arguments],
        cwd=ROOT,
        env={**os.environ, "PROJECTOR_DEDUP_DATABASE_URL": url},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_migration_yields_what_make_tables_describes(database: Database) -> None:
    """`alembic upgrade head` creates tables in which neither Alembic nor `check` finds a difference."""
    upgrade = _alembic(database, "upgrade", "head")
    assert upgrade.returncode == 0, upgrade.stderr
    compared = _alembic(database, "check")
    assert "No new upgrade operations detected" in compared.stdout + compared.stderr
    engine = create_engine(database.url())
    assert not [finding for finding in check(engine) if finding.fatal]
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT value FROM processed_message_state WHERE key = 'schema_version'")) == "1"
    engine.dispose()


def test_the_migration_can_be_taken_back(database: Database) -> None:
    """`downgrade base` leaves no table of ours but Alembic's own."""
    _alembic(database, "upgrade", "head")
    downgrade = _alembic(database, "downgrade", "base")
    assert downgrade.returncode == 0, downgrade.stderr
    engine = create_engine(database.url())
    assert inspect(engine).get_table_names() == ["processed_message_alembic_version"]
    engine.dispose()


def test_the_migration_without_a_database_says_what_to_set() -> None:
    """One line, no traceback."""
    environment = {name: value for name, value in os.environ.items() if name != "PROJECTOR_DEDUP_DATABASE_URL"}
    run = subprocess.run(
        [sys.executable, "-m", "alembic", "upgrade", "head"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "set PROJECTOR_DEDUP_DATABASE_URL" in run.stderr
    assert "Traceback" not in run.stderr


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


def test_check_finds_a_collation_that_merges_ids(sqlite: Database) -> None:
    """A table that takes "a" and "A" for one would lose messages: `check` tries it, and leaves nothing behind."""
    engine = create_engine(sqlite.url())
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE TABLE processed_message (message_id TEXT COLLATE NOCASE, handler TEXT, "
                "processed_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, occurred_at TIMESTAMP, "
                "PRIMARY KEY (message_id, handler))"
            )
        )
        connection.execute(text("CREATE TABLE processed_message_state (key TEXT PRIMARY KEY, value TEXT)"))
    assert any("takes different message ids for one" in finding.problem for finding in check(engine) if finding.fatal)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM processed_message")) == 0
    engine.dispose()
