"""Prometheus: a counter of outcomes, and histograms of how long deliveries took and how old their messages were."""

from __future__ import annotations

from collections.abc import Sequence

from .extras import needs

with needs("prometheus"):
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from ..observer import Observation
from .measures import AGE_BUCKETS, Series, age_of, duration_of, series_of

__all__ = ["PrometheusObserver"]


class PrometheusObserver:
    """Counts observations in a registry of ``prometheus_client``; give one observer to all dispatchers of a process.

    - ``projector_dedup_messages_total``: a counter by ``handler``, ``message_type``, ``outcome`` and ``error``, the
      name of an error's class. A ``duplicate`` that this delivery had applied, by a COMMIT whose answer was lost, is
      counted as ``applied``.
    - ``projector_dedup_delivery_seconds``: a histogram by ``handler``, ``message_type`` and ``outcome``, without
      ``retried``. Of a batch each message has the duration of all.
    - ``projector_dedup_message_age_seconds``: the same, of messages with an ``occurred_at``: how far the read model is
      behind. A time in the future counts as 0.

    Messages that go to no handler have an empty ``handler`` and ``message_type``: who sends them may make up types,
    and each would be a time series for good. ``buckets`` and ``age_buckets`` are upper bounds in seconds. Raises
    ``ValueError`` if the registry has metrics of these names already.
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
            "Messages, by what became of them.",
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

    def observed(self, observation: Observation) -> None:
        """Count the observation; called by the dispatcher."""
        series = series_of(observation)
        error = "" if observation.error is None else type(observation.error).__name__
        self._messages.labels(*series, error).inc()
        if (duration := duration_of(observation)) is not None:
            self._duration.labels(*series).observe(duration)
        if (age := age_of(observation)) is not None:
            self._age.labels(*series).observe(age)
