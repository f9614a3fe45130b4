"""What a marker costs the server: bytes of its log, and of its disk."""

from __future__ import annotations

from collections.abc import Callable

from .. import contenders as who
from ..bench import Bench
from ..harness import Contender, connected, enter, progress
from ..results import Section, Table
from ..servers import Server

KEY = "storage"
_WHO = (
    who.BASE, who.DEFAULT, who.BATCH_1000, who.ONE_STATEMENT, who.SELECT_INSERT, who.CTE, who.SET_BASED, who.PROTEAN,
    who.EVENTSOURCING,
)  # fmt: skip
_SIZES = "SELECT {}('{}')"


def measure(bench: Bench) -> Section:
    """Nothing is timed, so nothing is repeated."""
    everybody = who.on_engine("postgresql")
    found = {name: _bytes(bench, everybody[name]) for name in _WHO if name in everybody}
    base = found[who.BASE][0]
    rows = []
    for name, (log, table, indexes) in found.items():
        more = f"{log - base:+,.0f}" if everybody[name].batch == 1 else "-"
        rows.append([name, f"{log:,.0f}", more, f"{table:,.0f}", f"{indexes:,.0f}"])
    return Section(
        KEY,
        "Bytes for each message",
        "Write-ahead log: from after a CHECKPOINT and a warm-up, with the changes of the read model in it; `more` is "
        f"beside `{who.BASE}`. Disk: growth of the table that remembers messages, and of its indexes. Ids are UUIDs "
        "as text (36 bytes). Random ids leave pages of an index about 70 % full, and a young index is emptier.",
        [Table(["contender", "log", "more", "table", "indexes"], rows)],
        rounds={name: list(values) for name, values in found.items()},
    )


def _bytes(bench: Bench, contender: Contender) -> tuple[float, float, float]:
    progress(contender.name)
    server: Server = bench.postgresql
    entry = enter(server, contender)
    count = bench.size(20_000 if contender.batch > 1 else 2_000) // contender.batch * contender.batch or contender.batch
    with connected(entry, 8 * bench.seconds):
        contender.deliver(contender.messages(entry.stream.take(count)))
        entry.place.run("CHECKPOINT")
        contender.deliver(contender.messages(entry.stream.take(count)))
        before = _state(entry.place.ask, contender.markers)
        contender.deliver(contender.messages(entry.stream.take(count)))
        after = _state(entry.place.ask, contender.markers)
    server.drop(entry.place)
    log, table, indexes = ((now - then) / count for now, then in zip(after, before, strict=True))
    return log, table, indexes


def _state(ask: Callable[[str], int], markers: str) -> list[int]:
    sizes = [ask(_SIZES.format(size, markers)) if markers else 0 for size in ("pg_table_size", "pg_indexes_size")]
    return [ask("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')"), *sizes]
