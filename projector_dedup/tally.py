"""What the outcomes of a message come to together, handler by handler; and those of a batch, message by message."""

from __future__ import annotations

from .batch import Result
from .errors import BatchFailed, DeliveryFailed
from .handler import Handler
from .message import Message, printable
from .outcome import Delivery, Outcome


class Tally:
    """The outcomes of one message, handler by handler."""

    __slots__ = ("_alone", "_durable", "_failures", "_message_id", "_outcomes")

    def __init__(self, message_id: str | None, handlers: list[Handler]) -> None:
        self._message_id = message_id
        self._alone = len(handlers) == 1
        self._outcomes: dict[str, Outcome] = {}
        self._failures: tuple[Exception, ...] = ()
        self._durable = True

    @classmethod
    def not_routed(cls, message_id: str | None, error: Exception) -> Tally:
        """That of a message for which no handler was tried."""
        tally = cls(message_id, [])
        tally._alone, tally._failures = True, (error,)
        tally._outcomes["(not routed)"] = Outcome.FAILED
        return tally

    def settled(self, handler: Handler, outcome: Outcome, durable: bool) -> None:
        """It did what it had to."""
        self._outcomes[handler.identity] = outcome
        self._durable = self._durable and durable

    def failed(self, handler: Handler, error: Exception) -> None:
        """It did not apply; each of several handlers is tried before any error is raised."""
        self._outcomes[handler.identity] = Outcome.FAILED
        self._failures = (*self._failures, error)

    def delivery(self) -> Delivery:
        """Every outcome, settled or not."""
        return Delivery(self._message_id, self._outcomes, self._durable)

    def error(self) -> Exception | None:
        """What to raise if not all are settled: an only handler's error is the caller's own."""
        if not self._failures:
            return None
        if self._alone:
            return self._failures[0]
        failed = [name for name, outcome in self._outcomes.items() if outcome is Outcome.FAILED]
        causes = ", ".join(
            f"{name} ({type(error).__name__})" for name, error in zip(failed, self._failures, strict=True)
        )
        return DeliveryFailed(f"not applied by {causes}", self._failures, self.delivery())

    def settled_delivery(self) -> Delivery:
        """What ``deliver`` returns, or raises."""
        if (error := self.error()) is not None:
            raise error
        return self.delivery()


class BatchTally:
    """The outcomes of many messages, in the order of the input, and what each handler has to do."""

    def __init__(self) -> None:
        self._tallies: list[Tally] = []
        self._wanted: dict[str, list[tuple[Tally, Message]]] = {}

    def routed(self, message: Message, handlers: list[Handler], known: str | None) -> None:
        """The next message of the input."""
        tally = Tally(known, handlers)
        self._tallies.append(tally)
        for handler in handlers:
            self._wanted.setdefault(handler.identity, []).append((tally, message))

    def not_routed(self, message_id: str | None, error: Exception) -> None:
        """The next one is of nobody, or has no id."""
        self._tallies.append(Tally.not_routed(message_id, error))

    def messages_for(self, handler: Handler) -> list[Message]:
        """In the order of the input."""
        return [message for _, message in self._wanted.get(handler.identity, ())]

    def handled(self, handler: Handler, results: list[Result], durable: bool) -> None:
        """What became of ``messages_for(handler)``."""
        for (tally, _), result in zip(self._wanted[handler.identity], results, strict=True):
            if isinstance(result, Exception):
                tally.failed(handler, result)
            else:
                tally.settled(handler, result, durable)

    def settled_deliveries(self) -> list[Delivery]:
        """What ``deliver_batch`` returns, or raises."""
        deliveries = [tally.delivery() for tally in self._tallies]
        errors = [error for tally in self._tallies if (error := tally.error()) is not None]
        if errors:
            raise BatchFailed(
                f"{len(errors)} of {len(deliveries)} messages failed ({_ids(deliveries)}); acknowledge those in "
                ".deliveries whose outcome is not FAILED, and let the others be redelivered"
                + (
                    ", but first look at the TransactionViolatedError, whose handler has COMMITTED"
                    if any(getattr(error, "durable", False) for error in errors)
                    else ""
                ),
                list({id(error): error for error in errors}.values()),
                deliveries,
            )
        return deliveries


def _ids(deliveries: list[Delivery]) -> str:
    failed = [each.message_id for each in deliveries if each.outcome is Outcome.FAILED]
    names = ["one without a valid id" if each is None else printable(each) for each in failed[:5]]
    return ", ".join(names) + (", ..." if len(failed) > 5 else "")
