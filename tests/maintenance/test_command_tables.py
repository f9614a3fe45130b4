"""The tables of commands: the ways to own them, what `check` finds wrong with them, and their records in bulk."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine, MetaData, create_engine, inspect, select, text, update
from sqlalchemy.orm import sessionmaker

from alembic_project import OURS, Project
from databases import Database
from marked import one_of_each_engine  # noqa: F401  # a fixture
from owning import (  # noqa: F401  # second_schema is a fixture
    TWICE,
    described,
    fatal,
    made_by_our_revisions,
    place,
    run_script,
    second_schema,
    twice,
)
from projector_dedup import Outcome
from projector_dedup.commands import (
    Call,
    Commands,
    CommandTables,
    command,
    default_command_tables,
    make_command_tables,
)
from projector_dedup.errors import MissingTableError
from projector_dedup.maintenance.check import advise
from projector_dedup.maintenance.cleanup import prune
from projector_dedup.maintenance.rows import (
    find_records,
    forget_record,
    rename,
)
from projector_dedup.maintenance.schema import ddl, require_tables
from projector_dedup.maintenance.stats import ages
from projector_dedup.tables import default_tables


@command(name="shop.cancel")
def cancel(asked: dict[str, int], call: Call) -> str:
    """Answer as long a text as is asked for."""
    assert call.key is not None
    return "x" * asked["amount"]


def keys_of(engine: Engine, tables: CommandTables = default_command_tables) -> list[tuple[str, str]]:
    """The key and the operation of each record, as another connection sees them."""
    other = create_engine(engine.url)
    with other.connect() as connection:
        rows = connection.execute(select(tables.marker.c.message_id, tables.marker.c.handler)).all()
    other.dispose()
    return sorted((row.message_id, row.handler) for row in rows)


# The user's Alembic ----------------------------------------------------------------------------------------------


def test_autogenerate_adds_the_tables_to_a_history(database: Database, engine: Engine, tmp_path: Path) -> None:
    """As for any table of the user's; then Alembic has nothing to add."""
    project = Project(tmp_path, database)
    project.configure()
    project.model("from projector_dedup.commands import make_command_tables", "make_command_tables(metadata)")
    assert "projector_dedup" not in project.autogenerate()
    project.alembic("upgrade", "head")
    assert "No new upgrade operations" in project.alembic("check")
    assert fatal(engine, default_command_tables) == []
    assert twice(engine, default_command_tables) == TWICE


def test_our_revisions_in_the_users_environment(
    database: Database, engine: Engine, schema: str | None, tmp_path: Path
) -> None:
    """Names make tables; without any, later revisions leave what 0001 made; the branch can be taken back."""
    project = Project(tmp_path, database)
    project.begin_history()
    project.configure(locations=OURS)
    project.model("make_tables(metadata)")
    project.alembic("upgrade", "projector_dedup_0001")
    before = described(engine, default_tables)
    project.alembic("upgrade", "heads")
    assert "projector_dedup_0003" in project.alembic("current")
    assert described(engine, default_tables) == before
    assert "processed_command" not in inspect(engine).get_table_names()
    made_by_our_revisions(
        project, engine, schema, CommandTables, "projector_dedup_command_tables", "projector_dedup_0001"
    )
    assert described(engine, default_tables) == before


def test_a_project_of_commands_alone(database: Database, engine: Engine, tmp_path: Path) -> None:
    """An option that is there and empty means no tables of projectors."""
    project = Project(tmp_path, database)
    project.configure(locations=OURS, projector_dedup_tables="", projector_dedup_command_tables="processed_command")
    project.model()
    project.alembic("upgrade", "heads")
    assert "processed_message" not in inspect(engine).get_table_names()
    assert twice(engine, default_command_tables) == TWICE


# Checked ---------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_told_with_the_right_remedy(engine: Engine) -> None:
    """The maker and the option of this kind of tables, with the name that was given."""
    tables = make_command_tables(MetaData(), "orders")
    with pytest.raises(MissingTableError) as told:
        require_tables(engine, tables)
    for words in ("make_command_tables(metadata, name='orders')", "`idempotency schema --commands --table orders`"):
        assert words in str(told.value)


@pytest.mark.parametrize("column", ["fingerprint", "outcome", "codec", "result"])
def test_a_column_that_is_missing_is_found(engine: Engine, column: str) -> None:
    """Each of the four that records have beside those of markers."""
    default_command_tables.marker.metadata.create_all(engine)
    run_script(engine, f"ALTER TABLE processed_command DROP COLUMN {column}")
    assert fatal(engine, default_command_tables) == [f"processed_command has no column {column}"]
    with pytest.raises(
        MissingTableError, match=rf"processed_command has no column {column}; .*make_command_tables\(\)"
    ):
        require_tables(engine, default_command_tables)


@pytest.mark.parametrize(
    ("column", "kinds"),
    [
        ("result", {"postgresql": "text", "mariadb": "BLOB"}),  # the BLOB takes 64 KiB less one byte
        ("result", {"mariadb": "LONGTEXT"}),
        ("fingerprint", {"postgresql": "varchar(16)", "mariadb": "BINARY(16)"}),
        ("codec", {"postgresql": "varchar(32)", "mariadb": "VARBINARY(32)", "sqlite": "VARCHAR(32)"}),
        ("codec", {"postgresql": "bytea", "mariadb": "INT"}),
        ("codec", {"postgresql": "char(80)", "mariadb": "BINARY(80)"}),  # pads
        ("outcome", {"sqlite": "TEXT"}),  # gives back a text
    ],
    ids=str,
)
def test_a_column_that_changes_what_it_keeps_is_found(engine: Engine, column: str, kinds: dict[str, str]) -> None:
    """A record is tried out: cut, converted or refused, it is not given back as it was."""
    kind = kinds.get(engine.dialect.name)
    if kind is None:
        pytest.skip("no other type of this kind")
    tables = make_command_tables(MetaData())
    script = ddl(engine.dialect.name, tables)
    line = next(each for each in script.splitlines() if each.strip().startswith(f"{column} "))
    run_script(engine, script.replace(line, f"{column} {kind},"))
    (problem,) = fatal(engine, default_command_tables)
    assert problem.startswith(("processed_command", "no record could be inserted to try processed_command"))
    assert keys_of(engine) == []


def test_the_trial_leaves_no_record(engine: Engine) -> None:
    """Nor anything else that another connection could see."""
    default_command_tables.marker.metadata.create_all(engine)
    assert fatal(engine, default_command_tables) == []
    assert keys_of(engine) == []


def test_a_table_of_markers_is_no_table_of_commands(engine: Engine) -> None:
    """It lacks columns, and the error says how to create the table."""
    default_tables.marker.metadata.create_all(engine)
    as_records = make_command_tables(MetaData(), "processed_message")
    asks: list[Callable[[], object]] = [
        lambda: find_records(engine, "k", tables=as_records),
        lambda: forget_record(engine, "k", operation="o", tables=as_records),
        lambda: prune(engine, tables=as_records),
    ]
    for refused in asks:
        with pytest.raises(
            MissingTableError, match=r"(does not have the columns|has no column fingerprint).*make_command_tables\("
        ):
            refused()


def test_advice_speaks_of_records(engine: Engine) -> None:
    """What is said of markers is said of records, with the option that is needed."""
    default_command_tables.marker.metadata.create_all(engine)
    twice(engine, default_command_tables)
    with engine.begin() as connection:
        connection.execute(update(default_command_tables.marker).values(processed_at=text("'2020-01-01 00:00:00'")))
    found = ages(engine, tables=default_command_tables)
    (finding,) = advise(found, tables=default_command_tables)
    assert finding.problem.startswith("the oldest record is ")
    assert "`idempotency cleanup --commands`" in finding.remedy


# Records ---------------------------------------------------------------------------------------------------------


def test_a_record_is_found_by_its_scope_and_key(engine: Engine) -> None:
    """With what it answers; another scope's key is another."""
    default_command_tables.marker.metadata.create_all(engine)
    commands = Commands(sessionmaker(engine))
    commands.handle(place, {"amount": 3}, key="k", scope="s")
    commands.handle(cancel, {"amount": 3}, key="k", scope="s")
    found = find_records(engine, "k", scope="s")
    assert [(each.handler, each.state, each.result, each.codec) for each in found] == [
        ("shop.cancel", "result", b'"xxx"', cancel.codec.name),
        ("shop.place", "result", b"3", place.codec.name),
    ]
    assert all((each.key, each.scope) == ("k", "s") for each in found)
    assert find_records(engine, "k") == find_records(engine, "k", scope="t") == []
    assert forget_record(engine, "k", scope="s", operation="shop.place") == 1
    assert [each.handler for each in find_records(engine, "k", scope="s")] == ["shop.cancel"]
    assert commands.handle(place, {"amount": 4}, key="k", scope="s").outcome is Outcome.APPLIED


def test_a_renamed_operation_answers_as_before(engine: Engine) -> None:
    """The copies have what is answered, or whoever asks under the new name would be told nothing."""
    default_command_tables.marker.metadata.create_all(engine)

    def do(asked: dict[str, int], call: Call) -> int:
        """Answer what was asked."""
        assert call.key is not None
        return asked["amount"]

    commands = Commands(sessionmaker(engine))
    commands.handle(command(name="old")(do), {"amount": 5}, key="k")
    assert rename(engine, "old", "new", tables=default_command_tables).copied == 1
    again = commands.handle(command(name="new")(do), {"amount": 5}, key="k")
    assert (again.outcome, again.result) == (Outcome.DUPLICATE, 5)
