"""One command as the work of one unit: claim or recall, call the handler, and record what it returned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import ProjectorDedupError
from ..handler import check_result
from ..markers import marker_key
from ..message import printable
from ..outcome import Outcome
from ..retry import Attempts
from ..unit_of_work import UnitOfWork
from .call import AsyncCall, Call
from .codecs import Codec, as_json, is_same, json
from .errors import Rejected, ResultError
from .fingerprint import fingerprints
from .handled import Rejection
from .handler import NO_RESULT, Operation
from .record import DEFAULT, REJECTED, RESULT, Record, RecordKey, recalled, recalling, recording
from .tables import CommandTables

logger = logging.getLogger("projector_dedup")


@dataclass(frozen=True)
class Asked:
    """A caller's request: the operation, the command, its key, and what a record of it may hold."""

    operation: Operation[Any, Any]
    command: Any
    key: RecordKey | None
    fingerprints: tuple[bytes, ...]
    """The fingerprint to record, and others by which older records are recognised; none if nothing is compared."""
    tables: CommandTables
    max_result_bytes: int

    @classmethod
    def of(
        cls, operation: Operation[Any, Any], command: Any, key: RecordKey | None, tables: CommandTables, limit: int
    ) -> Asked:
        """Return what is asked for, with the fingerprints of the command if it has a key."""
        chosen = operation.settings.fingerprint
        found = () if key is None or chosen is None else fingerprints(chosen(command))
        return cls(operation, command, key, found, tables, limit)

    @property
    def fingerprint(self) -> bytes | None:
        """The fingerprint to record; None if nothing is compared."""
        return self.fingerprints[0] if self.fingerprints else None

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
            return self.rejected(returned)
        if self.operation.settings.default is not None:
            return Record(DEFAULT, NO_RESULT.name, None, self.fingerprint)
        codec = self.operation.codec
        return Record(RESULT, codec.name, self._stored(codec, returned), self.fingerprint)

    def rejected(self, rejection: Rejection) -> Record:
        """Return the record of a rejection, or raise ``ResultError`` if its detail cannot be stored."""
        data = self._stored(json, as_json({"code": rejection.code, "detail": rejection.detail}))
        return Record(REJECTED, json.name, data, self.fingerprint)

    def _stored(self, codec: Codec[Any], value: Any) -> bytes:
        try:
            stored = codec.dumps(value)
            if not isinstance(stored, (bytes, bytearray, memoryview)):
                raise ResultError(f"dumps of the codec {codec.name} returned {type(stored).__name__}, and not bytes")
            data = bytes(stored)
            read = codec.loads(data)  # also of a codec that is not exact: what nobody can read is not committed
            same = not codec.exact or is_same(read, value)
        except ProjectorDedupError as error:
            raise ResultError(f"{self.operation.identity}: {error}; nothing was applied") from error
        except Exception as error:
            raise ResultError(
                f"{self.operation.identity} returned {type(value).__name__}, which the codec {codec.name} cannot store "
                f"and read again ({type(error).__name__}); nothing was applied"
            ) from error
        if not same:
            raise ResultError(
                f"{self.operation.identity} returned {type(value).__name__}, and the codec {codec.name} reads another "
                "value than it was given to store: who asks again would get another answer; nothing was applied"
            )
        if len(data) > self.max_result_bytes:
            raise ResultError(
                f"the result of {self.operation.identity} takes {len(data)} bytes, and {self.max_result_bytes} are "
                "allowed; nothing was applied. Return an id of what was made, or give Commands(max_result_bytes=...)"
            )
        return data


class Once:
    """A command that is claimed, handled and recorded; or recalled, if it was before."""

    connected = True

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.identity = asked.operation.identity
        self.marked = asked.key is not None
        self.record: Record | None = None  # None as long as nothing has run, and without a key
        self.returned: Any = None  # by the handler, if it ran
        self.replayed = False

    def claim(self, uow: UnitOfWork) -> bool:
        """Begin with the claim, and return True if the command must run; else keep the record that is there."""
        self._uow, self.record, self.replayed = uow, None, False
        asked = self.asked
        if asked.key is None:
            uow.begin()
            return True
        stored, names = asked.key.stored, asked.operation.names
        recall = recalling(asked.tables, stored, names)
        if uow.claim_first(marker_key(stored, self.identity), names[1:], recall=recall):
            return True
        self.record, self.replayed = recalled(recall.row, asked.fingerprints, asked.key, self.identity), True
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
            after_unknown = self.replayed and attempts.unknown is not None
            told = f"{outcome.value}{' (after_unknown_commit)' if after_unknown else ''}"
            extra = self._extra(outcome.value, attempts) | {"after_unknown_commit": after_unknown}
            logger.log(level, "%s: %s", told, self._told(), extra=extra)

    def log_retry(self, error: Exception, attempts: Attempts) -> None:
        """Log at INFO that the command is tried again, and after which error."""
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
        self.returned = self._rejection
        if self.asked.key is not None:
            self._record(self.asked.rejected(self._rejection))
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
