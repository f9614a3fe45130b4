"""OpenTelemetry: metrics by the messaging conventions, and attributes on the span that is current."""

from __future__ import annotations

from collections.abc import Mapping

from .extras import needs

with needs("opentelemetry"):
    from opentelemetry.metrics import MeterProvider, get_meter
    from opentelemetry.trace import get_current_span
    from opentelemetry.util.types import AttributeValue

from ..observer import Observation
from .measures import AGE_BUCKETS, age_of, duration_of, series_of

__all__ = ["OpenTelemetryObserver"]

_SCHEMA = "https://opentelemetry.io/schemas/1.32.0"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_HANDLER, _TYPE, _OUTCOME = (f"projector_dedup.{name}" for name in ("handler", "message.type", "outcome"))


class OpenTelemetryObserver:
    """Records observations as metrics, and writes them on the current span, which is the broker's if that is traced.

    ``system`` is the broker: ``rabbitmq`` or ``kafka``, by the names of the conventions, or a name for one that they do
    not know. Other ``attributes`` go with every metric: ``{"messaging.destination.name": "flights"}``, say.

    Metrics: ``messaging.process.duration``, a histogram in seconds, without retries; ``projector_dedup.messages``, a
    counter of all observations; ``projector_dedup.message.age``, a histogram in seconds of messages with an
    ``occurred_at``. Each has ``messaging.system``, ``messaging.operation.name`` (``process``), ``error.type`` if it
    failed, and ``projector_dedup.handler``, ``.message.type`` and ``.outcome``; the first two are left out for messages
    that went to no handler, whose type anybody may have made up. A ``duplicate`` that this delivery had applied, by a
    COMMIT whose answer was lost, is recorded as ``applied``.

    On the span: attributes ``projector_dedup.handler`` and ``.outcome``, of the last observation if there are several,
    and an event ``projector_dedup.observed`` for each, with the attributes of the metrics, the message's id and the
    number of attempts. The span's status is its owner's to set.

    Without ``meter_provider`` the global one is used.
    """

    def __init__(
        self,
        system: str,
        *,
        attributes: Mapping[str, AttributeValue] | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        self._common: dict[str, AttributeValue] = {
            **(attributes or {}),
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
            "projector_dedup.messages", unit="{message}", description="Messages, by what became of them."
        )
        self._age = meter.create_histogram(
            "projector_dedup.message.age",
            unit="s",
            description="Time from occurred_at to the outcome.",
            explicit_bucket_boundaries_advisory=AGE_BUCKETS,
        )

    def observed(self, observation: Observation) -> None:
        """Record the observation; called by the dispatcher."""
        own = _attributes(observation)
        labels = {**self._common, **own}
        self._messages.add(1, labels)
        if (duration := duration_of(observation)) is not None:
            self._duration.record(duration, labels)
        if (age := age_of(observation)) is not None:
            self._age.record(age, labels)
        span = get_current_span()
        if span.is_recording():
            span.set_attributes({name: own[name] for name in (_HANDLER, _OUTCOME) if name in own})
            span.add_event("projector_dedup.observed", own | _details(observation))


def _attributes(observation: Observation) -> dict[str, AttributeValue]:
    """Return the attributes of metrics: each has few values."""
    named = zip((_HANDLER, _TYPE, _OUTCOME), series_of(observation), strict=True)
    found: dict[str, AttributeValue] = {name: value for name, value in named if value}
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
