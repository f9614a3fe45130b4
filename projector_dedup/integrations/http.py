"""HTTP without a framework: read the Idempotency-Key header, and say which error of a command becomes which answer.

The header is that of draft-ietf-httpapi-idempotency-key-header; error bodies are problem+json (RFC 9457).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..commands import DuplicateCommandError, Handled, InvalidKeyError, KeyReusedError, Rejected, UnusableKeyError
from ..errors import CommitOutcomeUnknown, Defer, InProgress, OvertakenError, RetriesExhaustedError

logger = logging.getLogger("projector_dedup")

KEY_HEADER = "Idempotency-Key"
REPLAYED_HEADER = "Idempotent-Replayed"
MAX_KEY = 255  # characters
PROBLEM_JSON = "application/problem+json"

_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')  # a String of RFC 9651
_BARE = re.compile(r"[!#-+\--\[\]-~]+")  # what is visible in ASCII, but no quote, comma or backslash


class IdempotencyKeyError(InvalidKeyError):
    """The Idempotency-Key header of a request is missing, sent twice, empty, too long or malformed; nothing ran.

    ``flaw`` is the last part of the problem's type: ``key-missing`` or ``key-malformed``.
    """

    def __init__(self, message: str, flaw: Literal["key-missing", "key-malformed"] = "key-malformed") -> None:
        super().__init__(message)
        self.flaw = flaw


def read_key(values: Sequence[str], *, required: bool = True) -> str | None:
    """Return the key that a request came with, given every value of its Idempotency-Key header.

    ``"key"``, a String as the draft says, and ``key``, as most clients send it, are one key. Returns None for a request
    without the header if it is not ``required``. Raises ``IdempotencyKeyError``.
    """
    if not values:
        if not required:
            return None
        raise IdempotencyKeyError(
            f"the {KEY_HEADER} header is required: send a new key, such as a UUID, with each new request, and the same "
            "key when a request is sent again",
            "key-missing",
        )
    if len(values) > 1:
        raise IdempotencyKeyError(f"the {KEY_HEADER} header was sent {len(values)} times; send it once")
    text = values[0].strip(" \t")
    if quoted := _QUOTED.fullmatch(text):
        key = re.sub(r"\\(.)", r"\1", quoted[1])
    elif _BARE.fullmatch(text):
        key = text
    elif not text:
        raise IdempotencyKeyError(f"the {KEY_HEADER} header is empty")
    else:
        raise IdempotencyKeyError(
            f'the {KEY_HEADER} header is one String of RFC 9651, as in "8e03978e", or the same without quotes, blanks '
            "and commas"
        )
    if not key:
        raise IdempotencyKeyError(f"the {KEY_HEADER} header is empty")
    if len(key) > MAX_KEY:
        raise IdempotencyKeyError(f"the {KEY_HEADER} has {len(key)} characters, and {MAX_KEY} are allowed")
    return key


def replay_headers(done: Handled[Any] | Rejected, key: str | None) -> dict[str, str]:
    """Return the headers for an answer: the key, and ``Idempotent-Replayed: true`` if the answer is a recorded one."""
    if key is None:
        return {}
    echoed = key if _BARE.fullmatch(key) else '"' + re.sub(r'(["\\])', r"\\\1", key) + '"'
    return {KEY_HEADER: echoed, **({REPLAYED_HEADER: "true"} if done.replayed else {})}


@dataclass(frozen=True)
class Problem:
    """An answer that says what went wrong: status, headers, and a body of RFC 9457."""

    status: int
    members: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        """The JSON of the body."""
        return json.dumps(dict(self.members), separators=(",", ":")).encode()


TRY_AGAIN = (CommitOutcomeUnknown, Defer, OvertakenError, RetriesExhaustedError)
ANSWERED = (
    *(IdempotencyKeyError, UnusableKeyError, KeyReusedError, DuplicateCommandError, InProgress, Rejected),
    *TRY_AGAIN,
)
"""The errors that are answered by a problem. Any other error is a fault of the program: the framework answers 500."""


@dataclass(frozen=True)
class Answers:
    """Which error becomes which answer.

    ``on_rejected`` maps the code of a rejection to a status; 422 is that of all others. ``mismatch_status`` is that of
    a key which came before with another request: 409 suits clients for whom 422 means a failed validation.
    ``retry_after`` is in seconds. ``type_base`` begins the ``type`` of each problem.
    """

    on_rejected: Mapping[str, int] = field(default_factory=dict)
    mismatch_status: int = 422
    retry_after: int = 1
    type_base: str = "urn:projector-dedup:problem:"

    def __post_init__(self) -> None:
        statuses = [self.mismatch_status, *self.on_rejected.values()]
        if not all(type(status) is int and 400 <= status < 500 for status in statuses):
            raise ValueError("on_rejected and mismatch_status give statuses of errors of the client's, 400 to 499")
        if type(self.retry_after) is not int or self.retry_after < 0:
            raise ValueError("retry_after is a whole number of seconds")

    def to(self, error: Exception, key_values: Sequence[str] = ()) -> Problem:
        """Return the answer to one of the errors in ``ANSWERED``; raise any other one again.

        The texts say nothing of the database, and nothing of another command's. ``key_values`` are the values of the
        request's header, echoed with a rejection.
        """
        if not isinstance(error, ANSWERED):
            raise error
        problem = self._rejected(error, key_values) if isinstance(error, Rejected) else self._failed(error)
        unavailable = isinstance(error, TRY_AGAIN)
        logger.log(
            logging.WARNING if unavailable or isinstance(error, UnusableKeyError) else logging.INFO,
            "answered %d to %s: %s",
            problem.status,
            type(error).__name__,
            error,
            exc_info=error if unavailable else None,
        )
        return problem

    def _failed(self, error: Exception) -> Problem:
        soon = {"Retry-After": str(self.retry_after)}
        match error:
            case IdempotencyKeyError():
                return self._problem(400, error.flaw, f"The {KEY_HEADER} cannot be used", detail=str(error))
            case UnusableKeyError():  # such as one that is too long together with its scope
                return self._problem(400, "key-unusable", f"The request cannot be recorded under its {KEY_HEADER}")
            case KeyReusedError():
                detail = "Nothing was done. Send each new request with a key of its own."
                title = f"The {KEY_HEADER} was used for another request before"
                return self._problem(self.mismatch_status, "key-reused", title, detail=detail)
            case DuplicateCommandError():
                return self._problem(409, "duplicate", "The request was handled before")
            case InProgress():
                detail = "Nothing is known about its outcome yet. Send the request again with the same key."
                return self._problem(409, "in-progress", "A request with this key is in progress", soon, detail=detail)
        detail = "Send the request again with the same key: it takes effect once, however often it is sent."
        return self._problem(503, "try-again", "The outcome of the request is not known", soon, detail=detail)

    def _rejected(self, error: Rejected, key_values: Sequence[str]) -> Problem:
        told = {} if error.detail is None else {"detail" if isinstance(error.detail, str) else "info": error.detail}
        headers = replay_headers(error, read_key(key_values, required=False))
        status = self.on_rejected.get(error.code, 422)
        return self._problem(status, "rejected", "The request was rejected", headers, code=error.code, **told)

    def _problem(
        self, status: int, kind: str, title: str, headers: Mapping[str, str] | None = None, **members: Any
    ) -> Problem:
        return Problem(
            status, {"type": self.type_base + kind, "title": title, "status": status, **members}, headers or {}
        )
