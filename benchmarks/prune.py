"""How fast expired markers go, and what claims notice of it (the figures of docs/adr/0014-pruning.md).

    python benchmarks/prune.py postgresql+psycopg://user@host/database

Contenders are interleaved in rounds, each on tables of its own. The first round finds the table as it was filled;
before each of the others it is vacuumed and filled up again, so that markers of all ages lie side by side. Then claims,
one after the other, idle and beside a running prune. If Protean can be imported, its own cleanup runs on its own table.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Engine, MetaData, create_engine, event, select, text, tuple_

from projector_dedup import configure_sqlite, make_tables
from projector_dedup.maintenance.cleanup import prune

METADATA = MetaData()
OURS, NAIVE = (make_tables(METADATA, f"benchmark_{name}") for name in ("ours", "naive"))
BEGINNING = datetime.now(UTC).replace(microsecond=0) - timedelta(days=300)  # marker n was processed n seconds later
BATCH = 5_000

_VALUES = {
    "postgresql": (
        "SELECT md5(n::text) || '-message', 'billing.AccountTotals.add_payment', "
        "timestamptz '{zero}+00' + n * interval '1 second' FROM generate_series({first}, {last}) n"
    ),
    "mariadb": (
        "SELECT concat(md5(seq), '-message'), 'billing.AccountTotals.add_payment', "
        "timestamp '{zero}' + interval seq second FROM seq_{first}_to_{last}"
    ),
    "sqlite": (
        "WITH RECURSIVE s(n) AS (SELECT {first} UNION ALL SELECT n + 1 FROM s WHERE n < {last}) SELECT "
        "printf('%08x', (n * 2654435761) % 4294967296) || '-message-' || n, 'billing.AccountTotals.add_payment', "
        "datetime('{zero}', '+' || n || ' seconds') FROM s"
    ),
}
_TIDYING = {"postgresql": "VACUUM ANALYZE {table}", "mariadb": "ANALYZE TABLE {table}", "sqlite": "ANALYZE"}


def fill(engine: Engine, table: str, first: int, last: int, columns: str = "", prefix: str = "") -> None:
    """Markers number ``first`` to before ``last``, and everything tidied up."""
    values = _VALUES[engine.name].format(zero=BEGINNING.strftime("%Y-%m-%d %H:%M:%S"), first=first, last=last - 1)
    with engine.begin() as connection:
        names = columns or "message_id, handler, processed_at"
        connection.execute(text(f"INSERT INTO {table} ({names}) {values.replace('SELECT ', 'SELECT ' + prefix, 1)}"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(_TIDYING[engine.name].format(table=table)))
        if engine.name == "postgresql":
            connection.execute(text("CHECKPOINT"))


def retention_before(number: int) -> float:
    """The hours after which markers below ``number`` are expired, and no others."""
    return (datetime.now(UTC) - BEGINNING - timedelta(seconds=number - 0.5)).total_seconds() / 3600


@contextmanager
def timed(engine: Engine) -> Iterator[list[float]]:
    """The seconds of each DELETE, and of each look for what is left."""
    seconds: list[float] = []

    def before(connection: Any, *_: Any) -> None:
        connection.info["began"] = time.perf_counter()

    def after(connection: Any, *_: Any) -> None:
        seconds.append(time.perf_counter() - connection.info["began"])

    event.listen(engine, "before_cursor_execute", before)
    event.listen(engine, "after_cursor_execute", after)
    yield seconds
    event.remove(engine, "before_cursor_execute", before)
    event.remove(engine, "after_cursor_execute", after)


def ours(engine: Engine, below: int) -> int:
    """The library's."""
    done = prune(engine, retention_hours=retention_before(below), batch_size=BATCH, tables=OURS)
    assert done.complete
    return done.deleted


def naive(engine: Engine, below: int) -> int:
    """The statement that one writes first; stopped after a while."""
    marker = NAIVE.marker
    expired = marker.c.processed_at < datetime.now(UTC) - timedelta(hours=retention_before(below))
    oldest = select(*marker.primary_key).where(expired).order_by(marker.c.processed_at).limit(BATCH)
    batch: Any = oldest if engine.name != "mariadb" else select(oldest.subquery("oldest"))
    deleted, end = 0, time.monotonic() + 20
    while time.monotonic() < end:
        with engine.begin() as connection:
            rows = connection.execute(marker.delete().where(tuple_(*marker.primary_key).in_(batch))).rowcount
        deleted += rows
        if rows < BATCH:
            break
    return deleted


def protean(url: str) -> tuple[Engine, Callable[[Engine, int], int]] | None:
    """Protean's cleanup of its own table; None where it cannot be had."""
    try:
        from protean import Domain
        from protean.core.projector import on
        from protean.fields import Identifier
        from protean.utils.consume_idempotency import cleanup_processed_messages
    except ImportError:
        return None
    logging.disable(logging.ERROR)  # each of its statements is slow enough for a warning
    plain = url.replace("+psycopg", "", 1)
    domain = Domain(
        name="benchmark", config={"databases": {"default": {"provider": "postgresql", "database_uri": plain}}}
    )

    class Order:
        name = Identifier()

    class Placed:
        id = Identifier()

    class Seen:
        id = Identifier(identifier=True)

    order = domain.aggregate(Order)

    class Projector:
        @on(domain.event(Placed, part_of=order))  # type: ignore[untyped-decorator]
        def placed(self, event: object) -> None:
            pass

    domain.projector(Projector, projector_for=domain.projection(Seen), aggregates=[order], idempotent=True)
    domain.init(traverse=False)
    with domain.domain_context():
        domain.setup_database()
        engine = domain.providers["default"]._engine

    def run(_engine: Engine, below: int) -> int:
        return int(cleanup_processed_messages(domain, retention_hours=retention_before(below), batch_size=BATCH))

    return engine, run


class Pruned(NamedTuple):
    """What one contender did in one round; ``statements`` are seconds."""

    contender: str
    deleted: int
    rate: float
    statements: list[float]


def compare(engine: Engine, rounds: int, markers: int, expired: int) -> Iterator[Pruned]:
    """Contenders in turns, round by round."""
    METADATA.drop_all(engine)
    METADATA.create_all(engine)
    contenders: dict[str, tuple[str, Engine, Callable[[Engine, int], int]]] = {
        "ours": (OURS.marker.name, engine, ours),
        "pk IN (SELECT ... LIMIT)": (NAIVE.marker.name, engine, naive),
    }
    theirs = protean(engine.url.render_as_string(hide_password=False)) if engine.name == "postgresql" else None
    if theirs is not None:
        contenders["Protean"] = ("processed_message", *theirs)
        with engine.begin() as connection:
            connection.execute(text("TRUNCATE processed_message"))
    filled = 0
    for number in range(rounds):
        below = number * expired + expired
        last, filled = filled, below - expired + markers
        for name, (table, on, run) in contenders.items():
            columns = "id, message_id, handler, processed_at" if name == "Protean" else ""
            fill(engine, table, last, filled, columns, columns and "gen_random_uuid()::text, ")
            with timed(on) as statements:
                began = time.perf_counter()
                deleted = run(on, below)
                rate = deleted / (time.perf_counter() - began)
            if deleted != expired:  # stopped; the rest must not be in its way next time
                with engine.begin() as connection:
                    oldest = BEGINNING + timedelta(seconds=below)
                    connection.execute(text(f"DELETE FROM {table} WHERE processed_at < '{oldest}'"))
            yield Pruned(name, deleted, rate, statements)
    if theirs is not None:
        theirs[0].dispose()


def main() -> None:
    """Print a line for each turn, the ratios, and the claims."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markers", type=int, default=1_200_000)
    parser.add_argument("--expired", type=int, default=1_000_000)
    options = parser.parse_args()
    engine = create_engine(options.url)
    if engine.name == "sqlite":
        configure_sqlite(engine)
    rates: dict[str, list[float]] = {}
    for turn in compare(engine, options.rounds, options.markers, options.expired):
        rates.setdefault(turn.contender, []).append(turn.rate)
        print(
            f"{turn.contender:26} {turn.deleted:9,} deleted {turn.rate:11,.0f}/s   statement median "
            f"{statistics.median(turn.statements) * 1000:6.1f} ms, longest {max(turn.statements) * 1000:6.1f} ms",
            flush=True,
        )
    for name, found in rates.items():
        ratios = [mine / rate for mine, rate in zip(rates["ours"], found, strict=True)]
        print(f"ours / {name:26} median {statistics.median(ratios):6.1f}   ({min(ratios):.1f} .. {max(ratios):.1f})")
    from claims_beside_prune import claims  # it fills tables as this does

    for name, seconds in claims(engine, options.markers, options.expired).items():
        cuts = statistics.quantiles(seconds, n=100)
        print(f"claims {name:15} {len(seconds):6} p50 {cuts[49] * 1000:6.2f} ms  p99 {cuts[98] * 1000:6.2f} ms")
    METADATA.drop_all(engine)


if __name__ == "__main__":
    main()
