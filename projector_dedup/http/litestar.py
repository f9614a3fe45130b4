"""Litestar: the Idempotency-Key as a dependency, and errors of commands as answers.

Needs the extra ``litestar``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, overload

from ..extras import needs

with needs("litestar"):
    from litestar import Request, Response

from .recording import ANSWERED, KEY_HEADER, PROBLEM_JSON, Answers, read_key, replay_headers

__all__ = ["IdempotencyKey", "exception_handlers", "replay_headers"]

AnyRequest = Request[Any, Any, Any]


@overload
def IdempotencyKey(*, required: Literal[True] = True) -> Callable[[AnyRequest], Awaitable[str]]: ...
@overload
def IdempotencyKey(*, required: bool) -> Callable[[AnyRequest], Awaitable[str | None]]: ...
def IdempotencyKey(*, required: bool = True) -> Callable[[AnyRequest], Awaitable[Any]]:  # noqa: N802  # as in Starlette
    """Return a dependency that returns the key of a request: ``dependencies={"key": Provide(IdempotencyKey())}``.

    With ``required=False`` it returns None for a request without a key. The dependency raises ``IdempotencyKeyError``,
    to which ``exception_handlers`` answer 400.
    """

    async def key_of(request: AnyRequest) -> str | None:
        return read_key(request.headers.getall(KEY_HEADER, []), required=required)

    return key_of


def exception_handlers(
    *, on_rejected: Mapping[str, int] | None = None, **answers: Any
) -> dict[type[Exception], Callable[[AnyRequest, Any], Response[bytes]]]:
    """Return handlers that answer the errors of commands: problem+json with the statuses of docs/http.md.

    ``Litestar(..., exception_handlers=exception_handlers())``. ``on_rejected`` maps the code of a rejection to a
    status; the other arguments are those of ``Answers``.
    """
    chosen = Answers(on_rejected=on_rejected or {}, **answers)

    def answer(request: AnyRequest, error: Exception) -> Response[bytes]:
        problem = chosen.to(error, request.headers.getall(KEY_HEADER, []))
        return Response(
            problem.body, status_code=problem.status, headers=dict(problem.headers), media_type=PROBLEM_JSON
        )

    return dict.fromkeys(ANSWERED, answer)
