"""``begin_command()`` and ``abegin_command()``: a command in a transaction that the caller owns and commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy.orm import Session

from ..asyncio_names import AsyncSession
from ..dialects import dialect_of
from ..markers import bind_of_marker, claim
from .call import AsyncCall, Call
from .errors import InvalidKeyError
from .handled import Handled
from .handler import AsyncCommand, Command, Operation, checked
from .record import DEFAULT, RecordKey, recalled, recalling, recording, recording_other_names
from .runner import MAX_RESULT_BYTES, handled
from .tables import CommandTables, default_command_tables
from .work import Asked, Once

C = TypeVar("C")
R = TypeVar("R")


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
    work = _claim(session, asked)
    if work is None:
        return Begun(asked.call(session), asked)
    if _is_default(work):
        work.returned = asked.present(asked.call(session))
    return handled(work, durable=False)


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
    work = await session.run_sync(_claim, asked)
    if work is None:
        return AsyncBegun(asked.call(session), asked)
    if _is_default(work):
        work.returned = await asked.present(asked.call(session))
    return handled(work, durable=False)


def _asked(
    operation: Operation[Any, Any], command: Any, key: object, scope: object, tables: CommandTables, limit: int
) -> Asked:
    if key is None:
        raise InvalidKeyError("begin_command() records a command under a key: give key=")
    return Asked.of(operation, command, RecordKey.of(key, scope), tables, limit)


def _claim(session: Session, asked: Asked) -> Once | None:
    """Claim the command; return None if it is new, else its work with the record that is there."""
    key, names = asked.key, asked.operation.names
    assert key is not None  # noqa: S101  # _asked() takes no command without
    if claim(session, key.stored, asked.operation.identity, formerly=names[1:], tables=asked.tables):
        return None
    connection = session.connection(bind_arguments={"bind": bind_of_marker(session, asked.tables)})
    recall = recalling(asked.tables, key.stored, names)
    recall.run(connection)
    work = Once(asked)
    work.record, work.replayed = recalled(recall.row, asked.fingerprints, key, asked.operation.identity), True
    if len(names) > 1:  # the caller commits what the claim inserted under other names
        recording_other_names(asked.tables, key.stored, names, work.record).run(connection)
    return work


def _is_default(work: Once) -> bool:
    return work.record is not None and work.record.outcome == DEFAULT


def _record(session: Session, asked: Asked, result: Any) -> Handled[Any]:
    work, key = Once(asked), asked.key
    assert key is not None  # noqa: S101  # _asked() takes no command without
    work.returned, work.record = result, asked.record_of(result)
    session.flush()
    connection = session.connection(bind_arguments={"bind": bind_of_marker(session, asked.tables)})
    recording(dialect_of(connection), asked.tables, key.stored, asked.operation.names, work.record).run(connection)
    return handled(work, durable=False)
