"""Starlette and FastAPI: the key as a dependency, errors as answers, and endpoints whose answers are recorded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from sqlalchemy.ext.asyncio import AsyncSession

from .extras import needs

with needs("starlette"):
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

from ..commands import AsyncCommands
from ..errors import HandlerDefinitionError, UnsafeSessionError
from .http import ANSWERED, KEY_HEADER, PROBLEM_JSON, Answers, read_key, replay_headers
from .recorded import NAME, PUBLIC, Public, Recording, Unrecorded, as_operation, bounded, check_scope
from .starlette_exchange import SESSION, Endpoint, Exchange, attempt, replayed

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
]

ScopeOf = Callable[[Request], Any] | Public


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
        return Response(problem.body, problem.status, dict(problem.headers), PROBLEM_JSON)

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
    formerly: Collection[str] = (),
) -> type[APIRoute]:
    """Return a route class for FastAPI whose endpoints are done once for each key, and whose answers are recorded.

    ``APIRouter(route_class=recorded_route(...))``. ``scope`` is called with the request, before anything else, and
    returns, or awaits, whose key it is; **it has to verify who asks, because dependencies do not run for a recorded
    answer**. ``PUBLIC`` shares keys and answers among all callers. ``required=False`` lets requests without a key run
    unrecorded. ``headers`` are recorded beside those that describe the body. ``name`` is the operation of these
    endpoints: give each service a name of its own if two share a database. ``formerly`` lists names from before, as in
    ``@command``.

    Raises ``HandlerDefinitionError``, for a wrong argument and for an endpoint that is no ``async def``.
    """
    with needs("fastapi"):
        from fastapi.routing import APIRoute

    around = _recorder(acommands, Recording.of(scope, required, methods, headers), name, formerly)

    class RecordedRoute(APIRoute):
        """A route whose answers are recorded."""

        def get_route_handler(self) -> Endpoint:
            """Return FastAPI's handler of the route, run as a command."""
            _check_async(self.endpoint)
            return around(super().get_route_handler())

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
    around = _recorder(acommands, Recording.of(scope, required, methods, headers), name, formerly)

    def decorate(endpoint: Endpoint) -> Endpoint:
        _check_async(endpoint)
        return functools.wraps(endpoint)(around(endpoint))

    return decorate


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
    operation = as_operation(attempt, name, formerly)

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
            response = replayed(answer) if done.replayed or exchange.response is None else exchange.response
            response.headers.update(replay_headers(done, key))
            return response

        return recorded

    return around


async def _whose(scope: ScopeOf, request: Request) -> Any:
    if isinstance(scope, Public):
        return None
    value = scope(request)
    return check_scope(await value if isinstance(value, Awaitable) else value)
