"""Our revisions as a labelled branch beside the user's own history; a configuration that loses them is found."""

from importlib.resources import files
from pathlib import Path

import pytest
from sqlalchemy import Engine, MetaData, create_engine, inspect

from alembic_project import OURS, Project, run_python
from databases import Database
from marked import one_of_each_engine  # noqa: F401  # a fixture
from owning import TWICE, fatal, second_schema, state_of, twice  # noqa: F401  # second_schema is a fixture
from projector_dedup import make_tables
from projector_dedup.maintenance.check import check_alembic
from projector_dedup.tables import default_metadata


def create_tables(database: Database) -> None:
    """Create the tables as `create_all` does."""
    engine = create_engine(database.url())
    default_metadata.create_all(engine)
    engine.dispose()


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


@pytest.mark.parametrize("run", [False, True], ids=["read", "imported"])
@pytest.mark.parametrize("separator", ["os", "space", ":"])
def test_a_separator_that_loses_our_revisions_is_found(
    separator: str, run: bool, sqlite: Database, tmp_path: Path
) -> None:
    """Alembic exits with 0 and makes nothing; `check` says which line to write."""
    project = Project(tmp_path, sqlite)
    project.model()
    project.configure(separator, locations=OURS)
    project.alembic("upgrade", "heads")
    engine = create_engine(sqlite.url())
    assert "processed_message" not in inspect(engine).get_table_names()
    engine.dispose()
    (finding,) = check_alembic(tmp_path / "alembic.ini", run=run)
    assert finding.fatal
    assert "does not find it" in finding.problem
    assert "path_separator = newline" in finding.remedy
    project.configure("newline", locations=OURS)
    assert check_alembic(tmp_path / "alembic.ini", run=run) == []


def test_a_configuration_without_our_branch_is_nobodys_business(sqlite: Database, tmp_path: Path) -> None:
    """Whoever has the tables in a history of their own needs no location of ours."""
    Project(tmp_path, sqlite).configure("os")
    assert check_alembic(tmp_path / "alembic.ini") == []


def test_a_configuration_that_cannot_be_read_is_no_verdict(sqlite: Database, tmp_path: Path) -> None:
    """One of the user's revisions fails to import where the check runs: said, but deliveries do not depend on it."""
    project = Project(tmp_path, sqlite)
    project.configure(locations=OURS)
    (project.versions / "broken.py").write_text("import not_installed_here")
    assert check_alembic(tmp_path / "alembic.ini") == []
    (finding,) = check_alembic(tmp_path / "alembic.ini", run=True)
    assert not finding.fatal
    assert "not_installed_here" in finding.problem


@pytest.mark.parametrize("given", [True, False], ids=["--alembic-config", "in this folder"])
def test_the_command_checks_the_configuration(given: bool, sqlite: Database, tmp_path: Path) -> None:
    """Named, or lying there: the tables are right today, and the next upgrade would find nothing; exit code 1."""
    project = Project(tmp_path, sqlite)
    url = sqlite.url().render_as_string()
    command = ["-m", "projector_dedup", "check", "--database-url", url]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    options = ["--alembic-config", str(tmp_path / "alembic.ini")] if given else []
    folder = elsewhere if given else tmp_path
    create_tables(sqlite)
    for separator, code in (("os", 1), ("newline", 0)):
        project.configure(separator, locations=OURS)
        done = run_python(*command, *options, cwd=folder)
        assert done.returncode == code, done.stdout + done.stderr
        assert ("does not find it there" in done.stdout) is (code == 1)
        assert len(done.stderr.splitlines()) == code


@pytest.mark.parametrize("named", [False, True], ids=["lying there", "--alembic-config"])
def test_code_of_the_folder_is_run_only_if_it_is_named(named: bool, sqlite: Database, tmp_path: Path) -> None:
    """What an alembic.ini of the current folder names is somebody else's code, and cron would run it."""
    url = sqlite.url().render_as_string()
    create_tables(sqlite)
    project = Project(tmp_path, sqlite)
    project.configure(locations=OURS)
    trace = tmp_path / "was run"
    (project.versions / "theirs.py").write_text(f"open({str(trace)!r}, 'w')\nrevision, down_revision = 'x', None\n")
    options = ["--alembic-config", "alembic.ini"] if named else []
    done = run_python("-m", "projector_dedup", "check", "--database-url", url, *options, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert trace.exists() is named


def test_our_folder_may_be_named_by_its_path(sqlite: Database, tmp_path: Path) -> None:
    """Alembic finds our revisions there too, whatever the separator."""
    project = Project(tmp_path, sqlite)
    project.configure(locations=f"    {files('projector_dedup.migrations.versions')}")
    assert check_alembic(tmp_path / "alembic.ini") == check_alembic(tmp_path / "alembic.ini", run=True) == []
