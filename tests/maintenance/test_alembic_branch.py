"""Our revisions as a labelled branch beside the user's own history."""

from importlib.resources import files
from pathlib import Path

import pytest
from sqlalchemy import Engine, MetaData, create_engine, inspect

from alembic_project import OURS, Project
from databases import Database
from marked import one_of_each_engine  # noqa: F401  # a fixture
from owning import TWICE, described, fatal, second_schema, state_of, twice  # noqa: F401  # second_schema is a fixture
from projector_dedup import Outcome, make_tables
from projector_dedup.commands import CommandTables
from projector_dedup.effects import EffectTables
from projector_dedup.http.parked import ParkedTables
from projector_dedup.tables import DedupTables, default_tables


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
        assert state_of(engine, tables) == {"schema_version": "2"}

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


@pytest.mark.parametrize(
    ("kind", "before"),
    [
        (CommandTables, "projector_dedup_0001"),
        (EffectTables, "projector_dedup_0002"),
        (ParkedTables, "projector_dedup_0004"),
    ],
    ids=["commands", "effects", "parked"],
)
def test_tables_of_a_later_kind_join_those_that_are_there(
    database: Database, engine: Engine, schema: str | None, tmp_path: Path, kind: type[DedupTables], before: str
) -> None:
    """Names make them; without any, later revisions change nothing. The data stays, and the branch is taken back."""
    project = Project(tmp_path, database)
    project.begin_history()
    project.configure(locations=OURS)
    project.model("make_tables(metadata)")
    project.alembic("upgrade", before)
    assert twice(engine, default_tables) == TWICE
    before_digests = described(engine)
    project.alembic("upgrade", "heads")
    released = described(engine)
    assert "projector_dedup_0005" in project.alembic("current")
    assert kind.default_name not in inspect(engine).get_table_names()

    other = f"other_{kind.subject}"
    names = f"{kind.default_name}, {f'{schema}.{other}' if schema else other}"
    project.configure(locations=OURS, **{f"projector_dedup_{kind.option.strip(' -').removesuffix('s')}_tables": names})
    project.model(
        "make_tables(metadata)",
        f"from {kind.__module__} import {kind.maker}",
        f"{kind.maker}(metadata)",
        f"{kind.maker}(metadata, {other!r}, {schema!r})",
    )
    project.alembic("stamp", before)
    project.alembic("upgrade", "heads")
    assert "No new upgrade operations" in project.alembic("check")
    for tables in (kind.make(MetaData(), kind.default_name, None), kind.make(MetaData(), other, schema)):
        assert fatal(engine, tables) == []
        assert twice(engine, tables) == TWICE
        assert state_of(engine, tables) == {"schema_version": "1"}
    assert described(engine) == released
    project.alembic("downgrade", before)
    assert kind.default_name not in inspect(engine).get_table_names()
    assert described(engine) == before_digests
    assert set(twice(engine, default_tables)) == {Outcome.DUPLICATE}
