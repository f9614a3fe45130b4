"""Run the demo: both projectors get the same deliveries and crashes, and are compared with the data file."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sqlalchemy import URL, Engine, MetaData, Table, select

from projector_dedup import make_tables

from ..connect import open_engine, parse, shown
from ..errors import Failed
from ..interrupts import deferred, not_for_children
from .carriers import carriers_table
from .flights import ALL_FLIGHTS, Totals, read_flights, totals_of
from .plan import plan
from .result import Result
from .workers import Target, deliver_all, run_engine


def run(
    *,
    flights: int | None,
    workers: int,
    seed: int,
    database_url: str | None = None,
    embedded: bool = False,
    redelivered: float = 0.2,
    crashes: int = 3,
    on_progress: Callable[[int], None] = lambda _acknowledged: None,
) -> Result:
    """Run the demo, print it, and return its results.

    ``redelivered``, ``crashes`` and ``on_progress`` are for the tests.

    Raises `Failed` unless the idempotent projector is exact and the naive one is not.
    """
    from .report import Report

    report = Report()
    events = read_flights(flights)
    lanes = plan(events, workers=workers, seed=seed, redelivered=redelivered, crashes=crashes)
    deliveries = sum(len(lane.deliveries) for lane in lanes)
    if database_url:
        open_engine(parse(database_url), create=True).dispose()  # fails in one line if something is wrong with it
    with deferred() as raise_if_interrupted, ExitStack() as stack:
        url = _database(stack, database_url, embedded)
        engine = stack.enter_context(_engine(url))
        report.opening(len(events), ALL_FLIGHTS, redelivered, workers, seed, _name(engine, database_url, embedded))
        run_id = f"demo_{secrets.token_hex(3)}"
        tables = stack.enter_context(_tables_of_a_run(engine, run_id))
        tallies = []
        for table, idempotent in zip(tables, (False, True), strict=True):
            target = Target(url.render_as_string(hide_password=False), table.name, _markers(run_id), idempotent)
            with report.progress("idempotent" if idempotent else "naive", deliveries) as advance:

                def step(acknowledged: int, advance: Callable[[int], None] = advance) -> None:
                    raise_if_interrupted()
                    advance(acknowledged)
                    on_progress(acknowledged)

                tallies.append(deliver_all(target, lanes, step))
        naive, ours = (_totals(engine, table) for table in tables)
    result = Result(totals_of(events), naive, ours, *tallies)
    report.result(result)
    if not result.exact:
        raise Failed("the idempotent projector is NOT exact: that is a bug in projector-dedup, please report it")
    if not result.naive_is_wrong:
        raise Failed("the naive projector happened to be right, so this run did not show anything; try more flights")
    return result


# The database ----------------------------------------------------------------------------------------------------


def _database(stack: ExitStack, database_url: str | None, embedded: bool) -> URL:
    if database_url:
        return parse(database_url)
    # A worker that was just killed may hold a file for a moment longer on Windows.
    folder = Path(
        stack.enter_context(tempfile.TemporaryDirectory(prefix="projector-dedup-", ignore_cleanup_errors=True))
    )
    if not embedded:
        return URL.create("sqlite+pysqlite", database=str(folder / "demo.sqlite3"))
    from projector_dedup.testing.postgres import embedded_postgres

    try:
        with not_for_children():
            url = parse(stack.enter_context(embedded_postgres(folder / "postgres")))
    except ImportError as error:
        raise Failed(str(error)) from error
    # The demo crashes workers, not servers: what they committed survives them without an fsync for each message.
    return url.update_query_dict({"options": "-c synchronous_commit=off"})


@contextmanager
def _engine(url: URL) -> Iterator[Engine]:
    engine = run_engine(url.render_as_string(hide_password=False))
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def _tables_of_a_run(engine: Engine, run_id: str) -> Iterator[list[Table]]:
    """Create the tables of one run, under names that nobody else has; yield both read models; drop all in the end."""
    metadata = MetaData()
    tables = [carriers_table(metadata, f"{run_id}_carriers_{kind}") for kind in ("naive", "idempotent")]
    make_tables(metadata, _markers(run_id))
    try:
        metadata.create_all(engine, checkfirst=False)
        yield tables
    finally:
        metadata.drop_all(engine)


def _markers(run_id: str) -> str:
    return f"{run_id}_processed_message"


def _totals(engine: Engine, table: Table) -> dict[str, Totals]:
    with engine.connect() as connection:
        return {row.carrier: Totals(row.flights, row.miles) for row in connection.execute(select(table))}


def _name(engine: Engine, database_url: str | None, embedded: bool) -> str:
    with engine.connect():
        version = ".".join(map(str, engine.dialect.server_version_info or ()))
    names = {"postgresql": "PostgreSQL", "sqlite": "SQLite", "mysql": "MySQL", "mariadb": "MariaDB"}
    name = f"{names.get(engine.dialect.name, engine.dialect.name)} {version}"
    if database_url:
        return f"{name} at {shown(engine.url)}"
    return f"{name} {'from a wheel' if embedded else 'in a temporary folder'}"
