"""Ways to tell a batch from its messages one by one, found by a reader of `rows.py`: entities, and handlers of them."""

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import JSON, DateTime, event, insert, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, make_transient, mapped_column

MIDNIGHT = datetime(2024, 1, 1, tzinfo=UTC)
Body = Callable[[int, Session, list[Any]], object]


class Base(DeclarativeBase):
    """The read model."""


class Row(Base):
    """Two of them, in each of two schemas."""

    __tablename__ = "attacked"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(default=0)
    note: Mapped[str | None]
    naive: Mapped[datetime | None]
    seen: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    tags: Mapped[Any] = mapped_column(JSON, default=list)


class Account(Base):
    """Nothing odd about it."""

    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(default=0)
    note: Mapped[str | None]


class Renewed(Base):
    """A column of the name that a parameter has."""

    __tablename__ = "renewed"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(default=0)
    new_number: Mapped[int] = mapped_column(default=0)


class Line(Base):
    """A line of an audit."""

    __tablename__ = "line"
    id: Mapped[int] = mapped_column(primary_key=True)
    what: Mapped[str]


class Keyed(Base):
    """A row whose key is a UUID."""

    __tablename__ = "keyed"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(default=0)


@event.listens_for(Row.seen, "set", retval=True)
def _latest(_row: Row, new: Any, old: Any, _initiator: object) -> Any:
    return max(new, old) if isinstance(old, datetime) else new


class Tenant(Session):
    """A session that reads only what its tenant may."""

    def execute(self, statement: Any, *arguments: Any, **options: Any) -> Any:
        """Execute the statement with one more condition: the tenant's."""
        tenant = self.info.get("tenant")
        return super().execute(
            statement if tenant is None else statement.where(Account.id == tenant), *arguments, **options
        )


class Stamping(Session):
    """A session that marks what is added to it."""

    def add(self, instance: Any, *arguments: Any, **options: Any) -> None:
        """Add the object, marked as new."""
        instance.note = "new"
        super().add(instance, *arguments, **options)


def _savepoint(number: int, session: Session, seen: list[Any]) -> None:
    account = session.get_one(Account, 0)
    with suppress(ValueError), session.begin_nested():
        account.number -= 7
        if account.number < session.get_one(Account, 1).number - 10:
            raise ValueError
    seen.append(number)


def _schemas(number: int, session: Session, seen: list[Any]) -> None:
    session.connection().execution_options(schema_translate_map={None: "other" if number % 2 else "public"})
    row = session.get_one(Account, 0)
    seen.append(row.number)
    row.number += 1


def _swallowed(first: Callable[[Session], Any]) -> Body:
    def body(number: int, session: Session, _seen: list[Any]) -> None:
        if number == 0:
            first(session)
        elif number == 1:
            session.get_one(Account, 1).number += 10
        else:
            with suppress(Exception):
                session.execute(text("SELECT 1"))

    return body


def _let_go(number: int, session: Session, seen: list[Any]) -> None:
    session.get_one(Account, 0).number += 1
    session.get_one(Account, 1).number += 1
    seen.append(sorted(each.id for each in session.dirty))
    if number:
        session.bulk_update_mappings(Account, [{"id": 0, "number": 500}])
        session.get_one(Account, 0).number += 10


def _audit(session: Session, *_: object) -> None:
    session.add_all([Line(what=str(each.number)) for each in session.dirty])


def _listens(_number: int, session: Session, _seen: list[Any]) -> None:
    event.listen(session, "before_flush", _audit)
    session.get_one(Account, 0).number += 1


def _copies(number: int, session: Session, _seen: list[Any]) -> None:
    row = session.get_one(Row, 0)
    if number:
        make_transient(row)
        row.id = 10 + number
        session.add(row)


def _out_of_order(number: int, session: Session, _seen: list[Any]) -> None:
    session.get_one(Row, 0).seen = MIDNIGHT + timedelta(hours=[5, 9, 1][number])


def _stale_read(number: int, session: Session, seen: list[Any]) -> None:
    row = session.get_one(Row, 0)
    if number:
        session.execute(text("UPDATE attacked SET tags = '[9]' WHERE id = 0"))
    seen.append(row.tags)


def _fold(number: int, session: Session, seen: list[Any]) -> None:
    row = session.get_one(Row, 0)
    seen.append(repr(row.naive))
    row.naive = datetime(2024, 10, 27, 2, 30, number, fold=1)  # noqa: DTZ001


def _reads_as(number: int, session: Session, seen: list[Any]) -> None:
    session.info["tenant"] = number % 2
    seen.append(session.get(Account, 0) is None)


def _adds(_number: int, session: Session, _seen: list[Any]) -> None:
    session.get_one(Account, 0).number += 1


def _note(session: Session) -> None:
    session.get_one(Account, 0).note = "€"


def _new_number(session: Session) -> None:
    session.get_one(Renewed, 0).number += 1


def _after_execute(connection: Any, statement: Any, *_: object) -> None:
    if getattr(statement, "is_update", False):
        connection.execute(insert(Line).values(what=statement.table.name))


ATTACKS: dict[str, tuple[Body, dict[str, Any]]] = {
    "a savepoint that was not sent yet": (_savepoint, {}),
    "a schema_translate_map of each message": (_schemas, {}),
    "a column of the name of a parameter, and an error that is swallowed": (_swallowed(_new_number), {}),
    "a value that the driver refuses, and an error that is swallowed": (
        _swallowed(_note),
        {"client_encoding": "latin1"},
    ),
    "an object that autoflush lets go of": (_let_go, {}),
    "a listener on the session of the message": (_listens, {}),
    "a copy of an object that is not loaded": (_copies, {}),
    "the old value in a listener of an attribute": (_out_of_order, {}),
    "an attribute that is read later than the row": (_stale_read, {}),
    "a moment that comes twice": (_fold, {}),
    "Session.execute of the user's": (_reads_as, {"session": Tenant}),
    "Session.add of the user's": (_adds, {"session": Stamping}),
    "a listener of the engine": (_adds, {"listener": _after_execute}),
}


async def _moment(session: AsyncSession, number: int) -> None:
    row = await session.get_one(Row, 0)
    if row.seen is None or row.seen < MIDNIGHT + timedelta(hours=number):
        row.seen = MIDNIGHT + timedelta(hours=number)


async def _json(session: AsyncSession, number: int) -> None:
    row = await session.get_one(Row, 0)
    row.number += len(row.tags) + number


async def _uuid(session: AsyncSession, number: int) -> None:
    (await session.get_one(Keyed, UUID(int=0))).number += number


AWAITED: dict[str, Callable[[AsyncSession, int], Any]] = {
    "a moment with a time zone": _moment,
    "a value that can be changed in place": _json,
    "a UUID of asyncpg's": _uuid,
}
