"""Handle commands once: claim the key or read its record, call the handler, record the result, and return it.

``Commands`` and ``AsyncCommands`` use their own transaction (``delivery.deliver``). ``begin_command`` and
``abegin_command`` use a transaction that the caller owns and commits.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Self, TypeVar

from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util import await_only, greenlet_spawn

from ..asyncio_names import AsyncSession, async_sessionmaker
from ..delivery import deliver
from ..dialects import Dialect, dialect_of
from ..errors import HandlerDefinitionError
from ..handler import check_result
from ..markers import bind_of_marker, claim, marker_key
from ..message import logger_of, printable
from ..observer import Observed, Observer, Observing, outcome_of
from ..options import NamedInErrors, RetryPolicy, UnitOptions, check_session_factory
from ..outcome import Outcome
from ..own_event import Originals
from ..retry import Attempts
from ..unit_of_work import UnitOfWork
from ..waiting import AWAITING, BLOCKING
from .codecs import Codec, as_json, encoded, json
from .errors import (
    DuplicateCommandError,
    Handled,
    InvalidKeyError,
    Rejected,
    Rejection,
    ResultError,
    ResultUnreadableError,
)
from .fingerprint import digest
from .lock import keys_of, take
from .operation import NO_RESULT, AsyncCall, AsyncCommand, Call, Command, Operation, checked
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

logger = logger_of("projector_dedup")

C = TypeVar("C")
R = TypeVar("R")

MAX_RESULT_BYTES = 64 * 1024

# One command as the work of one unit ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A caller's request: the operation, the command, its key, and the limits of its record."""

    operation: Operation[Any, Any]
    command: Any
    key: RecordKey | None
    fingerprint: bytes | None  #: None compares nothing
    locks: tuple[str, ...]  #: the rows to lock, as they are stored
    tables: CommandTables
    max_result_bytes: int
    originals: Originals = field(default_factory=Originals)

    @classmethod
    def of(
        cls, operation: Operation[Any, Any], command: Any, key: RecordKey | None, tables: CommandTables, limit: int
    ) -> Asked:
        """Return the request, with the fingerprint of the command if it has a key."""
        chosen = operation.settings.fingerprint
        fingerprint = None if key is None or chosen is None else digest(chosen(command))
        locks = keys_of(operation.identity, operation.settings.lock, command, None if key is None else key.scope)
        return cls(operation, command, key, fingerprint, locks, tables, limit)

    def lock(self, connection: Connection, dialect: Dialect, wait: float | None) -> None:
        """Lock the rows that the operation names."""
        take(connection, dialect, self.tables, self.locks, wait)

    def call(self, session: Any) -> Any:
        """Return the second argument of the handler."""
        key, scope = (None, None) if self.key is None else (self.key.key, self.key.scope)
        return (AsyncCall if self.operation.asynchronous else Call)(session, key, scope, self.operation.identity)

    def own_command(self) -> Any:
        """Return a command that no handler, and no earlier attempt, has changed."""
        return self.originals.copy_of(self.command)

    def present(self, call: Any) -> Any:
        """Return what the operation's ``default`` returns now (a coroutine for an ``async def``)."""
        default = self.operation.settings.default
        assert default is not None  # noqa: S101  # otherwise a result was recorded
        returned = default(self.own_command(), call)
        check_result(f"default= of {self.operation.identity}", returned, asynchronous=self.operation.asynchronous)
        return returned

    def record_of(self, returned: Any) -> Record:
        """Return the record of the handler's result. Raises ``ResultError`` if the result cannot be stored."""
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
                f"the result of {identity} has {len(data)} bytes, and at most {self.max_result_bytes} are allowed; "
                "nothing was applied. Return an id instead of the whole object, or give Commands(max_result_bytes=...)"
            )
        return data


class Once:
    """The work of a command: claim, handle and record it, or read its record if it was handled before."""

    connected = True

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.identity = asked.operation.identity
        self.marked = asked.key is not None
        self.record: Record | None = None  # None until the handler has run, and always without a key
        self.returned: Any = None  # what the handler returned, if it ran
        self.replayed = False
        self.in_doubt = False  # True: a COMMIT without an answer may have recorded the command
        self._waited = 0.0  # seconds for locks, in attempts that did not get all of them

    @property
    def is_answered_anew(self) -> bool:
        """True if the command was handled before, and its operation's ``default`` makes the answer."""
        return self.replayed and self.record is not None and self.record.outcome == DEFAULT

    def claim(self, uow: UnitOfWork) -> bool:
        """Begin with the claim. Return True if the command must run, else keep the record that was found."""
        self._uow, self.record, self.replayed = uow, None, False
        asked = self.asked
        if asked.key is None:
            uow.begin()
            return True
        stored, names = asked.key.stored, asked.operation.names
        recall = recalling(asked.tables, stored, names)
        first = self._lock if asked.locks else None
        if uow.claim_key(marker_key(stored, self.identity), names[1:], first=first, recall=recall):
            self.in_doubt = False  # the claim found no record, so the interrupted COMMIT did not happen
            self._waited = 0.0
            return True
        self.record, self.replayed = recalled(recall.row, asked.fingerprint, asked.key, self.identity), True
        return False

    def _lock(self, connection: Connection, dialect: Dialect, wait: float | None) -> None:
        """Take the locks. ``wait`` bounds the waits of all attempts, of which the first ones got some of the locks."""
        began = time.monotonic()
        try:
            self.asked.lock(connection, dialect, None if wait is None else max(wait - self._waited, 0.001))
        finally:
            self._waited += time.monotonic() - began

    def calls(self, uow: UnitOfWork) -> Iterator[Callable[[], Any]]:
        """Yield the only call of the handler. It also records the result."""
        call = self.asked.call(uow.handlers_session)
        yield (lambda: self._awaited(call)) if self.asked.operation.asynchronous else (lambda: self._called(call))

    def _called(self, call: Any) -> None:
        self._take(self.asked.operation.function(self.asked.own_command(), call))

    async def _awaited(self, call: Any) -> None:
        self._take(await self.asked.operation.function(self.asked.own_command(), call))

    def _take(self, returned: Any) -> None:
        check_result(self.identity, returned, asynchronous=False)
        self.returned = returned
        if self.asked.key is not None:
            self._record(self.asked.record_of(returned))

    def _record(self, record: Record) -> None:
        """Let the last statement of the transaction write the record."""
        asked, dialect = self.asked, self._uow.dialect
        assert asked.key is not None  # noqa: S101  # otherwise the library records nothing
        assert dialect is not None  # noqa: S101  # otherwise the command was not claimed
        self.record = record
        self._uow.last = recording(dialect, asked.tables, asked.key.stored, asked.operation.names, record)

    def log_settled(self, attempts: Attempts) -> None:
        """Log the outcome: at INFO if the command was handled before, else at DEBUG."""
        outcome, level = (Outcome.DUPLICATE, logging.INFO) if self.replayed else (Outcome.APPLIED, logging.DEBUG)
        if logger.isEnabledFor(level):
            after_unknown = self.replayed and self.in_doubt
            what = f"{outcome.value}{' (after_unknown_commit)' if after_unknown else ''}"
            extra = self._extra(outcome.value, attempts) | {"after_unknown_commit": after_unknown}
            logger.log(level, "%s: %s", what, self._label(), extra=extra)

    def log_retry(self, error: Exception, attempts: Attempts) -> None:
        """Log the retry and its cause at INFO. Note whether the outcome of the command is in doubt."""
        if attempts.unknown is error:
            self.in_doubt = self.record is not None
        extra = self._extra("retry", attempts)
        logger.info("retry after %s: %s", type(error).__name__, self._label(), extra=extra)

    def _label(self) -> str:
        key = "without a key" if self.asked.key is None else printable(self.asked.key.stored)
        return f"command {key}, operation {printable(self.identity)}"

    def _extra(self, outcome: str, attempts: Attempts) -> dict[str, Any]:
        return {"operation": printable(self.identity), "outcome": outcome, "attempts": attempts.number}


class Refused(Once):
    """The work after a handler raised ``Rejected``: claim the command again, and record the rejection.

    If another caller has recorded an outcome meanwhile, that outcome counts, because the handler's own writes were
    rolled back.
    """

    def __init__(self, asked: Asked, rejected: Rejected) -> None:
        super().__init__(asked)
        self._rejection = Rejection(rejected.code, rejected.detail)

    def calls(self, uow: UnitOfWork) -> Iterator[Callable[[], Any]]:  # noqa: ARG002  # as Once
        """Record the rejection. Yield no call, because the handler has already run."""
        self._take(self._rejection)
        yield from ()


class Present(Once):
    """The work of ``default=``: make the answer to a command that was handled before, without a claim."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self.marked = False

    def claim(self, uow: UnitOfWork) -> bool:
        """Open a transaction without a claim."""
        self._uow = uow
        uow.begin()
        return True

    def _called(self, call: Any) -> None:
        self.returned = self.asked.present(call)

    async def _awaited(self, call: Any) -> None:
        self.returned = await self.asked.present(call)


# The answer of a record -----------------------------------------------------------------------------------------------


def handled(work: Once, *, durable: bool) -> Handled[Any]:
    """Return the answer to a caller, from the record, so that it is the same for the first and every later caller.

    Raises ``ResultUnreadableError`` for a record that this code cannot read.
    """
    outcome, record = (Outcome.DUPLICATE if work.replayed else Outcome.APPLIED), work.record
    if record is None or record.outcome == DEFAULT:
        returned = work.returned
        if isinstance(returned, Rejection):
            rejection = Rejection(as_json(returned.code), as_json(returned.detail))  # as if it had been recorded
            return Handled(outcome, None, rejection, durable=durable)
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
            "does not have; the command was handled, and does not run again. Add the codec to "
            "@command(older_codecs=[...])",
            record.data,
        )
    reasons: list[Exception] = []
    for codec in codecs:
        try:
            return codec.loads(record.data)
        except Exception as error:  # noqa: BLE001  # a user's codec may raise any error
            reasons.append(error)
    why = str(reasons[0]) if isinstance(reasons[0], ResultUnreadableError) else type(reasons[0]).__name__
    raise ResultUnreadableError(
        f"the codec {codecs[0].name} cannot read a result of {operation.identity} ({why}); the command was handled, "
        "and does not run again. Add a codec with the same name that can read it to @command(older_codecs=[...])",
        record.data,
    ) from reasons[0]


# In a transaction of their own ----------------------------------------------------------------------------------------


class _Handling(NamedInErrors):
    """The part that ``Commands`` and ``AsyncCommands`` share."""

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
        observer: Observer | None = None,
    ) -> None:
        check_session_factory(session_factory, asynchronous=self._asynchronous)
        if scope not in ("required", "optional"):
            raise ValueError(f"scope must be 'required' or 'optional', not {scope!r}")
        if not isinstance(tables, CommandTables):
            raise ValueError(
                "tables must come from make_command_tables(), whose tables have columns for results, not make_tables()"
            )
        self._factory = session_factory
        self._tables = tables
        self._scope_required = scope == "required"
        self._policy = retry or RetryPolicy()
        self._options = UnitOptions(tables, claim_timeout, isolation, strict=strict)
        self._max_result_bytes = max_result_bytes
        self._observing = None if observer is None else Observing(observer)

    def bounded(self, claim_timeout: float) -> Self:
        """Return the same commands with this ``claim_timeout`` (seconds), or unchanged if they already have one."""
        if self._options.claim_timeout is not None:
            return self
        within = copy.copy(self)
        within._options = dataclasses.replace(self._options, claim_timeout=claim_timeout)
        return within

    def permit_external_transaction(self, permitted: bool) -> bool:
        """Permit or forbid an outer transaction, and return the previous setting. For ``external_transaction``."""
        before = self._options.external
        self._options = dataclasses.replace(self._options, external=permitted)
        return before

    def _asked(self, given: object, command: Any, key: object, scope: object) -> tuple[Asked, UnitOptions]:
        other = "Commands" if self._asynchronous else "AsyncCommands"
        operation = checked(given, asynchronous=self._asynchronous, by="handle()", other=other)
        if key is None and (operation.settings.key_required or operation.settings.lock):
            why = "key='required'" if operation.settings.key_required else "lock=..."
            raise InvalidKeyError(f"{operation.identity} is a @command({why}), so it needs a key; give handle() a key=")
        if scope is None and key is not None and self._scope_required:
            raise HandlerDefinitionError(  # a bug of the program, not an error of the command
                f"{operation.identity} was called without a scope, so two tenants with the same key would share an "
                "answer; give handle() a scope=, such as the tenant or the user"
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
        began = time.monotonic()
        try:
            answer = self._answer(asked, options)
        except Exception as error:
            self._report(outcome_of(error), asked, began, error)
            raise
        replayed = answer.outcome is Outcome.DUPLICATE
        rejected = answer.rejection is not None
        self._report("duplicate" if replayed else "rejected" if rejected else "applied", asked, began)
        if raise_on_duplicate and replayed:
            key_text = "" if asked.key is None else printable(asked.key.key)
            raise DuplicateCommandError(
                f"the command {key_text} of {asked.operation.identity} was handled before", answer
            )
        return answer

    def _report(self, outcome: Observed, asked: Asked, began: float, error: Exception | None = None) -> None:
        if self._observing is not None:
            key = None if asked.key is None else asked.key.key
            self._observing.report_call("command", outcome, asked.operation.identity, key, began, 1, error)

    def _answer(self, asked: Asked, options: UnitOptions) -> Handled[Any]:
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
        return handled(work, durable=durable)

    def _deliver(self, work: Once, options: UnitOptions) -> bool:
        return deliver(work, self._factory, options, self._policy, AWAITING if self._asynchronous else BLOCKING)


class Commands(_Handling):
    """Handles each command once, in its own transaction together with the record of its outcome.

    Threads may share the object. ``projector_dedup.options`` describes the arguments.
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
        """Handle a command once. **If it returns, the outcome is recorded**; otherwise it raises.

        If several callers use the same key, one runs the handler and the others wait. All get the recorded answer.

        - ``operation``: a function with ``@command``.
        - ``command``: the first argument of the function.
        - ``key``: the caller's text or UUID, the same in every retry of the same command. With None the library records
          nothing, and a retry runs the command again.
        - ``scope``: the owner of the key, such as a tenant or a user.
        - ``raise_on_duplicate``: True raises ``DuplicateCommandError`` instead of returning the recorded answer.

        Returns a ``Handled``. A rejection is returned too, and ``.result`` raises it as ``Rejected``.

        Raises ``KeyReusedError`` if the key was used for another command, ``InvalidKeyError``, ``ResultError`` if the
        result cannot be recorded, ``ResultUnreadableError``, and the errors of ``Dispatcher.deliver``.
        """
        return self._handle(operation, command, key, scope, raise_on_duplicate)


class AsyncCommands(_Handling):
    """Handles commands with ``async def`` handlers. Tasks of one event loop may share the object. See ``Commands``."""

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
        """Handle a command once. **If it returns, the outcome is recorded**; otherwise it raises.

        The arguments, the result and the errors are those of ``Commands.handle``. If the task is cancelled, the command
        is handled completely or not at all.
        """
        return await greenlet_spawn(self._handle, operation, command, key, scope, raise_on_duplicate)


# In a transaction of the caller's -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begun(Generic[R]):
    """A new command in the caller's transaction: run it, call ``record`` with its result, and commit."""

    call: Call
    _asked: Asked

    def record(self, result: Any) -> Handled[R]:
        """Record the result, or a ``Rejection``, in your transaction. Return the answer that later callers will get.

        Call it after all writes of the command. Raises ``ResultError`` if the result cannot be recorded. Roll back
        then.
        """
        return _record(self.call.session, self._asked, result)


@dataclass(frozen=True)
class AsyncBegun(Generic[R]):
    """A new command in the caller's transaction of an ``AsyncSession``. See ``Begun``."""

    call: AsyncCall
    _asked: Asked

    async def record(self, result: Any) -> Handled[R]:
        """Record the result, or a ``Rejection``, in your transaction. See ``Begun.record``."""
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
    """Claim a command in your own transaction, which you commit.

    Returns ``Begun`` if the command is new: run it, call ``begun.record(result)``, and commit. Returns a ``Handled``
    with the recorded answer (or with the result of ``default=``) if it was handled before: commit then too. A
    concurrent caller with the same key waits. At REPEATABLE READ and above, the waiting transaction then fails with a
    serialization error; run the whole transaction again. The arguments are those of ``Commands.handle``.

    ``begin_command`` checks nothing else in the transaction and does not retry; ``Commands`` does both.

    Raises the errors of ``claim()``, ``KeyReusedError``, ``InvalidKeyError`` and ``ResultUnreadableError``. Roll back
    after each: a COMMIT could leave a claim without an answer under the new name of an operation with ``formerly=``.
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
    """Claim a command in your own transaction of an ``AsyncSession``, such as that of an ``async def`` projector.

    ``operation`` is an ``async def``. Returns an ``AsyncBegun``, whose ``record`` you await, or the recorded answer.
    The errors are those of ``begin_command``.
    """
    checked(operation, asynchronous=True, by="abegin_command()", other="begin_command()")
    asked = _asked(operation, command, key, scope, tables, max_result_bytes)
    answer = await session.run_sync(_begin, asked, session)
    return AsyncBegun(asked.call(session), asked) if answer is None else answer


def _asked(
    operation: Operation[Any, Any], command: Any, key: object, scope: object, tables: CommandTables, limit: int
) -> Asked:
    if key is None:
        raise InvalidKeyError("begin_command() records a command under its key; give key=")
    if operation.settings.lock is not None:
        raise HandlerDefinitionError(
            f"{operation.identity} is a @command(lock=...), which must wait before its transaction reads anything; "
            "use Commands.handle for it"
        )
    return Asked.of(operation, command, RecordKey.of(key, scope), tables, limit)


def _begin(session: Session, asked: Asked, callers: Session | AsyncSession) -> Handled[Any] | None:
    """Claim the command. Return None if it is new, else the recorded answer. ``default`` gets ``callers``."""
    key, names = asked.key, asked.operation.names
    assert key is not None  # noqa: S101  # _asked() refuses a command without a key
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
    assert key is not None  # noqa: S101  # _asked() refuses a command without a key
    work.returned, work.record = result, asked.record_of(result)
    session.flush()
    connection = session.connection(bind_arguments={"bind": bind_of_marker(session, asked.tables)})
    recording(dialect_of(connection), asked.tables, key.stored, asked.operation.names, work.record).run(connection)
    return handled(work, durable=False)
