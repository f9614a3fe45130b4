"""OpenTelemetry: metrics by the messaging conventions, and attributes on the span that is current."""

from __future__ import annotations

from collections.abc import Mapping

from ..extras import needs

with needs("opentelemetry"):
    from opentelemetry.metrics import MeterProvider, get_meter
    from opentelemetry.trace import get_current_span
    from opentelemetry.util.types import AttributeValue

from ..observer import Observation
from . import AGE_BUCKETS, age_of, duration_of, series_of

__all__ = ["OpenTelemetryObserver"]

_SCHEMA = "https://opentelemetry.io/schemas/1.32.0"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_HANDLER, _TYPE, _OUTCOME = (f"projector_dedup.{name}" for name in ("handler", "message.type", "outcome"))
_BROKER, _REASON = "projector_dedup.broker", "projector_dedup.reason"


class OpenTelemetryObserver:
    """Records observations as metrics, and on the current span, which is the broker's if its client is traced.

    ``system`` is the broker: ``rabbitmq``, ``kafka`` or another name of the messaging conventions. ``attributes`` are
    added to every metric: ``{"messaging.destination.name": "flights"}``, for example. Without ``meter_provider`` the
    global provider is used. docs/observing.md lists the metrics and their attributes.

    A message that went to no handler has neither handler nor type: its sender may invent types. A ``duplicate`` that
    this delivery had applied itself, by a COMMIT whose answer was lost, is recorded as ``applied``.

    The span gets the attributes ``projector_dedup.handler`` and ``projector_dedup.outcome`` of its last message,
    command or effect, and an event ``projector_dedup.observed`` for each observation, with the attributes of the
    metrics, the message id and the number of attempts. The observer starts no span and sets no status.
    """

    def __init__(
        self,
        system: str,
        *,
        attributes: Mapping[str, AttributeValue] | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        self._given: dict[str, AttributeValue] = {**(attributes or {})}
        self._common: dict[str, AttributeValue] = {
            **self._given,
            "messaging.system": system,
            "messaging.operation.name": "process",
        }
        meter = get_meter("projector_dedup", meter_provider=meter_provider, schema_url=_SCHEMA)
        self._duration = meter.create_histogram(
            "messaging.process.duration",
            unit="s",
            description="Duration of processing operation.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._messages = meter.create_counter(
            "projector_dedup.messages", unit="{message}", description="Messages, by outcome."
        )
        self._deliveries = meter.create_counter(
            "projector_dedup.deliveries",
            unit="{delivery}",
            description="Deliveries of a broker, by what the consumer did.",
        )
        self._age = meter.create_histogram(
            "projector_dedup.message.age",
            unit="s",
            description="Time from occurred_at to the outcome.",
            explicit_bucket_boundaries_advisory=AGE_BUCKETS,
        )
        self._others = {
            kind: (
                meter.create_counter(
                    f"projector_dedup.{kind}s",
                    unit=f"{{{kind}}}",
                    description=f"{kind.capitalize()}s, by outcome.",
                ),
                meter.create_histogram(
                    f"projector_dedup.{kind}.duration",
                    unit="s",
                    description="Time from the beginning to the outcome.",
                    explicit_bucket_boundaries_advisory=_SECONDS,
                ),
            )
            for kind in ("command", "effect")
        }

    def observed(self, observation: Observation) -> None:
        """Record the observation."""
        own = _attributes(observation)
        if observation.kind == "message":
            labels = {**self._common, **own}
            self._messages.add(1, labels)
            if (duration := duration_of(observation)) is not None:
                self._duration.record(duration, labels)
            if (age := age_of(observation)) is not None:
                self._age.record(age, labels)
        elif observation.kind == "delivery":
            self._deliveries.add(1, {**self._common, **own})
        else:
            counter, histogram = self._others[observation.kind]
            counter.add(1, {**self._given, **own})
            if observation.duration:
                histogram.record(observation.duration, {**self._given, **own})
        span = get_current_span()
        if span.is_recording():
            if observation.kind != "delivery":  # which says less than the messages that it contained
                span.set_attributes({name: own[name] for name in (_HANDLER, _OUTCOME) if name in own})
            span.add_event("projector_dedup.observed", own | _details(observation))


def _attributes(observation: Observation) -> dict[str, AttributeValue]:
    """Return the attributes of metrics: each has few values."""
    named = zip((_HANDLER, _TYPE, _OUTCOME), series_of(observation), strict=True)
    found: dict[str, AttributeValue] = {name: value for name, value in named if value}
    for name, label in ((_BROKER, observation.broker), (_REASON, observation.reason)):
        if label is not None:
            found[name] = label
    if observation.error is not None:
        error = type(observation.error)
        found["error.type"] = f"{error.__module__}.{error.__qualname__}"
    return found


def _details(observation: Observation) -> dict[str, AttributeValue]:
    """Return what a trace has besides, of one message each."""
    found: dict[str, AttributeValue] = {"projector_dedup.attempts": observation.attempts}
    if observation.message_id is not None:
        found["messaging.message.id"] = observation.message_id
    if observation.batch_size > 1:
        found["messaging.batch.message_count"] = observation.batch_size
    return found
