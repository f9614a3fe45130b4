"""Recorded endpoints, without a framework: the endpoint is a command, and its answer is the command's result.

An answer is status, body, and the headers that describe the body. A cookie is never recorded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from email.message import Message
from enum import Enum
from hashlib import sha256
from typing import Any, Final, TypeVar
from uuid import UUID

from ..commands import AsyncCommands, Codec, Commands, ResultError, command
from ..commands.fingerprint import digest
from ..errors import HandlerDefinitionError, ProjectorDedupError


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

    def fingerprint(self) -> Mapping[str, object]:
        """Return what is compared: JSON as a value, a form by its parts, any other body byte by byte."""
        return {
            "method": self.method,
            "path": self.path,
            "query": sorted(self.query, key=lambda item: item[0]),  # those of one name stay in order
            "body": self._body(),
        }

    def _body(self) -> list[str]:
        kind = self.content_type.partition(";")[0].strip().lower()
        if kind == "application/json" or kind.endswith("+json"):
            try:
                return ["json", digest(json.loads(self.body)).hex()]
            except (ValueError, RecursionError):
                pass  # no JSON, or not a value that can be compared
        if kind == "multipart/form-data" and len(parts := self._parts()) > 1:
            return ["form", *(sha256(part).hexdigest() for part in parts)]
        return ["bytes", sha256(self.body).hexdigest()]

    def _parts(self) -> list[bytes]:
        """Return the body without its boundary, which clients choose anew whenever they encode a form."""
        header = Message()
        try:
            header["Content-Type"] = self.content_type
            boundary = (header.get_boundary() or "").encode("latin-1", "replace")
        except Exception:  # noqa: BLE001  # the client writes what it likes, and Python raises what it likes
            boundary = b""
        if not boundary:
            return [self.body]
        return re.split(rb"\r\n--" + re.escape(boundary) + rb"(?=--|[ \t]*\r\n)", b"\r\n" + self.body)


class NotCommittedError(ProjectorDedupError):
    """The endpoint has answered, and its COMMIT failed: what it had opened is left, before it runs again."""


class Unrecorded(Exception):  # noqa: N818  # it carries an answer through the unit of work, which rolls back
    """The endpoint has answered by a server error or "later": everything is rolled back, and nothing is recorded."""

    def __init__(self, response: Any) -> None:
        super().__init__(response)
        self.response = response


@dataclass(frozen=True)
class Recording:
    """How the answers of endpoints are recorded; the arguments of ``recorded_route`` and ``recorded_endpoint``."""

    scope: Callable[..., Any] | Public
    required: bool
    methods: frozenset[str]
    headers: frozenset[str]

    @classmethod
    def of(
        cls, scope: Callable[..., Any] | Public, required: bool, methods: Collection[str], headers: Collection[str]
    ) -> Recording:
        """Return the checked arguments. Raises ``HandlerDefinitionError``."""
        if scope is not PUBLIC and not callable(scope):
            raise HandlerDefinitionError(
                "scope is a function that returns whose key it is, such as the verified user's id; PUBLIC if any "
                "caller may see any other's answers"
            )
        chosen = frozenset(method.upper() for method in methods)
        if not chosen or chosen & {"GET", "HEAD", "OPTIONS", "TRACE"}:
            raise HandlerDefinitionError("methods are such that change something: POST, PATCH, PUT, DELETE")
        kept = frozenset(name.lower() for name in headers)
        if kept & NEVER_KEPT:
            raise HandlerDefinitionError(f"these headers are never recorded: {', '.join(sorted(kept & NEVER_KEPT))}")
        return cls(scope, required, chosen, kept | {name.lower() for name in KEPT})

    def answer(self, response: Any, status: int, headers: Iterable[tuple[str, str]], body: bytes | None) -> Answer:
        """Return the part of a response that is recorded; ``body`` is None if it is not there as a whole.

        Raises ``Unrecorded`` for a status of 500 or more and for one of ``LATER``, and ``ResultError`` for a stream.
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


def check_scope(value: object) -> str | UUID:
    """Return what ``scope`` has returned; raise ``HandlerDefinitionError`` if it would make strangers share keys."""
    if isinstance(value, UUID) or (isinstance(value, str) and value):
        return value
    raise HandlerDefinitionError(
        f"scope= returned {value if value == '' else type(value).__name__!r}, and a text or UUID is expected: whose "
        "key it is. Where there is no user, refuse the request; where nobody's answers are private, say scope=PUBLIC"
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
