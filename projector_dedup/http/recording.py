"""HTTP without a framework: the Idempotency-Key header, the answers to errors of commands, and recorded endpoints.

The header is that of draft-ietf-httpapi-idempotency-key-header; error bodies are problem+json (RFC 9457).
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from email.message import Message
from enum import Enum
from hashlib import sha256
from typing import Any, Final, Literal, NamedTuple, TypeVar
from uuid import UUID

from ..commands import (
    AsyncCommands,
    Codec,
    Commands,
    DuplicateCommandError,
    Handled,
    InvalidKeyError,
    KeyReusedError,
    Rejected,
    ResultError,
    UnusableKeyError,
    command,
)
from ..commands.fingerprint import digest
from ..errors import (
    CommitOutcomeUnknown,
    Defer,
    HandlerDefinitionError,
    InProgress,
    OvertakenError,
    ProjectorDedupError,
    RetriesExhaustedError,
    UncopyableError,
)
from ..json_numbers import exact
from ..message import logger_of
from ..own_event import Originals

__all__ = ["ANSWERED", "KEY_HEADER", "Answers", "IdempotencyKeyError", "Problem", "read_key", "replay_headers"]

logger = logger_of("projector_dedup")

KEY_HEADER = "Idempotency-Key"
REPLAYED_HEADER = "Idempotent-Replayed"
MAX_KEY = 255  # characters
PROBLEM_JSON = "application/problem+json"
JSON = "application/json"

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
    """An answer that says what went wrong: status, headers, and a body of JSON, by default that of RFC 9457."""

    status: int
    members: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = PROBLEM_JSON

    @property
    def body(self) -> bytes:
        """The JSON of the body."""
        return json.dumps(dict(self.members), separators=(",", ":")).encode()


TRY_AGAIN = (CommitOutcomeUnknown, Defer, OvertakenError, RetriesExhaustedError, UncopyableError)
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
    ``retry_after`` is in seconds. ``type_base`` begins the ``type`` of each problem. ``body`` is a function for clients
    of a standard with its own errors: it gets each ``Problem``, and returns the members of the JSON object to send in
    its place, as ``application/json``.
    """

    on_rejected: Mapping[str, int] = field(default_factory=dict)
    mismatch_status: int = 422
    retry_after: int = 1
    type_base: str = "urn:projector-dedup:problem:"
    body: Callable[[Problem], Mapping[str, Any]] | None = None

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
        return problem if self.body is None else replace(problem, members=self.body(problem), content_type=JSON)

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
        details = {} if error.detail is None else {"detail" if isinstance(error.detail, str) else "info": error.detail}
        headers = replay_headers(error, read_key(key_values, required=False))
        status = self.on_rejected.get(error.code, 422)
        return self._problem(status, "rejected", "The request was rejected", headers, code=error.code, **details)

    def _problem(
        self, status: int, kind: str, title: str, headers: Mapping[str, str] | None = None, **members: Any
    ) -> Problem:
        return Problem(
            status, {"type": self.type_base + kind, "title": title, "status": status, **members}, headers or {}
        )


# Recorded endpoints: the endpoint is a command, and its answer is the result of the command --------------------------
#
# An answer is status, body, and the headers that describe the body. A cookie is never recorded.


class Public(Enum):
    """The scope of endpoints whose callers all share their keys, and may see each other's answers."""

    PUBLIC = "public"


PUBLIC: Final = Public.PUBLIC
H = TypeVar("H", Commands, AsyncCommands)

KEPT = (
    *("Content-Type", "Content-Encoding", "Content-Language", "Content-Location", "Content-Disposition"),
    *("Location", "Link", "ETag", "Last-Modified"),
)
NEVER_KEPT = frozenset({"set-cookie", "content-length"})
MAX_INFLATED = 1 << 20  # bytes of a compressed request that are compared by what is in them, if the app has no limit
NAME = "http-endpoint"  # the operation of recorded endpoints that are given no name: one for all their routes
CLAIM_TIMEOUT = 5.0  # seconds that a duplicate waits if Commands has no bound: else a few of them hold the whole pool
FIRST_SERVER_ERROR = 500
LATER = frozenset({401, 408, 425, 429})  # sign in, be faster, come later, come less often: sent again, it may succeed


@dataclass(frozen=True)
class Answer:
    """An endpoint's answer, as it is recorded."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def _dumps(answer: Answer) -> bytes:
    head = json.dumps([answer.status, answer.headers], separators=(",", ":"))  # in ASCII, on one line
    return head.encode() + b"\n" + answer.body


def _loads(data: bytes) -> Answer:
    head, _, body = data.partition(b"\n")
    status, headers = json.loads(head)
    return Answer(status, tuple((name, value) for name, value in headers), body)


CODEC: Codec[Answer] = Codec("http-answer", _dumps, _loads, exact=True)


@dataclass(frozen=True)
class Received:
    """The parts of a request that must be the same when its key comes again; its headers need not be."""

    method: str
    path: str
    query: Collection[tuple[str, str]]
    content_type: str
    body: bytes
    encoding: str = ""  #: the Content-Encoding
    limit: int = MAX_INFLATED  #: bytes

    def fingerprint(self) -> Mapping[str, object]:
        """Return what is compared: JSON as a value, a form by its parts, any other body byte by byte.

        A body in gzip is compared by what is in it, up to ``limit`` bytes: a client may compress it anew.
        """
        return {
            "method": self.method,
            "path": self.path,
            "query": sorted(self.query, key=lambda item: item[0]),  # those of one name stay in order
            "body": self._body(),
        }

    def _body(self) -> list[str]:
        kind = self.content_type.partition(";")[0].strip().lower()
        body = self._inflated()
        if kind in ("application/json", "text/json") or kind.endswith("+json"):
            try:
                return ["json", digest(json.loads(body, parse_float=_number)).hex()]
            except (ValueError, RecursionError):
                pass  # no JSON, or not a value that can be compared
        if kind == "multipart/form-data" and len(parts := self._parts(body)) > 1:
            return ["form", *(sha256(part).hexdigest() for part in parts)]
        return ["bytes", sha256(body).hexdigest()]

    def _inflated(self) -> bytes:
        """Return what a body in gzip contains, or the body if that is larger than the limit or is no gzip."""
        if self.encoding.strip().lower() not in ("gzip", "x-gzip"):
            return self.body
        inflating = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        try:
            inflated = inflating.decompress(self.body, self.limit + 1)  # one more, to see the end of what just fits
        except zlib.error:
            return self.body
        whole = inflating.eof and not inflating.unused_data and len(inflated) <= self.limit
        return inflated if whole else self.body

    def _parts(self, body: bytes) -> list[bytes]:
        """Return the body without its boundary, which clients choose anew whenever they encode a form."""
        header = Message()
        try:
            header["Content-Type"] = self.content_type
            boundary = (header.get_boundary() or "").encode("latin-1", "replace")
        except Exception:  # noqa: BLE001  # the client writes what it likes, and Python raises what it likes
            boundary = b""
        if not boundary:
            return [body]
        return re.split(rb"\r\n--" + re.escape(boundary) + rb"(?=--|[ \t]*\r\n)", b"\r\n" + body)


class _Exact(NamedTuple):
    """A number that no float is. No other value of JSON has its fingerprint."""

    number: Decimal


def _number(text: str) -> object:
    """Return a number of a body: the float, or an ``_Exact`` for one that it would round."""
    number = exact(text)
    return number if isinstance(number, float) else _Exact(number)


class NotCommittedError(ProjectorDedupError):
    """The endpoint has answered, and its COMMIT failed: what it had opened is left, before it runs again."""


class Unrecorded(Exception):  # noqa: N818  # it carries an answer through the unit of work, which rolls back
    """The endpoint has answered by a server error or "later": everything is rolled back, and nothing is recorded."""

    def __init__(self, response: Any) -> None:
        super().__init__(response)
        self.response = response


class Recording:
    """How the answers of endpoints are recorded: the checked arguments of ``recorded_route`` and ``recorded_endpoint``.

    Raises ``HandlerDefinitionError`` for an argument that is wrong.
    """

    def __init__(
        self, scope: Callable[..., Any] | Public, required: bool, methods: Collection[str], headers: Collection[str]
    ) -> None:
        if scope is not PUBLIC and not callable(scope):
            raise HandlerDefinitionError(
                "scope is a function that returns whose key it is, such as the verified user's id; PUBLIC if any "
                "caller may see any other's answers"
            )
        self.scope, self.required = scope, required
        self.methods = frozenset(method.upper() for method in methods)
        if not self.methods or self.methods & {"GET", "HEAD", "OPTIONS", "TRACE"}:
            raise HandlerDefinitionError("methods are such that change something: POST, PATCH, PUT, DELETE")
        self.headers = frozenset(name.lower() for name in (*headers, *KEPT))
        if never := self.headers & NEVER_KEPT:
            raise HandlerDefinitionError(f"these headers are never recorded: {', '.join(sorted(never))}")

    def answer(self, response: Any, status: int, headers: Iterable[tuple[str, str]], body: bytes | None) -> Answer:
        """Return the part of a response that is recorded; ``body`` is None if it is not there as a whole.

        Raises ``Unrecorded`` for a status of 500 or more or in ``LATER``, and ``ResultError`` for a stream.
        """
        if status >= FIRST_SERVER_ERROR or status in LATER:
            raise Unrecorded(response)
        if body is None:
            raise ResultError(
                f"a recorded endpoint returned {type(response).__name__}, whose body is sent piece by piece: it cannot "
                "be recorded before it is sent. Everything was rolled back; return the whole body, or leave the "
                "endpoint unrecorded and call handle() in it"
            )
        return Answer(status, tuple((name, value) for name, value in headers if name.lower() in self.headers), body)


def restoring(mapping: MutableMapping[str, Any]) -> Callable[[], None]:
    """Return a function that gives ``mapping`` the contents that it has now, so that an attempt finds no changes.

    The function restores a value that cannot be copied as the attempts before it have left it.
    """

    def contents(of: Mapping[str, Any]) -> dict[str, Any]:
        return {name: Originals().copy_of(value) for name, value in of.items()}

    before = contents(mapping)

    def restore() -> None:
        if mapping or before:  # Flask refuses to change the empty session of an app without a secret key
            mapping.clear()
            mapping.update(contents(before))

    return restore


def check_scope(value: object) -> str | UUID:
    """Return what ``scope`` has returned; raise ``HandlerDefinitionError`` if it would make strangers share keys."""
    if isinstance(value, UUID) or (isinstance(value, str) and value):
        return value
    raise HandlerDefinitionError(
        f"scope= returned {value if value == '' else type(value).__name__!r}; return a text or a UUID that identifies "
        "the user of the key. If a request has no user, refuse it. If no answer is private, pass scope=PUBLIC"
    )


def bounded(commands: H) -> H:
    """Return commands whose duplicates wait for a bounded time, and hold a connection no longer."""
    return commands.bounded(CLAIM_TIMEOUT)


def as_operation(attempt: Callable[..., Any], name: str, formerly: Collection[str]) -> Any:
    """Return the operation of the recorded endpoints that are called ``name``.

    ``attempt`` is given the exchange, and a call. Raises ``RefusedError`` for a name that no operation can have.
    """
    return command(
        name=name, formerly=formerly, codec=CODEC, fingerprint=lambda exchange: exchange.received.fingerprint()
    )(attempt)
