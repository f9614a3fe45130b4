"""The contract for deliveries of one message at the same time: rivals wait, and one of them applies it (I3).

No test sleeps to win a race. A handler stops at a ``Gate`` until the test has seen its rivals where it wants them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from sqlalchemy.orm import Session

from ..dialects import dialect_of
from ..errors import InProgress, UnsupportedDatabaseError
from ..outcome import Outcome
from .harness import Harness
from .once import Broken
from .subject import PATIENCE, Added, add


class Gate:
    """A place in a handler where it stops: the test sees that it has come, and opens the gate."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._arrived = threading.Semaphore(0)
        self._open = threading.Event()

    def stop(self) -> None:
        """Report that the handler has come, and wait until the gate is open; called in the handler."""
        self._arrived.release()
        self._harness.blocking(self._wait)

    def _wait(self) -> None:
        assert self._open.wait(PATIENCE), "nobody opened the gate"

    def arrival(self, instead: Callable[[], bool] = lambda: False) -> None:
        """Wait until one more handler has come, or ``instead()`` is True; called in the test."""
        deadline = time.monotonic() + PATIENCE
        while not self._arrived.acquire(timeout=0.02) and not instead():
            assert time.monotonic() < deadline, "nobody came to the gate"

    def open(self) -> None:
        """Open the gate for every handler, now and later; called in the test."""
        self._open.set()


class Held:
    """A handler whose first run stops at a gate before it returns, and then fails if ``fails``."""

    def __init__(self, harness: Harness, *, fails: bool = False) -> None:
        self.gate = Gate(harness)
        self.runs = 0
        self._fails = fails

    def __call__(self, happened: Added, session: Session) -> None:
        """Write, and stop at the gate in the first run."""
        self.runs += 1
        first = self.runs == 1
        add(happened, session)
        session.flush()
        if first:
            self.gate.stop()
            if self._fails:
                raise Broken


class RaceContract:
    """I3: two deliveries of one message at the same time."""

    @pytest.mark.parametrize("rivals", [1, 5])
    def test_rivals_wait_and_skip_if_the_first_commits(self, harness: Harness, rivals: int) -> None:
        """The others wait for the first, and none of them enters the handler."""
        held = Held(harness)
        dispatcher = harness.dispatcher(harness.handler(held))
        winner = harness.start(harness.deliver, dispatcher)
        held.gate.arrival()
        losers = [harness.start(harness.deliver, dispatcher) for _ in range(rivals)]
        harness.waits(rivals)
        assert not any(loser.done() for loser in losers)
        held.gate.open()
        assert winner.result().outcome is Outcome.APPLIED
        assert [loser.result().outcome for loser in losers] == [Outcome.DUPLICATE] * rivals
        assert (held.runs, harness.totals(), harness.markers()) == (1, {"a": 1}, [("m1", "totals")])

    @pytest.mark.parametrize("rivals", [1, 5])
    def test_one_rival_applies_if_the_first_rolls_back(self, harness: Harness, rivals: int) -> None:
        """The others wait for the first; when it fails, exactly one of them applies, and the rest skip."""
        held = Held(harness, fails=True)
        dispatcher = harness.dispatcher(harness.handler(held))
        winner = harness.start(harness.deliver, dispatcher)
        held.gate.arrival()
        losers = [harness.start(harness.deliver, dispatcher) for _ in range(rivals)]
        harness.waits(rivals)
        held.gate.open()
        assert isinstance(winner.exception(), Broken)
        outcomes = Counter(loser.result().outcome for loser in losers)
        assert outcomes == Counter([Outcome.APPLIED] + [Outcome.DUPLICATE] * (rivals - 1))
        assert (held.runs, harness.totals(), harness.markers()) == (2, {"a": 1}, [("m1", "totals")])

    @pytest.mark.parametrize("fails", [False, True])
    def test_the_wait_can_be_bounded(self, harness: Harness, fails: bool) -> None:
        """Running out of ``claim_timeout`` is InProgress: no duplicate, and nothing is lost whatever the first does.

        Where the wait cannot be bounded, that is refused.
        """
        held = Held(harness, fails=fails)
        handler = harness.handler(held)
        winner = harness.start(harness.deliver, harness.dispatcher(handler))
        held.gate.arrival()
        hasty = harness.dispatcher(handler, claim_timeout=0.1)
        bounded = dialect_of(harness.engine).bounds_waits
        with pytest.raises(InProgress if bounded else UnsupportedDatabaseError, match=r"0\.1 s|claim_timeout"):
            harness.deliver(hasty)
        held.gate.open()
        assert isinstance(winner.exception(), Broken) is fails
        if not bounded:
            return
        assert harness.deliver(hasty).outcome is (Outcome.APPLIED if fails else Outcome.DUPLICATE)
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "totals")])

    def test_different_handlers_of_one_message_do_not_wait(self, harness: Harness) -> None:
        """Each handler has its own claim; where the database locks rows, a rival of another name goes on at once."""
        if harness.subject.one_writer or not dialect_of(harness.engine).locks_rows:
            pytest.skip("writers are serialised: everybody waits for the first")
        for key in "ab":  # a row that does not exist yet may be locked with its neighbours
            harness.transact(partial(add, Added((key,), 0)))
        held = Held(harness)
        winner = harness.start(harness.deliver, harness.dispatcher(harness.handler(held)))
        held.gate.arrival()
        other = harness.dispatcher(harness.handler(name="other"))
        assert harness.deliver(other, Added(("b",))).outcome is Outcome.APPLIED
        assert harness.deliver(other, Added(("b",)), "m2").outcome is Outcome.APPLIED
        held.gate.open()
        assert winner.result().outcome is Outcome.APPLIED
