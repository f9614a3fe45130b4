"""The tables of commands: the ways to own them, what `check` finds wrong with them, and their records in bulk."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine, MetaData, inspect, text, update
from sqlalchemy.orm import sessionmaker

from alembic_project import OURS, Project
from databases import Database
from marked import one_of_each_engine  # noqa: F401  # a fixture
from owning import (  # noqa: F401  # second_schema is a fixture
    TWICE,
    described,
    fatal,
    place,
    run_script,
    second_schema,
    twice,
)
from projector_dedup import Outcome
from projector_dedup.commands import (
    Call,
    Commands,
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
from projector_dedup.maintenance.schema import require_tables
from projector_dedup.maintenance.stats import ages
from projector_dedup.tables import default_tables


@command(name="shop.cancel")
def cancel(asked: dict[str, int], call: Call) -> str:
    """Answer as long a text as is asked for."""
    assert call.key is not None
    return "x" * asked["amount"]


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
            MissingTableError, match=r"(does not have the columns|is a table of another kind).*make_command_tables\("
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
