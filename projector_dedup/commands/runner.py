"""``Commands`` and ``AsyncCommands``: handle a command once, and give everybody who asks again the recorded answer."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Literal, Self, TypeVar

from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util import greenlet_spawn

from ..asyncio_names import AsyncSession, async_sessionmaker
from ..delivery import deliver
from ..errors import HandlerDefinitionError
from ..message import printable
from ..options import RetryPolicy, UnitOptions, check_session_factory
from ..outcome import Outcome
from ..waiting import AWAITING, BLOCKING
from .codecs import as_json, json
from .errors import DuplicateCommandError, InvalidKeyError, Rejected, ResultUnreadableError
from .handled import Handled, Rejection
from .handler import AsyncCommand, Command, Operation, checked
from .record import DEFAULT, REJECTED, Record, RecordKey
from .tables import CommandTables, default_command_tables
from .work import Asked, Once, Present, Refused

C = TypeVar("C")
R = TypeVar("R")

MAX_RESULT_BYTES = 64 * 1024


class _Settings:
    """The part that both share: what a command is asked for with, and what its record means."""

    _asynchronous: bool

    def __init__(
        self,
        session_factory: Any,
        *,
        tables: CommandTables = default_command_tables,
        scope: Literal["required", "optional"] = "optional",
        retry: RetryPolicy | None = None,
        claim_timeout: float | None = None,
        isolation: str | None = None,
        strict: bool = False,
        max_result_bytes: int = MAX_RESULT_BYTES,
    ) -> None:
        check_session_factory(session_factory, asynchronous=self._asynchronous)
        if scope not in ("required", "optional"):
            raise ValueError(f"scope is 'required' or 'optional', not {scope!r}")
        if not isinstance(tables, CommandTables):
            raise ValueError(
                "tables are those of make_command_tables(), which have columns for results; make_tables() has not"
            )
        self._factory = session_factory
        self._tables = tables
        self._scope_required = scope == "required"
        self._policy = retry or RetryPolicy()
        self._options = UnitOptions(tables, claim_timeout, isolation, strict=strict)
        self._max_result_bytes = max_result_bytes

    def bounded(self, claim_timeout: float) -> Self:
        """Return the same commands with this ``claim_timeout``, in seconds; those that have one are returned as is."""
        if self._options.claim_timeout is not None:
            return self
        within = copy.copy(self)
        within._options = dataclasses.replace(self._options, claim_timeout=claim_timeout)
        return within

    def permit_external_transaction(self, permitted: bool) -> bool:
        """Permit or forbid an outer transaction, for ``testing.external_transaction``; return the setting before."""
        before = self._options.external
        self._options = dataclasses.replace(self._options, external=permitted)
        return before

    def _asked(self, given: object, command: Any, key: object, scope: object) -> tuple[Asked, UnitOptions]:
        other = "Commands" if self._asynchronous else "AsyncCommands"
        operation = checked(given, asynchronous=self._asynchronous, by="handle()", other=other)
        if key is None and operation.settings.key_required:
            raise InvalidKeyError(f"{operation.identity} is a @command(key='required'): give key=")
        if scope is None and key is not None and self._scope_required:
            raise HandlerDefinitionError(  # of the program, and not of the command
                f"{operation.identity} was called without a scope, so that two tenants with one key would share an "
                "answer; give scope=, such as the tenant or the user"
            )
        own = operation.settings
        options = self._options
        if own.read_models or own.isolation:
            options = dataclasses.replace(
                options, read_models=own.read_models, isolation=own.isolation or options.isolation
            )
        record_key = None if key is None else RecordKey.of(key, scope)
        return Asked.of(operation, command, record_key, self._tables, self._max_result_bytes), options

    def _handle(
        self, operation: object, command: Any, key: object, scope: object, raise_on_duplicate: bool
    ) -> Handled[Any]:
        asked, options = self._asked(operation, command, key, scope)
        work = Once(asked)
        try:
            durable = self._deliver(work, options)
        except Rejected as rejected:
            work = Refused(asked, rejected)
            durable = self._deliver(work, options)
        if work.replayed and work.record is not None and work.record.outcome == DEFAULT:
            present = Present(asked)
            self._deliver(present, options)
            work.returned = present.returned
        answer = handled(work, durable=durable)
        return _refuse_duplicate(work, answer) if raise_on_duplicate else answer

    def _deliver(self, work: Once, options: UnitOptions) -> bool:
        return deliver(work, self._factory, options, self._policy, AWAITING if self._asynchronous else BLOCKING)


def handled(work: Once, *, durable: bool) -> Handled[Any]:
    """Return what a caller gets: the answer of the record, which is the same for the first and for every later one.

    Raises ``ResultUnreadableError`` for a record that this code cannot read.
    """
    outcome, record = (Outcome.DUPLICATE if work.replayed else Outcome.APPLIED), work.record
    if record is None or record.outcome == DEFAULT:
        returned = work.returned
        if isinstance(returned, Rejection):
            told = Rejection(as_json(returned.code), as_json(returned.detail))  # as if it had been recorded
            return Handled(outcome, None, told, durable=durable)
        return Handled(outcome, returned, recorded_at=record.recorded_at if record else None, durable=durable)
    value = _read(work.asked.operation, record)
    if record.outcome == REJECTED:
        return Handled(outcome, None, Rejection(value["code"], value["detail"]), record.recorded_at, durable)
    return Handled(outcome, value, None, record.recorded_at, durable)


def _read(operation: Operation[Any, Any], record: Record) -> Any:
    codecs = [json] if record.outcome == REJECTED else operation.codecs_called(record.codec)
    if not codecs or record.data is None:
        raise ResultUnreadableError(
            f"a result of {operation.identity} was stored by the codec {printable(str(record.codec))}, which this code "
            "does not have; the command was handled, and does not run again. Give @command(older_codecs=[...])",
            record.data,
        )
    reasons: list[Exception] = []
    for codec in codecs:
        try:
            return codec.loads(record.data)
        except Exception as error:  # noqa: BLE001  # a codec of the user's raises what it likes
            reasons.append(error)
    why = str(reasons[0]) if isinstance(reasons[0], ResultUnreadableError) else type(reasons[0]).__name__
    raise ResultUnreadableError(
        f"a result of {operation.identity} cannot be read by the codec {codecs[0].name} ({why}); the command was "
        "handled, and does not run again. Give @command(older_codecs=[...]) a codec of the same name that reads it",
        record.data,
    ) from reasons[0]


def _refuse_duplicate(work: Once, answer: Handled[R]) -> Handled[R]:
    """Return the answer of a command that was not handled before; raise ``DuplicateCommandError`` for any other."""
    if work.replayed:
        key = work.asked.key
        raise DuplicateCommandError(
            f"the command {printable('' if key is None else key.key)} of {work.identity} was handled before", answer
        )
    return answer


class Commands(_Settings):
    """Handles commands, each in a transaction of its own together with the record of its outcome.

    Threads may share it. ``session_factory`` is a ``sessionmaker`` on one engine; ``tables`` is the result of
    ``make_command_tables``. ``scope="required"`` refuses calls that name no scope. ``retry`` bounds how often and how
    long an attempt is repeated. ``claim_timeout`` is the longest wait, in seconds, for another caller with the same
    key; ``InProgress`` is raised then. ``isolation`` and ``strict`` are those of ``Dispatcher``. ``max_result_bytes``
    bounds what is recorded.

    Raises ``UnsafeSessionError`` for a session factory that does not fit, ``ValueError`` for any other wrong argument.
    """

    _asynchronous = False
    _factory: sessionmaker[Session]

    def handle(
        self,
        operation: Command[C, R],
        command: C,
        *,
        key: object,
        scope: object = None,
        raise_on_duplicate: bool = False,
    ) -> Handled[R]:
        """Handle a command once. **It returns only if an outcome is recorded**; otherwise it raises.

        ``key`` is a text or UUID of the caller's, the same whenever the same command is asked for again; with None
        nothing is recorded. ``scope`` says whose key it is: a tenant, a user. Of several callers with one key, one runs
        the handler and the others wait; all get the recorded answer. With ``raise_on_duplicate`` those others get
        ``DuplicateCommandError``.

        Raises ``KeyReusedError`` if the key came with another command before, ``InvalidKeyError``, ``ResultError`` if
        the result cannot be recorded, ``ResultUnreadableError``, and what ``Dispatcher.deliver`` raises. A rejection is
        an outcome: it is returned, and ``.result`` raises it.
        """
        return self._handle(operation, command, key, scope, raise_on_duplicate)


class AsyncCommands(_Settings):
    """Handles commands by ``async def`` handlers. Tasks of one event loop may share it. See ``Commands``."""

    _asynchronous = True
    _factory: async_sessionmaker[AsyncSession]

    async def handle(
        self,
        operation: AsyncCommand[C, R],
        command: C,
        *,
        key: object,
        scope: object = None,
        raise_on_duplicate: bool = False,
    ) -> Handled[R]:
        """Handle a command once. **It returns only if an outcome is recorded**; otherwise it raises.

        Takes, returns and raises what ``Commands.handle`` does. A cancellation leaves the command handled or not
        handled, and nothing in between.
        """
        return await greenlet_spawn(self._handle, operation, command, key, scope, raise_on_duplicate)
