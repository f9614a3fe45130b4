"""Commands, handled once: claim or recall, call the handler, record what it returned, and answer from the record.

``Commands`` and ``AsyncCommands`` do so in a transaction of their own, by ``delivery.deliver``; ``begin_command`` and
``abegin_command`` do so in a transaction that the caller owns and commits.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, Self, TypeVar

from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util import await_only, greenlet_spawn

from ..asyncio_names import AsyncSession, async_sessionmaker
from ..delivery import deliver
from ..dialects import dialect_of
from ..errors import HandlerDefinitionError
from ..handler import check_result
from ..markers import bind_of_marker, claim, marker_key
from ..message import printable
from ..options import RetryPolicy, UnitOptions, check_session_factory
from ..outcome import Outcome
from ..retry import Attempts
from ..unit_of_work import UnitOfWork
from ..waiting import AWAITING, BLOCKING
from .codecs import Codec, as_json, encoded, json
from .errors import DuplicateCommandError, InvalidKeyError, Rejected, ResultError, ResultUnreadableError
from .fingerprint import digest
from .operation import NO_RESULT, AsyncCall, AsyncCommand, Call, Command, Handled, Operation, Rejection, checked
from .record import (
    DEFAULT,
    REJECTED,
    RESULT,
    CommandTables,
    Record,
    RecordKey,
    default_command_tables,
    recalled,
    recalling,
    recording,
    recording_other_names,
)

logger = logging.getLogger("projector_dedup")

C = TypeVar("C")
R = TypeVar("R")

MAX_RESULT_BYTES = 64 * 1024

# One command as the work of one unit ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A caller's request: the operation, the command, its key, and what a record of it may hold."""

    operation: Operation[Any, Any]
    command: Any
    key: RecordKey | None
    fingerprint: bytes | None  #: None compares nothing
    tables: CommandTables
    max_result_bytes: int

    @classmethod
    def of(
        cls, operation: Operation[Any, Any], command: Any, key: RecordKey | None, tables: CommandTables, limit: int
    ) -> Asked:
        """Return what is asked for, with the fingerprint of the command if it has a key."""
        chosen = operation.settings.fingerprint
        fingerprint = None if key is None or chosen is None else digest(chosen(command))
        return cls(operation, command, key, fingerprint, tables, limit)

    def call(self, session: Any) -> Any:
        """Return what the handler is given beside the command."""
        key, scope = (None, None) if self.key is None else (self.key.key, self.key.scope)
        return (AsyncCall if self.operation.asynchronous else Call)(session, key, scope, self.operation.identity)

    def present(self, call: Any) -> Any:
        """Return what the operation's ``default`` says now; of an ``async def``, a coroutine that does."""
        default = self.operation.settings.default
        assert default is not None  # noqa: S101  # else a result was recorded
        returned = default(self.command, call)
        check_result(f"default= of {self.operation.identity}", returned, asynchronous=self.operation.asynchronous)
        return returned

    def record_of(self, returned: Any) -> Record:
        """Return the record of what the handler returned, or raise ``ResultError`` if it cannot be stored."""
        if isinstance(returned, Rejection):
            rejection = as_json({"code": returned.code, "detail": returned.detail})
            return Record(REJECTED, json.name, self._stored(json, rejection), self.fingerprint)
        if self.operation.settings.default is not None:
            return Record(DEFAULT, NO_RESULT.name, None, self.fingerprint)
        codec = self.operation.codec
        return Record(RESULT, codec.name, self._stored(codec, returned), self.fingerprint)

    def _stored(self, codec: Codec[Any], value: Any) -> bytes:
        identity = self.operation.identity
        try:
            data = encoded(codec, value, f"{identity} returned {type(value).__name__}")
        except ResultError as error:
            raise ResultError(f"{error}; nothing was applied") from error.__cause__
        if len(data) > self.max_result_bytes:
            raise ResultError(
                f"the result of {identity} takes {len(data)} bytes, and {self.max_result_bytes} are allowed; nothing "
                "was applied. Return an id of what was made, or give Commands(max_result_bytes=...)"
            )
        return data


class Once:
    """A command that is claimed, handled and recorded; or recalled, if it was handled before."""

    connected = True

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.identity = asked.operation.identity
        self.marked = asked.key is not None
        self.record: Record | None = None  # None as long as nothing has run, and without a key
        self.returned: Any = None  # by the handler, if it ran
        self.replayed = False
        self.in_doubt = False  # True: a COMMIT without an answer may have recorded the command

    @property
    def is_answered_anew(self) -> bool:
        """True if the command was handled before, and its operation's ``default`` makes the answer."""
        return self.replayed and self.record is not None and self.record.outcome == DEFAULT

    def claim(self, uow: UnitOfWork) -> bool:
        """Begin with the claim, and return True if the command must run; else keep the record that is there."""
        self._uow, self.record, self.replayed = uow, None, False
        asked = self.asked
        if asked.key is None:
            uow.begin()
            return True
        stored, names = asked.key.stored, asked.operation.names
        recall = recalling(asked.tables, stored, names)
        if uow.claim_key(marker_key(stored, self.identity), names[1:], recall=recall):
            self.in_doubt = False  # the claim was free: that COMMIT did not happen
            return True
        self.record, self.replayed = recalled(recall.row, asked.fingerprint, asked.key, self.identity), True
        return False

    def calls(self, uow: UnitOfWork) -> Iterator[Callable[[], Any]]:
        """Yield the one call of the handler, which records what it returns."""
        call = self.asked.call(uow.handlers_session)
        yield (lambda: self._awaited(call)) if self.asked.operation.asynchronous else (lambda: self._called(call))

    def _called(self, call: Any) -> None:
        self._take(self.asked.operation.function(self.asked.command, call))

    async def _awaited(self, call: Any) -> None:
        self._take(await self.asked.operation.function(self.asked.command, call))

    def _take(self, returned: Any) -> None:
        check_result(self.identity, returned, asynchronous=False)
        self.returned = returned
        if self.asked.key is not None:
            self._record(self.asked.record_of(returned))

    def _record(self, record: Record) -> None:
        """Have the record written by the last statement of the transaction."""
        asked, dialect = self.asked, self._uow.dialect
        assert asked.key is not None  # noqa: S101  # else nothing is recorded
        assert dialect is not None  # noqa: S101  # else nothing was claimed
        self.record = record
        self._uow.last = recording(dialect, asked.tables, asked.key.stored, asked.operation.names, record)

    def log_settled(self, attempts: Attempts) -> None:
        """Log the outcome: at INFO if the command was handled before, else at DEBUG."""
        outcome, level = (Outcome.DUPLICATE, logging.INFO) if self.replayed else (Outcome.APPLIED, logging.DEBUG)
        if logger.isEnabledFor(level):
            after_unknown = self.replayed and self.in_doubt
            told = f"{outcome.value}{' (after_unknown_commit)' if after_unknown else ''}"
            extra = self._extra(outcome.value, attempts) | {"after_unknown_commit": after_unknown}
            logger.log(level, "%s: %s", told, self._told(), extra=extra)

    def log_retry(self, error: Exception, attempts: Attempts) -> None:
        """Log at INFO that the command is tried again, and after which error; note whether its outcome is in doubt."""
        if attempts.unknown is error:
            self.in_doubt = self.record is not None
        extra = self._extra("retry", attempts)
        logger.info("retry after %s: %s", type(error).__name__, self._told(), extra=extra)

    def _told(self) -> str:
        key = "without a key" if self.asked.key is None else printable(self.asked.key.stored)
        return f"command {key}, operation {printable(self.identity)}"

    def _extra(self, outcome: str, attempts: Attempts) -> dict[str, Any]:
        return {"operation": printable(self.identity), "outcome": outcome, "attempts": attempts.number}


class Refused(Once):
    """A command that its handler has rejected by raising: claimed again, and recorded without running the handler.

    If somebody else has recorded an outcome meanwhile, that one counts: the handler's own writes were rolled back.
    """

    def __init__(self, asked: Asked, rejected: Rejected) -> None:
        super().__init__(asked)
        self._rejection = Rejection(rejected.code, rejected.detail)

    def calls(self, uow: UnitOfWork) -> Iterator[Callable[[], Any]]:  # noqa: ARG002  # as Once
        """Record the rejection, and yield no call: the handler has run before."""
        self._take(self._rejection)
        yield from ()


class Present(Once):
    """The present answer to a command that was handled before, by its operation's ``default``; nothing is claimed."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self.marked = False

    def claim(self, uow: UnitOfWork) -> bool:
        """Open a transaction, and claim nothing."""
        self._uow = uow
        uow.begin()
        return True

    def _called(self, call: Any) -> None:
        self.returned = self.asked.present(call)

    async def _awaited(self, call: Any) -> None:
        self.returned = await self.asked.present(call)


# The answer of a record -----------------------------------------------------------------------------------------------


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


# In a transaction of their own ----------------------------------------------------------------------------------------


class _Handling:
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
        if work.is_answered_anew:
            present = Present(asked)
            self._deliver(present, options)
            work.returned = present.returned
        answer = handled(work, durable=durable)
        if raise_on_duplicate and work.replayed:
            told = "" if asked.key is None else printable(asked.key.key)
            raise DuplicateCommandError(f"the command {told} of {work.identity} was handled before", answer)
        return answer

    def _deliver(self, work: Once, options: UnitOptions) -> bool:
        return deliver(work, self._factory, options, self._policy, AWAITING if self._asynchronous else BLOCKING)


class Commands(_Handling):
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


class AsyncCommands(_Handling):
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


# In a transaction of the caller's -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begun(Generic[R]):
    """A command that was claimed in the caller's transaction: do it, ``record`` its result, and commit."""

    call: Call
    _asked: Asked

    def record(self, result: Any) -> Handled[R]:
        """Record the result, or a ``Rejection``, in the caller's transaction; return what later callers will get.

        Call it behind everything that the command writes. Raises ``ResultError`` for what cannot be recorded, upon
        which the caller rolls back.
        """
        return _record(self.call.session, self._asked, result)


@dataclass(frozen=True)
class AsyncBegun(Generic[R]):
    """A command that was claimed in the caller's transaction, of an ``AsyncSession``. See ``Begun``."""

    call: AsyncCall
    _asked: Asked

    async def record(self, result: Any) -> Handled[R]:
        """Record the result, or a ``Rejection``, in the caller's transaction. See ``Begun.record``."""
        return await self.call.session.run_sync(_record, self._asked, result)


def begin_command(
    session: Session,
    operation: Command[C, R],
    command: C,
    *,
    key: object,
    scope: object = None,
    tables: CommandTables = default_command_tables,
    max_result_bytes: int = MAX_RESULT_BYTES,
) -> Begun[R] | Handled[R]:
    """Claim a command in a transaction that the caller owns and commits.

    Returns ``Begun`` if it is new: do what it asks for, ``begun.record(result)``, and commit. Returns the recorded
    answer if it was handled before, or what the operation's ``default`` returns: commit then, too. A concurrent caller
    with the same key waits; at REPEATABLE READ and above the loser gets a serialization failure, upon which the caller
    runs the whole transaction again.

    Nothing watches what else happens in the transaction; that, and retries, are what ``Commands`` adds. Raises what
    ``claim()`` raises, ``KeyReusedError``, ``InvalidKeyError`` and ``ResultUnreadableError``. The caller rolls back
    upon each: a commit could leave a claim without an answer under the new name of an operation with ``formerly=``.
    """
    checked(operation, asynchronous=False, by="begin_command()", other="abegin_command()")
    asked = _asked(operation, command, key, scope, tables, max_result_bytes)
    answer = _begin(session, asked, session)
    return Begun(asked.call(session), asked) if answer is None else answer


async def abegin_command(
    session: AsyncSession,
    operation: AsyncCommand[C, R],
    command: C,
    *,
    key: object,
    scope: object = None,
    tables: CommandTables = default_command_tables,
    max_result_bytes: int = MAX_RESULT_BYTES,
) -> AsyncBegun[R] | Handled[R]:
    """Claim a command in a transaction of an ``AsyncSession``, such as that of an ``async def`` projector.

    Takes an ``async def`` operation. Returns ``AsyncBegun``, whose ``record`` is awaited, or the answer. Raises what
    ``begin_command`` raises.
    """
    checked(operation, asynchronous=True, by="abegin_command()", other="begin_command()")
    asked = _asked(operation, command, key, scope, tables, max_result_bytes)
    answer = await session.run_sync(_begin, asked, session)
    return AsyncBegun(asked.call(session), asked) if answer is None else answer


def _asked(
    operation: Operation[Any, Any], command: Any, key: object, scope: object, tables: CommandTables, limit: int
) -> Asked:
    if key is None:
        raise InvalidKeyError("begin_command() records a command under a key: give key=")
    return Asked.of(operation, command, RecordKey.of(key, scope), tables, limit)


def _begin(session: Session, asked: Asked, callers: Session | AsyncSession) -> Handled[Any] | None:
    """Claim the command; return None if it is new, else the recorded answer. ``callers`` is for ``default``."""
    key, names = asked.key, asked.operation.names
    assert key is not None  # noqa: S101  # _asked() takes no command without
    if claim(session, key.stored, asked.operation.identity, formerly=names[1:], tables=asked.tables):
        return None
    connection = session.connection(bind_arguments={"bind": bind_of_marker(session, asked.tables)})
    recall = recalling(asked.tables, key.stored, names)
    recall.run(connection)
    work = Once(asked)
    work.record, work.replayed = recalled(recall.row, asked.fingerprint, key, asked.operation.identity), True
    if len(names) > 1:  # the caller commits what the claim inserted under other names
        recording_other_names(asked.tables, key.stored, names, work.record).run(connection)
    if work.is_answered_anew:
        present = asked.present(asked.call(callers))
        work.returned = await_only(present) if asked.operation.asynchronous else present
    return handled(work, durable=False)


def _record(session: Session, asked: Asked, result: Any) -> Handled[Any]:
    work, key = Once(asked), asked.key
    assert key is not None  # noqa: S101  # _asked() takes no command without
    work.returned, work.record = result, asked.record_of(result)
    session.flush()
    connection = session.connection(bind_arguments={"bind": bind_of_marker(session, asked.tables)})
    recording(dialect_of(connection), asked.tables, key.stored, asked.operation.names, work.record).run(connection)
    return handled(work, durable=False)
