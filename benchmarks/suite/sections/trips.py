"""How often a message waits for the server, counted at the wire."""

from __future__ import annotations

from ..bench import Bench
from ..contenders import on_engine
from ..harness import Contender, connected, enter, progress
from ..results import Section, Table
from ..servers import Server
from ..wire import Wire

KEY = "trips"


def measure(bench: Bench) -> Section:
    """New messages, and the same again."""
    with Wire(bench.postgresql.url) as wire:
        counts = {name: _count(bench.postgresql, each, wire) for name, each in on_engine("postgresql").items()}
    return Section(
        KEY,
        "Round trips for each message",
        "A round trip is counted when the client speaks after the server has spoken, once drivers have prepared their "
        "statements. A batch shares its round trips.",
        [Table(["contender", "new", "redelivered"], [[name, *map(_shown, both)] for name, both in counts.items()])],
        rounds={name: [new] for name, (new, _) in counts.items()},
    )


def _count(server: Server, contender: Contender, wire: Wire) -> tuple[float, float]:
    progress(contender.name)
    count = max(16 * contender.tasks, 2 * contender.batch)
    entry = enter(server, contender)
    with connected(entry, 5, wire.through):
        messages = contender.messages(entry.stream.take(count))
        counts = []
        for _ in ("new", "again, and warm by then", "again"):
            before = wire.trips
            contender.deliver(messages)
            counts.append((wire.trips - before) / count)
    server.drop(entry.place)
    return counts[0], counts[2]


def _shown(count: float) -> str:
    return f"{count:.3g}"
