"""What is measured; a section is a module with a ``KEY`` and ``measure(bench)``."""

from __future__ import annotations

from . import engines, latency, memory, pruning, rates, redeliveries, storage, table_size, trips, workers

SECTIONS = {
    section.KEY: section.measure
    for section in (rates, redeliveries, trips, latency, workers, storage, table_size, memory, pruning, engines)
}
