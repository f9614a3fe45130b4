"""A project with Alembic as a user has it: a folder with alembic.ini, env.py and models, driven by the command."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text

from databases import Database
from forked import run_module

INI = """[alembic]
script_location = %(here)s/scripts
prepend_sys_path = .
path_separator = {separator}
version_locations =
    %(here)s/scripts/versions
{locations}
{options}
"""
OURS = "    projector_dedup.migrations:versions"

ENV = """
import os
from alembic import context
from models import metadata
from sqlalchemy import create_engine

def include_name(name, kind, parents):
    return kind != "schema" or name in {None, *(table.schema for table in metadata.tables.values())}

engine = create_engine(os.environ["URL"])
with engine.connect() as connection:
    context.configure(
        connection=connection, target_metadata=metadata, include_schemas=True, include_name=include_name
    )
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
"""

MODELS = """
from sqlalchemy import Column, Integer, MetaData, Table, Text
from projector_dedup import make_tables

metadata = MetaData(naming_convention={{"ix": "ix_%(column_0_label)s", "pk": "pk_%(table_name)s"}})
Table("of_the_user", metadata, Column("id", Integer, primary_key=True){column})
{ours}
"""

MAKO = """
from alembic import op
import sqlalchemy as sa
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}

def upgrade():
    ${upgrades if upgrades else "pass"}

def downgrade():
    ${downgrades if downgrades else "pass"}
"""


def run_python(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with the editable checkout of the library, and return the finished process."""
    if arguments[0] == "-m":
        return run_module(*map(str, arguments[1:]), **options)
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, **options)


class Project:
    """A user's project folder, in which `alembic` runs the command."""

    def __init__(
        self,
        folder: Path,
        database: Database,
        python: Callable[..., subprocess.CompletedProcess[str]] = run_python,
    ) -> None:
        self.folder = folder
        self.versions = folder / "scripts" / "versions"
        self.versions.mkdir(parents=True)
        (folder / "scripts" / "env.py").write_text(ENV)
        (folder / "scripts" / "script.py.mako").write_text(MAKO)
        self._url = database.url().render_as_string(hide_password=False)
        self._python = python

    def configure(self, separator: str = "newline", *, locations: str = "", **options: str) -> None:
        """Write alembic.ini."""
        lines = "\n".join(f"{name} = {value}" for name, value in options.items())
        text = INI.format(separator=separator, locations=locations, options=lines)
        (self.folder / "alembic.ini").write_text(text)

    def model(self, *ours: str, column: str = "") -> None:
        """Write the models: the user's table, perhaps with one more column, and lines that call make_tables."""
        (self.folder / "models.py").write_text(MODELS.format(ours="\n".join(ours), column=column))

    def begin_history(self) -> None:
        """Write the first migration of the user's own, and run it."""
        self.configure()
        self.model()
        self.autogenerate()
        self.alembic("upgrade", "head")

    def alembic(self, *arguments: str, code: int = 0) -> str:
        """Run the command `alembic` in the project and return its output; fail if its exit code is not `code`."""
        environment = {**os.environ, "URL": self._url, "PYTHONDONTWRITEBYTECODE": "1"}
        done = self._python("-m", "alembic", *arguments, cwd=self.folder, env=environment)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def autogenerate(self, *arguments: str) -> str:
        """Let Alembic write a revision, and return its text."""
        said = self.alembic("revision", "--autogenerate", "-m", "more", *arguments)
        (written,) = re.findall(r"Generating (\S+\.py)", said.replace("\n", " ").replace("  ", ""))
        return Path(written).read_text()


@contextlib.contextmanager
def another_schema(database: Database) -> Iterator[str | None]:
    """A schema beside the usual one; None on SQLite, where it would be another file."""
    name = None if database.engine == "sqlite" else f"{database.url().database}_billing"
    engine = create_engine(database.url())
    with engine.begin() as connection:
        if name:
            connection.execute(text(f"CREATE SCHEMA {name}"))
    yield name
    with engine.begin() as connection:
        if name:
            connection.execute(text(f"DROP SCHEMA {name}{' CASCADE' if database.engine == 'postgresql' else ''}"))
    engine.dispose()
