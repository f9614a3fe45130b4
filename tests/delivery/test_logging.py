"""What operators read: one logger, one line for a duplicate, fields to count by, and nothing of the payload."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, MetaData, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.orm.exc import StaleDataError

from cut_proxy import CutProxy
from databases import Database
from projector_dedup import AsyncDispatcher, Dispatcher, RetryPolicy, make_tables, on, projector

SECRET = "4929-1234-5678-9012"


class Transient:
    """A handler that meets a transient error a few times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, event: dict[str, Any], _session: Session) -> None:
        """Fail, or do nothing."""
        assert event["card"] == SECRET
        self.times -= 1
        if self.times >= 0:
            raise StaleDataError(f"somebody was faster, and here is {SECRET}")


@pytest.fixture
def sessions(sqlite: Database) -> Iterator[sessionmaker[Session]]:
    """Sessions on a database with the marker table."""
    engine = create_engine(sqlite.url())
    metadata = MetaData()
    make_tables(metadata)
    metadata.create_all(engine)
    yield sessionmaker(engine)
    engine.dispose()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Everything that the library logs."""
    caplog.set_level(logging.DEBUG, logger="projector_dedup")
    return caplog


def fields(record: logging.LogRecord) -> tuple[Any, ...]:
    """What a structured handler would index."""
    return tuple(getattr(record, name) for name in ("message_id", "handler", "outcome", "attempts"))


def test_a_redelivery_is_one_line_at_info(sessions: sessionmaker[Session], log: pytest.LogCaptureFixture) -> None:
    """A duplicate is ordinary: INFO, with handler and id; what applied is at DEBUG."""
    dispatcher = Dispatcher(sessions, projector(idempotent=True, name="h")(on(dict)(Transient(0))))
    for _ in range(2):
        dispatcher.deliver({"card": SECRET}, message_id="m1")
    assert [(record.name, record.levelname, fields(record)) for record in log.records] == [
        ("projector_dedup", "DEBUG", ("m1", "h", "applied", 1)),
        ("projector_dedup", "INFO", ("m1", "h", "duplicate", 1)),
    ]
    assert log.messages == ["applied: message m1, handler h", "duplicate: message m1, handler h"]
    assert [vars(record)["after_unknown_commit"] for record in log.records] == [False, False]


def test_a_duplicate_is_logged_alike_under_asyncio(
    sqlite: Database, sessions: sessionmaker[Session], log: pytest.LogCaptureFixture
) -> None:
    """The same line and fields."""
    assert sessions is not None  # the table is there

    async def nothing(event: dict[str, Any], session: AsyncSession) -> None:
        """Do nothing."""

    async def deliver_twice() -> None:
        engine = create_async_engine(sqlite.async_url)
        dispatcher = AsyncDispatcher(
            async_sessionmaker(engine), projector(idempotent=True, name="h")(on(dict)(nothing))
        )
        for _ in range(2):
            await dispatcher.deliver({}, message_id="m1")
        await engine.dispose()

    asyncio.run(deliver_twice())
    assert [fields(record) for record in log.records] == [("m1", "h", "applied", 1), ("m1", "h", "duplicate", 1)]


def test_retries_are_counted(sessions: sessionmaker[Session], log: pytest.LogCaptureFixture) -> None:
    """Each further attempt is a line, and the outcome says how many there were."""
    handler = projector(idempotent=True, name="h")(on(dict)(Transient(2)))
    Dispatcher(sessions, handler, retry=RetryPolicy(base=0)).deliver({"card": SECRET}, message_id="m1")
    assert [fields(record)[2:] for record in log.records] == [("retry", 2), ("retry", 3), ("applied", 3)]


def test_no_payload_and_no_error_text_is_logged(sessions: sessionmaker[Session], log: pytest.LogCaptureFixture) -> None:
    """Not when it applies, is retried or is refused; SQLAlchemy's parameters do not come along either."""
    handler = projector(idempotent=True, name="h")(on(dict)(Transient(1)))
    dispatcher = Dispatcher(sessions, handler, retry=RetryPolicy(base=0))
    for _ in range(2):
        dispatcher.deliver({"card": SECRET}, message_id="m1")
    assert len(log.records) == 3
    for record in log.records:
        assert SECRET not in repr(vars(record))


@pytest.mark.parametrize(
    "message_id", ["m1\nINFO forged line", "m1\r\n", "\x1b[2Jm1", "m1\u2028x", "m1\u202ex", "m1\x85x", "m1\u200b"]
)
def test_an_id_cannot_forge_a_line(
    sessions: sessionmaker[Session], log: pytest.LogCaptureFixture, message_id: str
) -> None:
    """Line ends, terminal codes and direction marks come out escaped, in the text and in the fields."""
    dispatcher = Dispatcher(sessions, projector(idempotent=True, name="h")(on(dict)(Transient(0))))
    for _ in range(2):
        dispatcher.deliver({"card": SECRET}, message_id=message_id)
    for record in log.records:
        assert record.getMessage().isprintable()
        assert vars(record)["message_id"].isprintable()


def test_a_name_cannot_forge_a_line(sessions: sessionmaker[Session], log: pytest.LogCaptureFixture) -> None:
    """A handler's pinned name is the programmer's, but it is printed by the same rule."""
    dispatcher = Dispatcher(sessions, projector(idempotent=True, name="h\nx")(on(dict)(Transient(0))))
    dispatcher.deliver({"card": SECRET}, message_id="m1")
    assert all(record.getMessage().isprintable() for record in log.records)


@pytest.fixture(params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Database:
    """An empty database on each server."""
    database: Database = request.getfixturevalue(request.param)
    return database


def test_a_duplicate_after_an_unknown_commit_says_so(server: Database, log: pytest.LogCaptureFixture) -> None:
    """The answer to COMMIT is lost: the retry finds the marker, and the line says what that was."""
    with CutProxy(server.url()) as proxy:
        engine = create_engine(proxy.through(server.url()))
        metadata = MetaData()
        make_tables(metadata)
        metadata.create_all(engine)
        dispatcher = Dispatcher(sessionmaker(engine), projector(idempotent=True, name="h")(on(dict)(Transient(0))))
        proxy.cut_commit("after")
        dispatcher.deliver({"card": SECRET}, message_id="m1")
        engine.dispose()
    last = log.records[-1]
    assert fields(last) == ("m1", "h", "duplicate", 2)
    assert vars(last)["after_unknown_commit"] is True
    assert "after_unknown_commit" in last.getMessage()


def test_a_chosen_read_committed_is_warned_of_once(server: Database, log: pytest.LogCaptureFixture) -> None:
    """Where lost updates are possible because the user asked for that level, a dispatcher says so, once."""
    engine = create_engine(server.url(), isolation_level="READ COMMITTED")
    metadata = MetaData()
    make_tables(metadata)
    metadata.create_all(engine)
    dispatcher = Dispatcher(sessionmaker(engine), projector(idempotent=True, name="h")(on(dict)(Transient(0))))
    for number in range(3):
        dispatcher.deliver({"card": SECRET}, message_id=f"m{number}")
    warnings = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "read_models" in warnings[0]
    engine.dispose()


def test_a_level_is_warned_of_once_for_all_copies_of_an_engine(server: Database, log: pytest.LogCaptureFixture) -> None:
    """A Session class may make a copy of its engine for every session, with a tenant's schema say."""
    engine = create_engine(server.url(), isolation_level="READ COMMITTED")
    metadata = MetaData()
    make_tables(metadata)
    metadata.create_all(engine)

    class Copying(Session):
        """Asks for each session's own copy of the engine."""

        def get_bind(self, *_: Any, **__: Any) -> Engine:
            return engine.execution_options(schema_translate_map={None: None})

    handler = projector(idempotent=True, name="h")(on(dict)(Transient(0)))
    dispatcher = Dispatcher(sessionmaker(engine, class_=Copying), handler)
    for number in range(3):
        dispatcher.deliver({"card": SECRET}, message_id=f"m{number}")
    assert [record.levelname for record in log.records].count("WARNING") == 1
    engine.dispose()
