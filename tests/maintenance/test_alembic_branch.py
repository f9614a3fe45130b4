"""Our revisions as a labelled branch beside the user's own history."""

from importlib.resources import files
from pathlib import Path

from sqlalchemy import Engine, MetaData, create_engine, inspect

from alembic_project import OURS, Project
from databases import Database
from marked import one_of_each_engine  # noqa: F401  # a fixture
from owning import TWICE, fatal, second_schema, state_of, twice  # noqa: F401  # second_schema is a fixture
from projector_dedup import make_tables


def test_the_branch_lives_beside_the_users_history(
    database: Database, engine: Engine, schema: str | None, tmp_path: Path
) -> None:
    """`upgrade heads` makes every table set; the next autogenerate leaves them alone; `@base` takes them back."""
    project = Project(tmp_path, database)
    project.begin_history()
    (theirs,) = project.alembic("heads").split()[:1]

    wanted = [(None, "processed_message"), (None, "inbox"), (schema, "inbox2")]
    option = ", ".join(f"{place}.{name}" if place else name for place, name in wanted)
    project.configure(locations=OURS, projector_dedup_tables=option)
    project.model(*(f"make_tables(metadata, {name!r}, {place!r})" for place, name in wanted))
    project.alembic("upgrade", "heads")
    assert "(projector_dedup) (head)" in project.alembic("heads")
    assert "No new upgrade operations" in project.alembic("check")
    ours = [make_tables(MetaData(), name, place) for place, name in wanted]
    for tables in ours:
        assert fatal(engine, tables) == []
        assert twice(engine, tables) == TWICE
        assert state_of(engine, tables) == {"schema_version": "1"}

    project.model(
        *(f"make_tables(metadata, {name!r}, {place!r})" for place, name in wanted), column=", Column('more', Text)"
    )
    assert "Multiple head revisions" in project.alembic("upgrade", "head", code=255)
    written = project.autogenerate("--head", theirs).partition("def downgrade")[0]
    assert "add_column('of_the_user'" in written
    assert "_table(" not in written
    project.alembic("upgrade", "heads")
    assert "No new upgrade operations" in project.alembic("check")

    project.alembic("downgrade", "projector_dedup@base")
    assert sorted(inspect(engine).get_table_names()) == ["alembic_version", "of_the_user"]
    assert {column["name"] for column in inspect(engine).get_columns("of_the_user")} == {"id", "more"}
    project.alembic("upgrade", "heads")
    assert [fatal(engine, tables) for tables in ours] == [[]] * 3


def test_our_folder_may_be_named_by_its_path(sqlite: Database, tmp_path: Path) -> None:
    """Alembic finds our revisions there too."""
    project = Project(tmp_path, sqlite)
    project.configure(locations=f"    {files('projector_dedup.migrations.versions')}")
    project.model()
    project.alembic("upgrade", "heads")
    engine = create_engine(sqlite.url())
    assert fatal(engine) == []
    engine.dispose()
