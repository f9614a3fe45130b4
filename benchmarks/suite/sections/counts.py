"""Counted, not timed: round trips, and bytes of the server's log and of its disk, for each message."""

from __future__ import annotations

from .. import contenders as who
from ..harness import Bench, Contender, Entry, connected, enter, progress
from ..results import Section, Table
from ..servers import Place, Server
from ..wire import Wire

_STORED = (
    who.BASE, who.DEFAULT, who.BATCH_1000, who.ONE_STATEMENT, who.SELECT_INSERT, who.CTE, who.SET_BASED, who.PROTEAN,
    who.EVENTSOURCING,
)  # fmt: skip


def trips(bench: Bench) -> Section:
    """How often a message waits for the server: new messages, and the same again."""
    with Wire(bench.postgresql.url) as wire:
        counts = {name: _trips(bench.postgresql, each, wire) for name, each in who.on_engine("postgresql").items()}
    return Section(
        "trips",
        "Round trips for each message",
        "Counted by a proxy, after the drivers have prepared their statements. A batch shares its round trips.",
        [
            Table(
                ["contender", "new", "redelivered"],
                [[name, *(f"{n:.3g}" for n in both)] for name, both in counts.items()],
            )
        ],
        rounds={name: [new] for name, (new, _) in counts.items()},
    )


def _trips(server: Server, contender: Contender, wire: Wire) -> tuple[float, float]:
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


def storage(bench: Bench) -> Section:
    """What a marker costs the server. Nothing is timed, so nothing is repeated."""
    everybody = who.on_engine("postgresql")
    found = {name: _bytes(bench, everybody[name]) for name in _STORED if name in everybody}
    rows = [[name, *(f"{each:,.0f}" for each in measured)] for name, measured in found.items()]
    return Section(
        "storage",
        "Bytes for each message",
        "Write-ahead log after a CHECKPOINT, with the changes of the read model. Disk: growth of the table that "
        "remembers messages, and of its indexes. Ids are random UUIDs as text (36 bytes).",
        [Table(["contender", "log", "table", "indexes"], rows)],
        rounds=found,
    )


def _bytes(bench: Bench, contender: Contender) -> list[float]:
    progress(contender.name)
    entry = enter(bench.postgresql, contender)
    count = bench.size(20_000 if contender.batch > 1 else 2_000) // contender.batch * contender.batch or contender.batch
    with connected(entry, 8 * bench.seconds):
        _deliver(entry, count)
        entry.place.run("CHECKPOINT")
        _deliver(entry, count)
        before = _sizes(entry.place, contender.markers)
        _deliver(entry, count)
        after = _sizes(entry.place, contender.markers)
    bench.postgresql.drop(entry.place)
    return [(now - then) / count for now, then in zip(after, before, strict=True)]


def _deliver(entry: Entry, count: int) -> None:
    entry.contender.deliver(entry.contender.messages(entry.stream.take(count)))


def _sizes(place: Place, markers: str) -> list[int]:
    functions = ("pg_table_size", "pg_indexes_size")
    sizes = [place.ask(f"SELECT {size}('{markers}')") if markers else 0 for size in functions]
    return [place.ask("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')"), *sizes]
