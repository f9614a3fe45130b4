"""The acknowledgement contract and I9: `deliver` returns only what is settled, and off means free."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="failure-is-acknowledged",
        breaks="deliver() returns although a handler failed, so the message is acknowledged and lost.",
        where="Results.failed",
        old="self._outcomes[handler.identity], self._errors[handler.identity] = Outcome.FAILED, error",
        new="self._outcomes[handler.identity] = Outcome.FAILED",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_every_handler_is_tried_and_the_failures_come_together[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="delivery-error-is-not-raised",
        breaks="deliver() returns a Delivery with FAILED in it instead of raising DeliveryFailed.",
        where="Results.settled_delivery",
        old="if (error := self.error()) is not None:",
        new="if (error := self.error()) is not None and self._alone:",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_every_handler_is_tried_and_the_failures_come_together[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="first-failure-ends-the-delivery",
        breaks="The handlers behind one that failed are not tried.",
        where="BaseDispatcher._deliver",
        old="results.failed(handler, error)",
        new="results.failed(handler, error)\n                break",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_every_handler_is_tried_and_the_failures_come_together[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="handlers-in-another-order",
        breaks="Handlers of one event are called in another order than that of their registration.",
        where="BaseDispatcher._who_wants",
        old="for handler in self._handlers.values() if handler.wants(route)]",
        new="for handler in reversed(self._handlers.values()) if handler.wants(route)]",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_every_handler_is_tried_and_the_failures_come_together[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="failed-delivery-is-called-applied",
        breaks="A delivery of which one handler failed and one applied is called APPLIED as a whole.",
        where="Delivery.outcome",
        old="(Outcome.FAILED, Outcome.APPLIED, Outcome.DUPLICATE)",
        new="(Outcome.APPLIED, Outcome.FAILED, Outcome.DUPLICATE)",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_every_handler_is_tried_and_the_failures_come_together[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="unwanted-message-is-skipped",
        breaks="An event that no handler wants is skipped without a word, so a wrong route loses it.",
        where="BaseDispatcher._route",
        old="if not handlers and not self._ignore_unhandled:",
        new="if not handlers and self._ignore_unhandled is None:",
        tests=("tests/delivery/test_projector.py::test_what_no_handler_wants_is_an_error",),
    ),
    Mutant(
        name="subclasses-are-routed-unasked",
        breaks="A handler gets events of derived classes that it did not ask for.",
        where="Handler.wants",
        old="self.on.subclasses\n            and isinstance(route, type)",
        new="isinstance(route, type)",
        tests=(
            "tests/delivery/test_projector.py::test_a_message_goes_where_its_type_or_class_says[mark-event1-False]",
        ),
    ),
    Mutant(
        name="message-type-does-not-route",
        breaks="A message that names its type is routed by the class of its body.",
        where="route_of",
        old="if event.type is not None:",
        new="if False:",
        tests=("tests/delivery/test_projector.py::test_a_message_goes_where_its_type_or_class_says[mark-event4-True]",),
    ),
    Mutant(
        name="off-writes-markers",
        breaks="A projector without idempotent=True claims a marker, and needs the table.",
        where="Chunk._claim",
        old="if not handler.idempotent:",
        new="if handler is None:",
        tests=("tests/delivery/test_contract.py::TestDefault::test_off_means_free[sqlite+pysqlite]",),
    ),
    Mutant(
        name="inherited-handler-keeps-its-base-name",
        breaks="A projector class takes the name of its base, and skips what that has applied.",
        where="handlers_of",
        old="settings = replace(settings, name=None, formerly=())",
        new="pass",
        tests=("tests/delivery/test_projector.py::test_an_inherited_handler_has_the_identity_of_its_own_class",),
    ),
    Mutant(
        name="log-line-is-forged",
        breaks="An id with a line break forges a line of the log.",
        where="printable",
        old="if text.isprintable():",
        new="if text:",
        tests=("tests/delivery/test_logging.py::test_an_id_cannot_forge_a_line[m1\\nINFO forged line]",),
    ),
)
