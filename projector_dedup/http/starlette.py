"""Starlette and FastAPI: the key as a dependency, errors as answers, and endpoints whose answers are recorded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, MutableMapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from sqlalchemy.ext.asyncio import AsyncSession

from ..extras import needs

with needs("starlette"):
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import Response

from ..brokers.incoming import Convert, json_event
from ..commands import AsyncCall, AsyncCommands
from ..dispatcher import AsyncDispatcher, Dispatcher
from ..errors import HandlerDefinitionError, UnsafeSessionError
from .recording import (
    ANSWERED,
    KEY_HEADER,
    NAME,
    PUBLIC,
    Answer,
    Answers,
    NotCommittedError,
    Public,
    Received,
    Recording,
    Unrecorded,
    as_operation,
    bounded,
    check_scope,
    read_key,
    replay_headers,
    restoring,
)
from .webhook import Provider, Webhook, WebhookOptions

if TYPE_CHECKING:
    from fastapi.routing import APIRoute

__all__ = [
    "PUBLIC",
    "IdempotencyKey",
    "endpoint_session",
    "install",
    "recorded_endpoint",
    "recorded_route",
    "replay_headers",
    "webhook_endpoint",
]

ScopeOf = Callable[[Request], Any] | Public
Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]

SESSION = "projector_dedup.session"  # in the scope of the request that a recorded endpoint is given


@overload
def IdempotencyKey(*, required: Literal[True] = True) -> Callable[[Request], Awaitable[str]]: ...
@overload
def IdempotencyKey(*, required: bool) -> Callable[[Request], Awaitable[str | None]]: ...
def IdempotencyKey(*, required: bool = True) -> Callable[[Request], Awaitable[Any]]:  # noqa: N802  # as it is written
    """Return a dependency that returns the key of a request: ``Annotated[str, Depends(IdempotencyKey())]``.

    Without FastAPI, await it with the request. With ``required=False`` it returns None for a request without a key.
    The dependency raises ``IdempotencyKeyError``, to which ``install`` answers 400.
    """

    async def key_of(request: Request) -> str | None:  # a function: FastAPI < 0.124 cannot read a callable object
        return read_key(request.headers.getlist(KEY_HEADER), required=required)

    return key_of


def install(app: Starlette, *, on_rejected: Mapping[str, int] | None = None, **answers: Any) -> None:
    """Let the app answer the errors of commands: problem+json with the statuses of docs/http.md.

    ``on_rejected`` maps the code of a rejection to a status; the other arguments are those of ``Answers``.
    """
    chosen = Answers(on_rejected=on_rejected or {}, **answers)

    async def answer(request: Request, error: Exception) -> Response:
        problem = chosen.to(error, request.headers.getlist(KEY_HEADER))
        return Response(problem.body, problem.status, dict(problem.headers), problem.content_type)

    for kind in ANSWERED:
        app.add_exception_handler(kind, answer)


async def endpoint_session(request: Request) -> AsyncSession:
    """Return the session of a recorded endpoint: ``Annotated[AsyncSession, Depends(endpoint_session)]``.

    It is the session of the unit of work that records the answer; the endpoint must not commit. Without FastAPI, await
    it with the request.
    """
    session = request.scope.get(SESSION)
    if not isinstance(session, AsyncSession):
        raise UnsafeSessionError(
            "endpoint_session is for recorded endpoints: recorded_route() or recorded_endpoint(), and the methods that "
            "they record"
        )
    return session


def recorded_route(
    acommands: AsyncCommands,
    *,
    scope: ScopeOf,
    required: bool = True,
    methods: Collection[str] = ("POST", "PATCH"),
    headers: Collection[str] = (),
    name: str = NAME,
    each_route: bool = False,
    formerly: Collection[str] = (),
) -> type[APIRoute]:
    """Return a route class for FastAPI whose endpoints are done once for each key, and whose answers are recorded.

    ``APIRouter(route_class=recorded_route(...))``. ``scope`` is called with the request, before anything else, and
    returns, or awaits, whose key it is; **it has to verify who asks, because dependencies do not run for a recorded
    answer**. ``PUBLIC`` shares keys and answers among all callers. ``required=False`` lets requests without a key run
    unrecorded. ``headers`` are recorded beside those that describe the body. ``name`` is the operation of these
    endpoints: give each service a name of its own if two share a database. With ``each_route=True``, each route is an
    operation of its own, ``<name>.<name of the route>``, so that the same key at two routes is two requests. Write
    ``@router.post(path, name=...)``: the default is the name of the function, which must then not change. ``formerly``
    lists names from before, as in ``@command``.

    Raises ``HandlerDefinitionError``, for a wrong argument and for an endpoint that is no ``async def``.
    """
    with needs("fastapi"):
        from fastapi.routing import APIRoute

    recording = Recording(scope, required, methods, headers)
    around = _recorder(acommands, recording, name, formerly)

    class RecordedRoute(APIRoute):
        """A route whose answers are recorded."""

        def get_route_handler(self) -> Endpoint:
            """Return FastAPI's handler of the route, run as a command."""
            _check_async(self.endpoint)
            # The path would not do: the part of it that a route knows depends on the version of FastAPI.
            own = _recorder(acommands, recording, f"{name}.{self.name}", formerly) if each_route else around
            return own(super().get_route_handler())

    return RecordedRoute


def recorded_endpoint(
    acommands: AsyncCommands,
    *,
    scope: ScopeOf,
    required: bool = True,
    methods: Collection[str] = ("POST", "PATCH"),
    headers: Collection[str] = (),
    name: str = NAME,
    formerly: Collection[str] = (),
) -> Callable[[Endpoint], Endpoint]:
    """Return a decorator for endpoints of Starlette, ``async def endpoint(request)``. See ``recorded_route``."""
    around = _recorder(acommands, Recording(scope, required, methods, headers), name, formerly)

    def decorate(endpoint: Endpoint) -> Endpoint:
        _check_async(endpoint)
        return functools.wraps(endpoint)(around(endpoint))

    return decorate


def webhook_endpoint(
    dispatcher: Dispatcher | AsyncDispatcher,
    provider: Provider,
    convert: Convert = json_event,
    **options: Unpack[WebhookOptions],
) -> Endpoint:
    """Return an endpoint that delivers the requests of a ``provider`` to a dispatcher, for a POST route.

    Write ``app.add_route("/webhooks/stripe", webhook_endpoint(dispatcher, stripe(secret)), methods=["POST"])``. The
    arguments, the answers and the errors are those of ``projector_dedup.http.webhook.Webhook``. A ``Dispatcher`` runs
    in Starlette's threads.
    """
    webhook = Webhook(dispatcher, provider, convert, **options)

    async def receive_webhook(request: Request) -> Response:
        body, headers = await _body(request, webhook.max_bytes), request.headers.items()
        if webhook.asynchronous:
            reply = await webhook.adeliver(body, headers)
        else:
            reply = await run_in_threadpool(webhook.deliver, body, headers)
        return Response(reply.body, reply.status, dict(reply.headers), "application/json")

    receive_webhook.webhook = webhook  # type: ignore[attr-defined]  # for `idempotency dead`
    return receive_webhook


async def _body(request: Request, most: int) -> bytes:
    """Return the body of a request, or its beginning if it has more than ``most`` bytes."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            break
    return bytes(body)


def _check_async(endpoint: Callable[..., Any]) -> None:
    if not inspect.iscoroutinefunction(inspect.unwrap(endpoint)):
        raise HandlerDefinitionError(
            f"a recorded endpoint is an async def, and {endpoint!r} is not; with a synchronous engine, let the "
            "endpoint call Commands.handle() instead (docs/http.md)"
        )


def _recorder(
    acommands: AsyncCommands, recording: Recording, name: str, formerly: Collection[str]
) -> Callable[[Endpoint], Endpoint]:
    """Return what puts a command around an endpoint."""
    if not isinstance(acommands, AsyncCommands):
        raise HandlerDefinitionError(f"recorded endpoints are handled by AsyncCommands, not {acommands!r}")
    operation = as_operation(_attempt, name, formerly)

    def around(endpoint: Endpoint) -> Endpoint:
        async def recorded(request: Request) -> Response:
            if request.method not in recording.methods:
                return await endpoint(request)
            key = read_key(request.headers.getlist(KEY_HEADER), required=recording.required)
            whose = await _whose(recording.scope, request)
            exchange = Exchange(recording, endpoint, request, await request.body())
            try:
                done = await bounded(acommands).handle(operation, exchange, key=key, scope=whose)
            except Unrecorded as unrecorded:
                unrecorded.response.background = None  # nothing was committed that it could follow from
                response: Response = unrecorded.response
                return response
            except BaseException as error:
                await exchange.leave(error)
                raise
            exchange.hand_over()
            answer = done.result
            response = _replayed(answer) if done.replayed or exchange.response is None else exchange.response
            response.headers.update(replay_headers(done, key))
            return response

        return recorded

    return around


async def _whose(scope: ScopeOf, request: Request) -> Any:
    if isinstance(scope, Public):
        return None
    value = scope(request)
    return check_scope(await value if isinstance(value, Awaitable) else value)


class Exchange:
    """One request, and what became of it: the endpoint may run several times, and one response is sent."""

    def __init__(self, recording: Recording, endpoint: Endpoint, request: Request, body: bytes) -> None:
        content_type, encoding = (request.headers.get(f"content-{name}", "") for name in ("type", "encoding"))
        query = request.query_params.multi_items()
        self.received = Received(request.method, request.scope["path"], query, content_type, body, encoding)
        self.response: Response | None = None
        self._recording, self._endpoint, self._request = recording, endpoint, request
        self._stacks: list[tuple[AsyncExitStack, AsyncExitStack]] = []  # of the app, and of this attempt
        shared = (request.scope.get(name) for name in ("path_params", "session"))  # by the requests of all attempts
        self._restore = [restoring(each) for each in shared if isinstance(each, MutableMapping)]
        self._ran = False

    def __deepcopy__(self, memo: object) -> Self:
        """Return the exchange itself, because ``attempt`` makes a request for each run of the endpoint."""
        return self

    async def attempt(self, session: AsyncSession) -> Answer:
        """Run the endpoint, on a request of its own and the session of the unit of work."""
        await self.leave(NotCommittedError("the COMMIT of this attempt failed"))
        if self._ran:
            for restore in self._restore:
                restore()
        self._ran = True
        self._request.scope.setdefault("state", {})  # or middleware would not see what the endpoint sets in it
        scope: MutableMapping[str, Any] = {**self._request.scope, SESSION: session}
        for name, stack in self._request.scope.items():
            if isinstance(stack, AsyncExitStack):  # of FastAPI's, for dependencies with yield
                scope[name] = AsyncExitStack()
                self._stacks.append((stack, scope[name]))
        try:
            response = await self._endpoint(Request(scope, self._receive_again()))
            whole = type(response).__call__ is Response.__call__  # streams and files have another way to send
            answer = self._recording.answer(
                response, response.status_code, response.headers.items(), bytes(response.body) if whole else None
            )
        except BaseException as error:
            await self.leave(error)
            raise
        self.response = response
        return answer

    async def leave(self, error: BaseException) -> None:
        """Leave what an attempt has entered that came to nothing, such as dependencies with yield."""
        entered = AsyncExitStack()
        for _, own in self._stacks:
            entered.push_async_exit(own)
        self._stacks = []
        await entered.__aexit__(type(error), error, error.__traceback__)

    def hand_over(self) -> None:
        """Leave what the attempt has entered that was committed when the app leaves: after the response."""
        for app, own in self._stacks:
            app.push_async_exit(own)

    def _receive_again(self) -> Callable[[], Awaitable[MutableMapping[str, Any]]]:
        bodies = [self.received.body]

        async def receive() -> MutableMapping[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            return await self._request.receive()

        return receive


async def _attempt(exchange: Exchange, call: AsyncCall) -> Answer:
    """Run the endpoint once: the function of the operation that a recorded endpoint is."""
    return await exchange.attempt(call.session)


def _replayed(answer: Answer) -> Response:
    """Return the response of a recorded answer."""
    response = Response(answer.body, answer.status)
    for name, value in answer.headers:
        response.headers.append(name, value)
    return response
