"""The contract for one message after another: applied once or not at all, and acknowledged only when settled."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import insert, text
from sqlalchemy.orm import Session

from ..errors import Defer, DeliveryFailed, InvalidMessageIdError, MissingTableError
from ..outcome import Outcome
from ..tables import default_tables
from .harness import Harness
from .subject import Added, Total, add

LOOK_ALIKES = (
    *("a", "A", "á", "a\u0301", "à", "ä", "ae", "æ", "a ", " a", "a\t", "a\n", "a\u200b", "a\u00a0", "\uff41"),
    *("1", "01", "1.0", "1e0", "+1", "\u0661", "1e3", "1000", "0x1", "true", "True", "t"),
    *(
        "\U0001f600",
        "\U0001f601",
        "ß",
        "ss",
        "SS",
        "\u0131",
        "i",
        "I",
        "\u0130",
        "K",
        "\u212a",
        "null",
        "NULL",
        "None",
        " ",
    ),
    *("a'b", "a''b", "a%b", "a%%b", "a_b", "a\\", "a\\\\", "a\\n", ":a", ":b", "?", "%s", "$1"),
    *("x" * 511 + "1", "x" * 511 + "2", "x" * 255, "x" * 256, "€" * 170 + "a", "€" * 170 + "b"),
    *(
        "0b1a2c3d-1111-4111-8111-111111111111",
        "0B1A2C3D-1111-4111-8111-111111111111",
        "0b1a2c3d111141118111111111111111",
    ),
)


class Broken(Exception):  # noqa: N818  # as InProgress is
    """An error that a handler raises by itself."""


class Interruption(BaseException):
    """An interruption that is no Exception, as KeyboardInterrupt is, which would end an event loop."""


def broken(_happened: Added, session: Session) -> None:
    """A handler that writes, then fails."""
    add(_happened, session)
    session.flush()
    raise Broken


class OnceContract:
    """I1, I2, I7, I8 and I9: each message is applied once, together with its marker."""

    def test_marker_and_write_commit_together(self, harness: Harness) -> None:
        """I1: after a delivery, others see the write and the marker."""
        delivery = harness.deliver(harness.dispatcher(), Added(("a", "b"), 3), "m1")
        assert (delivery.outcome, delivery.message_id, delivery.durable) == (Outcome.APPLIED, "m1", True)
        assert harness.totals() == {"a": 3, "b": 3}
        assert harness.markers() == [("m1", "totals")]

    @pytest.mark.parametrize("point", ["before the write", "after the write", "after the flush", "in the last flush"])
    def test_a_failing_handler_leaves_neither(self, harness: Harness, point: str) -> None:
        """I1: wherever a handler fails, neither its write nor the marker is there, and a redelivery applies."""
        failing = [True]

        def body(happened: Added, session: Session) -> None:
            if failing and point == "before the write":
                raise Broken
            add(happened, session)
            if point == "after the flush":
                session.flush()
            if failing and point == "in the last flush":
                session.execute(insert(Total).values(key="b", amount=0))
                session.add(Total(key="b"))
            elif failing:
                raise Broken

        dispatcher = harness.dispatcher(harness.handler(body))
        with pytest.raises(Exception) as failure:  # noqa: PT011  # the next line looks at the type
            harness.deliver(dispatcher)
        assert isinstance(failure.value, Broken) is (point != "in the last flush")
        assert (harness.totals(), harness.markers()) == ({}, [])
        failing.clear()
        assert harness.deliver(dispatcher).outcome is Outcome.APPLIED
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "totals")])

    def test_a_redelivery_never_enters_the_handler(self, harness: Harness) -> None:
        """I2: the handler runs once; a redelivery, also by another dispatcher, is an outcome and no exception."""
        entered: list[Added] = []

        def body(happened: Added, session: Session) -> None:
            entered.append(happened)
            add(happened, session)

        outcomes = [harness.deliver(harness.dispatcher(harness.handler(body))).outcome for _ in range(3)]
        assert outcomes == [Outcome.APPLIED, Outcome.DUPLICATE, Outcome.DUPLICATE]
        assert len(entered) == 1
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "totals")])

    def test_a_redelivery_writes_nothing(self, harness: Harness) -> None:
        """I2: the marker stays as it was, on PostgreSQL to its transaction ids and its place in the file."""
        system = ", xmin::text, xmax::text, ctid::text" if harness.engine.dialect.name == "postgresql" else ""

        def look(session: Session) -> list[Any]:
            return [tuple(row) for row in session.execute(text(f"select *{system} from processed_message"))]  # noqa: S608

        dispatcher = harness.dispatcher()
        harness.deliver(dispatcher)
        before = harness.transact(look)
        harness.deliver(dispatcher)
        assert harness.transact(look) == before

    def test_ids_that_look_alike_are_different(self, harness: Harness) -> None:
        """I7: case, accents, spaces, long prefixes and ways to write a number tell ids apart, and handlers."""
        lower, upper = (harness.dispatcher(harness.handler(name=name)) for name in ("totals", "Totals"))
        for message_id in LOOK_ALIKES:
            assert harness.deliver(lower, message_id=message_id).outcome is Outcome.APPLIED
            assert harness.deliver(upper, message_id=message_id).outcome is Outcome.APPLIED
        for message_id in LOOK_ALIKES:
            assert harness.deliver(lower, message_id=message_id).outcome is Outcome.DUPLICATE
        assert harness.totals() == {"a": 2 * len(LOOK_ALIKES)}
        assert harness.markers() == sorted((each, name) for each in LOOK_ALIKES for name in ("totals", "Totals"))

    def test_what_is_no_id_is_refused(self, harness: Harness) -> None:
        """I8: without an id that every database can tell from every other, no handler runs."""
        for message_id in (None, "", "x" * 513, "\0", "\ud800", 5, b"a"):
            with pytest.raises(InvalidMessageIdError):
                harness.deliver(harness.dispatcher(), message_id=message_id)
        assert (harness.totals(), harness.markers()) == ({}, [])

    def test_a_missing_table_is_refused(self, harness: Harness) -> None:
        """I8: without the marker table nothing is applied, and the error names the remedy."""
        harness.transact(lambda session: default_tables.marker.drop(session.connection()))
        with pytest.raises(MissingTableError, match=r"processed_message is missing.*idempotency"):
            harness.deliver(harness.dispatcher())
        assert harness.totals() == {}

    def test_off_means_free(self, harness: Harness) -> None:
        """I9: a projector that is not idempotent needs neither table nor id, and applies every delivery."""
        harness.transact(lambda session: default_tables.marker.drop(session.connection()))
        dispatcher = harness.dispatcher(harness.handler(idempotent=False))
        outcomes = [harness.deliver(dispatcher, message_id=given).outcome for given in (None, "m1", "m1")]
        assert outcomes == [Outcome.APPLIED] * 3
        assert harness.totals() == {"a": 3}

    def test_off_writes_no_marker(self, harness: Harness) -> None:
        """I9: a projector that is not idempotent leaves the marker table alone, and is rolled back when it fails."""
        dispatcher = harness.dispatcher(harness.handler(idempotent=False))
        assert harness.deliver(dispatcher).outcome is Outcome.APPLIED
        with pytest.raises(Broken):
            harness.deliver(harness.dispatcher(harness.handler(broken, idempotent=False)))
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [])


class AcknowledgementContract:
    """``deliver`` returns if, and only if, the message may be acknowledged."""

    def test_every_handler_is_tried_and_the_failures_come_together(self, harness: Harness) -> None:
        """One handler's failure leaves the others applied, in the order of registration; a redelivery skips those."""
        order: list[str] = []

        def noted(name: str, fails: bool) -> Any:
            def body(_happened: Added, session: Session) -> None:
                order.append(name)
                add(Added((name,)), session)
                if fails and failing:
                    raise Broken(name)

            return harness.handler(body, name)

        failing = [True]
        dispatcher = harness.dispatcher(noted("c", False), noted("a", True), noted("b", False), noted("d", True))
        with pytest.raises(DeliveryFailed) as failure:
            harness.deliver(dispatcher)
        applied, failed = Outcome.APPLIED, Outcome.FAILED
        assert dict(failure.value.delivery.outcomes) == {"c": applied, "a": failed, "b": applied, "d": failed}
        assert failure.value.delivery.outcome is failed
        assert [str(error) for error in failure.value.exceptions] == ["a", "d"]
        assert order == ["c", "a", "b", "d"]
        assert harness.markers() == [("m1", "b"), ("m1", "c")]

        failing.clear()
        delivery = harness.deliver(dispatcher)
        duplicate = Outcome.DUPLICATE
        assert list(delivery.outcomes.items()) == [("c", duplicate), ("a", applied), ("b", duplicate), ("d", applied)]
        assert order == ["c", "a", "b", "d", "a", "d"]
        assert harness.totals() == dict.fromkeys("abcd", 1)

    def test_defer_rolls_the_marker_back(self, harness: Harness) -> None:
        """A handler that says "not now" raises through ``deliver``; a redelivery applies."""
        early = [True]

        def body(happened: Added, session: Session) -> None:
            add(happened, session)
            session.flush()
            if early:
                raise Defer

        dispatcher = harness.dispatcher(harness.handler(body))
        with pytest.raises(Defer):
            harness.deliver(dispatcher)
        assert (harness.totals(), harness.markers()) == ({}, [])
        early.clear()
        assert harness.deliver(dispatcher).outcome is Outcome.APPLIED

    def test_an_interruption_passes_through_at_once(self, harness: Harness) -> None:
        """An interruption is raised at once: later handlers do not run, and the interrupted one leaves nothing."""

        def body(happened: Added, session: Session) -> None:
            add(happened, session)
            session.flush()
            raise Interruption

        dispatcher = harness.dispatcher(
            harness.handler(name="first"), harness.handler(body, "second"), harness.handler(name="third")
        )
        with pytest.raises(Interruption):
            harness.deliver(dispatcher)
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "first")])
