"""Whoever creates the tables, our migration, `create_all` or the user's own migration: they are the same tables."""

import os
import subprocess
from pathlib import Path

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Engine, MetaData, inspect

from databases import Database
from forked import run_module
from marked import one_of_each_engine  # noqa: F401  # a fixture
from owning import TWICE, described, fatal, run_script, state_of, twice
from projector_dedup import make_tables
from projector_dedup.tables import default_metadata, default_tables

ROOT = Path(__file__).parents[2]

ENVIRONMENT = """
from alembic import context
from projector_dedup import make_tables
from sqlalchemy import Column, Integer, MetaData, Table, create_engine

metadata = MetaData()
Table("of_the_user", metadata, Column("id", Integer, primary_key=True))
make_tables(metadata)

engine = create_engine(context.config.get_main_option("sqlalchemy.url"))
with engine.connect() as connection:
    context.configure(connection=connection, target_metadata=metadata)
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
"""


def _alembic(database: Database, *arguments: str) -> subprocess.CompletedProcess[str]:
    url = database.url().render_as_string(hide_password=False)
    return run_module("alembic", *arguments, cwd=ROOT, env={**os.environ, "PROJECTOR_DEDUP_DATABASE_URL": url})


def test_the_migration_yields_what_make_tables_does(database: Database, engine: Engine) -> None:
    """The database describes its tables in the words that it has for `create_all`'s; `downgrade base` drops them."""
    default_metadata.create_all(engine)
    expected = described(engine)
    default_metadata.drop_all(engine)
    upgrade = _alembic(database, "upgrade", "head")
    assert upgrade.returncode == 0, upgrade.stderr
    assert described(engine) == expected
    compared = _alembic(database, "check")
    assert "No new upgrade operations detected" in compared.stdout + compared.stderr
    assert fatal(engine) == []
    assert state_of(engine) == {"schema_version": "1"}
    downgrade = _alembic(database, "downgrade", "base")
    assert downgrade.returncode == 0, downgrade.stderr
    assert inspect(engine).get_table_names() == ["processed_message_alembic_version"]


def test_the_migration_can_be_written_to_a_file(database: Database, engine: Engine) -> None:
    """`alembic upgrade head --sql` needs no database, and its statements create what the migration does."""
    default_metadata.create_all(engine)
    expected = described(engine)
    default_metadata.drop_all(engine)
    written = _alembic(database, "upgrade", "head", "--sql")
    assert written.returncode == 0, written.stderr
    run_script(engine, written.stdout)
    assert described(engine) == expected
    assert state_of(engine) == {"schema_version": "1"}


def test_the_migration_without_a_database_says_what_to_set() -> None:
    """One line, no traceback."""
    environment = {name: value for name, value in os.environ.items() if name != "PROJECTOR_DEDUP_DATABASE_URL"}
    run = run_module("alembic", "upgrade", "head", cwd=ROOT, env=environment)
    assert run.returncode == 1
    assert "set PROJECTOR_DEDUP_DATABASE_URL" in run.stderr
    assert "Traceback" not in run.stderr


def test_the_users_own_migration_runs_unedited(database: Database, engine: Engine, tmp_path: Path) -> None:
    """`revision --autogenerate` on the user's metadata renders it; then neither a second one nor `check` finds more."""
    default_metadata.create_all(engine)
    expected = described(engine)
    default_metadata.drop_all(engine)
    config = Config(tmp_path / "alembic.ini")
    command.init(config, str(tmp_path / "scripts"))
    (tmp_path / "scripts" / "env.py").write_text(ENVIRONMENT)
    config.set_main_option("script_location", str(tmp_path / "scripts"))
    config.set_main_option("sqlalchemy.url", database.url().render_as_string(hide_password=False))

    command.revision(config, "ours", autogenerate=True)
    command.upgrade(config, "head")
    command.check(config)

    assert described(engine) == expected
    assert fatal(engine) == []
    assert twice(engine, default_tables) == TWICE
    assert "projector_dedup" not in next((tmp_path / "scripts" / "versions").glob("*.py")).read_text()

    metadata = MetaData()
    make_tables(metadata)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        differences = [each for each in compare_metadata(context, metadata) if each[0] not in ("remove_table",)]
    assert differences == []
