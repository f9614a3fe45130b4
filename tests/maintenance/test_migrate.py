"""`migrate`: tables that the library owns are made, adopted, and changed under load, by one run at a time."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, MetaData, create_engine, func, inspect, select, text
from sqlalchemy.orm import Session

import projector_dedup.maintenance.schema
from alembic_project import run_python
from databases import Database
from marked import on_one_database, one_of_each_engine  # noqa: F401  # a fixture
from owning import (  # noqa: F401  # second_schema is a fixture
    TWICE,
    deliver,
    described,
    fatal,
    run_script,
    second_schema,
    state_of,
    twice,
)
from projector_dedup import (
    DedupTables,
    MissingTableError,
    Outcome,
    RetriesExhaustedError,
    UnsafeSessionError,
    claim,
    make_tables,
)
from projector_dedup.commands import default_command_tables, make_command_tables
from projector_dedup.effects import default_effect_tables, make_effect_tables
from projector_dedup.maintenance.check import check
from projector_dedup.maintenance.running import KINDS
from projector_dedup.maintenance.schema import Migrated, ddl, migrate
from projector_dedup.maintenance.state import write_state
from projector_dedup.tables import default_tables

ROOT = Path(__file__).parents[2]
SCHEMA = default_tables.version

NEXT = '''"""A change as a later version may make it."""

import sqlalchemy as sa
from alembic import op

from projector_dedup.migrations.table_sets import table_sets

revision = "projector_dedup_0004"
down_revision = "projector_dedup_0003"
branch_labels = None
depends_on = None


def upgrade():
    for schema, name in table_sets(op.get_context().config):
        op.add_column(name, sa.Column("note", sa.Text(), nullable=True), schema=schema)
        state = sa.table(f"{name}_state", sa.column("key"), sa.column("value"), schema=schema)
        op.execute(sa.update(state).values(value="2").where(state.c.value == "1"))
'''


@pytest.fixture
def next_version(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library as a later version, whose schema has one column more, on tables of this one."""
    run_script(engine, ddl(engine.dialect.name))
    folder = tmp_path / "migrations"
    shutil.copytree(ROOT / "migrations", folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "versions" / "0004_next.py").write_text(NEXT)
    monkeypatch.setattr(projector_dedup.maintenance.schema, "files", lambda _package: folder)
    monkeypatch.setattr(DedupTables, "revisions", (*DedupTables.revisions, "projector_dedup_0004"))


# Made, adopted, refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_tables, make_command_tables, make_effect_tables])
def test_the_tables_are_made_once(engine: Engine, schema: str | None, make: Callable[..., DedupTables]) -> None:
    """Of any name, in any schema, side by side, as `create_all` makes them; a second run leaves everything as it is."""
    default = make(MetaData()).marker.name
    for name, place in ((default, None), ("inbox", None), ("inbox2", schema), ("t" * 43, schema)):
        tables = make(MetaData(), name, place)
        assert migrate(engine, tables) == Migrated(before=None, after=SCHEMA)
        if name == default:  # the only table as yet
            with engine.connect() as connection:
                context = MigrationContext.configure(connection, opts={"compare_server_default": True})
                differences = compare_metadata(context, tables.marker.metadata)
            assert [each for each in differences if each[0] != "remove_table"] == []
        made = described(engine, tables)
        assert twice(engine, tables) == TWICE
        assert migrate(engine, tables) == Migrated(before=SCHEMA, after=SCHEMA)
        assert set(twice(engine, tables)) == {Outcome.DUPLICATE}
        assert fatal(engine, tables) == []
        assert state_of(engine, tables) == {"schema_version": str(SCHEMA)}
        tables.marker.metadata.drop_all(engine)
        tables.marker.metadata.create_all(engine)
        assert described(engine, tables) == made


def test_an_engine_that_moves_schemas_is_followed(engine: Engine, schema: str | None) -> None:
    """With a `schema_translate_map` the tables are where deliveries through the engine look for them."""
    if schema is None:
        pytest.skip("one schema")
    moved = engine.execution_options(schema_translate_map={None: schema})
    assert migrate(moved) == Migrated(before=None, after=SCHEMA)
    assert migrate(moved) == Migrated(before=SCHEMA, after=SCHEMA)
    assert inspect(engine).get_table_names() == []
    assert deliver(moved, "m1") is Outcome.APPLIED


@pytest.mark.parametrize(
    "tables", [default_tables, default_command_tables, default_effect_tables], ids=["markers", "records", "effects"]
)
@pytest.mark.parametrize("way", ["create_all", "schema", "died half way"])
def test_tables_that_are_there_and_right_are_adopted(engine: Engine, way: str, tables: DedupTables) -> None:
    """With what is in them; where a run died between the two tables, the one that is missing is made."""
    if way == "create_all":
        tables.marker.metadata.create_all(engine)
    elif way == "schema":
        run_script(engine, ddl(engine.dialect.name, tables))
        assert fatal(engine, tables) == []
    else:
        tables.marker.create(engine)
    if way != "died half way":
        assert twice(engine, tables) == TWICE
    assert migrate(engine, tables) == Migrated(before=SCHEMA, after=SCHEMA, adopted=True)
    assert migrate(engine, tables) == Migrated(before=SCHEMA, after=SCHEMA)
    assert state_of(engine, tables) == {"schema_version": str(SCHEMA)}
    assert fatal(engine, tables) == []
    if way != "died half way":
        assert set(twice(engine, tables)) == {Outcome.DUPLICATE}


def test_tables_that_are_wrong_are_left_alone(engine: Engine) -> None:
    """A table of somebody else's with our name: an error that names what is wrong, and no table more than before."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE processed_message (message_id VARCHAR(512) PRIMARY KEY)"))
    with pytest.raises(MissingTableError, match=r"has no column handler; nothing was changed; write a migration"):
        migrate(engine)
    assert inspect(engine).get_table_names() == ["processed_message"]


def test_tables_that_were_dropped_behind_its_back_are_not_called_ready(engine: Engine) -> None:
    """The version table alone says nothing: the error names it."""
    migrate(engine)
    default_tables.marker.drop(engine)
    with pytest.raises(MissingTableError, match=r"drop processed_message_alembic_version too"):
        migrate(engine)


def test_a_schema_that_is_not_there_is_named(engine: Engine) -> None:
    """It is the owner's to create."""
    with pytest.raises(MissingTableError, match=r"there is no schema nowhere; create it"):
        migrate(engine, make_tables(MetaData(), schema="nowhere"))


def test_autocommit_is_refused(engine: Engine) -> None:
    """Neither lock nor change would be one transaction."""
    with pytest.raises(UnsafeSessionError, match="AUTOCOMMIT"):
        migrate(engine.execution_options(isolation_level="AUTOCOMMIT"))


def test_the_newest_revision_is_that_of_one_kind_of_tables() -> None:
    """The kinds together name every revision, so that the newest one is the last of one of them."""
    config = Config()
    config.set_main_option("script_location", str(ROOT / "migrations"))
    script = ScriptDirectory.from_config(config)
    revisions = [each.revision for each in script.walk_revisions()]
    assert sorted(revisions) == sorted(each for kind in KINDS for each in kind.revisions)
    assert script.get_heads() == [max(revisions)]


# Several at once, and beside deliveries --------------------------------------------------------------------------


BEGIN_TOGETHER = """
import sys
from projector_dedup.maintenance.schema import migrate
from sqlalchemy import create_engine
engine = create_engine(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
done = migrate(engine)
print(done.before, done.after, done.adopted)
"""


def test_runs_that_meet_are_one_after_the_other(engine: Engine) -> None:
    """Three processes begin at once: one makes the tables, the others find them."""
    url = engine.url.render_as_string(hide_password=False)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN_TOGETHER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    said = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        said.append(process.communicate(timeout=60)[0].strip())
    assert sorted(said) == [f"{SCHEMA} {SCHEMA} False"] * 2 + [f"None {SCHEMA} False"]
    assert fatal(engine) == []


def test_threads_that_meet_are_one_after_the_other(engine: Engine) -> None:
    """Alembic runs one environment at a time in a process; whoever calls `migrate` need not know."""
    count = 3
    barrier = Barrier(count)

    def one_of_them() -> Migrated:
        barrier.wait()
        return migrate(engine)

    with ThreadPoolExecutor(count) as threads:
        done = [future.result() for future in [threads.submit(one_of_them) for _ in range(count)]]
    assert sorted(each.before or 0 for each in done) == [0, *[SCHEMA] * (count - 1)]


@pytest.mark.usefixtures("next_version")
def test_a_change_gives_way_to_writers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a transaction holds the table, others claim; when it has ended, the change goes through."""
    if engine.dialect.name == "sqlite":
        pytest.skip("one writer at a time")
    gave_way, resume, pause = Event(), Event(), time.sleep

    def sleep(seconds: float) -> None:
        gave_way.set()
        resume.wait(60)
        pause(seconds / 10)

    monkeypatch.setattr("projector_dedup.maintenance.schema.time.sleep", sleep)
    with Session(engine) as holder, ThreadPoolExecutor(1) as threads:
        claim(holder, "held", "h")
        running = threads.submit(migrate, engine)
        assert gave_way.wait(60)
        assert deliver(engine, "m1") is Outcome.APPLIED
        holder.commit()
        resume.set()
        done = running.result()
    assert (done.before, done.after) == (1, 2)
    assert [deliver(engine, each) for each in ("held", "m1", "m2")] == [
        Outcome.DUPLICATE,
        Outcome.DUPLICATE,
        Outcome.APPLIED,
    ]


@pytest.mark.usefixtures("next_version")
def test_a_table_that_is_never_let_go_is_an_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to do, and the table is as it was."""
    if engine.dialect.name == "sqlite":
        pytest.skip("one writer at a time")
    monkeypatch.setattr(projector_dedup.maintenance.schema, "_PATIENCE", 0.0)
    with Session(engine) as holder:
        claim(holder, "held", "h")
        with pytest.raises(
            RetriesExhaustedError, match="another transaction locks it; end the transaction that has been open"
        ):
            migrate(engine)
        holder.commit()
    assert "note" not in {column["name"] for column in inspect(engine).get_columns("processed_message")}


@pytest.mark.usefixtures("next_version")
def test_code_of_the_old_version_claims_during_and_after_an_upgrade(engine: Engine) -> None:
    """Nothing that was claimed before, during or after it is lost or applied again."""
    applied = [f"before {number}" for number in range(20)]
    assert {deliver(engine, each) for each in applied} == {Outcome.APPLIED}
    under_way, stop = Event(), Event()

    def meanwhile() -> list[str]:
        ids: list[str] = []
        while not (stop.is_set() and len(ids) >= 20):
            ids.append(f"during {len(ids)}")
            assert deliver(engine, ids[-1]) is Outcome.APPLIED
            under_way.set()
        return ids

    with ThreadPoolExecutor(1) as threads:
        others = threads.submit(meanwhile)
        assert under_way.wait(60)
        try:
            assert migrate(engine) == Migrated(before=1, after=2, adopted=True)
        finally:
            stop.set()
        applied += others.result()
    assert deliver(engine, "after") is Outcome.APPLIED
    applied.append("after")
    assert {deliver(engine, each) for each in applied} == {Outcome.DUPLICATE}
    with engine.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(default_tables.marker)) == len(applied)
    assert state_of(engine) == {"schema_version": "2"}
    assert migrate(engine) == Migrated(before=2, after=2)


@pytest.mark.parametrize(
    ("written", "code", "problem"),
    [
        (None, 3, None),
        ("3", 3, None),
        ("2", 3, "advice"),
        ("1", 3, "works with version 2 too, but not with older ones; run `idempotency migrate`"),
        ("4", 3, "upgrade projector-dedup here"),
        ("x", 3, "another program wrote"),
    ],
)
def test_check_knows_two_versions(
    engine: Engine, written: str | None, code: int, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own and the one before, for rolling deploys; without a number the structure decides."""
    monkeypatch.setattr(DedupTables, "revisions", ("a revision",) * code)
    default_tables.marker.metadata.create_all(engine)
    with engine.begin() as connection:
        write_state(connection, default_tables, {"schema_version": written})
    found = [finding for finding in check(engine) if "schema version" in finding.problem]
    assert [finding.fatal for finding in found] == ([] if problem is None else [problem != "advice"])
    if problem not in (None, "advice"):
        assert str(problem) in found[0].remedy


# The commands ----------------------------------------------------------------------------------------------------


@on_one_database
def test_the_command(database: Database) -> None:
    """`migrate` makes the tables (and an SQLite file), and says what it found."""
    url = database.url().render_as_string(hide_password=False)

    def command(*arguments: str) -> Any:
        return run_python("-m", "projector_dedup", *arguments, "--database-url", url, "--table", "inbox")

    assert command("check").returncode == 1
    said = [command("migrate") for _ in range(2)]
    assert [(done.returncode, done.stdout, done.stderr) for done in said] == [
        (0, "inbox was created at version 1.\n", ""),
        (0, "inbox is at version 1.\n", ""),
    ]
    assert command("check").returncode == 0


def test_the_command_schema_prints_what_makes_the_tables(database: Database) -> None:
    """For the table that was asked for, with the rights that an application user needs."""
    done = run_python("-m", "projector_dedup", "schema", "--dialect", database.engine, "--table", "inbox")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"-- for {database.engine} (--dialect names another database: ")
    assert "-- GRANT SELECT, INSERT, UPDATE, DELETE ON inbox_state TO" in done.stdout
    engine = create_engine(database.url())
    run_script(engine, done.stdout)
    assert fatal(engine, make_tables(MetaData(), "inbox")) == []
    assert state_of(engine, make_tables(MetaData(), "inbox")) == {"schema_version": "1"}
    engine.dispose()


def test_a_name_that_is_too_long_is_told_in_one_line(sqlite: Database) -> None:
    """By every command that takes a name."""
    for command in (["schema"], ["migrate", "--database-url", sqlite.url().render_as_string()]):
        done = run_python("-m", "projector_dedup", *command, "--table", "t" * 44)
        assert done.returncode == 1
        assert done.stderr.startswith("Error: the name of the marker table must have 1 to 43 bytes, and ")
        assert len(done.stderr.splitlines()) == 1
