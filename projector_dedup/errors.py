"""The errors of this library, and what to do after each.

::

    ProjectorDedupError
    |-- RefusedError                  nothing ran, because a message could have been lost or applied twice
    |   |-- InvalidMessageError       the type or the time of the message cannot be used (also a ValueError)
    |   |   `-- InvalidMessageIdError     the id is missing, empty, too long, or not text
    |   |-- HandlerDefinitionError    a projector is defined so that it would lose messages (also a TypeError)
    |   |-- UnsupportedDatabaseError  the library does not support the database, the driver or the pool
    |   |-- UnsafeSessionError        AUTOCOMMIT, a transaction of another owner, a second database
    |   |-- MissingTableError         the marker table is missing, or has the wrong columns
    |   |-- BeyondRetention           the marker of the message may be deleted already
    |   |-- OtherBodyError            a message with this id was applied, and its body was another one
    |   `-- RetentionTooShortError    the retention of a cleanup is shorter than the declared horizon
    |-- UnhandledMessage              no handler is registered for the message
    |-- Defer                         raised by a handler to postpone the message; everything is rolled back
    |-- OvertakenError                another transaction was faster: run the unit of work again
    |-- InProgress                    the claim waited too long, mostly for another delivery of the message
    |-- TransactionViolatedError      a handler committed, rolled back or closed the transaction
    |   `-- UnlockedWriteError        with ``read_models``, a handler changed a row that it had not read under lock
    |-- RetriesExhaustedError         a transient database error lasted longer than the retry policy allows
    |-- UncopyableError               a handler would run again, but its event cannot be copied
    |-- CommitOutcomeUnknown          the connection failed during COMMIT: the message is applied, or it is not
    |-- CleanupInterruptedError       a database error stopped a cleanup; the deleted markers stay deleted
    |-- DeliveryFailed                several handlers: their failures together (an ExceptionGroup)
    `-- BatchFailed                   some messages of a batch: their failures together (an ExceptionGroup)

After any of them, do not acknowledge the message. ``verdict_of(error)`` returns whether to retry the message, and
when, or to reject it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from .outcome import Delivery


class ProjectorDedupError(Exception):
    """The base of every error of this library. Do not acknowledge the message."""


class RefusedError(ProjectorDedupError):
    """The library refused to run, because a message could have been lost or applied twice.

    Every redelivery is refused too, until you correct the configuration or the code that the error text names.
    """


class InvalidMessageError(RefusedError, ValueError):
    """The type, the ``occurred_at`` or the id of the message cannot be used. Reject the message.

    The other messages of a batch are applied.
    """


class InvalidMessageIdError(InvalidMessageError):
    """The message has no id, or an id that some database cannot store or compare exactly. Reject the message."""


class HandlerDefinitionError(RefusedError, TypeError):
    """A projector is defined so that it would lose messages. The library raises this at start-up where possible."""


class UnsupportedDatabaseError(RefusedError):
    """The library does not support the database, its driver or its connection pool."""


class UnsafeSessionError(RefusedError):
    """The marker and the read model might not commit together in this session. The error text names the reason."""


class MissingTableError(RefusedError):
    """The marker table is missing, or its columns are not those that this version expects. Run the migration."""


class RetentionTooShortError(RefusedError, ValueError):
    """The retention of the cleanup is shorter than the declared horizon. Nothing was deleted.

    Clean up with a longer retention. If the broker redelivers no message as late as that, declare a shorter horizon.
    """


class BeyondRetention(RefusedError):
    """The message has no marker, but is so old that its marker may have been deleted: perhaps it was applied before.

    No handler ran. Reject the message. If you know that the message was not applied, deliver it with a dispatcher that
    has ``late="apply"``. Use such a dispatcher also for a new handler until it has read the history of its topic.
    """


class OtherBodyError(RefusedError):
    """A message with this id was applied before, and its body was another one (``other_body="reject"``).

    No handler ran. Reject the message. Find out whether the producer has given one id to two events, or has written the
    same event again with other bytes. Publish an event that was lost again, with an id of its own.
    """

    read_from_the_table = True  # an earlier COMMIT of this delivery would have stored the same digest


class UnhandledMessage(ProjectorDedupError):
    """No handler is registered for the message. With ``unhandled="ignore"`` its outcome is ``SKIPPED`` instead."""


class Defer(ProjectorDedupError):
    """Raise it in a handler to postpone the message. The library rolls back, and a redelivery calls the handler."""


class InProgress(ProjectorDedupError):
    """Another transaction held the claim longer than ``claim_timeout``, and may still commit or roll back.

    The library also raises it if the database answered the claim of a message with a time after half an hour.
    Do not acknowledge the message; let the broker redeliver it. For an effect, ``retry_after`` is the time in seconds
    until the lease of the other process ends.
    """

    def __init__(self, message: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class OvertakenError(ProjectorDedupError):
    """Another transaction was faster. Everything was rolled back: run the unit of work again.

    Another delivery has claimed one of the same messages, or has committed a row that the snapshot of this transaction
    hides. A dispatcher runs the message again by itself. ``isolation`` is the isolation level for the next run, or
    None if any level will do.
    """

    text = ""  # the driver's text of a unique violation, if that was the reason
    by_lock = False  # True: the handler has read behind a lock that is younger than its snapshot

    def __init__(self, message: str = "", isolation: str | None = None) -> None:
        super().__init__(message)
        self.isolation = isolation


class TransactionViolatedError(ProjectorDedupError):
    """A handler committed, rolled back or closed the unit of work's transaction (invariant I4). Correct the handler.

    If ``durable`` is False, everything was rolled back, and a redelivery runs the handler again. If ``durable`` is
    True, the handler ended the transaction on the driver's own connection or in a procedure, so the marker and its
    writes *may be committed*. Look for the marker with ``idempotency show``. If the marker is there, a redelivery is
    skipped: compare the read model with the message and correct it.
    """

    def __init__(self, message: str, *, durable: bool = False) -> None:
        super().__init__(message)
        self.durable = durable


class UnlockedWriteError(TransactionViolatedError):
    """A handler changed a row that it had not read under lock. Everything was rolled back.

    With ``read_models`` each changed row must be locked. In a second run at READ COMMITTED, this is necessary only for
    a value that is changed in place.
    """


class RetriesExhaustedError(ProjectorDedupError):
    """A transient database error (the ``__cause__``) lasted longer than the retry policy allows. Try again later.

    No message was applied. Batches that ``rename`` has committed stay renamed.
    """


class UncopyableError(ProjectorDedupError):
    """The library did not call a handler again, because the event cannot be copied and a handler may have changed it.

    This call applied nothing for the handler. Let the broker redeliver the message, which brings a new event. To let
    the library retry by itself, define ``__deepcopy__`` in the class of the event, or deliver plain data. The error of
    ``copy.deepcopy`` is the ``__cause__``.
    """


class CommitOutcomeUnknown(ProjectorDedupError):
    """The library does not know whether the message is applied. Do not acknowledge it; let the broker redeliver it.

    Either the connection failed during COMMIT, or PostgreSQL stopped waiting for its synchronous standby, so a failover
    may still lose the COMMIT. With an idempotent projector, a redelivery finds out: it applies the message or is a
    duplicate. With any other projector, a redelivery may apply the message twice.
    """


class CleanupInterruptedError(ProjectorDedupError):
    """A database error (the ``__cause__``) stopped a cleanup, also after retries. Run the cleanup again.

    ``deleted`` is the number of markers that the cleanup had deleted by then. They stay deleted.
    """

    def __init__(self, message: str, deleted: int) -> None:
        super().__init__(message)
        self.deleted = deleted

    def __reduce__(self) -> tuple[Any, ...]:  # an exception is made again from its args, which lack the count
        return type(self), (*self.args, self.deleted), vars(self)


class _Failures(ProjectorDedupError, ExceptionGroup[Exception]):
    """A group of failures, and the delivery or the batch that failed. Every part of the group keeps it too."""

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
        """Return a part of the group, for ``split`` and ``except*``."""
        return type(self)(self.message, excs, self._of)


class DeliveryFailed(_Failures):
    """Some handlers of one message failed. ``delivery`` has every outcome, ``exceptions`` has the failures.

    Do not acknowledge the message. A redelivery skips the handlers that have applied it. ``verdict_of`` returns a retry
    if it would retry any of the failures.
    """

    @property
    def delivery(self) -> Delivery:
        """The delivery with every outcome, failures included."""
        delivery: Delivery = self._of
        return delivery


class BatchFailed(_Failures):
    """Some messages of a batch failed. ``deliveries`` has a delivery for each message, in the order of the input.

    Acknowledge each message whose ``outcome`` is not ``FAILED``. For each other message, do what
    ``verdict_of(delivery.error)`` returns. After a ``TransactionViolatedError`` that is ``durable``, read its notes
    first. ``exceptions`` has the failures; messages that failed together share one.
    """

    @property
    def deliveries(self) -> list[Delivery]:
        """The delivery of each message, in the order of the input."""
        deliveries: list[Delivery] = self._of
        return deliveries
