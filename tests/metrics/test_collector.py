"""The collector of gauges: what a database says of its tables without a scan, and nothing where it does not say it."""

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine, create_engine, event, insert, text
from sqlalchemy.ext.asyncio import create_async_engine

from databases import Database
from marked import fill, one_of_each_engine, tables  # noqa: F401  # a fixture
from projector_dedup.effects import default_effect_tables
from projector_dedup.maintenance.cleanup import declare_horizon, prune
from projector_dedup.metrics.prometheus_tables import TablesCollector

HOUR = 3600.0
EFFECTS = default_effect_tables.marker


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """What a server would scrape, by metric and table."""
    return {
        (sample.name.removeprefix("projector_dedup_"), sample.labels["table"]): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if "table" in sample.labels
    }


def scraped(engine: Engine, *of: Any) -> dict[tuple[str, str], float]:
    """What a collector of these tables says."""
    registry = CollectorRegistry()
    registry.register(TablesCollector(engine, of or (tables,)))
    return samples(registry)


def analyze(engine: Engine) -> None:
    """Bring the statistics up to date."""
    with engine.begin() as connection:
        connection.execute(text("ANALYZE TABLE processed_message" if engine.name == "mariadb" else "ANALYZE"))


def add_effects(engine: Engine, **of: int) -> None:
    """Write so many rows of each kind: ``done``, ``unknown``, ``armed``."""
    default_effect_tables.marker.metadata.create_all(engine)
    now = datetime.now(UTC)
    bare = dict.fromkeys(("fingerprint", "request"), b"") | {"armed": True, "armed_at": 1, "attempt": 1}
    rows = [
        {
            **bare,
            "message_id": f"0:{kind}{number}",
            "handler": "charge",
            "provider_key": str(number),
            "token": "t",
            "first_sent_at": None if kind == "armed" else 1,
            "outcome": 1 if kind == "done" else None,
            "processed_at": now if kind == "done" else None,
        }
        for kind, count in of.items()
        for number in range(count)
    ]
    with engine.begin() as connection:
        connection.execute(insert(EFFECTS), rows)


def test_the_gauges_say_what_is_in_the_tables(engine: Engine) -> None:
    """The number of markers where the server keeps statistics, the age of the oldest, and how far cleanup is behind."""
    fill(engine, [1, 2, 300])
    analyze(engine)
    found = scraped(engine)
    assert found["tables_up", "processed_message"] == 1
    assert found.get(("rows", "processed_message")) == (None if engine.name == "sqlite" else 3)
    assert found["oldest_row_age_seconds", "processed_message"] == pytest.approx(300 * HOUR, abs=120)
    assert found["cleanup_lag_seconds", "processed_message"] == pytest.approx((300 - 168) * HOUR, abs=120)
    assert ("unknown_effects", "processed_message") not in found


def test_the_lag_is_counted_from_what_must_be_kept(engine: Engine) -> None:
    """The declared horizon, or the longer retention of the last cleanup; it is 0 if cleanup keeps up."""
    fill(engine, [1, 300])
    declare_horizon(engine, 240, tables=tables)
    assert scraped(engine)["cleanup_lag_seconds", "processed_message"] == pytest.approx(60 * HOUR, abs=120)
    prune(engine, tables=tables, retention_hours=336)
    assert scraped(engine)["cleanup_lag_seconds", "processed_message"] == 0


def test_an_empty_table_has_no_oldest_marker(engine: Engine) -> None:
    """What is not there is absent, and not 0."""
    fill(engine, {})
    found = scraped(engine)
    assert found["tables_up", "processed_message"] == 1
    assert ("oldest_row_age_seconds", "processed_message") not in found


def test_unknown_effects_are_counted_up_to_a_thousand(engine: Engine) -> None:
    """Not those that are done, or were never sent; the number is bounded, so that its cost is."""
    add_effects(engine, done=5, unknown=3, armed=2)
    assert scraped(engine, default_effect_tables)["unknown_effects", "external_effect"] == 3
    with engine.begin() as connection:
        connection.execute(EFFECTS.delete())
    add_effects(engine, unknown=1_003)
    assert scraped(engine, default_effect_tables)["unknown_effects", "external_effect"] == 1_000


def test_no_scrape_reads_a_whole_table(postgresql: Database) -> None:
    """PostgreSQL's plans of all statements on the tables go through an index."""
    engine = create_engine(postgresql.url())
    fill(engine, range(3_000))
    add_effects(engine, done=3_000, unknown=2)
    analyze(engine)
    found: list[tuple[str, Any]] = []
    event.listen(engine, "before_cursor_execute", lambda _c, _cursor, said, given, *_: found.append((said, given)))
    scraped(engine, tables, default_effect_tables)
    looked = [(said, given) for said, given in found if "processed_at" in said and said.startswith("SELECT")]
    assert len(looked) == 5  # two ends of indexes, and effects: unknown ones, those that need a person, overdue ones
    with engine.connect() as connection:
        plans = ["\n".join(connection.exec_driver_sql(f"EXPLAIN {said}", given).scalars()) for said, given in looked]
    engine.dispose()
    assert all("Index" in plan and "Seq Scan" not in plan for plan in plans), plans


def test_a_table_that_cannot_be_read_fails_no_scrape(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Other metrics are exported, and other tables too; the log says it once, and again after it was mended."""
    fill(engine, [1])
    registry = CollectorRegistry()
    Counter("something", "Else.", registry=registry).inc()
    registry.register(TablesCollector(engine, [default_effect_tables, tables]))
    for _ in range(2):
        found = samples(registry)
        assert found["tables_up", "external_effect"] == 0
        assert found["tables_up", "processed_message"] == 1
        assert ("unknown_effects", "external_effect") not in found
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(lines) == 1
    assert "the table external_effect could not be read for its metrics: MissingTableError" in lines[0]
    add_effects(engine, unknown=1)
    assert samples(registry)["unknown_effects", "external_effect"] == 1


def test_to_register_a_collector_asks_no_database() -> None:
    """A worker starts although the database is away; the scrapes say so."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(TablesCollector(create_engine("postgresql+psycopg://nobody@127.0.0.1:1/none")))
    assert samples(registry) == {("tables_up", "processed_message"): 0}
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(TablesCollector(create_engine("sqlite://")))


def test_an_asynchronous_engine_is_refused() -> None:
    """Prometheus scrapes outside of the event loop."""
    engine: Any = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(TypeError, match="synchronous Engine, as create_engine"):
        TablesCollector(engine)


def test_a_scrape_does_not_wait_for_a_table_that_is_locked(postgresql: Database) -> None:
    """With the engine of the page, beside a migration: the table is not readable, within the time of a scrape."""
    engine = create_engine(postgresql.url(), connect_args={"connect_timeout": 3, "options": "-c lock_timeout=1000"})
    fill(engine, [1])
    with engine.begin() as migration:
        migration.exec_driver_sql("LOCK TABLE processed_message IN ACCESS EXCLUSIVE MODE")
        before = datetime.now(UTC)
        assert scraped(engine) == {("tables_up", "processed_message"): 0}
        assert datetime.now(UTC) - before < timedelta(seconds=8)
    engine.dispose()
