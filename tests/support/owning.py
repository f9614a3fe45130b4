"""Tables as their owners make them: what the database says that it has, and whether they keep the promise."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, MetaData, select
from sqlalchemy.orm import sessionmaker
from sqlalchemy.schema import CreateIndex, CreateTable

from alembic_project import another_schema
from databases import Database
from projector_dedup import Dispatcher, Message, Outcome, on, projector
from projector_dedup.commands import Call, Commands, CommandTables, command
from projector_dedup.effects import Attempt, Effects, EffectTables, effect, stop
from projector_dedup.http.parked import ParkedTables, Parking
from projector_dedup.maintenance.check import check
from projector_dedup.maintenance.state import read_state
from projector_dedup.tables import DedupTables, default_tables

TWICE = [Outcome.APPLIED, Outcome.DUPLICATE]


@pytest.fixture(name="schema")
def second_schema(database: Database) -> Iterator[str | None]:
    """A second schema, where there is such a thing."""
    with another_schema(database) as name:
        yield name


@projector(idempotent=True, name="h")
@on(dict)
def handler(event: object, session: object) -> None:
    """Do nothing."""


@command(name="shop.place")
def place(asked: dict[str, int], call: Call) -> int:
    """Answer what was asked."""
    assert call.key is not None
    return asked["amount"]


@effect(name="shop.charge", lease=30, unknown=stop)
def charge(amount: int, attempt: Attempt) -> str:
    """Send nothing."""
    return f"{amount} by attempt {attempt.number} at {attempt.key}"


def deliver(engine: Engine, message: str | Message, tables: DedupTables = default_tables) -> Outcome:
    """Deliver one message, which may be given by its id."""
    given = Message(message, {}) if isinstance(message, str) else message
    return Dispatcher(sessionmaker(engine), handler, tables=tables).deliver(given).outcome


def twice(engine: Engine, tables: DedupTables) -> list[Outcome]:
    """Deliver a message twice, ask twice for a command or an effect, or park a request twice; return the outcomes."""
    if isinstance(tables, EffectTables):
        effects = Effects(sessionmaker(engine), [charge], tables=tables)
        with engine.connect() as connection:
            there = connection.execute(select(tables.marker)).first() is not None
        assert effects.run(charge, 3, key="é ", scope="s") == effects.run(charge, 3, key="é ", scope="s")
        return [Outcome.DUPLICATE if there else Outcome.APPLIED, Outcome.DUPLICATE]
    if isinstance(tables, ParkedTables):
        parking = Parking(Dispatcher(sessionmaker(engine), handler), tables, "shop")
        outcomes: list[Outcome] = []
        for body in (bytes(range(256)), b"another"):
            outcomes.append(Outcome.DUPLICATE if parking.ids() else Outcome.APPLIED)
            parking.park("é ", body, {"a": "é\0"}, "è")
        assert parking.ids() == ["é "]
        assert parking.find("é ") == (bytes(range(256)), {"a": "é\0"}, "\\xe8")
        return outcomes
    if not isinstance(tables, CommandTables):
        return [deliver(engine, "é ", tables) for _ in range(2)]
    commands = Commands(sessionmaker(engine), tables=tables)
    answers = [commands.handle(place, {"amount": 3}, key="é ", scope="s") for _ in range(2)]
    assert [answer.result for answer in answers] == [3, 3]
    return [answer.outcome for answer in answers]


def fatal(engine: Engine, tables: DedupTables = default_tables) -> list[str]:
    """The problems that `check` calls fatal."""
    return [finding.problem for finding in check(engine, tables) if finding.fatal]


def state_of(engine: Engine, tables: DedupTables = default_tables) -> dict[str, str]:
    """The state table, as another connection reads it."""
    with engine.connect() as connection:
        return read_state(connection, tables)


def described(engine: Engine, tables: DedupTables = default_tables) -> list[str]:
    """The DDL of the two tables, as the database itself tells what it has: types, collations, defaults, options."""
    found, both = MetaData(), (tables.marker, tables.state)
    found.reflect(engine, schema=tables.marker.schema, only=[table.name for table in both])
    mirrored = [found.tables[table.fullname] for table in both]
    indexes = sorted(str(CreateIndex(index).compile(engine)) for table in mirrored for index in table.indexes)
    return [*(str(CreateTable(table).compile(engine)) for table in mirrored), *indexes]


def run_script(engine: Engine, script: str) -> None:
    """Run the statements of a script, as a driver without SQLAlchemy sends them."""
    connection = engine.raw_connection()
    cursor = connection.cursor()
    lines = [line for line in script.splitlines() if not line.startswith("--")]
    for statement in "\n".join(lines).split(";"):
        if statement.strip() and statement.strip() not in ("BEGIN", "COMMIT"):
            cursor.execute(statement)
    cursor.close()  # SQLite commits nothing while a RETURNING is unread
    connection.commit()
    connection.close()
