"""From a broker to the read model: the consumers, beside a loop by hand without deduplication."""

from __future__ import annotations

from ..contenders.consumers import BROKERS, of
from ..harness import Bench, enter, progress, race
from ..results import Section, rounds_of, standings


def consume(bench: Bench) -> Section:
    """Each broker to each server, in one process. A turn takes a second or so, because it connects."""
    section = Section(
        "consume",
        "From a broker to the read model",
        "One process; every message new. Divided by the rate of the same client by hand, without deduplication, in the "
        "same round: one message, one transaction, one acknowledgement. The handler reads a row and adds to it; with "
        "`batch=True` it reads and writes the rows of a batch together.",
    )
    for server in filter(None, (bench.postgresql, bench.mariadb)):
        for broker in BROKERS:
            progress(f"{broker} to {server.engine}")
            entries = [enter(server, each) for each in of(broker)]
            race(entries, bench.rounds(7), 20 * bench.seconds)
            table = standings(entries, entries[0])
            table.title = f"{broker} to {server.version.split()[0]}"
            section.tables.append(table)
            section.rounds |= rounds_of(entries, f", {server.engine}")
    return section
