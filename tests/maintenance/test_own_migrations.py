"""The tables in the user's own MetaData: what Alembic writes for them runs unedited, and nothing is ever dropped."""

from pathlib import Path

from sqlalchemy import Engine, MetaData, func, inspect, select

from alembic_project import Project
from databases import Database
from marked import one_of_each_engine  # noqa: F401  # a fixture
from owning import TWICE, described, fatal, second_schema, twice  # noqa: F401  # second_schema is a fixture
from projector_dedup import make_tables
from projector_dedup.commands import make_command_tables
from projector_dedup.effects import make_effect_tables
from projector_dedup.http.parked import make_parked_tables
from projector_dedup.tables import default_metadata


def test_autogenerate_adds_the_tables_to_a_history(
    database: Database, engine: Engine, schema: str | None, tmp_path: Path
) -> None:
    """The default set joins the user's history, then others of each kind, name and place; Alembic is content."""
    default_metadata.create_all(engine)
    expected = described(engine)
    default_metadata.drop_all(engine)
    project = Project(tmp_path, database)
    project.begin_history()
    theirs = ["make_tables(metadata)", "make_tables(metadata, 'inbox')", f"make_tables(metadata, 'inbox2', {schema!r})"]
    for wing, kind in (("commands", "command"), ("effects", "effect"), ("http.parked", "parked")):
        theirs += [f"from projector_dedup.{wing} import make_{kind}_tables", f"make_{kind}_tables(metadata)"]
    ours = [make_tables(MetaData()), make_tables(MetaData(), "inbox"), make_tables(MetaData(), "inbox2", schema)]
    ours += [make_command_tables(MetaData()), make_effect_tables(MetaData()), make_parked_tables(MetaData())]
    for lines, made in ((theirs[:1], ours[:1]), (theirs, ours[1:])):
        project.model(*lines)
        written = project.autogenerate()
        assert "projector_dedup" not in written
        assert "drop" not in written.partition("def downgrade")[0]
        project.alembic("upgrade", "head")
        assert "No new upgrade operations" in project.alembic("check")
        assert [twice(engine, tables) for tables in made] == [TWICE] * len(made)
        assert described(engine) == expected
    again = project.autogenerate()
    assert again.count("pass") == 2
    project.alembic("upgrade", "head")
    for tables in ours:
        assert fatal(engine, tables) == []
    with engine.connect() as connection:
        kept = [connection.scalar(select(func.count()).select_from(tables.marker)) for tables in ours]
    assert kept == [1] * len(ours)
    assert "of_the_user" in inspect(engine).get_table_names()
    project.alembic("downgrade", "base")
    assert inspect(engine).get_table_names() == ["alembic_version"]
