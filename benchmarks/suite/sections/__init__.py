"""What is measured, by the name that the command line has for it."""

from __future__ import annotations

from collections.abc import Callable

from ..harness import Bench
from ..results import Section
from . import batched, consume, counts, growth, meeting, races, workers

SECTIONS: dict[str, Callable[[Bench], Section]] = {
    "rates": races.rates,
    "consume": consume.consume,
    "redeliveries": races.redeliveries,
    "trips": counts.trips,
    "distance": races.distance,
    "workers": workers.workers,
    "meeting": meeting.meeting,
    "batches": batched.batched,
    "storage": counts.storage,
    "table-size": growth.table_size,
    "engines": races.engines,
}
