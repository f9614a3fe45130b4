"""The desk behind a web framework: FastAPI where the driver is asynchronous, Flask where it is not."""

import contextlib
import gzip
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import fastapi
import flask
import httpx
import pytest
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from command_rig import Desk, PlaceOrder, desk_on, place
from cut_proxy import CutProxy
from databases import DRIVERS, USUAL, USUAL_ASYNC, Driver
from projector_dedup.http import flask as flask_plug
from projector_dedup.http import starlette as starlette_plug
from projector_dedup.http.starlette import IdempotencyKey

WEB = [driver for driver in DRIVERS if driver.drivername == (USUAL_ASYNC if driver.is_async else USUAL)[driver.engine]]
"""The usual drivers of each engine: one to reach it from FastAPI, one from Flask."""
SERVERS = [driver for driver in DRIVERS if driver.engine != "sqlite"]

FRAMEWORK: dict[bool, Any] = {True: starlette_plug, False: flask_plug}

Keys = str | list[str] | None
Scope = MutableMapping[str, Any]


@dataclass(frozen=True)
class Reply:
    """What an endpoint answers, in the words of no framework. ``kind`` is whole, stream or file; or it is raised."""

    status: int = 201
    content: Any = None
    headers: tuple[tuple[str, str], ...] = ()
    kind: Literal["whole", "stream", "file", "raised"] = "whole"


View = Callable[[Any, Session], Reply]


class Shop:
    """A desk whose orders come by HTTP. It notes in ``heard`` when a byte of an answer leaves the app."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.harness = desk.harness
        self.asynchronous = desk.harness.asynchronous
        self.heard: list[str] = []
        self.walking: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.entered: set[str] = set()  # files of the library, if ``walking`` notes them
        self._engines: list[Any] = []
        self.app: Any = fastapi.FastAPI() if self.asynchronous else flask.Flask("shop")

    def factory_through(self, proxy: CutProxy) -> Any:
        """Return a session factory whose connections go through the proxy."""
        create: Any = create_async_engine if self.asynchronous else create_engine
        engine = create(proxy.through(self.harness.subject.url))
        self._engines.append(engine)
        return self.harness.factory_for(engine)

    def close(self) -> None:
        """Close the connections that go through a proxy."""
        for engine in self._engines:
            self.harness.run(engine.dispose)

    def install(self, **answers: Any) -> None:
        """Let the app answer the errors of commands."""
        FRAMEWORK[self.asynchronous].install(self.app, **answers)

    def sells(self, body: Any = place, commands: Any = None, *, required: bool = True, **said: Any) -> None:
        """Take orders at POST /orders: an endpoint that calls ``handle``, and renders the result."""
        operation = self.desk.operation(body)
        (self._fastapi if self.asynchronous else self._flask)(
            operation, commands or self.desk.commands(), required, {"scope": "tenant", **said}
        )

    def _fastapi(self, operation: Any, commands: Any, required: bool, said: dict[str, Any]) -> None:
        async def place_order(
            order: PlaceOrder,
            response: fastapi.Response,
            key: Annotated[str | None, fastapi.Depends(IdempotencyKey(required=required))],
        ) -> Any:
            done = await commands.handle(operation, order, key=key, **said)
            response.headers.update(starlette_plug.replay_headers(done, key))
            return asdict(done.result)

        self.app.post("/orders", status_code=201)(place_order)

    def _flask(self, operation: Any, commands: Any, required: bool, said: dict[str, Any]) -> None:
        def place_order() -> Any:
            key = flask_plug.idempotency_key(required=required)
            done = commands.handle(operation, PlaceOrder(**flask.request.get_json()), key=key, **said)
            return asdict(done.result), 201, flask_plug.replay_headers(done, key)

        self.app.post("/orders")(place_order)

    def records(
        self,
        view: View,
        path: str = "/things",
        commands: Any = None,
        *,
        served: tuple[str, ...] = ("POST", "PATCH", "PUT", "GET"),
        **options: Any,
    ) -> None:
        """Serve ``view`` at a path: an endpoint whose answers are recorded. It is given the JSON and the session."""
        tenant: Any = (lambda _request: "tenant") if self.asynchronous else (lambda: "tenant")
        options = {"scope": tenant, **options}
        commands = commands or self.desk.commands()
        if self.asynchronous:
            router = fastapi.APIRouter(route_class=starlette_plug.recorded_route(commands, **options))
            router.api_route(path, methods=list(served))(_fastapi_endpoint(view))
            self.app.include_router(router)
        else:
            recorded = flask_plug.recorded_endpoint(commands, **options)(_flask_endpoint(view))
            name = path.strip("/").replace("/", "-").replace("{n}", "n")
            self.app.add_url_rule(path.replace("{n}", "<n>"), name, recorded, methods=served)

    def send(self, method: str = "POST", path: str = "/orders", key: Keys = "k1", **request: Any) -> httpx.Response:
        """Send a request by httpx, straight into the app, with each of ``key`` as an Idempotency-Key header."""
        keys = [] if key is None else [key] if isinstance(key, str) else key
        if not self.asynchronous and len(keys) > 1:
            keys = [",".join(keys)]  # as servers of WSGI do it, Werkzeug's and Gunicorn; httpx would keep the last
        headers = [*request.pop("headers", {}).items(), *(("Idempotency-Key", each) for each in keys)]
        if method == "POST" and not {"json", "content", "files", "data"} & request.keys():
            request["json"] = {"amount": 3}
        arguments: dict[str, Any] = {"headers": headers, **request}
        if self.asynchronous:
            answer: httpx.Response = self.harness.run(self._awaited, method, path, arguments)
            return answer
        transport = httpx.WSGITransport(app=self._heard_wsgi, raise_app_exceptions=False)
        with httpx.Client(transport=transport, base_url="http://shop") as client:
            return client.request(method, path, **arguments)

    async def _awaited(self, method: str, path: str, arguments: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(self._heard_asgi, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await client.request(method, path, **arguments)

    async def _heard_asgi(self, scope: Scope, receive: Any, send: Any) -> None:
        async def heard(message: Scope) -> None:
            self.heard.append(message["type"])
            await send(message)

        with self.walking() as self.entered:
            await self.app(scope, receive, heard)

    def _heard_wsgi(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        def heard(*arguments: Any) -> Any:
            self.heard.append("http.response.start")
            return start_response(*arguments)

        with self.walking() as self.entered:
            parts = self.app(environ, heard)
        for part in parts:
            self.heard.append("http.response.body")
            yield part


def _fastapi_endpoint(view: View) -> Any:
    async def endpoint(
        request: fastapi.Request, session: Annotated[AsyncSession, fastapi.Depends(starlette_plug.endpoint_session)]
    ) -> fastapi.Response:
        asked: Any = request
        if request.headers.get("content-encoding") == "gzip":
            asked = json.loads(gzip.decompress(await request.body()))
        elif request.headers.get("content-type") == "application/json":
            asked = await request.json()
        reply = await session.run_sync(lambda inner: view(asked, inner))
        if reply.kind == "raised":
            raise fastapi.HTTPException(reply.status, "refused")
        response: fastapi.Response
        if reply.kind == "stream":
            response = StreamingResponse(iter([b"piece"]), reply.status)
        elif reply.kind == "file":
            response = FileResponse(__file__, reply.status)
        else:
            response = JSONResponse(reply.content, reply.status)
        for name, value in reply.headers:
            response.headers.append(name, value)
        return response

    return endpoint


def _flask_endpoint(view: View) -> Any:
    def endpoint(**_path: str) -> flask.Response:
        asked: Any = flask.request
        if flask.request.content_encoding == "gzip":
            asked = json.loads(gzip.decompress(flask.request.get_data()))
        elif flask.request.is_json:
            asked = flask.request.get_json()
        reply = view(asked, flask_plug.endpoint_session())
        if reply.kind == "raised":
            flask.abort(reply.status)
        if reply.kind == "stream":
            response = flask.Response(iter([b"piece"]), reply.status)
        elif reply.kind == "file":
            response = flask.send_file(__file__)
        else:
            response = flask.jsonify(reply.content)
        response.status_code = reply.status
        for name, value in reply.headers:
            response.headers.add(name, value)
        return response

    return endpoint


def problem(answer: httpx.Response) -> tuple[int, str]:
    """The status of an answer, and the last part of its problem's type."""
    assert answer.headers["content-type"] == "application/problem+json"
    told = answer.json()
    assert told["status"] == answer.status_code
    return answer.status_code, told["type"].removeprefix("urn:projector-dedup:problem:")


def commits(trip: list[str]) -> bool:
    """True if a round trip sends COMMIT; BEGIN with READ COMMITTED does not."""
    return any(re.search(r"(: |;)\s*commit\b", message, re.IGNORECASE) for message in trip)


@contextlib.contextmanager
def shop_on(request: pytest.FixtureRequest, driver: Driver, **subject: Any) -> Iterator[Shop]:
    """Return a shop with its tables on an empty database of the driver's."""
    with desk_on(request, driver, **subject) as desk:
        shop = Shop(desk)
        yield shop
        shop.close()


@contextlib.contextmanager
def serving(app: str, port: int, folder: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """An app under uvicorn, in a process of its own, which answers when the block is entered."""
    arguments = ["-m", "uvicorn", app, "--port", str(port), "--log-level", "warning", "--no-access-log"]
    process = subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environment)
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None, "the app does not start"
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()
