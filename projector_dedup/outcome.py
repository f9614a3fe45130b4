"""What became of a message: one outcome per handler, and the delivery that holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Outcome(Enum):
    """What one handler's unit of work came to. All but ``FAILED`` are settled: they may be acknowledged."""

    APPLIED = "applied"  #: the handler ran and its transaction is known to have committed
    DUPLICATE = "duplicate"  #: the handler had applied this message before; it was not entered
    SKIPPED = "skipped"  #: no handler wanted the message, and ``unhandled="ignore"`` says that is well
    FAILED = "failed"  #: only inside ``DeliveryFailed.delivery`` and ``BatchFailed.deliveries``


class _ReadOnly(Mapping[str, Outcome]):
    __slots__ = ("_outcomes",)

    def __init__(self, outcomes: Mapping[str, Outcome]) -> None:
        self._outcomes = dict(outcomes)

    def __getitem__(self, handler: str) -> Outcome:
        return self._outcomes[handler]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outcomes)

    def __len__(self) -> int:
        return len(self._outcomes)

    def __repr__(self) -> str:
        return repr(self._outcomes)

    def __deepcopy__(self, _memo: object) -> dict[str, Outcome]:  # which dataclasses.asdict() asks for
        return dict(self._outcomes)


@dataclass(frozen=True)
class Delivery:
    """What ``deliver`` returns. That it returns at all means: the message may be acknowledged.

    ``outcomes`` maps each handler's identity to its outcome, in registration order. ``durable`` is false only
    inside ``testing.external_transaction``, where an outer transaction may still take everything back.
    """

    message_id: str | None
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    durable: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "outcomes", _ReadOnly(self.outcomes))

    def __hash__(self) -> int:
        return hash((self.message_id, frozenset(self.outcomes.items()), self.durable))

    def __reduce__(self) -> tuple[Any, ...]:  # with plain data: a copy, or another process, makes it read-only again
        return Delivery, (self.message_id, dict(self.outcomes), self.durable)

    @property
    def outcome(self) -> Outcome:
        """All handlers in one word: ``FAILED`` if any failed, else ``APPLIED`` if any applied, else what all are."""
        present = set(self.outcomes.values())
        for outcome in (Outcome.FAILED, Outcome.APPLIED, Outcome.DUPLICATE):
            if outcome in present:
                return outcome
        return Outcome.SKIPPED
