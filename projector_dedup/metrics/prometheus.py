"""Export metrics to Prometheus: outcomes, durations and ages of messages, commands, effects and deliveries."""

from __future__ import annotations

from collections.abc import Sequence

from ..extras import needs

with needs("prometheus"):
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from ..observer import Observation
from . import AGE_BUCKETS, Series, age_of, duration_of, series_of

__all__ = ["PrometheusObserver"]


class PrometheusObserver:
    """Counts observations in a registry of ``prometheus_client``.

    Give one observer to all dispatchers, ``Commands`` and ``Effects`` of a process. docs/observing.md lists the metrics
    and their labels.

    ``buckets`` and ``age_buckets`` are upper bounds in seconds, of durations and of ages. A message that went to no
    handler has an empty ``handler`` and ``message_type``: its sender may invent types, and each type would be a time
    series for ever. A ``duplicate`` that this delivery had applied itself, by a COMMIT whose answer was lost, is
    counted as ``applied``. An ``occurred_at`` in the future counts as an age of 0.

    Raises ``ValueError`` if the registry already has metrics of these names.
    """

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        buckets: Sequence[float] = Histogram.DEFAULT_BUCKETS,
        age_buckets: Sequence[float] = AGE_BUCKETS,
    ) -> None:
        self._messages = Counter(
            "projector_dedup_messages",
            "Messages, by outcome.",
            (*Series._fields, "error"),
            registry=registry,
        )
        self._duration = Histogram(
            "projector_dedup_delivery_seconds",
            "Seconds from before the claim to the outcome, with waits and retries.",
            Series._fields,
            registry=registry,
            buckets=buckets,
        )
        self._age = Histogram(
            "projector_dedup_message_age_seconds",
            "Seconds from occurred_at to the outcome.",
            Series._fields,
            registry=registry,
            buckets=age_buckets,
        )
        self._deliveries = Counter(
            "projector_dedup_deliveries",
            "Deliveries of a broker, by what the consumer did.",
            ("broker", "outcome", "reason"),
            registry=registry,
        )
        self._others = {
            kind: (
                Counter(
                    f"projector_dedup_{kind}s",
                    f"{kind.capitalize()}s, by outcome.",
                    ("handler", "outcome", "error"),
                    registry=registry,
                ),
                Histogram(
                    f"projector_dedup_{kind}_seconds",
                    "Seconds from the beginning to the outcome.",
                    ("handler", "outcome"),
                    registry=registry,
                    buckets=buckets,
                ),
            )
            for kind in ("command", "effect")
        }

    def observed(self, observation: Observation) -> None:
        """Count the observation."""
        if observation.kind == "delivery":
            self._deliveries.labels(observation.broker, observation.outcome, observation.reason or "").inc()
            return
        series = series_of(observation)
        error = "" if observation.error is None else type(observation.error).__name__
        if observation.kind != "message":
            counter, histogram = self._others[observation.kind]
            counter.labels(series.handler, series.outcome, error).inc()
            if observation.duration:
                histogram.labels(series.handler, series.outcome).observe(observation.duration)
            return
        self._messages.labels(*series, error).inc()
        if (duration := duration_of(observation)) is not None:
            self._duration.labels(*series).observe(duration)
        if (age := age_of(observation)) is not None:
            self._age.labels(*series).observe(age)
