"""Handlers drawn by lot: what a message may do with its session, on tables of every kind, and what it sees there.

A batch of them must leave the database, and have seen it, as the same messages one by one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import JSON, CheckConstraint, Connection, ForeignKey, String, func, inspect, select, text, update
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

ROWS = 4


class Base(DeclarativeBase):
    """The read model."""


class Row:
    """A table of numbers."""

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(default=0)


class Plain(Row, Base):
    """Columns with constraints, and children."""

    __tablename__ = "program_plain"
    __table_args__ = (CheckConstraint("checked >= 0"),)
    checked: Mapped[int] = mapped_column(default=0)
    code: Mapped[str | None] = mapped_column(String(20), unique=True)
    note: Mapped[str | None] = mapped_column(String(6))
    children: Mapped[list[Child]] = relationship(back_populates="parent")


class Rich(Row, Base):
    """A column whose value may be changed in place."""

    __tablename__ = "program_rich"
    tags: Mapped[Any] = mapped_column(JSON, default=list)


class Simple(Row, Base):
    """Nothing else."""

    __tablename__ = "program_simple"


class Triggering(Row, Base):
    """Each change of it adds to the plain row 0."""

    __tablename__ = "program_triggering"


class Versioned(Row, Base):
    """Each UPDATE counts."""

    __tablename__ = "program_versioned"
    version: Mapped[int] = mapped_column(default=1)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


class Child(Row, Base):
    """Has a plain parent."""

    __tablename__ = "program_child"
    parent_id: Mapped[int] = mapped_column(ForeignKey(Plain.id))
    parent: Mapped[Plain] = relationship(back_populates="children")


FOLLOWED = "UPDATE program_plain SET number = number + 100 WHERE id = 0"
EVENTS = ("UPDATE ON program_triggering", "INSERT ON program_triggering")
FUNCTION = f"""CREATE FUNCTION program_follow() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN {FOLLOWED}; RETURN NEW; END $$"""
FOLLOW = {
    "postgresql": "EXECUTE FUNCTION program_follow()",
    "mariadb": FOLLOWED,
    "sqlite": f"BEGIN {FOLLOWED}; END",
}


def prepare(connection: Connection) -> None:
    """The tables, and what some of them do by themselves."""
    Base.metadata.create_all(connection)
    if connection.dialect.name == "postgresql":
        connection.execute(text(FUNCTION))
    for number, change in enumerate(EVENTS):
        follow = f"CREATE TRIGGER follow_{number} AFTER {change} FOR EACH ROW {FOLLOW[connection.dialect.name]}"
        connection.execute(text(follow))


def _filled() -> Iterator[str]:
    tables = Base.metadata.sorted_tables
    for table in reversed(tables):
        yield f"DELETE FROM {table.name}"
    for table in tables:
        values = {"version": "1", "tags": "'[]'"}
        columns = [column.name for column in table.columns if column.name != "id" and not column.nullable]
        chosen = ", ".join(values.get(name, "0") for name in columns)
        numbers = "(SELECT 0 AS n UNION SELECT 1 UNION SELECT 2) AS numbers"
        yield f"INSERT INTO {table.name} (id, {', '.join(columns)}) SELECT n, {chosen} FROM {numbers}"


def reset(session: Session) -> None:
    """Fill the tables as they were in the beginning; each lacks one of the rows that are asked for."""
    for statement in _filled():
        session.execute(text(statement))


def state(session: Session) -> dict[str, Any]:
    """Every row of every table."""
    tables = Base.metadata.sorted_tables
    return {table.name: [tuple(row) for row in session.execute(table.select().order_by("id"))] for table in tables}


# What a message may do: each takes the session, a row's number, a number to work with, and a list of what it saw ------

Step = Callable[[Session, int, int, list[Any]], object]
HELD: list[Any] = []
REACHED: list[Any] = []  # by this message: what the session alone would let go of, when the collector comes


def _get(session: Session, entity: Any, ident: int) -> Any:
    found = session.get(entity, ident)
    if found is None:
        found = entity(id=ident, number=0, **({"parent_id": 0} if entity is Child else {}))
        session.add(found)
    REACHED.append(found)
    return found


def adds_to(entity: Any) -> Step:
    """The accumulating projector."""

    def step(session: Session, ident: int, number: int, seen: list[Any]) -> None:
        row = _get(session, entity, ident)
        seen.append((entity.__name__, ident, str(row.number)))
        row.number += number

    step.__name__ = f"adds_to_{entity.__name__}"
    return step


def sets(name: str, *values: Any, entity: Any = Plain) -> Step:
    """An attribute."""

    def step(session: Session, ident: int, number: int, seen: list[Any]) -> None:
        row = _get(session, entity, ident)
        seen.append((name, str(getattr(row, name))))
        setattr(row, name, values[number % len(values)])

    step.__name__ = f"sets_{name}"
    return step


def of_session(name: str) -> Step:
    """A method of the session."""

    def step(session: Session, _ident: int, _number: int, _seen: list[Any]) -> None:
        getattr(session, name)()

    step.__name__ = name
    return step


def expression(session: Session, ident: int, number: int, _seen: list[Any]) -> None:
    """SQLAlchemy's idiom for an atomic update."""
    _get(session, Plain, ident).number = Plain.number + number


def by_text(session: Session, ident: int, number: int, _seen: list[Any]) -> None:
    """Run an UPDATE as text, which does not flush."""
    session.execute(text("UPDATE program_plain SET number = number * 2 + :n WHERE id = :i"), {"i": ident, "n": number})


def by_core(session: Session, ident: int, number: int, _seen: list[Any]) -> None:
    """Run an UPDATE of Core on the connection."""
    session.connection().execute(
        update(Base.metadata.tables["program_plain"]).where(Plain.id == ident).values(number=Plain.number + number)
    )


def by_bulk(session: Session, ident: int, number: int, _seen: list[Any]) -> None:
    """The ORM's UPDATE, which changes objects too."""
    session.execute(update(Plain).where(Plain.id >= ident).values(number=Plain.number - number))


def by_upsert(session: Session, ident: int, number: int, _seen: list[Any]) -> None:
    """Atomic."""
    values, changed = {"id": ident, "number": number, "checked": 0}, {"number": Plain.number + number}
    name = session.get_bind().dialect.name
    if name == "mariadb":
        session.execute(mysql.insert(Plain).on_duplicate_key_update(changed).values(values))
    else:
        insert: Any = {"postgresql": postgresql, "sqlite": sqlite}[name].insert(Plain)
        session.execute(insert.on_conflict_do_update(index_elements=["id"], set_=changed).values(values))


def by_driver(session: Session, ident: int, number: int, seen: list[Any]) -> None:
    """Below SQLAlchemy."""
    cursor = session.connection().connection.cursor()
    cursor.execute(f"UPDATE program_plain SET number = number + {number} WHERE id = {ident}")
    cursor.execute(f"SELECT number FROM program_plain WHERE id = {ident}")
    seen.append(cursor.fetchall())
    cursor.close()


def sums(session: Session, _ident: int, _number: int, seen: list[Any]) -> None:
    """All that is there."""
    seen.append(("sum", session.scalar(select(func.sum(Plain.number)))))


def sums_unflushed(session: Session, _ident: int, _number: int, seen: list[Any]) -> None:
    """All that is there, but for what this message changed."""
    with session.no_autoflush:
        seen.append(("sum", session.scalar(select(func.sum(Plain.number)))))


def selects(session: Session, ident: int, number: int, seen: list[Any]) -> None:
    """Select by a condition that earlier messages may have changed."""
    for row in session.scalars(select(Plain).where(Plain.number >= ident).order_by(Plain.id)):
        seen.append((row.id, str(row.number)))
        row.number += number


def looks(session: Session, ident: int, _number: int, seen: list[Any]) -> None:
    """Look at the session itself, and at the history of a row."""
    row = _get(session, Plain, ident)
    history = inspect(row).attrs.number.history
    seen.append((len(session.new), row in session, str(history.unchanged), str(history.deleted)))


def deletes(session: Session, ident: int, _number: int, _seen: list[Any]) -> None:
    """And a row is gone."""
    if (row := session.get(Versioned, ident)) is not None:
        session.delete(row)
    if ident and (plain := session.get(Plain, ident)) is not None and not plain.children:
        session.delete(plain)


def removes(session: Session, ident: int, _number: int, seen: list[Any]) -> None:
    """A row that nothing refers to, so that the ORM looks for nothing."""
    if (row := session.get(Simple, ident)) is not None:
        seen.append(row.number)
        session.delete(row)


def merges(session: Session, ident: int, number: int, _seen: list[Any]) -> None:
    """A row from outside."""
    session.merge(Plain(id=ident, number=number))


def locks(session: Session, ident: int, number: int, seen: list[Any]) -> None:
    """Lock a row by an option of `session.get`."""
    if (row := session.get(Plain, ident, with_for_update=True)) is not None:
        seen.append(str(row.number))
        row.number += number


def refreshes(session: Session, ident: int, number: int, seen: list[Any]) -> None:
    """Change a row and refresh it, which undoes the change."""
    row = session.get_one(Plain, 0)
    row.number += number
    session.refresh(row)
    seen.append(str(row.number))
    session.expire(row, ["note"])
    seen.append(row.note)
    session.expunge(session.get_one(Plain, ident % 2))


def savepoint(session: Session, ident: int, number: int, seen: list[Any]) -> None:
    """One of two is rolled back."""
    row = _get(session, Plain, ident)
    for kept in (False, True):
        with session.begin_nested() as nested:
            row.number += number
            if not kept:
                nested.rollback()
        seen.append(str(row.number))


def changes_in_place(session: Session, ident: int, number: int, seen: list[Any]) -> None:
    """Which the ORM does not notice."""
    tags = _get(session, Rich, ident).tags
    seen.append(repr(tags))
    if tags is not None:
        tags.append(number)


def holds(session: Session, ident: int, number: int, seen: list[Any]) -> None:
    """A row of a message before it; changing that is for nobody to see."""
    if HELD:
        HELD[-1].number = number
    HELD.append(_get(session, Plain, ident))
    seen.append(str(HELD[-1].number))


def reaches_a_parent(session: Session, ident: int, number: int, seen: list[Any]) -> None:
    """Reach a row through a relationship."""
    child = _get(session, Child, ident)
    if child.parent is not None:
        seen.append(str(child.parent.number))
        child.parent.number += number
        seen.append(sorted(each.id for each in child.parent.children))
    child.parent = _get(session, Plain, number % 2)


def swallows(session: Session, ident: int, number: int, _seen: list[Any]) -> None:
    """An error inside a savepoint."""
    try:
        with session.begin_nested():
            _get(session, Plain, ident).checked = number - 2
    except Exception:  # noqa: BLE001  # whatever it is
        pass


def fails(_session: Session, _ident: int, number: int, _seen: list[Any]) -> None:
    """Sometimes."""
    if number == 1:
        raise ValueError("as it was asked to")


STEPS: list[Step] = [
    *(adds_to(entity) for entity in (Plain, Plain, Simple, Rich, Child)),
    sets("checked", 1, -1, 2),
    sets("code", "a", "b", None, "c"),
    sets("note", "abcdef", "abcdefg", None),
    *(of_session(name) for name in ("expire_all", "expunge_all", "flush")),
    *(sums, selects, deletes, removes, merges, locks, savepoint, swallows, fails),
    *(by_text, by_core, by_bulk, by_upsert, by_driver),
    *(adds_to(entity) for entity in (Triggering, Versioned)),
    sets("tags", [1], {"a": 1}, None, entity=Rich),
    sets("id", 0, 7),
    *(expression, sums_unflushed, looks, refreshes, changes_in_place, holds, reaches_a_parent),
]
LATE = [adds_to(Plain), sets("note", "x", None, "ä€ß")]
Program = list[list[tuple[Step, int, int]]]
"""A program: the steps of each message in a batch."""


def draw(seed: int) -> Program:
    """Anything, or little but what is written late, and one or two things more."""
    dice = random.Random(seed)  # repeatable, which is what a test wants
    steps = STEPS if seed % 3 == 0 else [*LATE * 2, *dice.sample(STEPS, seed % 3)]
    return [
        [(dice.choice(steps), dice.randrange(ROWS), dice.randrange(8)) for _ in range(dice.randint(1, 4))]
        for _ in range(dice.randint(2, 7))
    ]
