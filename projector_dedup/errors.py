"""Every error that this library raises, and what to do about each.

::

    ProjectorDedupError
    |-- RefusedError                  nothing ran: a message could have been lost or doubled
    |   |-- InvalidMessageError       a type that is no class or name, a time that is no moment (also a ValueError)
    |   |   `-- InvalidMessageIdError     the id is missing, empty, too long, or not text
    |   |-- HandlerDefinitionError    a projector cannot be told apart, called or awaited (also a TypeError)
    |   |-- UnsupportedDatabaseError  a database, driver or pool that is not known to keep the promise
    |   |-- UnsafeSessionError        AUTOCOMMIT, a foreign transaction, a second database
    |   |-- MissingTableError         the marker table is not there, or not the one expected
    |   `-- RetentionTooShortError    markers would be deleted while their messages may still be redelivered
    |-- UnhandledMessage              no handler is registered for the message
    |-- Defer                         raised by a handler: not now; everything is rolled back
    |-- OvertakenError                another delivery took one of several messages that were claimed together
    |-- InProgress                    another delivery held the claim longer than ``claim_timeout``
    |-- TransactionViolatedError      a handler ended, or broke, a transaction that is not its own
    |   `-- UnlockedWriteError        with ``read_models``, a row was written that had not been read under lock
    |-- RetriesExhaustedError         a transient database error outlived the retry policy
    |-- CommitOutcomeUnknown          COMMIT was interrupted, or may be lost in a failover, and no retry could ask
    |-- CleanupInterruptedError       a cleanup met an error that did not pass; what it had deleted stays deleted
    |-- DeliveryFailed                several handlers: the failures together (an ExceptionGroup)
    `-- BatchFailed                   some messages of a batch: the failures together (an ExceptionGroup)

None of them means that the message may be acknowledged. ``verdict_of`` tells a consumer of each whether the message
is to be delivered again, and when, or rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from .outcome import Delivery


class ProjectorDedupError(Exception):
    """The base of every error of this library. The message must not be acknowledged."""


class RefusedError(ProjectorDedupError):
    """Nothing ran, because a message could have been lost or applied twice.

    A redelivery will be refused again until somebody corrects what the text names.
    """


class InvalidMessageError(RefusedError, ValueError):
    """A part of the message cannot be used: its type, the time when it occurred, or its id.

    Only this message is concerned: every other message of a batch is applied.
    """


class InvalidMessageIdError(InvalidMessageError):
    """The message has no id, or one that not every database could tell apart from every other id."""


class HandlerDefinitionError(RefusedError, TypeError):
    """A projector was written in a way that would lose events; raised at start-up where possible."""


class UnsupportedDatabaseError(RefusedError):
    """The database, its driver or its connection pool is not one that the promise was proved on."""


class UnsafeSessionError(RefusedError):
    """Marker and read model could not be committed together, and by nobody else, through this session."""


class MissingTableError(RefusedError):
    """The marker table is missing, or is not the table that this version expects."""


class RetentionTooShortError(RefusedError, ValueError):
    """Markers would be deleted while their messages may still be redelivered, which would be applied again.

    Clean up with a longer retention; or declare a shorter horizon, if no message comes again as late as that.
    """


class UnhandledMessage(ProjectorDedupError):
    """No handler is registered for the message; ``unhandled="ignore"`` makes that ``SKIPPED``."""


class Defer(ProjectorDedupError):
    """A handler raises it to say "not now": everything is rolled back, the marker too, so a redelivery applies."""


class InProgress(ProjectorDedupError):
    """Another transaction held the claim longer than ``claim_timeout``; it may yet commit or roll back.

    Do not acknowledge; let the broker redeliver. ``retry_after`` (seconds) is given for an effect: its lease ends then.
    """

    def __init__(self, message: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class OvertakenError(ProjectorDedupError):
    """Another delivery committed the marker of one of several messages while they were claimed together.

    Run the unit of work again; a dispatcher does so by itself.
    """


class TransactionViolatedError(ProjectorDedupError):
    """A handler committed, rolled back, closed or broke the unit of work's transaction (invariant I4).

    ``durable`` is false where everything was rolled back: a redelivery runs the handler again. It is true where
    the marker, and what the handler had written by then, were already committed when it was found out: a
    redelivery will be *skipped*, so the read model has to be looked at.
    """

    def __init__(self, message: str, *, durable: bool = False) -> None:
        super().__init__(message)
        self.durable = durable


class UnlockedWriteError(TransactionViolatedError):
    """A handler with ``read_models`` was to change a row without the lock that makes that safe; nothing was written."""


class RetriesExhaustedError(ProjectorDedupError):
    """A transient database error, the ``__cause__``, lasted longer than the retry policy allows; try again later.

    No message was applied. Batches that ``rename`` committed before stay renamed.
    """


class CommitOutcomeUnknown(ProjectorDedupError):
    """The message is applied or not, and the library could not find out which. Do not acknowledge.

    Either the connection failed during COMMIT, or PostgreSQL was told not to wait for its synchronous standby, so that
    a failover may still lose the COMMIT. For an idempotent projector a redelivery finds out; for any other projector
    it may apply the message twice.
    """


class CleanupInterruptedError(ProjectorDedupError):
    """A database error, the ``__cause__``, stopped a cleanup each time that a batch was tried. Run the cleanup again.

    ``deleted`` is the number of markers that were deleted before; they stay deleted.
    """

    def __init__(self, message: str, deleted: int) -> None:
        super().__init__(message)
        self.deleted = deleted

    def __reduce__(self) -> tuple[Any, ...]:  # an exception is made again from its args, which lack the count
        return type(self), (*self.args, self.deleted), vars(self)


class _Failures(ProjectorDedupError, ExceptionGroup[Exception]):
    """Several failures, and what they were failures of, which every part of the group keeps."""

    def __new__(cls, message: str, exceptions: Sequence[Exception], of: Any) -> Self:
        """Create the group and keep ``of``: ``ExceptionGroup`` takes its arguments here."""
        self = super().__new__(cls, message, exceptions)
        self._of = of
        return self

    def __init__(self, message: str, exceptions: Sequence[Exception], of: Any) -> None:
        super().__init__(message, exceptions)
        self._of = of

    def __reduce__(self) -> tuple[Any, ...]:  # an exception is made again from its args, which lack ``of``
        return type(self), (self.message, list(self.exceptions), self._of), vars(self)

    def derive(self, excs: Sequence[Exception]) -> Self:  # type: ignore[override]  # narrower on purpose
        """Return a part of the group, as ``split`` and ``except*`` ask for one."""
        return type(self)(self.message, excs, self._of)


class DeliveryFailed(_Failures):
    """Some handlers of one message failed. ``delivery`` has every outcome, ``exceptions`` has the failures.

    A redelivery skips the handlers that have applied the message. ``verdict_of`` retries if any of the failures is to
    be retried.
    """

    @property
    def delivery(self) -> Delivery:
        """The delivery with every outcome, failures included."""
        delivery: Delivery = self._of
        return delivery


class BatchFailed(_Failures):
    """Some messages of a batch failed. ``deliveries`` has one for each message, in the order of the input.

    Acknowledge those whose ``outcome`` is not ``FAILED``, and ask ``verdict_of(delivery.error)`` of each other; after a
    ``TransactionViolatedError`` that is ``durable``, read its notes first. ``exceptions`` are the failures; messages
    that failed together share one.
    """

    @property
    def deliveries(self) -> list[Delivery]:
        """The delivery of each message, in the order of the input."""
        deliveries: list[Delivery] = self._of
        return deliveries
