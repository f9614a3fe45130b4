"""The result of delivering a message: a ``Delivery`` with an ``Outcome`` for each handler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Outcome(Enum):
    """The result of one message for one handler. Acknowledge the message after every outcome except ``FAILED``."""

    APPLIED = "applied"  #: the handler ran, and the database has confirmed the COMMIT
    DUPLICATE = "duplicate"  #: the handler applied this message before, so the library did not call it again
    SKIPPED = "skipped"  #: no handler takes it (``unhandled="ignore"``), or it is too late (``late="skip"``)
    FAILED = "failed"  #: the handler failed; only in ``DeliveryFailed.delivery`` and ``BatchFailed.deliveries``


@dataclass(frozen=True)
class Delivery:
    """The result of ``deliver``. If ``deliver`` returns it, acknowledge the message.

    - ``message_id``: the id of the message, or None if the event has no valid id.
    - ``outcomes``: maps each handler's identity to its outcome, in the order of registration.
    - ``durable``: False only inside ``testing.external_transaction``, where the outer transaction may still roll back.
    - ``errors``: maps each handler that has ``FAILED`` to its exception, in ``DeliveryFailed.delivery`` and
      ``BatchFailed.deliveries``. If no handler could be found, the error is under ``(not routed)``.

    ``==`` ignores ``errors``.
    """

    message_id: str | None
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    durable: bool = True
    errors: Mapping[str, Exception] = field(default_factory=dict, compare=False, repr=False)

    def __hash__(self) -> int:
        return hash((self.message_id, frozenset(self.outcomes.items()), self.durable))

    @property
    def error(self) -> Exception | None:
        """The error of the message, for ``verdict_of``, or None if no handler failed.

        If several handlers failed, it is an ``ExceptionGroup`` of their errors.
        """
        failures = list(self.errors.values())
        if len(failures) > 1:
            return ExceptionGroup(f"{len(failures)} handlers failed", failures)
        return failures[0] if failures else None

    @property
    def outcome(self) -> Outcome:
        """One outcome for all handlers: ``FAILED`` if any failed, else ``APPLIED`` if any applied, else ``DUPLICATE``.

        It is ``SKIPPED`` if no handler took the message, or if all skipped it.
        """
        present = set(self.outcomes.values())
        for outcome in (Outcome.FAILED, Outcome.APPLIED, Outcome.DUPLICATE):
            if outcome in present:
                return outcome
        return Outcome.SKIPPED
