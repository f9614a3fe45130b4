"""Run a scene of the demo: both sides get the same deliveries and crashes, and are compared with the input."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, MetaData

from ..connect import open_engine, parse, shown
from ..errors import Failed
from ..interrupts import deferred, not_for_children
from ..progress import tell
from .plan import plan
from .result import Result
from .scene import Scene
from .workers import deliver_all, run_engine


def run(
    scene: Scene[Any],
    *,
    workers: int,
    seed: int,
    database_url: str | None = None,
    embedded: bool = False,
    crashes: int | None = None,
    on_progress: Callable[[int], None] = lambda _acknowledged: None,
) -> Result:
    """Run a scene of the demo, print it, and return its results.

    Workers are killed ``crashes`` times at each point, by default as often as there are workers. ``crashes`` and
    ``on_progress`` are for the tests.

    Raises `Failed` unless the side with the library is exact and the other one is not.
    """
    from .report import Report

    report = Report(scene.words)
    lanes = plan(
        scene.messages,
        workers=workers,
        seed=seed,
        redelivered=scene.redelivered,
        crashes=workers if crashes is None else crashes,
        window=scene.window,
    )
    deliveries = sum(len(lane.deliveries) for lane in lanes)
    if database_url:
        open_engine(parse(database_url), create=True).dispose()  # fails in one line if something is wrong with it
    with deferred() as raise_if_interrupted, ExitStack() as stack:
        url = _database(stack, database_url, embedded)
        engine = stack.enter_context(_engine(url))
        report.opening(f"{scene.opening(workers)} {_name(engine, database_url, embedded)}, seed {seed}.")
        run_id = f"demo_{secrets.token_hex(3)}"
        stack.enter_context(_tables_of_a_run(engine, scene, run_id))
        tallies = []
        for side, idempotent in zip(scene.words.sides, (False, True), strict=True):
            with report.progress(side, deliveries) as advance:

                def step(acknowledged: int, advance: Callable[[int], None] = advance) -> None:
                    raise_if_interrupted()
                    advance(acknowledged)
                    on_progress(acknowledged)

                tallies.append(deliver_all(scene.target(url, run_id, idempotent=idempotent), lanes, step))
        with engine.connect() as connection:
            naive, ours = (scene.totals(connection, run_id, idempotent=idempotent) for idempotent in (False, True))
    result = Result(scene.expected(), naive, ours, *tallies)
    report.result(result)
    if not result.exact:
        raise Failed(f"the {scene.words.sides[1]} is NOT exact: that is a bug in projector-dedup, please report it")
    if not result.naive_is_wrong:
        raise Failed(
            f"the {scene.words.sides[0]} happened to be right, so this run did not show anything; "
            f"try more {scene.words.messages}"
        )
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

    tell("Making and starting a PostgreSQL server, which takes some seconds ...")
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
def _tables_of_a_run(engine: Engine, scene: Scene[Any], run_id: str) -> Iterator[None]:
    """Create the tables of one run, under names that nobody else has; drop them in the end."""
    metadata = MetaData()
    scene.add_tables(metadata, run_id)
    try:
        metadata.create_all(engine, checkfirst=False)
        with engine.begin() as connection:
            scene.prepare(connection, run_id)
        yield
    finally:
        metadata.drop_all(engine)


def _name(engine: Engine, database_url: str | None, embedded: bool) -> str:
    with engine.connect():
        version = ".".join(map(str, engine.dialect.server_version_info or ()))
    names = {"postgresql": "PostgreSQL", "sqlite": "SQLite", "mysql": "MySQL", "mariadb": "MariaDB"}
    name = f"{names.get(engine.dialect.name, engine.dialect.name)} {version}"
    if database_url:
        return f"{name} at {shown(engine.url)}"
    return f"{name} {'from a wheel' if embedded else 'in a temporary folder'}"
