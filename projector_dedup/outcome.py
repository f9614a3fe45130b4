"""The result of delivering a message: an outcome for each handler, and the delivery that holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar


class Outcome(Enum):
    """The result of one message for one handler. All but ``FAILED`` are settled: they may be acknowledged."""

    APPLIED = "applied"  #: the handler ran and its transaction is known to have committed
    DUPLICATE = "duplicate"  #: the handler had applied this message before; it was not entered
    SKIPPED = "skipped"  #: no handler wanted the message, and ``unhandled="ignore"`` permits that
    FAILED = "failed"  #: only inside ``DeliveryFailed.delivery`` and ``BatchFailed.deliveries``


T = TypeVar("T")


class _ReadOnly(Mapping[str, T]):
    __slots__ = ("_by_handler",)

    def __init__(self, by_handler: Mapping[str, T]) -> None:
        self._by_handler = dict(by_handler)

    def __getitem__(self, handler: str) -> T:
        return self._by_handler[handler]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_handler)

    def __len__(self) -> int:
        return len(self._by_handler)

    def __repr__(self) -> str:
        return repr(self._by_handler)

    def __deepcopy__(self, _memo: object) -> dict[str, T]:  # dataclasses.asdict() calls it
        return dict(self._by_handler)


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "outcomes", _ReadOnly(self.outcomes))
        object.__setattr__(self, "errors", _ReadOnly(self.errors))

    def __hash__(self) -> int:
        return hash((self.message_id, frozenset(self.outcomes.items()), self.durable))

    def __reduce__(self) -> tuple[Any, ...]:  # with a plain dict: unpickling makes it read-only again
        return Delivery, (self.message_id, dict(self.outcomes), self.durable, dict(self.errors))

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
