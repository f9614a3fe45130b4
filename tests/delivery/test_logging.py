"""What operators read: one logger, one line for a duplicate, fields to count by, and nothing of the payload."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.orm.exc import StaleDataError

from cut_proxy import CutProxy
from databases import Database
from projector_dedup import AsyncDispatcher, Dispatcher, RetryPolicy, on, projector
from projector_dedup.tables import default_metadata

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


def meets(sessions: sessionmaker[Session], times: int = 0, *, name: str = "h", **options: Any) -> Dispatcher:
    """A dispatcher whose handler meets a transient error a few times."""
    return Dispatcher(sessions, projector(idempotent=True, name=name)(on(dict)(Transient(times))), **options)


@pytest.fixture(params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Database:
    """An empty database on each server."""
    database: Database = request.getfixturevalue(request.param)
    return database


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Everything that the library logs."""
    caplog.set_level(logging.DEBUG, logger="projector_dedup")
    return caplog


def fields(record: logging.LogRecord) -> tuple[Any, ...]:
    """What a structured handler would index."""
    return tuple(getattr(record, name) for name in ("message_id", "handler", "outcome", "attempts"))


def test_a_redelivery_is_one_line_at_info(factory: sessionmaker[Session], log: pytest.LogCaptureFixture) -> None:
    """A duplicate is ordinary: INFO, with handler and id; what applied is at DEBUG."""
    dispatcher = meets(factory)
    for _ in range(2):
        dispatcher.deliver({"card": SECRET}, message_id="m1")
    assert [(record.name, record.levelname, fields(record)) for record in log.records] == [
        ("projector_dedup", "DEBUG", ("m1", "h", "applied", 1)),
        ("projector_dedup", "INFO", ("m1", "h", "duplicate", 1)),
    ]
    assert log.messages == ["applied: message m1, handler h", "duplicate: message m1, handler h"]
    assert [vars(record)["after_unknown_commit"] for record in log.records] == [False, False]


def test_a_duplicate_is_logged_alike_under_asyncio(
    sqlite: Database, factory: sessionmaker[Session], log: pytest.LogCaptureFixture
) -> None:
    """The same line and fields."""
    assert factory is not None  # the table is there

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


def test_retries_are_counted(factory: sessionmaker[Session], log: pytest.LogCaptureFixture) -> None:
    """Each further attempt is a line, and the outcome says how many there were."""
    meets(factory, 2, retry=RetryPolicy(base=0)).deliver({"card": SECRET}, message_id="m1")
    assert [fields(record)[2:] for record in log.records] == [("retry", 2), ("retry", 3), ("applied", 3)]


def test_no_payload_and_no_error_text_is_logged(factory: sessionmaker[Session], log: pytest.LogCaptureFixture) -> None:
    """Not when it applies, is retried or is refused; SQLAlchemy's parameters do not come along either."""
    dispatcher = meets(factory, 1, retry=RetryPolicy(base=0))
    for _ in range(2):
        dispatcher.deliver({"card": SECRET}, message_id="m1")
    assert len(log.records) == 3
    for record in log.records:
        assert SECRET not in repr(vars(record))


@pytest.mark.parametrize(
    "message_id", ["m1\nINFO forged line", "m1\r\n", "\x1b[2Jm1", "m1\u2028x", "m1\u202ex", "m1\x85x", "m1\u200b"]
)
def test_an_id_cannot_forge_a_line(
    factory: sessionmaker[Session], log: pytest.LogCaptureFixture, message_id: str
) -> None:
    """Line ends, terminal codes and direction marks come out escaped, in the text and in the fields."""
    dispatcher = meets(factory)
    for _ in range(2):
        dispatcher.deliver({"card": SECRET}, message_id=message_id)
    for record in log.records:
        assert record.getMessage().isprintable()
        assert vars(record)["message_id"].isprintable()


def test_a_name_cannot_forge_a_line(factory: sessionmaker[Session], log: pytest.LogCaptureFixture) -> None:
    """A handler's pinned name is the programmer's, but it is printed by the same rule."""
    dispatcher = meets(factory, name="h\nx")
    dispatcher.deliver({"card": SECRET}, message_id="m1")
    assert all(record.getMessage().isprintable() for record in log.records)


@contextmanager
def engine_of(url: URL, **options: Any) -> Iterator[Engine]:
    """An engine whose database has the marker table."""
    engine = create_engine(url, **options)
    default_metadata.create_all(engine)
    yield engine
    engine.dispose()


def test_a_duplicate_after_an_unknown_commit_says_so(server: Database, log: pytest.LogCaptureFixture) -> None:
    """The answer to COMMIT is lost: the retry finds the marker, and the line says what that was."""
    with CutProxy(server.url()) as proxy, engine_of(proxy.through(server.url())) as engine:
        dispatcher = meets(sessionmaker(engine))
        proxy.cut_commit("after")
        dispatcher.deliver({"card": SECRET}, message_id="m1")
    last = log.records[-1]
    assert fields(last) == ("m1", "h", "duplicate", 2)
    assert vars(last)["after_unknown_commit"] is True
    assert "after_unknown_commit" in last.getMessage()


def test_a_chosen_read_committed_is_warned_of_once(server: Database, log: pytest.LogCaptureFixture) -> None:
    """Where lost updates are possible because the user asked for that level, a dispatcher says so, once.

    Also once for all copies of an engine: a Session class may make one for every session, with a tenant's schema say.
    """
    for copies in (False, True):
        with engine_of(server.url(), isolation_level="READ COMMITTED") as engine:

            class Copying(Session):
                """Asks for each session's own copy of the engine."""

                def get_bind(self, *_: Any, engine: Engine = engine, **__: Any) -> Engine:
                    return engine.execution_options(schema_translate_map={None: None})

            log.clear()
            dispatcher = meets(sessionmaker(engine, class_=Copying if copies else Session))
            for number in range(3):
                dispatcher.deliver({"card": SECRET}, message_id=f"{copies} {number}")
            (warning,) = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
            assert "read_models" in warning
