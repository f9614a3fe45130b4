"""Collect the outcomes of one message, handler by handler, or of a batch, and make a ``Delivery`` or an error."""

from __future__ import annotations

from .batch import Result
from .errors import BatchFailed, DeliveryFailed
from .handler import Handler
from .message import Message, printable
from .outcome import Delivery, Outcome


class Results:
    """The outcomes of one message, noted handler by handler."""

    __slots__ = ("_alone", "_durable", "_errors", "_message_id", "_outcomes")

    def __init__(self, message_id: str | None, handlers: list[Handler]) -> None:
        self._message_id = message_id
        self._alone = len(handlers) == 1
        self._outcomes: dict[str, Outcome] = {}
        self._errors: dict[str, Exception] = {}
        self._durable = True

    @classmethod
    def not_routed(cls, message_id: str | None, error: Exception) -> Results:
        """Return the results of a message for which no handler was tried."""
        results = cls(message_id, [])
        results._alone = True
        results._outcomes["(not routed)"], results._errors["(not routed)"] = Outcome.FAILED, error
        return results

    def settled(self, handler: Handler, outcome: Outcome, durable: bool) -> None:
        """Note that a handler has applied the message, or found that it was applied."""
        self._outcomes[handler.identity] = outcome
        self._durable = self._durable and durable

    def failed(self, handler: Handler, error: Exception) -> None:
        """Note that a handler has failed; the error is raised after every other handler was tried."""
        self._outcomes[handler.identity], self._errors[handler.identity] = Outcome.FAILED, error

    def delivery(self) -> Delivery:
        """Return every outcome that was noted, failures included."""
        return Delivery(self._message_id, self._outcomes, self._durable, self._errors)

    def error(self) -> Exception | None:
        """Return the error to raise, or None if no handler failed.

        The error of the only handler is returned as it is; those of several handlers, in one ``DeliveryFailed``.
        """
        if not self._errors:
            return None
        failures = tuple(self._errors.values())
        if self._alone:
            return failures[0]
        causes = ", ".join(f"{name} ({type(error).__name__})" for name, error in self._errors.items())
        return DeliveryFailed(f"not applied by {causes}", failures, self.delivery())

    def settled_delivery(self) -> Delivery:
        """Return the delivery of a message that every handler has settled, or raise ``error()``."""
        if (error := self.error()) is not None:
            raise error
        return self.delivery()


class BatchResults:
    """The outcomes of many messages, in the order of the input, and the messages that each handler wants."""

    def __init__(self) -> None:
        self._all: list[Results] = []
        self._wanted: dict[str, list[tuple[Results, Message]]] = {}

    def routed(self, message: Message, handlers: list[Handler], known: str | None) -> None:
        """Note the next message of the input, and the handlers that want it."""
        results = Results(known, handlers)
        self._all.append(results)
        for handler in handlers:
            self._wanted.setdefault(handler.identity, []).append((results, message))

    def not_routed(self, message_id: str | None, error: Exception) -> None:
        """Note the next message of the input and why it goes to no handler: nobody wants it, or it has no id, say."""
        self._all.append(Results.not_routed(message_id, error))

    def messages_for(self, handler: Handler) -> list[Message]:
        """Return the messages that a handler wants, in the order of the input."""
        return [message for _, message in self._wanted.get(handler.identity, ())]

    def handled(self, handler: Handler, became: list[Result], durable: bool) -> None:
        """Note an outcome or an error for each of ``messages_for(handler)``, in their order."""
        for (results, _), result in zip(self._wanted[handler.identity], became, strict=True):
            if isinstance(result, Exception):
                results.failed(handler, result)
            else:
                results.settled(handler, result, durable)

    def settled_deliveries(self) -> list[Delivery]:
        """Return the delivery of each message, in the order of the input; raise ``BatchFailed`` if any has failed."""
        deliveries = [results.delivery() for results in self._all]
        errors = [error for results in self._all if (error := results.error()) is not None]
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
