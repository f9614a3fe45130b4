"""The contract of a rename: while both names are in use, a message is applied under one of them."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from ..outcome import Outcome
from .convergence import generate, redelivered, totals_of
from .harness import Harness
from .once import Broken
from .races import Held
from .subject import add, until_acknowledged

OLD, NEW = "old", "new"


def deployed(harness: Harness, version: str, body: Any = add) -> Any:
    """Return a dispatcher of one version of the code; the newer one knows the older one's name."""
    formerly = [OLD] if version == NEW else []
    return harness.dispatcher(harness.handler(body, version, formerly=formerly, **harness.subject.exact))


class FormerlyContract:
    """Code of the old name, and code of the new name that lists the old: in any order, and at the same time."""

    @pytest.mark.parametrize(("first", "second"), [(OLD, NEW), (NEW, OLD)])
    def test_what_one_version_applied_the_other_skips(self, harness: Harness, first: str, second: str) -> None:
        """The new version skips a message that the old one applied, and the reverse, as after a rolled back deploy."""
        outcomes = [
            harness.deliver(deployed(harness, version), message_id=message_id).outcome
            for message_id, versions in {"m1": (first, second), "m2": (second, first)}.items()
            for version in versions
        ]
        assert outcomes == [Outcome.APPLIED, Outcome.DUPLICATE] * 2
        assert harness.totals() == {"a": 2}
        by_old = {"m1" if first == OLD else "m2"}  # a duplicate left no marker behind
        assert harness.markers() == sorted(
            (each, name) for each in ("m1", "m2") for name in ((OLD,) if each in by_old else (OLD, NEW))
        )

    @pytest.mark.parametrize("fails", [False, True], ids=["commits", "rolls back"])
    @pytest.mark.parametrize(("first", "second"), [(OLD, NEW), (NEW, OLD)])
    def test_one_version_waits_for_the_other(self, harness: Harness, first: str, second: str, fails: bool) -> None:
        """I3: the second neither enters its handler nor gives up before the first has ended."""
        held = Held(harness, fails=fails)
        winner = harness.start(harness.deliver, deployed(harness, first, held))
        held.gate.arrival()
        loser = harness.start(harness.deliver, deployed(harness, second, held))
        harness.waits()
        assert held.runs == 1
        held.gate.open()
        assert isinstance(winner.exception(), Broken) is fails
        assert loser.result().outcome is (Outcome.APPLIED if fails else Outcome.DUPLICATE)
        assert harness.totals() == {"a": 1}

    def test_both_versions_converge(self, harness: Harness) -> None:
        """Consumers of both versions race with duplicated and reordered messages: the totals are exact."""
        messages, dice = generate(4, 30), random.Random(4)  # noqa: S311  # repeatable
        stream = redelivered(messages, dice)

        def consume(version: str) -> None:
            dispatcher = deployed(harness, version)
            while stream:
                message_id, happened = stream.pop()
                until_acknowledged(partial(harness.deliver, dispatcher, happened, message_id))

        for consumer in [harness.start(consume, version) for version in (OLD, NEW) * 2]:
            consumer.result()
        assert harness.totals() == totals_of(messages)
        assert {message_id for message_id, _ in harness.markers()} == messages.keys()
