"""A project begins with our Alembic branch as the pages say, and its revisions stay in its own folder."""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import projector_dedup.migrations.versions
import pytest
from sqlalchemy import create_engine, inspect

from databases import Database
from projector_dedup.maintenance.check import check, check_installed_revisions

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
OURS = Path(projector_dedup.migrations.versions.__path__[0])
INIT = "alembic init migrations"
ENV = "from models import metadata as target_metadata"
MODELS = """
from sqlalchemy import Column, Integer, MetaData, Table
from projector_dedup import make_tables

metadata = MetaData()
Table("account_totals", metadata, Column("id", Integer, primary_key=True){more})
make_tables(metadata)
"""


def _replaced(path: Path, line: str, by: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(f"\n{line}\n") == 1
    path.write_text(text.replace(f"\n{line}\n", f"\n{by}\n"), encoding="utf-8")


class NewProject:
    """A folder in which the commands of the recipe are run as they are written."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.folder, self.ini = folder, folder / "alembic.ini"
        self.url = database.url().render_as_string(hide_password=False)
        self.model()

    def model(self, more: str = "") -> None:
        """Write the models, perhaps with one more column."""
        (self.folder / "models.py").write_text(MODELS.format(more=more))

    def run(self, block: str) -> str:
        """Run each line of a shell block by the module of the command that it names; return what they say."""
        said = ""
        for line in block.replace("\\\n", "").splitlines():
            program, *arguments = shlex.split(line)
            assert program == "alembic"
            environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
            command = [sys.executable, "-m", "alembic", *arguments]
            done = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, line + done.stdout + done.stderr
            said += done.stdout
        return said


def _steps() -> list[str]:
    """The blocks of the steps of way b in docs/tables.md, without the indentation of the list."""
    text = (ROOT / "docs" / "tables.md").read_text(encoding="utf-8")
    section = text.partition("\n## b. ")[2].partition("\nRun `idempotency check`")[0]
    return [
        textwrap.dedent(block) for block in re.findall(r"^ +```\w+\n(.*?)^ +```$", section, re.DOTALL | re.MULTILINE)
    ]


@pytest.mark.parametrize("history", [False, True], ids=["no revision yet", "revisions of its own"])
def test_the_steps_of_the_page_keep_revisions_in_the_project(history: bool, sqlite: Database, tmp_path: Path) -> None:
    """docs/tables.md, way b, in the order of its text: no revision of the project lies in our package."""
    first, ini, upgrade, later = _steps()
    ours = sorted(each.name for each in OURS.glob("*.py"))
    project = NewProject(tmp_path, sqlite)
    project.run(INIT)
    _replaced(project.ini, "sqlalchemy.url = driver://user:pass@localhost/dbname", f"sqlalchemy.url = {project.url}")
    _replaced(tmp_path / "migrations" / "env.py", "target_metadata = None", ENV)
    if history:
        (tmp_path / "models.py").write_text(MODELS.format(more="").replace("make_tables(metadata)", ""))
        project.run('alembic revision --autogenerate -m "theirs"\nalembic upgrade head\nalembic revision -m "second"')
        (theirs,) = (tmp_path / "migrations" / "versions").glob("*theirs.py")
        labelled = re.sub(r"^branch_labels.*$", 'branch_labels = ("app",)', theirs.read_text(), flags=re.MULTILINE)
        theirs.write_text(labelled)
    else:
        project.run(first)
    _replaced(project.ini, "path_separator = os", ini.rstrip())
    project.model(more=", Column('more', Integer)")
    project.run(upgrade)
    project.run(later)
    assert "No new upgrade operations" in project.run("alembic check\n")
    assert sorted(each.name for each in OURS.glob("*.py")) == ours
    written = (tmp_path / "migrations" / "versions").glob("*.py")
    assert not [each.name for each in written if "processed_message" in each.read_text()]
    assert check_installed_revisions() == []
    engine = create_engine(sqlite.url())
    assert not [finding for finding in check(engine) if finding.fatal]
    assert {column["name"] for column in inspect(engine).get_columns("account_totals")} == {"id", "more"}
    engine.dispose()


def test_a_revision_of_theirs_in_our_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name and where it lies; our own revisions are not."""
    for file in OURS.glob("*.py"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr("projector_dedup.maintenance.check._installed_versions", lambda: tmp_path)
    assert check_installed_revisions() == []
    (tmp_path / "1c9213d5b8ad_first.py").touch()
    (finding,) = check_installed_revisions()
    assert not finding.fatal
    assert f"1c9213d5b8ad_first.py in {tmp_path}" in finding.problem
    assert "--version-path" in finding.remedy
