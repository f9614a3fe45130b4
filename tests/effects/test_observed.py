"""What an observer is told of effects and of commands."""

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from sqlalchemy.orm import Session
from sqlalchemy.util import greenlet_spawn

from effect_rig import Charge, Lost, Till, tills
from kit import Gate
from projector_dedup.commands import AsyncCommands, Commands, Rejected, command, default_command_tables
from projector_dedup.effects import NotDone, NotRecordedError, resend
from projector_dedup.errors import ProjectorDedupError
from projector_dedup.maintenance.effects import resolve
from projector_dedup.metrics.opentelemetry import OpenTelemetryObserver
from projector_dedup.metrics.prometheus import PrometheusObserver
from projector_dedup.observer import Observation

till = tills()
HOUR = timedelta(hours=1)


class Told:
    """Keeps what it is told, and fails: that changes nothing."""

    def __init__(self) -> None:
        self.observations = list[Observation]()

    def observed(self, observation: Observation) -> None:
        """Keep it."""
        self.observations.append(observation)
        raise ZeroDivisionError

    @property
    def outcomes(self) -> list[str]:
        """The outcomes, in order."""
        return [each.outcome for each in self.observations]


def _do(till: Till, call: str, observer: Any, made: Any, *args: Any, **said: Any) -> Any:
    """Call ``run`` or ``settle`` of ``Effects`` with the observer; return what it raised, if it did."""
    try:
        return till.harness.run(getattr(till.effects(made, observer=observer), call), *args, **said)
    except ProjectorDedupError as error:
        return error


ENDINGS = [
    (None, ["armed", "done"]),
    (Rejected("card_declined"), ["armed", "rejected"]),
    (NotDone(), ["armed", "not_done"]),
    (Lost(), ["armed", "unknown"]),
]


@pytest.mark.parametrize(("raised", "outcomes"), ENDINGS, ids=lambda each: type(each).__name__)
def test_each_ending_of_an_armed_effect_is_told(till: Till, raised: Exception | None, outcomes: list[str]) -> None:
    """With the key as it is stored, the attempt, and the error if there is no outcome."""

    told, charge = Told(), till.effect(till.body(raised))
    till.arm(charge)
    _do(till, "settle", told, charge)
    assert told.outcomes == outcomes
    last = told.observations[-1]
    assert (last.kind, last.handler, last.message_id, last.attempts) == ("effect", "till.charge", "0:k1", 1)
    assert last.error is (raised if outcomes[1] in ("not_done", "unknown") else None)
    assert last.duration > 0
    assert "o1" not in repr(last)


def test_a_retried_effect_is_armed_once(till: Till) -> None:
    """Its second attempt is a resend."""
    told, charge = Told(), till.effect(till.loses_reply, resend(within=HOUR))
    till.arm(charge)
    for _ in range(2):
        _do(till, "settle", told, charge)
        till.pass_time(61)
    assert told.outcomes == ["armed", "unknown", "done"]


def test_what_run_does_without_arming_is_not_armed(till: Till) -> None:
    """The second call is answered by the record: nothing was done."""
    told, charge = Told(), till.effect()
    for _ in range(2):
        _do(till, "run", told, charge, charge, Charge(), key="k1")
    assert told.outcomes == ["done"]


def test_a_policy_that_ends_and_a_decision_are_told(till: Till) -> None:
    """A person decides, and the next sweep records it."""
    told, charge = Told(), till.effect(till.loses_reply)
    _do(till, "run", told, charge, charge, Charge(), key="k1")
    _do(till, "settle", told, charge)  # it is not due yet
    till.pass_time(40)
    _do(till, "settle", told, charge)
    url = till.harness.subject.url
    if not till.harness.asynchronous:
        said = {"why": "seen", "who": "me"}
        resolve(till.harness.engine, "k1", attempt=1, outcome="done", value='"pi_1"', **said)  # type: ignore[arg-type]
        _do(till, "settle", told, charge)
    assert told.outcomes == ["unknown", "stopped", *([] if till.harness.asynchronous else ["done"])], url


def test_what_cannot_be_recorded_is_told_once_for_each_try(till: Till) -> None:
    """The value is kept."""
    failures = [ZeroDivisionError(), ZeroDivisionError()]

    def recorded(_request: Charge, _value: str, _session: Session) -> None:
        if failures:
            raise failures.pop()

    told, charge = Told(), till.effect(recorded=recorded)
    assert isinstance(_do(till, "run", told, charge, charge, Charge(), key="k1"), NotRecordedError)
    for _ in range(2):
        till.pass_time(3700)
        _do(till, "settle", told, charge)
    assert told.outcomes == ["failed", "failed", "done"]


@pytest.mark.parametrize("same", [True, False], ids=["fenced", "double"])
def test_a_late_value_is_told(till: Till, same: bool) -> None:
    """Equal values of a ``resend`` are one deed."""
    gate, told = Gate(till.harness), Told()
    charge = till.effect(till.body("pi", "pi" if same else "pi_2", gate=gate), resend(within=HOUR))
    first = till.harness.start(_do, till, "run", told, charge, charge, Charge(), key="k1")
    gate.arrival()
    till.pass_time(40)
    _do(till, "settle", told, charge)
    gate.open()
    first.result()
    assert told.outcomes == ["done", "fenced" if same else "double"]


def test_an_ask_is_told(till: Till) -> None:
    """What the provider has done is done."""
    told, charge = Told(), till.effect(till.loses_reply, till.asks("pi_1"))
    _do(till, "run", told, charge, charge, Charge(), key="k1")
    till.pass_time(40)
    _do(till, "settle", told, charge)
    assert told.outcomes == ["unknown", "done"]


@dataclass(frozen=True)
class Order:
    """A command."""

    amount: int = 1


def test_commands_are_told(till: Till) -> None:
    """Handled, answered again, rejected, failed; and counted by Prometheus and OpenTelemetry."""
    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    told, prometheus = Told(), PrometheusObserver(registry)
    telemetry = OpenTelemetryObserver("shop", meter_provider=MeterProvider([reader]))

    class All:
        def observed(self, observation: Observation) -> None:
            prometheus.observed(observation)
            telemetry.observed(observation)
            told.observed(observation)

    def direct(order: Order, _call: Any) -> int:
        if order.amount < 0:
            raise Rejected("negative")
        return 10 // order.amount

    async def awaited(order: Order, call: Any) -> int:
        return await greenlet_spawn(direct, order, call)

    asynchronous = till.harness.asynchronous
    till.harness.transact(lambda session: default_command_tables.marker.metadata.create_all(session.connection()))
    place: Any = command(name="shop.place")(awaited if asynchronous else direct)
    kind: Any = AsyncCommands if asynchronous else Commands
    commands = kind(till.harness.factory, observer=All())
    for key, amount in (("a", 1), ("a", 1), ("b", -1), ("b", -1)):
        till.harness.run(commands.handle, place, Order(amount), key=key)
    with pytest.raises(ZeroDivisionError):
        till.harness.run(commands.handle, place, Order(0), key="c")
    charge = till.effect()
    for key in ("k1", "k2"):
        _do(till, "run", All(), charge, charge, Charge(), key=key)

    expected = ["applied", "duplicate", "rejected", "duplicate", "failed"]
    assert told.outcomes == [*expected, "done", "done"]
    assert [(each.kind, each.handler, each.message_id) for each in told.observations[:5]] == [
        ("command", "shop.place", key) for key in "aabbc"
    ]
    for outcome, number in Counter(expected).items():
        error = "ZeroDivisionError" if outcome == "failed" else ""
        labels = {"handler": "shop.place", "outcome": outcome, "error": error}
        assert registry.get_sample_value("projector_dedup_commands_total", labels) == number
    labels = {"handler": "till.charge", "outcome": "done", "error": ""}
    assert registry.get_sample_value("projector_dedup_effects_total", labels) == 2
    assert registry.get_sample_value("projector_dedup_messages_total", labels | {"message_type": ""}) is None
    data: Any = reader.get_metrics_data()
    (scope,) = data.resource_metrics[0].scope_metrics
    counted = {metric.name: metric.data.data_points for metric in scope.metrics}
    assert sum(point.value for point in counted["projector_dedup.commands"]) == 5
    assert [point.value for point in counted["projector_dedup.effects"]] == [2]
    assert [point.count for point in counted["projector_dedup.effect.duration"]] == [2]
    assert "projector_dedup.messages" not in counted


def test_an_observer_has_a_method(till: Till) -> None:
    """As for dispatchers."""
    kind: Any = AsyncCommands if till.harness.asynchronous else Commands
    with pytest.raises(ValueError, match="observer must be an object"):
        till.effects(observer=object())
    with pytest.raises(ValueError, match="observer must be an object"):
        kind(till.harness.factory, observer=object())
