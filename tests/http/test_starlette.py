"""Dependencies with yield, background tasks and uploads of recorded endpoints; and Starlette without FastAPI."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import fastapi
import httpx
import pytest
from fastapi import BackgroundTasks, Depends, Request, Response, UploadFile
from fastapi.responses import JSONResponse
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm.exc import StaleDataError
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.routing import Route

from command_rig import Order, PlaceOrder
from cut_proxy import CutProxy
from databases import Driver
from http_rig import SERVERS, WEB, Shop, shop_on
from projector_dedup.errors import HandlerDefinitionError
from projector_dedup.http.starlette import (
    IdempotencyKey,
    endpoint_session,
    install,
    recorded_endpoint,
    recorded_route,
)

ASYNC = [driver for driver in WEB if driver.engine == "sqlite" and driver.is_async]  # the engine has no part in it
UnitSession = Annotated[AsyncSession, Depends(endpoint_session)]


@pytest.fixture(params=ASYNC, ids=str)
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    """A shop in FastAPI."""
    with shop_on(request, request.param) as shop:
        shop.install()
        yield shop


def router_of(shop: Shop, commands: Any = None, **options: Any) -> fastapi.APIRouter:
    """A router whose endpoints are recorded."""
    route = recorded_route(commands or shop.desk.commands(), **{"scope": lambda _request: "tenant", **options})
    return fastapi.APIRouter(route_class=route)


def serve(shop: Shop, endpoint: Any, router: fastapi.APIRouter | None = None, path: str = "/things") -> None:
    """Serve an endpoint at POST ``path``."""
    router = router or router_of(shop)
    router.post(path)(endpoint)
    shop.app.include_router(router)


class Log:
    """A dependency with yield that writes down how it is entered and left, among what leaves the app."""

    def __init__(self, heard: list[str]) -> None:
        self.heard = heard
        self.entered = 0

    async def __call__(self) -> AsyncIterator[int]:
        """Enter, and leave: well, or with an error."""
        self.entered += 1
        number = self.entered
        self.heard.append(f"enter {number}")
        try:
            yield number
        except BaseException as error:
            self.heard.append(f"{type(error).__name__} {number}")
            raise
        self.heard.append(f"leave {number}")


def test_dependencies_of_an_attempt_that_failed_are_left_with_its_error(shop: Shop) -> None:
    """Before the next attempt enters its own; those of the attempt that was committed are left after the response."""
    log = Log(shop.heard)

    async def endpoint(session: UnitSession, number: Annotated[int, Depends(log)]) -> dict[str, int]:
        session.add(Order(note=f"run {number}", amount=1))
        if number == 1:
            raise StaleDataError("somebody was faster")
        return {"run": number}

    serve(shop, endpoint)
    answer = shop.send(path="/things")
    assert answer.json() == {"run": 2}
    sent = ["http.response.start", "http.response.body"]
    assert shop.heard == ["enter 1", "StaleDataError 1", "enter 2", *sent, "leave 2"]
    assert shop.desk.orders() == ["run 2"]
    shop.heard.clear()
    assert shop.send(path="/things").json() == {"run": 2}
    assert shop.heard == sent  # of a recorded answer no dependency is entered


@pytest.mark.parametrize("driver", [driver for driver in SERVERS if driver.is_async], ids=str)
def test_dependencies_of_an_attempt_whose_commit_failed_are_left_with_an_error(
    request: pytest.FixtureRequest, driver: Driver
) -> None:
    """The endpoint had answered, and nothing was committed: it runs again."""
    with shop_on(request, driver) as shop, CutProxy(request.getfixturevalue(driver.engine).url()) as proxy:
        log = Log(shop.heard)

        async def endpoint(session: UnitSession, number: Annotated[int, Depends(log)]) -> dict[str, int]:
            session.add(Order(note=f"run {number}", amount=1))
            return {"run": number}

        serve(shop, endpoint, router_of(shop, shop.desk.commands(shop.factory_through(proxy))))
        proxy.cut_commit("before")
        assert shop.send(path="/things").json() == {"run": 2}
        sent = ["http.response.start", "http.response.body"]
        assert shop.heard == ["enter 1", "NotCommittedError 1", "enter 2", *sent, "leave 2"]
        assert shop.desk.orders() == ["run 2"]


def test_dependencies_are_left_with_what_the_endpoint_raised(shop: Shop) -> None:
    """An HTTPException ends the request, once."""
    log = Log(shop.heard)

    async def endpoint() -> None:
        raise fastapi.HTTPException(404)

    router = router_of(shop)
    router.post("/things", dependencies=[Depends(log)])(endpoint)
    shop.app.include_router(router)
    assert shop.send(path="/things").status_code == 404
    assert shop.heard[:2] == ["enter 1", "HTTPException 1"]


def test_background_tasks_run_after_the_commit_and_the_response(shop: Shop) -> None:
    """They see what was committed, and run for the answer that was given first, not for recorded ones."""

    async def task() -> None:
        async with shop.harness.factory() as session:
            shop.heard.append(f"task sees {list(await session.scalars(select(Order.note)))}")

    async def endpoint(session: UnitSession, tasks: BackgroundTasks) -> dict[str, int]:
        session.add(Order(note="sold", amount=1))
        tasks.add_task(task)
        return {}

    serve(shop, endpoint)
    assert [shop.send(path="/things").status_code for _ in range(2)] == [200, 200]
    sent = ["http.response.start", "http.response.body"]
    assert shop.heard == [*sent, "task sees ['sold']", *sent]


def test_background_tasks_of_what_was_rolled_back_do_not_run(shop: Shop) -> None:
    """A server error that is returned commits nothing that a task could follow from."""

    async def endpoint(session: UnitSession) -> Response:
        session.add(Order(note="sold", amount=1))
        return JSONResponse({}, 503, background=BackgroundTask(shop.heard.append, "task"))

    serve(shop, endpoint)
    assert shop.send(path="/things").status_code == 503
    assert "task" not in shop.heard
    assert shop.desk.orders() == []


def test_an_upload_is_read_again_by_each_attempt(shop: Shop) -> None:
    """Forms are parsed anew from the body, which was received once."""
    read: list[bytes] = []

    async def endpoint(file: UploadFile) -> dict[str, int]:
        read.append(await file.read())
        if len(read) == 1:
            raise StaleDataError("somebody was faster")
        return {}

    serve(shop, endpoint)
    assert shop.send(path="/things", files={"file": b"bytes"}).status_code == 200
    assert read == [b"bytes", b"bytes"]


def test_a_request_is_validated_anew_each_time(shop: Shop) -> None:
    """An answer of 422 by FastAPI itself is not recorded."""

    async def endpoint(session: UnitSession, order: PlaceOrder) -> dict[str, int]:
        session.add(Order(note="sold", amount=order.amount))
        return {}

    serve(shop, endpoint)
    answers = [shop.send(path="/things", json={"amount": amount}).status_code for amount in ("x", "x", 1)]
    assert answers == [422, 422, 200]
    assert shop.desk.orders() == ["sold"]


def test_an_endpoint_in_a_thread_is_refused(shop: Shop) -> None:
    """The session is of the event loop; FastAPI runs a plain def in another thread."""

    def endpoint() -> None:
        return

    with pytest.raises(HandlerDefinitionError, match="async def"):
        serve(shop, endpoint)
    with pytest.raises(HandlerDefinitionError, match="AsyncCommands"):
        recorded_route(object(), scope=lambda _request: "tenant")  # type: ignore[arg-type]


def test_a_plain_endpoint_calls_handle_on_a_synchronous_engine(request: pytest.FixtureRequest) -> None:
    """FastAPI runs a plain def in a thread, with the same dependency, and the same answers to errors."""
    with shop_on(request, next(driver for driver in WEB if driver.engine == "sqlite" and not driver.is_async)) as shop:
        commands, operation = shop.desk.commands(), shop.desk.operation()
        app = fastapi.FastAPI()
        install(app)

        @app.post("/orders")
        def endpoint(order: PlaceOrder, key: Annotated[str, Depends(IdempotencyKey())]) -> Any:
            return commands.handle(operation, order, key=key).result

        async def ask() -> list[int]:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
                key = {"Idempotency-Key": "k1"}
                answers = [await client.post("/orders", json={"amount": each}, headers=key) for each in (3, 3, 4)]
                return [answer.status_code for answer in answers]

        assert asyncio.run(ask()) == [200, 200, 422]
        assert shop.desk.orders() == ["k1"]


def test_routers_may_be_nested_and_apps_mounted(shop: Shop) -> None:
    """The whole path is compared: one key in two places is a key that was used before."""

    async def endpoint(session: UnitSession) -> dict[str, int]:
        session.add(Order(note="sold", amount=1))
        return {}

    router, inner = router_of(shop), fastapi.FastAPI()
    install(inner)
    router.post("/things")(endpoint)
    shop.app.include_router(router, prefix="/v1")
    outer = fastapi.APIRouter(prefix="/v2")
    outer.include_router(router)
    shop.app.include_router(outer)
    inner.include_router(router)
    shop.app.mount("/v3", inner)
    for number, path in enumerate(("/v1/things", "/v2/things", "/v3/things")):
        answers = [shop.send(path=path, key=str(number)) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert answers[1].headers["idempotent-replayed"] == "true"
        assert shop.send(path=path, key="0").status_code == (422 if number else 200)
    assert len(shop.desk.orders()) == 3


def test_a_response_that_sends_itself_otherwise_is_refused(shop: Shop) -> None:
    """Nobody knows whether its body is what it sends."""

    class Own(Response):
        """A response with a way of its own."""

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await Response(b"something else")(scope, receive, send)

    async def endpoint(session: UnitSession) -> Response:
        session.add(Order(note="sold", amount=1))
        return Own(b"something")

    serve(shop, endpoint)
    assert shop.send(path="/things").status_code == 500
    assert shop.desk.orders() == []


def test_a_scope_may_be_awaited(shop: Shop) -> None:
    """It may ask a database or another server who the user is."""

    async def whose(request: Request) -> str:
        return request.headers["authorization"]

    async def endpoint() -> dict[str, int]:
        return {}

    serve(shop, endpoint, router_of(shop, scope=whose))
    shop.send(path="/things", headers={"Authorization": "alice"})
    assert [key for key, _, _ in shop.desk.records()] == ["5:alicek1"]


def test_starlette_needs_no_fastapi(shop: Shop) -> None:
    """The same endpoint by a decorator, and the key and the session by awaiting their functions."""

    @recorded_endpoint(shop.desk.commands(), scope=lambda _request: "tenant")
    async def endpoint(request: Request) -> Response:
        session = await endpoint_session(request)
        asked = await request.json()
        session.add(Order(note=await IdempotencyKey()(request), amount=asked["amount"]))
        return JSONResponse({"placed": asked["amount"]}, 201)

    shop.app = Starlette(routes=[Route("/things", endpoint, methods=["POST"])])
    install(shop.app)
    answers = [shop.send(path="/things") for _ in range(2)]
    assert [(answer.status_code, answer.json()) for answer in answers] == [(201, {"placed": 3})] * 2
    assert shop.desk.orders() == ["k1"]
    assert shop.send(path="/things", key=None).status_code == 400


def test_middleware_sees_what_an_endpoint_sets_in_the_state(shop: Shop) -> None:
    """The state is of the request, as without a record; for a recorded answer the endpoint does not run."""
    seen: list[object] = []

    async def endpoint(request: Request) -> dict[str, int]:
        request.state.placed = 3
        return {}

    async def look(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        seen.append(getattr(request.state, "placed", None))
        return response

    shop.app.middleware("http")(look)
    serve(shop, endpoint)
    assert [shop.send(path="/things").status_code for _ in range(2)] == [200, 200]
    assert seen == [3, None]


def test_a_client_may_hang_up(shop: Shop) -> None:
    """The endpoint is not cut short: the answer is recorded for when the client asks again."""
    gone: list[bool] = []

    async def endpoint(request: Request, session: UnitSession) -> dict[str, int]:
        await request.body()
        gone.append((await request.receive())["type"] == "http.disconnect")
        session.add(Order(note="sold", amount=1))
        return {}

    serve(shop, endpoint)

    async def ask_and_leave() -> None:
        messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": b"{}", "more_body": False},
            {"type": "http.disconnect"},
        ]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/things", "raw_path": b"/things", "query_string": b"", "root_path": "",
            "headers": [(b"idempotency-key", b"k1")], "server": ("shop", 80), "client": ("client", 1),
        }  # fmt: skip

        async def receive() -> dict[str, Any]:
            return messages.pop(0)

        async def send(_message: Any) -> None:
            return

        await shop.app(scope, receive, send)

    shop.harness.run(ask_and_leave)
    assert gone == [True]
    assert shop.desk.orders() == ["sold"]
