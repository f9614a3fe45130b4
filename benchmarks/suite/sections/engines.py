"""SQLite and MariaDB: the same handler, with and without deduplication."""

from __future__ import annotations

from .. import contenders as who
from ..bench import Bench
from ..harness import enter, race
from ..results import Section, rates, standings
from ..servers import Server, sqlite

KEY = "engines"
CONTENDERS = (
    who.BASE,
    who.DEFAULT,
    who.BATCH_100,
    who.BATCH_1000,
    who.SHARED_100,
    who.SHARED_1000,
    who.ROWS_ONCE,
    who.SELECT_INSERT,
)


def measure(bench: Bench) -> Section:
    """Rates, on each engine that there is."""
    text = (
        f"Rates divided by that of `{who.BASE}` on the same engine. SQLite: files on this machine's disk, "
        "`configure_sqlite()` (write-ahead log) for everybody."
    )
    section = Section(KEY, "SQLite and MariaDB", text)
    with sqlite() as files:
        _race(bench, files, section)
    if bench.mariadb is None:
        section.text += " MariaDB was left out: no server was given (`--mariadb URL`)."
    else:
        _race(bench, bench.mariadb, section)
    return section


def _race(bench: Bench, server: Server, section: Section) -> None:
    everybody = who.on_engine(server.engine)
    entries = [enter(server, everybody[name]) for name in CONTENDERS]
    race(entries, bench.rounds(25), bench.seconds)
    name = server.version.split()[0]
    table = standings(entries, entries[0])
    table.title = server.version
    section.tables.append(table)
    section.rounds |= rates(entries, f", {name}")
