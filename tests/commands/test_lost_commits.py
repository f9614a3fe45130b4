"""The line is cut at COMMIT: whoever asked gets the recorded answer, or hears that nobody knows."""

import logging
from collections.abc import Iterator

import pytest

from command_rig import Desk, desks
from cut_proxy import Cut, CutProxy
from databases import DRIVERS
from http_rig import Shop
from projector_dedup import Outcome
from projector_dedup.errors import CommitOutcomeUnknown
from projector_dedup.options import RetryPolicy

SERVERS = [driver for driver in DRIVERS if driver.engine != "sqlite"]


desk = desks(SERVERS)


@pytest.fixture
def proxy(desk: Desk) -> Iterator[CutProxy]:
    """A line to the server that can be cut at COMMIT."""
    with CutProxy(desk.harness.subject.url) as proxy:
        yield proxy


@pytest.mark.parametrize(
    ("cuts", "ran", "outcome"),
    [
        (["before"], 2, Outcome.APPLIED),
        (["after"], 1, Outcome.DUPLICATE),
        (["before", "after"], 2, Outcome.DUPLICATE),
    ],
    ids=["before", "after", "before and after"],
)
def test_whoever_lost_the_commit_gets_the_answer(
    desk: Desk, proxy: CutProxy, cuts: list[Cut], ran: int, outcome: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    """The key is claimed again: it is free, and the command runs; or it is taken, and its record is the answer."""
    shop = Shop(desk)
    commands, operation = desk.commands(shop.factory_through(proxy)), desk.operation()
    desk.handle(operation, key="k0", commands=commands)  # what an engine commits first is not of this command
    for cut in cuts:
        proxy.cut_commit(cut)
    with caplog.at_level(logging.INFO, "projector_dedup"):
        answer = desk.handle(operation, commands=commands)
    assert (proxy.cuts, answer.outcome) == (len(cuts), outcome)
    assert desk.ran == ["k0"] + ["k1"] * ran
    assert desk.handle(operation).result == answer.result
    assert (desk.orders(), desk.spent(), len(desk.records())) == (["k0", "k1"], 2, 2)
    told = [getattr(record, "after_unknown_commit", False) for record in caplog.records]
    assert any(told) == (outcome is Outcome.DUPLICATE)
    shop.close()


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_commit_that_nobody_can_ask_about_is_told(desk: Desk, proxy: CutProxy, cut: Cut) -> None:
    """Where no attempt is left, the caller hears that the outcome is unknown; the same key finds out."""
    shop = Shop(desk)
    commands, operation = desk.commands(shop.factory_through(proxy), retry=RetryPolicy(attempts=1)), desk.operation()
    desk.handle(operation, key="k0", commands=commands)
    proxy.cut_commit(cut)
    with pytest.raises(CommitOutcomeUnknown):
        desk.handle(operation, commands=commands)
    assert desk.handle(operation).replayed == (cut == "after")
    assert (desk.orders(), desk.spent(), len(desk.records())) == (["k0", "k1"], 2, 2)
    shop.close()
