"""Starlette and FastAPI: the key as a dependency, errors as answers, and endpoints whose answers are recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar, overload

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from .http import ANSWERED, KEY_HEADER, PROBLEM_JSON, Answers, read_key, replay_headers

__all__ = ["IdempotencyKey", "install", "replay_headers"]

K = TypeVar("K", str, str | None)


class IdempotencyKey(Generic[K]):
    """A dependency that returns the key a request came with: ``Annotated[str, Depends(IdempotencyKey())]``.

    Without FastAPI, call it with the request. With ``required=False`` it returns None for a request without a key.
    Raises ``IdempotencyKeyError``, to which ``install`` answers 400.
    """

    @overload
    def __init__(self: IdempotencyKey[str], *, required: Literal[True] = True) -> None: ...
    @overload
    def __init__(self: IdempotencyKey[str | None], *, required: bool) -> None: ...
    def __init__(self, *, required: bool = True) -> None:
        self.required = required

    async def __call__(self, request: Request) -> K:
        """Return the key of a request."""
        return read_key(request.headers.getlist(KEY_HEADER), required=self.required)  # type: ignore[return-value]


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
