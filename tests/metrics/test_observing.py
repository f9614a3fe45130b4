"""What Prometheus and OpenTelemetry are told, read back from their own registry and exporters."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from cut_proxy import CutProxy
from databases import DRIVERS, USUAL, USUAL_ASYNC, Database
from kit import Added, Harness, Subject, add
from projector_dedup import Defer, Message
from projector_dedup.brokers.incoming import Incoming
from projector_dedup.brokers.settling import Settling
from projector_dedup.errors import BatchFailed, UnhandledMessage
from projector_dedup.metrics.opentelemetry import OpenTelemetryObserver
from projector_dedup.metrics.prometheus import PrometheusObserver
from projector_dedup.options import RetryPolicy
from reach import reach

SIX = [driver for driver in DRIVERS if driver.drivername in (USUAL_ASYNC if driver.is_async else USUAL).values()]
ADDED = f"{Added.__module__}.Added"
VALUE_ERROR = "builtins.ValueError"


class Handler:
    """Adds; raises for a negative amount, a transient error for the first hundred, and defers zero if told so."""

    def __init__(self) -> None:
        self.transient = 1
        self.defers = False

    def __call__(self, happened: Added, session: Session) -> None:
        """Add, or raise."""
        if happened.amount < 0:
            raise ValueError("poison")
        if self.defers and happened.amount == 0:
            raise Defer("not yet")
        add(happened, session)
        if happened.amount == 100 and self.transient:
            self.transient = 0
            raise StaleDataError("somebody was faster")


class Nobody:
    """An event that no handler wants."""


def message(name: str, amount: int, hours: float | None = None) -> Message:
    """A message, of so many hours ago."""
    return Message(
        name, Added(amount=amount), occurred_at=None if hours is None else datetime.now(UTC) - timedelta(hours=hours)
    )


def messages() -> list[Message]:
    """Applied, duplicate, failed, retried and then applied, applied; their ages counted from now."""
    return [message("m1", 1, 2), message("m1", 1, 2), message("m2", -1), message("m3", 100), message("m4", 2, -1)]


def deliver(harness: Harness, observer: Any) -> None:
    """Each message alone, then all of them in a batch of duplicates and a failure, and a message that nobody wants."""
    dispatcher = harness.dispatcher(harness.handler(Handler()), observer=observer, retry=RetryPolicy(base=0))
    for each in messages():
        if each.body.amount < 0:
            with pytest.raises(ValueError, match="poison"):
                harness.run(dispatcher.deliver, each)
        else:
            harness.run(dispatcher.deliver, each)
    with pytest.raises(BatchFailed):
        harness.run(dispatcher.deliver_batch, messages())
    with pytest.raises(UnhandledMessage):
        harness.run(dispatcher.deliver, Message("m5", Nobody()))
    assert harness.totals() == {"a": 1 + 100 + 2}


# Expected, from what is delivered: alone m1 applied and m1 again, m2 fails, m3 retried and applied, m4 applied; in the
# batch m1 twice, m3 and m4 are duplicates, and m2 fails.
COUNTS = {
    ("applied", ""): 3,
    ("duplicate", ""): 1 + 4,
    ("failed", "ValueError"): 2,
    ("retried", "StaleDataError"): 1,
}
AGED = {"applied": 2, "duplicate": 1 + 3}
"""Those with an `occurred_at`: m1 and m4; m1 again; m1 twice and m4 in the batch."""


@pytest.fixture(params=SIX, ids=str)
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """The contract's tables on each engine, by a synchronous and an asynchronous driver."""
    with Harness(reach(request, request.param)) as harness:
        harness.create_tables()
        yield harness


SQLITE = pytest.mark.parametrize("harness", [each for each in SIX if each.engine == "sqlite"], ids=str, indirect=True)


@pytest.fixture
def on_sqlite(sqlite: Database) -> Iterator[Harness]:
    """The contract's tables, where it does not matter on which engine."""
    with Harness(Subject(sqlite.url())) as harness:
        harness.create_tables()
        yield harness


# Prometheus ----------------------------------------------------------------------------------------------------------


def samples(registry: CollectorRegistry, name: str, *labels: str) -> dict[Any, float]:
    """What a server would scrape."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
    }


def test_prometheus_counts_each_outcome(harness: Harness) -> None:
    """Messages by handler, type, outcome and error; durations and ages of those that have ended."""
    registry = CollectorRegistry()
    deliver(harness, PrometheusObserver(registry))
    labels = ("handler", "message_type", "outcome")
    counted = samples(registry, "projector_dedup_messages_total", *labels, "error")
    assert counted == {
        **{("totals", ADDED, *pair): number for pair, number in COUNTS.items()},
        ("", "", "failed", "UnhandledMessage"): 1,
    }
    durations = samples(registry, "projector_dedup_delivery_seconds_count", *labels)
    assert durations == {
        ("totals", ADDED, outcome): number for (outcome, _), number in COUNTS.items() if outcome != "retried"
    }
    ages = samples(registry, "projector_dedup_message_age_seconds_count", *labels)
    assert ages == {("totals", ADDED, outcome): number for outcome, number in AGED.items()}
    summed = samples(registry, "projector_dedup_message_age_seconds_sum", "outcome")
    assert summed["applied",] == pytest.approx(2 * 3600, abs=300)  # m4 is from the future, and counts as 0


def test_types_that_are_made_up_make_no_time_series(on_sqlite: Harness) -> None:
    """Twenty unknown types are counted under one."""
    registry = CollectorRegistry()
    dispatcher = on_sqlite.dispatcher(observer=PrometheusObserver(registry), unhandled="ignore")
    for number in range(20):
        dispatcher.deliver(Message(f"m{number}", {}, type=f"type {number}"))
    assert samples(registry, "projector_dedup_messages_total", "handler", "message_type", "outcome") == {
        ("", "", "skipped"): 20
    }


def read(incoming: Incoming) -> Message:
    """A converter of bodies that are numbers; it raises for any other body."""
    return message(str(incoming.message_id), int(incoming.body))


@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
def test_deliveries_are_counted_by_broker_and_reason(
    on_sqlite: Harness, reader: InMemoryMetricReader, observer: OpenTelemetryObserver, batch: bool
) -> None:
    """By both observers: what is acknowledged, what comes again, what is rejected before a handler got it or after."""
    registry = CollectorRegistry()
    prometheus = PrometheusObserver(registry)
    incoming = [Incoming(b"1", "m1"), Incoming(b"{", "m2"), Incoming(b"-1", "m3"), Incoming(b"2", "m4")]
    early = Incoming(b"0", "m5", attempt=3)
    for each in (prometheus, observer):
        handler = Handler()
        handler.defers = True
        dispatcher = on_sqlite.dispatcher(on_sqlite.handler(handler), observer=each)
        settling = Settling(dispatcher, read, max_attempts=3, broker="redis")
        answers = settling.deliver_batch(incoming) if batch else [settling.deliver(each) for each in incoming]
        answers += [settling.deliver(replace(early, attempt=attempt)) for attempt in (2, 3)]
        settling.kept(answers[1])
        settling.kept(answers[0])  # which was not rejected: this counts nothing
    expected = {
        ("redis", "acknowledged", ""): 2,
        ("redis", "rejected", "invalid_message"): 1,
        ("redis", "rejected", "handler"): 1,
        ("redis", "retried", "deferred"): 1,
        ("redis", "rejected", "max_attempts"): 1,
        ("redis", "dead_letter", "invalid_message"): 1,
    }
    assert samples(registry, "projector_dedup_deliveries_total", "broker", "outcome", "reason") == expected
    names = [f"projector_dedup.{name}" for name in ("broker", "outcome", "reason")]
    found = {
        tuple(point.attributes.get(name, "") for name in names): point.value
        for point in points(reader, "projector_dedup.deliveries")
    }
    assert found == expected


def test_buckets_are_the_users_to_choose(on_sqlite: Harness) -> None:
    """For durations and for ages."""
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry, buckets=[60], age_buckets=[3600, 4 * 3600])
    on_sqlite.dispatcher(observer=observer).deliver(message("m1", 1, hours=2))
    assert samples(registry, "projector_dedup_delivery_seconds_bucket", "le") == {("60.0",): 1, ("+Inf",): 1}
    ages = samples(registry, "projector_dedup_message_age_seconds_bucket", "le")
    assert ages == {("3600.0",): 0, ("14400.0",): 1, ("+Inf",): 1}


@pytest.mark.parametrize("engine", ["postgresql", "mariadb"])
def test_a_lost_answer_to_commit_is_counted_as_applied(request: pytest.FixtureRequest, engine: str) -> None:
    """One message that was applied once counts as that, though the library learns of it as of a duplicate."""
    registry = CollectorRegistry()
    url = request.getfixturevalue(engine).url()
    with CutProxy(url) as proxy, Harness(Subject(proxy.through(url))) as harness:
        harness.create_tables()
        dispatcher = harness.dispatcher(observer=PrometheusObserver(registry))
        proxy.cut_commit("after")
        harness.deliver(dispatcher)
        assert harness.totals() == {"a": 1}
    assert samples(registry, "projector_dedup_messages_total", "outcome") == {("retried",): 1, ("applied",): 1}


# OpenTelemetry -------------------------------------------------------------------------------------------------------


@pytest.fixture
def reader() -> InMemoryMetricReader:
    """The SDK's own exporter of metrics, which keeps them in memory."""
    return InMemoryMetricReader()


@pytest.fixture
def observer(reader: InMemoryMetricReader) -> OpenTelemetryObserver:
    """An observer of a consumer of RabbitMQ."""
    provider = MeterProvider([reader])
    return OpenTelemetryObserver(
        "rabbitmq", attributes={"messaging.destination.name": "flights"}, meter_provider=provider
    )


def points(reader: InMemoryMetricReader, name: str) -> list[Any]:
    """The data points of one metric."""
    data = reader.get_metrics_data()
    assert data is not None
    return [
        point
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == name
        for point in metric.data.data_points
    ]


COMMON = {
    "messaging.system": "rabbitmq",
    "messaging.operation.name": "process",
    "messaging.destination.name": "flights",
}
OURS = {"projector_dedup.handler": "totals", "projector_dedup.message.type": ADDED}
ERROR_TYPES = {"ValueError": VALUE_ERROR, "StaleDataError": "sqlalchemy.orm.exc.StaleDataError"}


def expected(outcome: str, error: str = "") -> dict[str, Any]:
    """The attributes of a metric."""
    failed = {"error.type": ERROR_TYPES[error]} if error else {}
    return {**COMMON, **OURS, "projector_dedup.outcome": outcome, **failed}


def by_attributes(found: list[Any], value: str) -> list[tuple[dict[str, Any], Any]]:
    """In an order that can be compared."""
    pairs = [(dict(point.attributes), getattr(point, value)) for point in found]
    return sorted(pairs, key=lambda pair: sorted(pair[0].items()))


@SQLITE
def test_opentelemetry_has_the_conventions_metric_and_counts(
    harness: Harness, reader: InMemoryMetricReader, observer: OpenTelemetryObserver
) -> None:
    """`messaging.process.duration` with the attributes that are required, a count of all, and ages."""
    deliver(harness, observer)
    counted = [(expected(*pair), number) for pair, number in COUNTS.items()]
    unhandled = {"projector_dedup.outcome": "failed", "error.type": "projector_dedup.errors.UnhandledMessage"}
    everything = sorted([*counted, ({**COMMON, **unhandled}, 1)], key=lambda pair: sorted(pair[0].items()))
    assert by_attributes(points(reader, "projector_dedup.messages"), "value") == everything
    ended = [(labels, number) for labels, number in counted if labels["projector_dedup.outcome"] != "retried"]
    durations = by_attributes(points(reader, "messaging.process.duration"), "count")
    assert durations == sorted(ended, key=lambda pair: sorted(pair[0].items()))
    ages = {
        point.attributes["projector_dedup.outcome"]: point for point in points(reader, "projector_dedup.message.age")
    }
    assert {outcome: point.count for outcome, point in ages.items()} == AGED
    assert ages["applied"].sum == pytest.approx(2 * 3600, abs=300)


def test_the_duration_has_the_buckets_of_the_conventions(
    on_sqlite: Harness, reader: InMemoryMetricReader, observer: OpenTelemetryObserver
) -> None:
    """Seconds, and the boundaries that the conventions advise."""
    on_sqlite.dispatcher(observer=observer).deliver(message("m1", 1))
    (point,) = points(reader, "messaging.process.duration")
    assert point.explicit_bounds == (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)


@pytest.fixture
def spans() -> InMemorySpanExporter:
    """The SDK's own exporter of spans, which keeps them in memory."""
    return InMemorySpanExporter()


def _within_a_span(harness: Harness, spans: InMemorySpanExporter, dispatcher: Any, event: Any) -> ReadableSpan:
    """Deliver as a consumer does whose client library is traced, and return the span of that library."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracer = provider.get_tracer("broker")

    async def process_later() -> None:
        with tracer.start_as_current_span("process flights"):
            await (dispatcher.deliver_batch if isinstance(event, list) else dispatcher.deliver)(event)

    def process() -> None:
        with tracer.start_as_current_span("process flights"):
            (dispatcher.deliver_batch if isinstance(event, list) else dispatcher.deliver)(event)

    harness.run(process_later if harness.asynchronous else process)
    (span,) = spans.get_finished_spans()
    return span


@SQLITE
def test_the_brokers_span_says_what_became_of_the_message(
    harness: Harness, spans: InMemorySpanExporter, observer: OpenTelemetryObserver
) -> None:
    """Its attributes have handler and outcome, its events each observation, retries too."""
    dispatcher = harness.dispatcher(harness.handler(Handler()), observer=observer, retry=RetryPolicy(base=0))
    span = _within_a_span(harness, spans, dispatcher, message("m3", 100))
    assert span.attributes == {"projector_dedup.handler": "totals", "projector_dedup.outcome": "applied"}
    assert [(event.name, dict(event.attributes or {})) for event in span.events] == [
        (
            "projector_dedup.observed",
            {
                **OURS,
                "projector_dedup.outcome": "retried",
                "error.type": ERROR_TYPES["StaleDataError"],
                "projector_dedup.attempts": 2,
                "messaging.message.id": "m3",
            },
        ),
        (
            "projector_dedup.observed",
            {
                **OURS,
                "projector_dedup.outcome": "applied",
                "projector_dedup.attempts": 2,
                "messaging.message.id": "m3",
            },
        ),
    ]
    assert span.status.is_unset  # the broker's library sets it


@SQLITE
def test_a_span_of_a_batch_has_an_event_for_each_message(
    harness: Harness, spans: InMemorySpanExporter, observer: OpenTelemetryObserver
) -> None:
    """And how many messages shared the transaction."""
    dispatcher = harness.dispatcher(observer=observer)
    span = _within_a_span(harness, spans, dispatcher, [message("m1", 1), message("m2", 2)])
    told = [dict(event.attributes or {}) for event in span.events]
    assert [each["messaging.message.id"] for each in told] == ["m1", "m2"]
    assert [each["messaging.batch.message_count"] for each in told] == [2, 2]


def test_a_span_keeps_the_outcome_of_its_message_beside_that_of_the_delivery(
    on_sqlite: Harness, spans: InMemorySpanExporter, observer: OpenTelemetryObserver
) -> None:
    """The delivery is an event with the broker; the attributes of the span stay those of the message."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    settling = Settling(on_sqlite.dispatcher(observer=observer), read, broker="redis")
    with provider.get_tracer("broker").start_as_current_span("process flights"):
        settling.deliver(Incoming(b"1", "m1"))
    (span,) = spans.get_finished_spans()
    assert span.attributes == {"projector_dedup.handler": "totals", "projector_dedup.outcome": "applied"}
    _, delivery = (dict(event.attributes or {}) for event in span.events)
    assert delivery == {
        "projector_dedup.broker": "redis",
        "projector_dedup.outcome": "acknowledged",
        "projector_dedup.attempts": 1,
        "messaging.message.id": "m1",
    }


def test_without_a_span_and_without_an_sdk_nothing_is_asked_for(on_sqlite: Harness) -> None:
    """Where no SDK is set up, the API of OpenTelemetry does nothing, and neither does the observer."""
    assert isinstance(metrics.get_meter_provider(), metrics.MeterProvider)
    assert not trace.get_current_span().is_recording()
    delivery = on_sqlite.dispatcher(observer=OpenTelemetryObserver("nats")).deliver(message("m1", 1))
    assert delivery.outcome.value == "applied"
