"""docs/sending-on.md: what a handler sends on commits with its marker, once, or not at all."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from procrastinate.schema import SchemaManager
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from databases import Database
from pages import snippets, typed
from projector_dedup import AsyncDispatcher, Dispatcher, Outcome, on, projector
from projector_dedup.options import RetryPolicy
from rig import CONFLICT

PROCRASTINATE, OBAN, OUTBOX, RELAYED, NOTIFY = snippets("docs/sending-on.md")
ONCE = ([Outcome.APPLIED, Outcome.DUPLICATE], 1)


class Sent:
    """Delivers one payment to the handlers of a page, and counts what another connection finds sent on."""

    def __init__(self, page: Any, database: Database, count: Callable[[], int]) -> None:
        self.page, self.database, self.count = page, database, count

    def deliver(self, declared: Any, times: int = 1) -> list[Outcome]:
        """Deliver the same message so many times to a projector."""
        engine = create_engine(self.database.url())
        dispatcher = Dispatcher(sessionmaker(engine), declared, retry=RetryPolicy(base=0.0005))
        payment = self.page.PaymentReceived("alice", 30)
        try:
            return [dispatcher.deliver(payment, message_id="payment-1").outcome for _ in range(times)]
        finally:
            engine.dispose()

    def deliver_async(self, declared: Any, driver: str, times: int = 1) -> list[Outcome]:
        """The same with ``async def`` handlers."""

        async def delivered() -> list[Outcome]:
            engine = create_async_engine(self.database.url(driver))
            dispatcher = AsyncDispatcher(async_sessionmaker(engine), declared)
            payment = self.page.PaymentReceived("alice", 30)
            try:
                return [(await dispatcher.deliver(payment, message_id="payment-1")).outcome for _ in range(times)]
            finally:
                await engine.dispose()

        return asyncio.run(delivered())

    def declare(self, handler: Any) -> Any:
        """Return a projector of a function."""
        return projector(idempotent=True, name="sender")(on(self.page.PaymentReceived)(handler))

    def assert_sent_once(self, declared: Any, method: str) -> None:
        """Nothing after a rollback, and one for two deliveries."""

        def failing(event: Any, session: Any) -> None:
            getattr(declared, method)(event, session)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            self.deliver(self.declare(failing))
        assert self.count() == 0
        assert (self.deliver(declared, times=2), self.count()) == ONCE

    def assert_sent_once_async(self, declared: Any, method: str, driver: str) -> None:
        """The same with an ``async def`` handler."""

        async def failing(event: Any, session: Any) -> None:
            await getattr(declared, method)(event, session)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            self.deliver_async(self.declare(failing), driver)
        assert self.count() == 0
        assert (self.deliver_async(declared, driver, times=2), self.count()) == ONCE


def counted(database: Database, table: str) -> Callable[[], int]:
    """Return what counts the rows of a table, each time from a new connection."""

    def count() -> int:
        engine = create_engine(database.url())
        with engine.connect() as connection:
            rows = connection.exec_driver_sql(f"SELECT 1 FROM {table}").all()
        engine.dispose()
        return len(rows)

    return count


def create(page: Any, database: Database, *scripts: str) -> None:
    """Create the tables of the page, and those of a queue."""
    engine = create_engine(database.url())
    page.Base.metadata.create_all(engine)
    engine.dispose()
    for script in scripts:
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            connection.execute(script.encode())


@pytest.fixture
def typed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return what makes a module of blocks of the page."""
    return lambda *blocks: typed([*blocks], tmp_path, monkeypatch)


def test_a_job_of_procrastinate(typed_in: Any, postgresql: Database) -> None:
    """One job for two deliveries, and none after a rollback."""
    page = typed_in(PROCRASTINATE)
    create(page, postgresql, SchemaManager.get_schema())
    sent = Sent(page, postgresql, counted(postgresql, "procrastinate_jobs"))
    sent.assert_sent_once(page.Receipts(), "send_receipt")
    with psycopg.connect(postgresql.dsn) as connection:
        jobs = connection.execute("SELECT task_name, args FROM procrastinate_jobs").fetchall()
    assert jobs == [("send-receipt", {"account": "alice"})]


def test_a_job_of_oban(typed_in: Any, postgresql: Database) -> None:
    """One job for two deliveries, and none after a rollback. Oban needs Python 3.12."""
    schema = pytest.importorskip("oban.schema")
    page = typed_in(OBAN)
    create(page, postgresql, schema.install_sql())
    asyncio.run(page.start(postgresql.dsn))
    sent = Sent(page, postgresql, counted(postgresql, "oban_jobs"))
    sent.assert_sent_once_async(page.AsyncReceipts(), "send_receipt", "postgresql+psycopg")
    with psycopg.connect(postgresql.dsn) as connection:
        jobs = connection.execute("SELECT queue, args FROM oban_jobs").fetchall()
    assert jobs == [("mail", {"account": "alice"})]


def test_a_row_of_an_outbox_table(typed_in: Any, database: Database) -> None:
    """One row for two deliveries, and none after a rollback, on each database."""
    page = typed_in(OUTBOX)
    create(page, database)
    sent = Sent(page, database, counted(database, "outbox"))
    sent.assert_sent_once(page.Announcements(), "announce")
    assert {"id", "aggregatetype", "aggregateid", "type", "payload"} == {*page.Outbox.__table__.columns.keys()}


@pytest.mark.parametrize("driver", ["postgresql+asyncpg", "postgresql+psycopg"])
def test_a_row_of_faststream_outbox(typed_in: Any, postgresql: Database, driver: str) -> None:
    """One row for two deliveries, and none after a rollback."""
    page = typed_in(OUTBOX, RELAYED)
    create(page, postgresql)
    sent = Sent(page, postgresql, counted(postgresql, "relayed"))
    sent.assert_sent_once_async(page.RelayedAnnouncements(), "announce", driver)
    with psycopg.connect(postgresql.dsn) as connection:
        ((queue, payload),) = connection.execute("SELECT queue, payload FROM relayed").fetchall()
    assert (queue, json.loads(payload)["amount"]) == ("payments", 30)


@pytest.fixture
def listening(postgresql: Database) -> Iterator[Callable[[], list[str]]]:
    """Listen to the channel of the page; a call returns what has come since the last one."""
    with psycopg.connect(postgresql.dsn, autocommit=True) as connection:
        connection.execute("LISTEN account_changed")

        def heard() -> list[str]:
            connection.execute("NOTIFY account_changed, 'end'")  # behind everything that was committed before
            came: list[str] = []
            while "end" not in came:
                came += [each.payload for each in connection.notifies(timeout=20, stop_after=1)]
            return came[:-1]

        yield heard


def test_a_notification(typed_in: Any, postgresql: Database, listening: Callable[[], list[str]]) -> None:
    """One for two deliveries, and none after a rollback."""
    page = typed_in(NOTIFY)
    create(page, postgresql)
    Sent(page, postgresql, lambda: len(listening())).assert_sent_once(page.Hints(), "tell")


def test_a_process_that_listens_later_gets_no_notification(typed_in: Any, postgresql: Database) -> None:
    """PostgreSQL sends only to the connections that listen at the COMMIT."""
    page = typed_in(NOTIFY)
    create(page, postgresql)
    Sent(page, postgresql, lambda: 0).deliver(page.Hints())
    with psycopg.connect(postgresql.dsn, autocommit=True) as connection:
        connection.execute("LISTEN account_changed")
        connection.execute("NOTIFY account_changed, 'end'")
        first = next(connection.notifies(timeout=20))
    assert first.payload == "end"


def test_what_is_published_inside_a_handler_is_sent_too_often(typed_in: Any, postgresql: Database) -> None:
    """Twice if the library runs the handler again, and once although nothing was applied."""
    page = typed_in()
    create(page, postgresql)
    published: list[str] = []

    def conflicting(_event: Any, session: Any) -> None:
        published.append("by a handler that runs again")
        if len(published) == 1:
            session.connection().exec_driver_sql(CONFLICT["postgresql"])

    def failing(_event: Any, _session: Any) -> None:
        published.append("by a handler that fails")
        raise ZeroDivisionError

    sent = Sent(page, postgresql, counted(postgresql, "processed_message"))
    with pytest.raises(ZeroDivisionError):
        sent.deliver(sent.declare(failing))
    assert (published, sent.count()) == (["by a handler that fails"], 0)
    published.clear()
    assert sent.deliver(sent.declare(conflicting)) == [Outcome.APPLIED]
    assert (published, sent.count()) == (["by a handler that runs again"] * 2, 1)
