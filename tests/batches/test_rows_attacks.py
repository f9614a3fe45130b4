"""A batch is as its messages one by one: ways in which it was not, that a reader of `rows.py` found."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, event, insert
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from databases import Database
from projector_dedup import AsyncDispatcher, BatchFailed, Dispatcher, Message, RetryPolicy, on, projector
from projector_dedup.tables import default_metadata
from rows_attacks import ATTACKS, AWAITED, Account, Base, Body, Keyed, Renewed, Row


@pytest.fixture
def admin(postgresql: Database) -> Iterator[Engine]:
    """Whoever makes the tables, and reads them."""
    engine = create_engine(postgresql.url())
    yield engine
    engine.dispose()


def begin(admin: Engine) -> None:
    """As it was."""
    with admin.begin() as connection:
        for schema in ("public", "other"):
            connection.exec_driver_sql(f"DROP SCHEMA IF EXISTS {schema} CASCADE; CREATE SCHEMA {schema}")
            Base.metadata.create_all(connection.execution_options(schema_translate_map={None: schema}))
            rows = [{"id": number, "number": 0} for number in (0, 1)]
            connection.execute(insert(Row), [row | {"tags": [1]} for row in rows])
            connection.execute(insert(Renewed), [row | {"new_number": 0} for row in rows])
            connection.execute(insert(Account), rows)
            connection.execute(insert(Keyed), [{"id": UUID(int=number), "number": 0} for number in (0, 1)])
        default_metadata.create_all(connection.execution_options(schema_translate_map={None: "public"}))


def left(admin: Engine) -> list[Any]:
    """Every row."""
    names = [f"{schema}.{table}" for schema in ("public", "other") for table in Base.metadata.tables]
    with admin.connect() as connection:
        return [(name, connection.exec_driver_sql(f"SELECT * FROM {name} ORDER BY id").all()) for name in names]


@pytest.mark.parametrize(("body", "settings"), ATTACKS.values(), ids=ATTACKS)
def test_a_batch_is_as_its_messages(admin: Engine, body: Body, settings: dict[str, Any]) -> None:
    """What each saw, and every row of every table."""
    encoding = {"client_encoding": settings["client_encoding"]} if "client_encoding" in settings else {}
    found: list[Any] = []
    for together in (False, True):
        begin(admin)
        seen: dict[int, list[Any]] = {}
        engine = create_engine(admin.url, connect_args=encoding)
        if "listener" in settings:
            event.listen(engine, "after_execute", settings["listener"])

        @projector(idempotent=True, name="attack")
        @on(int)
        def handler(number: int, session: Session, seen: dict[int, list[Any]] = seen) -> None:
            seen[number] = []
            body(number, session, seen[number])

        sessions = sessionmaker(engine, class_=settings.get("session", Session))
        dispatcher = Dispatcher(sessions, handler, retry=RetryPolicy(attempts=2))
        batch = [Message(f"m{number}", number) for number in range(3)]
        for part in [batch] if together else [[each] for each in batch]:
            with suppress(BatchFailed):
                dispatcher.deliver_batch(part)
        engine.dispose()
        found.append((seen, left(admin)))
    assert found[1] == found[0]


@pytest.mark.parametrize("body", AWAITED.values(), ids=AWAITED)
def test_no_handler_under_asyncio_meets_an_error_of_ours(
    admin: Engine, postgresql: Database, body: Callable[[AsyncSession, int], Any]
) -> None:
    """By which the batch would be tried again in parts: each is called once."""
    begin(admin)
    calls: list[int] = []

    @projector(idempotent=True, name="attack")
    @on(int)
    async def handler(number: int, session: AsyncSession) -> None:
        calls.append(number)
        await body(session, number)

    async def deliver() -> None:
        engine = create_async_engine(postgresql.url("postgresql+asyncpg"))
        dispatcher = AsyncDispatcher(async_sessionmaker(engine), handler)
        await dispatcher.deliver_batch([Message(f"m{number}", number) for number in range(20)])
        await engine.dispose()

    asyncio.run(deliver())
    assert calls == list(range(20))
