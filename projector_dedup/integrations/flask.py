"""Flask: the key of a request, errors as answers, and endpoints whose answers are recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, overload

from flask import Flask, Response, request

from .http import ANSWERED, KEY_HEADER, PROBLEM_JSON, Answers, read_key, replay_headers

__all__ = ["idempotency_key", "install", "replay_headers"]


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
        return Response(problem.body, problem.status, dict(problem.headers), mimetype=PROBLEM_JSON)

    for kind in ANSWERED:
        app.register_error_handler(kind, answer)
