"""Those who are compared: no library, ours, and the peers, each with its own tables in a database of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Response
from pydantic import BaseModel
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from projector_dedup.commands import AsyncCall, AsyncCommands, Call, Commands, command
from projector_dedup.integrations.starlette import IdempotencyKey, install, replay_headers
from suite.servers import Place

from . import model
from .model import Add, Added

Asked = Sequence[tuple[str, int]]
"""Keys, and the row that each is about."""

LEASE = 1  # seconds, where a peer has one: the crash section waits for it


class Contender:
    """Answers commands one after the other, between ``connect`` and ``disconnect``."""

    name: str
    with_redis = False
    with_http = False

    def create(self, place: Place) -> None:
        """Make tables of its own, once."""

    def connect(self, url: URL, redis: str | None) -> None:
        """Open connections; ``url`` names no driver."""

    def ask(self, asked: Asked) -> list[Any]:
        """Answer each command; raise if one was refused."""
        raise NotImplementedError

    def disconnect(self) -> None:
        """Close everything."""


def by(driver: str, url: URL) -> URL:
    """Return the URL for a driver."""
    return url.set(drivername=driver)


def plain_url(url: URL) -> str:
    """Return the URL as those write it who use no SQLAlchemy."""
    return by("postgresql", url).render_as_string(hide_password=False)


# Functions, with psycopg -----------------------------------------------------------------------------------------


class _Sync(Contender):
    engine: Engine

    def connect(self, url: URL, redis: str | None) -> None:
        self.engine = create_engine(by("postgresql+psycopg", url))
        self.factory = sessionmaker(self.engine)

    def one(self, key: str, row: int) -> Any:
        raise NotImplementedError

    def ask(self, asked: Asked) -> list[Any]:
        return [self.one(key, row) for key, row in asked]

    def disconnect(self) -> None:
        self.engine.dispose()


class Plain(_Sync):
    """The handler in `session.begin()`: keys are ignored."""

    name = "no library"

    def one(self, key: str, row: int) -> Added:
        with self.factory.begin() as session:
            return model.add(row, session)


@command(name="bench.add")
def _add(asked: Add, call: Call) -> Added:
    return model.add(asked.row, call.session)


class Ours(_Sync):
    """`Commands.handle` with its defaults."""

    name = "Commands"

    def connect(self, url: URL, redis: str | None) -> None:
        super().connect(url, redis)
        self.commands = Commands(self.factory, tables=model.RECORDS)

    def one(self, key: str, row: int) -> Added:
        return self.commands.handle(_add, Add(row), key=key, scope="tenant").result


class TwoStores(_Sync):
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
        with self.factory.begin() as session:
            answer = vars(model.add(row, session))
        self.cache.set(f"answer:{self.engine.url.database}:{key}", json.dumps(answer), ex=3600)
        return answer


class Dbos(_Sync):
    """A workflow whose id is the key, with one transaction of a datasource in it."""

    name = "DBOS"

    def create(self, place: Place) -> None:
        self.connect(place.url, None)
        self.disconnect()

    def connect(self, url: URL, redis: str | None) -> None:
        from dbos import DBOS, SetWorkflowID, SQLAlchemyDatasource

        database = by("postgresql+psycopg", url).render_as_string(hide_password=False)
        DBOS(config={"name": "bench", "system_database_url": database, "log_level": "CRITICAL"})
        self.datasource = SQLAlchemyDatasource.create(database)

        def adding(row: int) -> dict[str, Any]:
            return vars(model.add(row, self.datasource.sql_session()))

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


# Functions, with asyncpg -----------------------------------------------------------------------------------------


class _Async(Contender):
    engine: AsyncEngine

    def connect(self, url: URL, redis: str | None) -> None:
        self.runner = asyncio.Runner()
        self.engine = create_async_engine(by("postgresql+asyncpg", url))
        self.factory = async_sessionmaker(self.engine)

    async def one(self, key: str, row: int) -> Any:
        raise NotImplementedError

    def ask(self, asked: Asked) -> list[Any]:
        async def all_of_them() -> list[Any]:
            return [await self.one(key, row) for key, row in asked]

        return self.runner.run(all_of_them())

    async def close(self) -> None:
        await self.engine.dispose()

    def disconnect(self) -> None:
        self.runner.run(self.close())
        self.runner.close()


class AsyncPlain(_Async):
    """The handler in `session.begin()`."""

    name = "no library, async"

    async def one(self, key: str, row: int) -> Added:
        async with self.factory.begin() as session:
            return await model.async_add(row, session)


@command(name="bench.add-async")
async def _async_add(asked: Add, call: AsyncCall) -> Added:
    return await model.async_add(asked.row, call.session)


class AsyncOurs(_Async):
    """`AsyncCommands.handle` with its defaults."""

    name = "AsyncCommands"

    def connect(self, url: URL, redis: str | None) -> None:
        super().connect(url, redis)
        self.commands = AsyncCommands(self.factory, tables=model.RECORDS)

    async def one(self, key: str, row: int) -> Added:
        return (await self.commands.handle(_async_add, Add(row), key=key, scope="tenant")).result


class Idemkit(_Async):
    """idemkit's `@idempotent` with its PostgreSQL backend."""

    name = "idemkit"

    def create(self, place: Place) -> None:
        _init_idemkit(place)

    def connect(self, url: URL, redis: str | None) -> None:
        from idemkit import MethodConfig, idempotent

        super().connect(url, redis)
        self.backend = _idemkit_backend(url, redis if self.with_redis else None)
        config = MethodConfig(
            key_fields=["key"], scope=lambda _arguments: "tenant", lease_ttl_seconds=LEASE, expires_after_seconds=3600
        )

        async def adding(*, key: str, row: int) -> dict[str, Any]:
            async with self.factory.begin() as session:
                return vars(await model.async_add(row, session))

        self.adding = idempotent(backend=self.backend, config=config)(adding)

    async def one(self, key: str, row: int) -> Any:
        return await self.adding(key=key, row=row)

    async def close(self) -> None:
        await self.backend.aclose()
        await super().close()


def _init_idemkit(place: Place) -> None:
    command = [str(Path(sys.executable).parent / "idemkit"), "init-pg", plain_url(place.url)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _idemkit_backend(url: URL, redis: str | None) -> Any:
    from idemkit import PostgresBackend, RedisBackend

    if redis:
        return RedisBackend.from_url(redis, namespace=str(url.database))
    return PostgresBackend.from_url(plain_url(url), min_size=1)


# HTTP: the same endpoint, called by ASGI without a socket -----------------------------------------------------------


class Body(BaseModel):
    """The body of a request."""

    row: int


class _Http(_Async):
    with_http = True
    app: FastAPI

    def connect(self, url: URL, redis: str | None) -> None:
        super().connect(url, redis)
        self.app = FastAPI()
        self.mount(url, redis)

    def mount(self, url: URL, redis: str | None) -> None:
        """Add the endpoint, and what makes it idempotent."""

        @self.app.post("/add")
        async def adding(body: Body) -> dict[str, Any]:
            async with self.factory.begin() as session:
                return vars(await model.async_add(body.row, session))

    async def one(self, key: str, row: int) -> Any:
        status, body = await post(self.app, key, json.dumps({"row": row}).encode())
        if status != 200:
            raise RuntimeError(f"{self.name} answered {status}: {body.decode()}")
        return json.loads(body)


class HttpPlain(_Http):
    """The endpoint alone: keys are ignored."""

    name = "no library, HTTP"


class HttpOurs(_Http):
    """An endpoint that handles a command, as docs/http.md has it."""

    name = "AsyncCommands, HTTP"

    def mount(self, url: URL, redis: str | None) -> None:
        commands = AsyncCommands(self.factory, tables=model.RECORDS, scope="required")
        install(self.app)

        @self.app.post("/add")
        async def adding(body: Body, response: Response, key: Annotated[str, Depends(IdempotencyKey())]) -> Any:
            done = await commands.handle(_async_add, Add(body.row), key=key, scope="tenant")
            response.headers.update(replay_headers(done, key))
            return vars(done.result)


class HttpIdemkit(_Http):
    """idemkit's middleware with its PostgreSQL backend."""

    name = "idemkit, HTTP"

    def create(self, place: Place) -> None:
        _init_idemkit(place)

    def mount(self, url: URL, redis: str | None) -> None:
        from idemkit import HttpConfig, IdempotencyMiddleware

        self.backend = _idemkit_backend(url, redis if self.with_redis else None)
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

    def create(self, place: Place) -> None:
        """Make nothing: Redis has no tables."""


class HttpFastidempotent(_Http):
    """fastidempotent's middleware with its PostgreSQL backend."""

    name = "fastidempotent, HTTP"

    def mount(self, url: URL, redis: str | None) -> None:
        from fastidempotent import IdempotencyConfig, IdempotencyMiddleware
        from fastidempotent.backends.postgres import PostgresBackend

        self.backend = PostgresBackend(by("postgresql+asyncpg", url).render_as_string(hide_password=False))
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
    sent = False
    status, parts = 0, []

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # the client stays
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)


GROUPS: dict[str, tuple[type[Contender], tuple[type[Contender], ...]]] = {
    "HTTP, asyncpg": (HttpOurs, (HttpPlain, HttpIdemkit, HttpFastidempotent, HttpIdemkitRedis)),
    "functions, asyncpg": (AsyncOurs, (AsyncPlain, Idemkit)),
    "functions, psycopg": (Ours, (Plain, Dbos, TwoStores)),
}
"""Ours, and those beside it, by what is measured."""
