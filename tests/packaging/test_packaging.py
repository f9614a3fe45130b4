"""What is installed is what is on the disk: in an editable checkout every mistake here goes unseen."""

import os
import re
import subprocess
import sys
import tomllib
from functools import partial
from importlib import metadata
from pathlib import Path
from shutil import copy, copytree, ignore_patterns
from typing import Any

import pytest
from sqlalchemy import create_engine, inspect

from alembic_project import OURS, Project, run_python
from databases import Database
from owning import run_script
from projector_dedup.maintenance.check import check

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = {
    "projector_dedup": "projector_dedup",
    "cli": "projector_dedup.cli",
    "migrations": "projector_dedup.migrations",
}


def test_declared_packages_are_those_on_disk() -> None:
    """A new folder with Python in it is declared, or it would be missing from the wheel."""
    on_disk = set()
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            on_disk.add(".".join([package, *path.parent.relative_to(ROOT / folder).parts]))
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == on_disk


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: setuptools takes stale files from a `build` folder in the checkout
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "pytest_projector_dedup.py"):
        copy(ROOT / name, source)
    for name in FOLDERS:
        copytree(ROOT / name, source / name, ignore=ignore_patterns("__pycache__"))
    target = folder / "target"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", target, wheel], check=True)
    return target


def _run(installed: Path, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with the installed wheel and its dependencies, but without the editable checkout."""
    # A venv may take its dependencies from another by a .pth file.
    path = [str(installed), *(each for each in sys.path if each.endswith("site-packages"))]
    environment = {**os.environ, **options.pop("env", {}), "PYTHONPATH": os.pathsep.join(path)}
    # -S: no .pth files, one of which would lead back to the checkout
    return run_python("-S", *arguments, **{"cwd": installed.parent, "env": environment, **options})


def _python(installed: Path, *arguments: str) -> str:
    done = _run(installed, *arguments)
    done.check_returncode()
    return done.stdout


def test_the_wheel_has_every_source_file(installed: Path) -> None:
    """Every Python file of the library, the command and the migrations is in the wheel, and no other."""
    wanted = {
        Path(package.replace(".", "/")) / path.relative_to(ROOT / folder)
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {path.relative_to(installed) for path in installed.rglob("projector_dedup/**/*.py")} == wanted


def test_the_wheel_has_nothing_else(installed: Path) -> None:
    """No tests, no benchmarks, no settings of a machine: a package, the plugin of pytest, and what pip writes."""
    files = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    files = {path for path in files if "__pycache__" not in path.parts}
    about = f"projector_dedup-{PYPROJECT['project']['version']}.dist-info"
    assert {path.parts[0] for path in files} == {"projector_dedup", "pytest_projector_dedup.py", about, "bin"}
    assert {str(path) for path in files if path.parts[0] == "projector_dedup" and path.suffix != ".py"} == {
        "projector_dedup/py.typed"
    }
    assert Path(about, "licenses", "LICENSE") in files
    assert {path for path in files if path.parts[0] == "bin"} == {Path("bin", "idempotency")}


def test_the_wheel_says_what_it_needs(installed: Path) -> None:
    """Name, Pythons, the three dependencies, every extra, and a description that a package index can show."""
    project = PYPROJECT["project"]
    (about,) = metadata.distributions(name="projector-dedup", path=[str(installed)])
    assert about.metadata["Requires-Python"] == project["requires-python"]
    assert set(about.metadata.get_all("Provides-Extra") or []) == set(project["optional-dependencies"])
    needed = [each for each in about.requires or [] if "extra ==" not in each]
    assert {re.split(r"[><=]", each)[0] for each in needed} == {"SQLAlchemy", "alembic", "click"}
    assert about.metadata["Description-Content-Type"] == "text/markdown"


def test_the_command_runs_from_the_wheel(installed: Path) -> None:
    """Away from the checkout, `python -m projector_dedup --version` answers with the version of the wheel."""
    assert PYPROJECT["project"]["version"] in _python(installed, "-m", "projector_dedup", "--version")


def test_importing_the_library_does_not_need_the_extras(installed: Path) -> None:
    """`import projector_dedup` loads no driver, no web framework and no test tool."""
    loaded = set(_python(installed, "-c", "import projector_dedup, sys; print(*sys.modules)").split())
    drivers, frameworks = {"psycopg", "psycopg2", "asyncpg", "aiosqlite"}, {"fastapi", "flask", "starlette", "werkzeug"}
    others = {"pytest", "hypothesis", "alembic", "opentelemetry", "prometheus_client", "faststream"}
    assert {*drivers, *frameworks, *others} & loaded == set()
    ours = tuple(f"projector_dedup.{wing}" for wing in ("brokers", "commands", "effects", "http", "metrics", "rebuild"))
    assert {name for name in loaded if name.startswith(ours)} == set()


def test_http_and_settling_need_no_framework_and_no_client_of_a_broker(installed: Path) -> None:
    """They are for every framework, and every broker, that has no module of its own here."""
    both = "projector_dedup.http.recording, projector_dedup.brokers.settling"
    loaded = _python(installed, "-c", f"import {both}, sys; print(*sys.modules)").split()
    clients = {"pika", "aio_pika", "nats", "redis", "confluent_kafka", "celery", "faststream"}
    assert {"fastapi", "flask", "starlette", "werkzeug", *clients} & set(loaded) == set()


def test_the_wheel_brings_the_revisions(installed: Path, sqlite: Database, tmp_path: Path) -> None:
    """The user's `alembic upgrade heads` finds them in the wheel, and `downgrade` takes them back."""
    project = Project(tmp_path, sqlite, partial(_run, installed))
    project.configure(locations=OURS)
    project.model("make_tables(metadata)")
    located = _python(installed, "-c", "import projector_dedup.migrations as m; print(m.__file__)")
    assert Path(located.strip()).is_relative_to(installed)
    project.alembic("upgrade", "heads")
    engine = create_engine(sqlite.url())
    assert not [finding for finding in check(engine) if finding.fatal]
    project.alembic("downgrade", "projector_dedup@base")
    assert inspect(engine).get_table_names() == ["alembic_version"]
    engine.dispose()


def test_the_wheel_prints_the_tables(installed: Path, sqlite: Database) -> None:
    """`idempotency schema`, away from the checkout, prints the SQL of tables on which its `check` is content."""
    engine = create_engine(sqlite.url())
    run_script(engine, _python(installed, "-m", "projector_dedup", "schema", "--dialect", "sqlite"))
    engine.dispose()
    url = sqlite.url().render_as_string(hide_password=False)
    assert "is ready" in _python(installed, "-m", "projector_dedup", "check", "--database-url", url)


# The release ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A copy of what a release looks at, with one version in CHANGELOG.md."""
    (tmp_path / ".ci").mkdir()
    copy(ROOT / ".ci" / "release_notes", tmp_path / ".ci")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "p"\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        "# C\n\n## [Unreleased]\n\n## [1.2.3] - 2026-01-02\n\n- New.\n\n## [1.2.2]\n\n- Old.\n"
    )
    return tmp_path


def _notes(folder: Path, tag: str) -> tuple[int, str, str]:
    done = subprocess.run([folder / ".ci" / "release_notes", tag], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def test_a_release_has_the_version_of_its_tag(release: Path) -> None:
    """The notes are those of the version. Another tag, unreleased changes, or a version without notes are refused."""
    assert _notes(release, "v1.2.3") == (0, "- New.", "")
    assert _notes(release, "v1.2.4") == (
        1,
        "",
        "the tag is v1.2.4, and pyproject.toml has the version 1.2.3: they must be one",
    )
    changelog = release / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("[Unreleased]\n", "[Unreleased]\n\n- Newer.\n"))
    assert "has unreleased changes" in _notes(release, "v1.2.3")[2]
    changelog.write_text("# C\n")
    assert "has no section [1.2.3]" in _notes(release, "v1.2.3")[2]


WORKFLOWS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").iterdir()}


def test_the_steps_of_the_workflows_are_there() -> None:
    """Each script, each make target and each workflow that a workflow names. A release begins with the checks."""
    workflows = "\n".join(WORKFLOWS.values())
    assert set(re.findall(r"\.ci/\w+", workflows)) == {".ci/absolute_links", ".ci/release_notes", ".ci/run"}
    named = re.findall(r"\.ci/\w+|\.github/workflows/\w+\.yml", workflows)
    assert [file for file in named if not (ROOT / file).is_file()] == []
    targets = re.findall(r"- run: make (\S+)$", workflows, re.MULTILINE)
    assert targets == ["try-release"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
    assert "bash .ci/run" in WORKFLOWS["checks.yml"]
    assert "uses: ./.github/workflows/checks.yml" in WORKFLOWS["release.yml"]


def test_actions_are_pinned() -> None:
    """A tag of an action can be moved to other code, a commit cannot. PyPI's action publishes from its branch."""
    actions = re.findall(r"uses: (?!\./)(\S+)", "\n".join(WORKFLOWS.values()))
    moving = {action for action in actions if not re.search(r"@[0-9a-f]{40}$", action)}
    assert moving == {"pypa/gh-action-pypi-publish@release/v1"}
