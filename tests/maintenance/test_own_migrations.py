"""The tables in the user's own MetaData: what Alembic writes for them runs unedited, and nothing is ever dropped."""

from pathlib import Path

import pytest
from sqlalchemy import Engine, MetaData, func, inspect, select

from alembic_project import Project
from databases import Database
from marked import one_of_each_engine  # noqa: F401  # a fixture
from owning import TWICE, fatal, second_schema, twice  # noqa: F401  # second_schema is a fixture
from projector_dedup import make_tables


def test_autogenerate_adds_the_tables_to_a_history(
    database: Database, engine: Engine, schema: str | None, tmp_path: Path
) -> None:
    """The default set joins the user's history, then two more of other names and places; Alembic is content."""
    project = Project(tmp_path, database)
    project.begin_history()
    theirs = ["make_tables(metadata)", "make_tables(metadata, 'inbox')", f"make_tables(metadata, 'inbox2', {schema!r})"]
    ours = [make_tables(MetaData()), make_tables(MetaData(), "inbox"), make_tables(MetaData(), "inbox2", schema)]
    for count in (1, 3):
        project.model(*theirs[:count])
        written = project.autogenerate()
        assert "projector_dedup" not in written
        assert "drop" not in written.partition("def downgrade")[0]
        project.alembic("upgrade", "head")
        assert "No new upgrade operations" in project.alembic("check")
        assert twice(engine, ours[count - 1]) == TWICE
    again = project.autogenerate()
    assert again.count("pass") == 2
    project.alembic("upgrade", "head")
    for tables in ours:
        assert fatal(engine, tables) == []
    with engine.connect() as connection:
        kept = [connection.scalar(select(func.count()).select_from(tables.marker)) for tables in ours]
    assert kept == [1, 0, 1]
    assert "of_the_user" in inspect(engine).get_table_names()
    project.alembic("downgrade", "base")
    assert inspect(engine).get_table_names() == ["alembic_version"]


@pytest.mark.parametrize(("length", "fits"), [(47, True), (48, False)])
def test_a_name_is_as_long_as_every_database_takes(engine: Engine, length: int, fits: bool) -> None:
    """The longest that is accepted works, with all that is named after it; one letter more is refused at once."""
    name = "t" * length
    if not fits:
        with pytest.raises(ValueError, match=r"must have 1 to 47 bytes, and .* has 48"):
            make_tables(MetaData(), name)
        return
    tables = make_tables(MetaData(), name)
    tables.marker.metadata.create_all(engine)
    assert fatal(engine, tables) == []
    assert set(inspect(engine).get_table_names()) == {name, f"{name}_state"}
    assert twice(engine, tables) == TWICE
