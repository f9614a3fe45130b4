"""``begin_command()``: a command in a transaction that the caller owns and commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy.orm import Session

from ..caller_claim import claim
from ..dialects import dialect_of
from ..markers import bind_of_marker
from .call import Call
from .errors import InvalidKeyError
from .handled import Handled
from .handler import Command
from .record import RecordKey, recalled, recalling, recording, recording_other_names
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
        work, session, key = Once(self._asked), self.call.session, self._asked.key
        assert key is not None  # noqa: S101  # begin_command() takes no command without
        work.returned, work.record = result, self._asked.record_of(result)
        session.flush()
        connection = session.connection(bind_arguments={"bind": bind_of_marker(session, self._asked.tables)})
        names = self._asked.operation.names
        recording(dialect_of(connection), self._asked.tables, key.stored, names, work.record).run(connection)
        return handled(work, durable=False)


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
    answer if it was handled before: commit then, too. A concurrent caller with the same key waits; at REPEATABLE READ
    and above the loser gets a serialization failure, upon which the caller runs the whole transaction again.

    Nothing watches what else happens in the transaction; that, and retries, are what ``Commands`` adds. Raises what
    ``claim()`` raises, ``KeyReusedError``, ``InvalidKeyError`` and ``ResultUnreadableError``.
    """
    if key is None:
        raise InvalidKeyError("begin_command() records a command under a key: give key=")
    record_key = RecordKey.of(key, scope)
    asked = Asked.of(operation, command, record_key, tables, max_result_bytes)
    names = operation.names
    if claim(session, record_key.stored, operation.identity, formerly=names[1:], tables=tables):
        return Begun(asked.call(session), asked)
    connection = session.connection(bind_arguments={"bind": bind_of_marker(session, tables)})
    recall = recalling(tables, record_key.stored, names)
    recall.run(connection)
    work = Once(asked)
    work.record, work.replayed = recalled(recall.row, asked.fingerprints, record_key, operation.identity), True
    if len(names) > 1:  # the caller commits what the claim inserted under other names
        recording_other_names(tables, record_key.stored, names, work.record).run(connection)
    return handled(work, durable=False)
