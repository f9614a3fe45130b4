"""Export gauges of the tables to Prometheus: rows, the oldest row, cleanup, unknown effects.

This module imports ``maintenance``, and so is apart from the observer, which every worker imports.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy.engine import Engine

from ..extras import needs

with needs("prometheus"):
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector

from ..maintenance.stats import Gauges, gauges
from ..message import logger_of, printable
from ..tables import DedupTables, default_tables

__all__ = ["TablesCollector"]

logger = logger_of("projector_dedup")

_GAUGES = {
    "rows": ("projector_dedup_rows", "Rows of the table, as the database server estimates them."),
    "oldest": ("projector_dedup_oldest_row_age_seconds", "Age of the oldest row."),
    "lag": ("projector_dedup_cleanup_lag_seconds", "Seconds by which the oldest row exceeds what must be kept."),
    "unknown": ("projector_dedup_unknown_effects", "Effects of which nobody knows whether they were done."),
    "person": ("projector_dedup_effects_needing_person", "Effects that need a person, or were done twice."),
    "overdue": ("projector_dedup_overdue_effects", "Effects that were due, or armed, more than 15 minutes ago."),
}
"""The gauges of a table by their names in ``Gauges``."""
_UP = ("projector_dedup_tables_up", "1 if the table could be read, 0 if not.")


class TablesCollector(Collector):
    """Reads gauges from the database when Prometheus scrapes: rows, the oldest row, cleanup, unknown effects.

    Register it in one process of each database: ``REGISTRY.register(TablesCollector(engine))``. A scrape reads the
    server's statistics and ends of indexes; its cost does not grow with the tables. A gauge that the database cannot
    tell cheaply is absent, as is the number of rows on SQLite.

    ``engine`` is synchronous, also beside an ``AsyncDispatcher``. Give it a short connect timeout
    and a short lock timeout, because a scrape waits for both (docs/observing.md). ``tables`` are the tables to read:
    markers, commands, effects. If a table cannot be read, ``projector_dedup_tables_up`` is 0, its other
    gauges are absent, and the first failure is logged; the scrape itself succeeds.

    Raises ``TypeError`` for an engine that is asynchronous.
    """

    def __init__(self, engine: Engine, tables: Sequence[DedupTables] = (default_tables,)) -> None:
        if engine.dialect.is_async:
            raise TypeError("engine is a synchronous Engine, as create_engine(...) returns it, not an asynchronous one")
        self._engine, self._tables = engine, tuple(tables)
        self._failed: set[str] = set()

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the metrics without values, so that registering the collector asks no database."""
        return [GaugeMetricFamily(name, text, labels=["table"]) for name, text in (*_GAUGES.values(), _UP)]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Read the tables and return their gauges."""
        families = dict(zip((*_GAUGES, "up"), self.describe(), strict=True))
        for tables in self._tables:
            table, found = tables.marker.fullname, self._read(tables)
            families["up"].add_metric([table], float(found is not None))
            for name, value in vars(found).items() if found is not None else ():
                if value is not None:
                    families[name].add_metric([table], value)
        return families.values()

    def _read(self, tables: DedupTables) -> Gauges | None:
        name = tables.marker.fullname
        try:
            found = gauges(self._engine, tables=tables)
        except Exception as error:  # noqa: BLE001  # a scrape that fails would take all other metrics with it
            if name not in self._failed:
                self._failed.add(name)
                reason = printable(f"{type(error).__name__}: {error}"[:500])
                logger.warning("the table %s could not be read for its metrics: %s", name, reason)
            return None
        self._failed.discard(name)
        return found
