"""Flask: the key of a request, errors as answers, and endpoints whose answers are recorded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, ParamSpec, Self, Unpack, overload

from sqlalchemy.orm import Session

from ..extras import needs

with needs("flask"):
    from flask import Flask, Response, current_app, g, request
    from flask import session as cookie_session
    from flask.typing import ResponseReturnValue

from ..brokers.incoming import Convert, json_event
from ..commands import Call, Commands, ResultError
from ..dispatcher import Dispatcher
from ..errors import HandlerDefinitionError, UnsafeSessionError
from .recording import (
    ANSWERED,
    KEY_HEADER,
    MAX_INFLATED,
    NAME,
    PUBLIC,
    Answer,
    Answers,
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

__all__ = [
    "PUBLIC",
    "endpoint_session",
    "idempotency_key",
    "install",
    "recorded_endpoint",
    "replay_headers",
    "webhook_endpoint",
]

P = ParamSpec("P")

_SESSION = "projector_dedup_session"  # in flask.g, while a recorded endpoint runs


@overload
def idempotency_key(*, required: Literal[True] = True) -> str: ...
@overload
def idempotency_key(*, required: bool) -> str | None: ...
def idempotency_key(*, required: bool = True) -> str | None:
    """Return the key that the request came with. With ``required=False``, None for a request without one.

    Raises ``IdempotencyKeyError``, to which ``install`` answers 400.
    """
    return read_key(request.headers.getlist(KEY_HEADER), required=required)


def install(app: Flask, *, on_rejected: Mapping[str, int] | None = None, **answers: Any) -> None:
    """Let the app answer the errors of commands: problem+json with the statuses of docs/http.md.

    ``on_rejected`` maps the code of a rejection to a status; the other arguments are those of ``Answers``.
    """
    chosen = Answers(on_rejected=on_rejected or {}, **answers)

    def answer(error: Exception) -> Response:
        problem = chosen.to(error, request.headers.getlist(KEY_HEADER))
        return Response(problem.body, problem.status, dict(problem.headers), mimetype=problem.content_type)

    for kind in ANSWERED:
        app.register_error_handler(kind, answer)


def endpoint_session() -> Session:
    """Return the session of the recorded endpoint that runs: that of the unit of work which records its answer.

    The endpoint must not commit.
    """
    session = g.get(_SESSION)
    if not isinstance(session, Session):
        raise UnsafeSessionError(
            "endpoint_session() is for endpoints under @recorded_endpoint, and the methods that it records"
        )
    return session


def recorded_endpoint(
    commands: Commands,
    *,
    scope: Callable[[], Any] | Public,
    required: bool = True,
    methods: Collection[str] = ("POST", "PATCH"),
    headers: Collection[str] = (),
    name: str = NAME,
    formerly: Collection[str] = (),
) -> Callable[[Callable[P, ResponseReturnValue]], Callable[P, ResponseReturnValue]]:
    """Return a decorator for views that are done once for each key, and whose answers are recorded.

    It stands below ``@app.route``. ``scope`` is called before the view, and returns whose key it is; **it has to verify
    who asks, because the view, and decorators below this one, do not run for a recorded answer**. ``PUBLIC`` shares
    keys and answers among all callers. ``required=False`` lets requests without a key run unrecorded. ``headers`` are
    recorded beside those that describe the body. ``name`` is the operation of these endpoints: give each service a name
    of its own if two share a database. ``formerly`` lists names from before, as in ``@command``.

    Raises ``HandlerDefinitionError``, for a wrong argument and for a view that is an ``async def``.
    """
    if not isinstance(commands, Commands):
        raise HandlerDefinitionError(f"recorded endpoints are handled by Commands, not {commands!r}")
    recording = Recording(scope, required, methods, headers)
    operation = as_operation(_attempt, name, formerly)

    def decorate(view: Callable[P, ResponseReturnValue]) -> Callable[P, ResponseReturnValue]:
        if inspect.iscoroutinefunction(view):
            raise HandlerDefinitionError(f"{view!r} is an async def, which Flask runs in another thread")

        @functools.wraps(view)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> ResponseReturnValue:
            if request.method not in recording.methods:
                return view(*args, **kwargs)
            key = idempotency_key(required=recording.required)
            whose = None if isinstance(scope, Public) else check_scope(scope())
            exchange = _Exchange(recording, functools.partial(view, *args, **kwargs))
            try:
                done = bounded(commands).handle(operation, exchange, key=key, scope=whose)
            except Unrecorded as unrecorded:
                answered: Response = unrecorded.response
                return answered
            answer = done.result
            response = _replayed(answer) if done.replayed or exchange.response is None else exchange.response
            response.headers.update(replay_headers(done, key))
            return response

        return recorded

    return decorate


def webhook_endpoint(
    dispatcher: Dispatcher,
    provider: Provider,
    convert: Convert = json_event,
    **options: Unpack[WebhookOptions],
) -> Callable[[], Response]:
    """Return a view that delivers the requests of a ``provider`` to a dispatcher, for a POST route.

    Write ``app.post("/webhooks/stripe")(webhook_endpoint(dispatcher, stripe(secret)))``. The view has the name of the
    provider; give a second one of the same provider another name, with ``endpoint=``. The arguments, the answers and
    the errors are those of ``projector_dedup.http.webhook.Webhook``.
    An ``AsyncDispatcher`` raises ``HandlerDefinitionError``.
    """
    webhook = Webhook(dispatcher, provider, convert, **options)
    if webhook.asynchronous:
        raise HandlerDefinitionError(
            "Flask runs async code in another thread: pass a Dispatcher, not an AsyncDispatcher"
        )

    def receive_webhook() -> Response:
        reply = webhook.deliver(_body(webhook.max_bytes), request.headers.items())
        return Response(reply.body, reply.status, dict(reply.headers), mimetype="application/json")

    receive_webhook.__name__ = provider.name.replace(".", "-")  # Flask wants one name for each view, without a dot
    receive_webhook.webhook = webhook  # type: ignore[attr-defined]  # for `idempotency dead`
    return receive_webhook


def _body(most: int) -> bytes:
    """Return the body of the request, or its beginning if it has more than ``most`` bytes."""
    if request.content_length is not None and request.content_length <= most:
        return request.get_data(cache=True)  # also the body that a hook has read before the view
    body = bytearray()
    while len(body) <= most and (part := request.stream.read(most + 1 - len(body))):
        body += part
    return bytes(body)


class _Exchange:
    """One request, and what became of it: the view may run several times, and one response is sent."""

    def __init__(self, recording: Recording, view: Callable[[], ResponseReturnValue]) -> None:
        body = request.get_data(cache=True)
        query = [(name, value) for name, values in request.args.lists() for value in values]
        path = request.script_root + request.path
        encoding, limit = request.content_encoding or "", request.max_content_length or MAX_INFLATED
        self.received = Received(request.method, path, query, request.content_type or "", body, encoding, limit)
        self.response: Response | None = None
        self._recording, self._view = recording, view
        self._restore = restoring(cookie_session)
        self._ran = False

    def __deepcopy__(self, memo: object) -> Self:
        """Return the exchange itself, because ``attempt`` restores the request for each run of the view."""
        return self

    def attempt(self, session: Session) -> Answer:
        """Run the view on the session of the unit of work."""
        if self._ran:
            self._restore()
        self._ran = True
        request._cached_json = (..., ...)  # decode the body again
        for file in request.files.values():  # which an attempt before this one may have read
            file.seek(0)
        setattr(g, _SESSION, session)
        try:
            response = current_app.make_response(self._view())
        finally:
            g.pop(_SESSION)
        whole = not (response.is_streamed or response.direct_passthrough)
        body = response.get_data() if whole else None
        self.response = response
        try:
            return self._recording.answer(response, response.status_code, response.headers.items(), body)
        except ResultError:
            response.close()  # nobody else will: it may be a file
            raise


def _attempt(exchange: _Exchange, call: Call) -> Answer:
    return exchange.attempt(call.session)


def _replayed(answer: Answer) -> Response:
    response = Response(answer.body, answer.status)
    del response.headers["Content-Type"]
    for name, value in answer.headers:
        response.headers.add(name, value)
    return response
