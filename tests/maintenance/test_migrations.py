"""Whoever creates the tables, our revisions, `create_all` or the user's own migration: they are the same tables."""

from pathlib import Path

from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect

from alembic_project import OURS, Project
from databases import Database
from marked import one_of_each_engine  # noqa: F401  # a fixture
from owning import described, fatal, run_script, state_of
from projector_dedup.maintenance.schema import KINDS
from projector_dedup.tables import default_metadata

ROOT = Path(__file__).parents[2]


OFFLINE = """
from alembic import context

context.configure(dialect_name=context.config.get_main_option("dialect"), literal_binds=True)
with context.begin_transaction():
    context.run_migrations()
"""


def test_our_revisions_yield_what_make_tables_does(database: Database, engine: Engine, tmp_path: Path) -> None:
    """The database describes the tables in the same words, whether our revisions or `create_all` made them."""
    default_metadata.create_all(engine)
    expected = described(engine)
    default_metadata.drop_all(engine)
    project = Project(tmp_path, database)
    project.configure(locations=OURS)
    project.model("make_tables(metadata)")
    project.alembic("upgrade", "heads")
    assert described(engine) == expected
    assert fatal(engine) == []
    assert state_of(engine) == {"schema_version": "2"}
    project.alembic("downgrade", "projector_dedup@base")
    assert inspect(engine).get_table_names() == ["alembic_version"]


def test_our_revisions_can_be_written_to_a_file(database: Database, engine: Engine, tmp_path: Path) -> None:
    """`alembic upgrade heads --sql` needs no database, and its statements create what the revisions do."""
    default_metadata.create_all(engine)
    expected = described(engine)
    default_metadata.drop_all(engine)
    project = Project(tmp_path, database)
    (tmp_path / "scripts" / "env.py").write_text(OFFLINE)
    project.configure(locations=OURS, dialect=database.engine)
    said = project.alembic("upgrade", "heads", "--sql").splitlines()
    run_script(engine, "\n".join(line for line in said if not line.startswith("INFO ")))
    assert described(engine) == expected
    assert state_of(engine) == {"schema_version": "2"}


def test_the_newest_revision_is_that_of_one_kind_of_tables() -> None:
    """The kinds together name every revision, so that the newest one is the last of one of them."""
    script = ScriptDirectory(str(ROOT / "migrations"))
    revisions = [each.revision for each in script.walk_revisions()]
    assert sorted(revisions) == sorted(each for kind in KINDS for each in kind.revisions)
    assert script.get_heads() == [max(revisions)]
