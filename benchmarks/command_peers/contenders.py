"""Those who are compared: no library, ours, and the peers, each with its own tables in a database of its own.

Everybody does the same work: read one of 100 rows, add one to it, and answer with about 200 bytes. Functions are called
with psycopg. HTTP is a FastAPI endpoint with asyncpg, called through ASGI, without a socket and without a client.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Response
from sqlalchemy import URL, MetaData, create_engine, insert
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from projector_dedup.commands import AsyncCall, AsyncCommands, Call, Commands, command, make_command_tables
from projector_dedup.integrations.starlette import IdempotencyKey, install, replay_headers
from suite.servers import Place

Asked = Sequence[tuple[str, int]]
"""Keys, and the row that each is about."""

ROWS = 100
NOTE = "x" * 180
LEASE = 1  # seconds, where a peer has one: the crash section waits for it
OF_THE_HANDLER = "of the handler"  # in the info of its session, so that the crash section knows whose commit it sees


class Base(DeclarativeBase):
    """The tables, the records' too."""

    metadata = MetaData()


RECORDS = make_command_tables(Base.metadata)


class Total(Base):
    """A row that is added to."""

    __tablename__ = "total"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]


@dataclass(frozen=True)
class Add:
    """The command, and the body of its request."""

    row: int


@dataclass(frozen=True)
class Added:
    """The answer."""

    amount: int
    note: str


def add(row: int, session: Session) -> Added:
    """Do the work."""
    session.info[OF_THE_HANDLER] = True
    total = session.get_one(Total, row)
    total.amount += 1
    return Added(total.amount, NOTE)


async def async_add(row: int, session: AsyncSession) -> Added:
    """Do the work with asyncio."""
    return await session.run_sync(lambda sync_session: add(row, sync_session))


@command(name="bench.add")
def _add(asked: Add, call: Call) -> Added:
    return add(asked.row, call.session)


@command(name="bench.add-async")
async def _async_add(asked: Add, call: AsyncCall) -> Added:
    return await async_add(asked.row, call.session)


def plain_url(url: URL, driver: str = "postgresql") -> str:
    """Return the URL with its password, for a driver, or as those write it who use no SQLAlchemy."""
    return url.set(drivername=driver).render_as_string(hide_password=False)


class Contender:
    """Answers commands one after the other, between ``connect`` and ``disconnect``."""

    name: str
    with_redis = False

    def create(self, place: Place) -> None:
        """Make the tables and the rows, and what it needs itself; once."""
        engine = create_engine(place.url)
        Base.metadata.create_all(engine)
        with engine.begin() as connection:
            connection.execute(insert(Total), [{"id": row, "amount": 0} for row in range(ROWS)])
        engine.dispose()

    def connect(self, url: URL, redis: str | None) -> None:
        """Open connections; ``url`` names no driver."""
        raise NotImplementedError

    def ask(self, asked: Asked) -> list[Any]:
        """Answer each command; raise if one was refused."""
        raise NotImplementedError

    def disconnect(self) -> None:
        """Close everything."""
        raise NotImplementedError


# Functions ------------------------------------------------------------------------------------------------------------


class Plain(Contender):
    """The handler in `session.begin()`: keys are ignored."""

    name = "no library"

    def connect(self, url: URL, redis: str | None) -> None:
        self.engine = create_engine(plain_url(url, "postgresql+psycopg"))
        self.factory = sessionmaker(self.engine)

    def one(self, key: str, row: int) -> Any:
        """Answer one command."""
        with self.factory.begin() as session:
            return add(row, session)

    def ask(self, asked: Asked) -> list[Any]:
        return [self.one(key, row) for key, row in asked]

    def disconnect(self) -> None:
        self.engine.dispose()


class Ours(Plain):
    """`Commands.handle` with its defaults."""

    name = "Commands"

    def connect(self, url: URL, redis: str | None) -> None:
        super().connect(url, redis)
        self.commands = Commands(self.factory, tables=RECORDS)

    def one(self, key: str, row: int) -> Any:
        return self.commands.handle(_add, Add(row), key=key, scope="tenant").result


class TwoStores(Plain):
    """The answer is put into Redis after the handler's commit, as tutorials have it."""

    name = "answers in Redis"
    with_redis = True

    def connect(self, url: URL, redis: str | None) -> None:
        from redis import Redis

        super().connect(url, redis)
        self.cache = Redis.from_url(str(redis))

    def one(self, key: str, row: int) -> Any:
        kept = self.cache.get(f"answer:{self.engine.url.database}:{key}")
        if kept is not None:
            return json.loads(kept)
        answer = vars(super().one(key, row))
        self.cache.set(f"answer:{self.engine.url.database}:{key}", json.dumps(answer), ex=3600)
        return answer


class Dbos(Plain):
    """A workflow whose id is the key, with one transaction of a datasource in it."""

    name = "DBOS"

    def create(self, place: Place) -> None:
        super().create(place)
        self.connect(place.url, None)
        self.disconnect()

    def connect(self, url: URL, redis: str | None) -> None:
        from dbos import DBOS, SetWorkflowID, SQLAlchemyDatasource

        database = plain_url(url, "postgresql+psycopg")
        DBOS(config={"name": "bench", "system_database_url": database, "log_level": "CRITICAL"})
        self.datasource = SQLAlchemyDatasource.create(database)

        def adding(row: int) -> dict[str, Any]:
            return vars(add(row, self.datasource.sql_session()))

        transaction = self.datasource.transaction(adding, isolation_level="REPEATABLE READ")

        def workflow(row: int) -> Any:
            return transaction(row)

        self.workflow = DBOS.workflow()(workflow)
        DBOS.launch()
        self.with_id, self.close = SetWorkflowID, DBOS.destroy

    def one(self, key: str, row: int) -> Any:
        with self.with_id(key):
            return self.workflow(row)

    def disconnect(self) -> None:
        self.close(destroy_registry=True)
        self.datasource.engine.dispose()


# HTTP -----------------------------------------------------------------------------------------------------------------


class HttpPlain(Contender):
    """The endpoint alone: keys are ignored."""

    name = "no library, HTTP"

    def connect(self, url: URL, redis: str | None) -> None:
        self.runner, self.app = asyncio.Runner(), FastAPI()
        self.engine = create_async_engine(plain_url(url, "postgresql+asyncpg"))
        self.factory = async_sessionmaker(self.engine)
        self.mount(url, redis)

    def mount(self, url: URL, redis: str | None) -> None:
        """Add the endpoint, and what makes it idempotent."""

        @self.app.post("/add")
        async def adding(body: Add) -> dict[str, Any]:
            async with self.factory.begin() as session:
                return vars(await async_add(body.row, session))

    def ask(self, asked: Asked) -> list[Any]:
        async def all_of_them() -> list[Any]:
            return [await self.one(key, row) for key, row in asked]

        return self.runner.run(all_of_them())

    async def one(self, key: str, row: int) -> Any:
        """Send one request."""
        status, body = await post(self.app, key, json.dumps({"row": row}).encode())
        if status != 200:
            raise RuntimeError(f"{self.name} answered {status}: {body.decode()}")
        return json.loads(body)

    async def close(self) -> None:
        """Close what asyncio has open."""
        await self.engine.dispose()

    def disconnect(self) -> None:
        self.runner.run(self.close())
        self.runner.close()


class HttpOurs(HttpPlain):
    """An endpoint that handles a command, as docs/http.md has it."""

    name = "AsyncCommands, HTTP"

    def mount(self, url: URL, redis: str | None) -> None:
        commands = AsyncCommands(self.factory, tables=RECORDS, scope="required")
        install(self.app)

        @self.app.post("/add")
        async def adding(body: Add, response: Response, key: Annotated[str, Depends(IdempotencyKey())]) -> Any:
            done = await commands.handle(_async_add, body, key=key, scope="tenant")
            response.headers.update(replay_headers(done, key))
            return vars(done.result)


class HttpIdemkit(HttpPlain):
    """idemkit's middleware with its PostgreSQL backend."""

    name = "idemkit, HTTP"

    def create(self, place: Place) -> None:
        super().create(place)
        idemkit = Path(sys.executable).parent / "idemkit"
        subprocess.run([idemkit, "init-pg", plain_url(place.url)], check=True, stdout=subprocess.DEVNULL)

    def backend_of(self, url: URL, redis: str | None) -> Any:
        """Return where the answers are kept."""
        from idemkit import PostgresBackend

        return PostgresBackend.from_url(plain_url(url), min_size=1)

    def mount(self, url: URL, redis: str | None) -> None:
        from idemkit import HttpConfig, IdempotencyMiddleware

        self.backend = self.backend_of(url, redis)
        config = HttpConfig(scope=lambda _request: "tenant", lease_ttl_seconds=LEASE, expires_after_seconds=3600)
        self.app.add_middleware(IdempotencyMiddleware, backend=self.backend, config=config)
        super().mount(url, redis)

    async def close(self) -> None:
        await self.backend.aclose()
        await super().close()


class HttpIdemkitRedis(HttpIdemkit):
    """idemkit's middleware with its Redis backend."""

    name = "idemkit in Redis, HTTP"
    with_redis = True

    def backend_of(self, url: URL, redis: str | None) -> Any:
        from idemkit import RedisBackend

        return RedisBackend.from_url(redis, namespace=str(url.database))


class HttpFastidempotent(HttpPlain):
    """fastidempotent's middleware with its PostgreSQL backend."""

    name = "fastidempotent, HTTP"

    def mount(self, url: URL, redis: str | None) -> None:
        from fastidempotent import IdempotencyConfig, IdempotencyMiddleware
        from fastidempotent.backends.postgres import PostgresBackend

        self.backend = PostgresBackend(plain_url(url, "postgresql+asyncpg"))
        self.runner.run(self.backend.init())
        config = IdempotencyConfig(lock_timeout=LEASE)
        self.app.add_middleware(IdempotencyMiddleware, backend=self.backend, config=config)
        super().mount(url, redis)

    async def close(self) -> None:
        await self.backend.close()
        await super().close()


async def post(app: Callable[..., Awaitable[None]], key: str, body: bytes) -> tuple[int, bytes]:
    """Send a request with a key; return the status and the body of the answer."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/add",
        "raw_path": b"/add",
        "root_path": "",
        "query_string": b"",
        "headers": [*headers, (b"idempotency-key", key.encode())],
        "server": ("bench", 80),
        "client": ("bench", 1),
        "state": {},
    }
    requests = iter([{"type": "http.request", "body": body, "more_body": False}])
    status, parts = 0, []

    async def receive() -> dict[str, Any]:
        for request in requests:
            return request
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)


GROUPS: dict[str, tuple[type[Contender], ...]] = {
    "HTTP, asyncpg": (HttpOurs, HttpPlain, HttpIdemkit, HttpFastidempotent, HttpIdemkitRedis),
    "functions, psycopg": (Ours, Plain, Dbos, TwoStores),
}
"""Ours, and those beside it, by what is measured."""
