"""The result of delivering a message: an outcome for each handler, and the delivery that holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Outcome(Enum):
    """The result of one message for one handler. All but ``FAILED`` are settled: they may be acknowledged."""

    APPLIED = "applied"  #: the handler ran and its transaction is known to have committed
    DUPLICATE = "duplicate"  #: the handler had applied this message before; it was not entered
    SKIPPED = "skipped"  #: no handler wanted the message, and ``unhandled="ignore"`` permits that
    FAILED = "failed"  #: only inside ``DeliveryFailed.delivery`` and ``BatchFailed.deliveries``


@dataclass(frozen=True)
class Delivery:
    """The result of ``deliver``, which returns only if the message may be acknowledged, and raises otherwise.

    ``message_id`` is None if the event has no valid id. ``outcomes`` maps each handler's identity to its outcome, in
    the order of registration. ``durable`` is False only inside
    ``testing.external_transaction``, where the outer transaction may still be rolled back. ``errors`` maps each handler
    that has ``FAILED`` to its exception, in ``DeliveryFailed.delivery`` and ``BatchFailed.deliveries``; a message
    that went to no handler has its own under ``(not routed)``. Two deliveries are equal whatever their errors.
    """

    message_id: str | None
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    durable: bool = True
    errors: Mapping[str, Exception] = field(default_factory=dict, compare=False, repr=False)

    def __hash__(self) -> int:
        return hash((self.message_id, frozenset(self.outcomes.items()), self.durable))

    @property
    def error(self) -> Exception | None:
        """The error of the message, for ``verdict_of``: of the only handler that failed, or those of several together.

        None if no handler failed.
        """
        failures = list(self.errors.values())
        if len(failures) > 1:
            return ExceptionGroup(f"{len(failures)} handlers failed", failures)
        return failures[0] if failures else None

    @property
    def outcome(self) -> Outcome:
        """The outcomes of all handlers as one: ``FAILED`` if any is, else ``APPLIED`` if any is, else ``DUPLICATE``.

        ``SKIPPED`` if there was no handler.
        """
        present = set(self.outcomes.values())
        for outcome in (Outcome.FAILED, Outcome.APPLIED, Outcome.DUPLICATE):
            if outcome in present:
                return outcome
        return Outcome.SKIPPED
