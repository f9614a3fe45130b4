"""Deliver real flights, some twice and by processes that are killed, to a naive projector and an idempotent one.

Each flight out of New York in 2013 is an event. A fifth of the flights come twice, several processes deliver them, and
the processes are killed: before the commit, and after the commit but before the acknowledgement. A naive projector and
an idempotent one, the same code, keep flights and miles of each carrier. Both are compared with totals that are
computed from the data file alone. Exit code 0 means: the idempotent projector is exact, and the naive one is not.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sqlalchemy import URL, Engine, delete, insert, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from . import rebuilding
from .flights import ALL_FLIGHTS, FlightScheduled, Totals, read_flights, totals_of
from .projectors import Base, CarrierTotals
from .report import IDEMPOTENT, NAIVE, Result, progress, show
from .workers import deliver_all, open_engine, plan


def run(
    flights: Sequence[FlightScheduled],
    url: URL | None = None,
    *,
    workers: int = 3,
    seed: int = 2013,
    redelivered: float = 0.2,
    kills: int = 3,
    on_progress: Callable[[int], None] = lambda _acknowledged: None,
) -> Result:
    """Deliver the flights to both projectors, print what came of it, and return it.

    The demo makes tables of its own at ``url`` and drops them in the end; without one it uses SQLite in a temporary
    folder.
    """
    expected = totals_of(flights)
    lanes = plan(flights, workers=workers, seed=seed, redelivered=redelivered, kills=kills)
    number = sum(len(lane.deliveries) for lane in lanes)
    results = []
    with _tables(url) as engine:
        for name in (NAIVE, IDEMPOTENT):
            _begin_at_zero(engine, expected)
            with progress(name, number) as draw:

                def step(acknowledged: int, draw: Callable[[int], None] = draw) -> None:
                    draw(acknowledged)
                    on_progress(acknowledged)

                tally = deliver_all(engine.url, lanes, idempotent=name == IDEMPOTENT, on_progress=step)
            results.append((_totals(engine), tally))
    (naive, naive_tally), (idempotent, tally) = results
    result = Result(expected, naive, idempotent, naive_tally, tally)
    show(result)
    return result


@contextmanager
def _tables(url: URL | None) -> Iterator[Engine]:
    """Make the tables of the demo at ``url``, or in a temporary folder, and drop them in the end."""
    with ExitStack() as stack:
        if url is None:
            folder = tempfile.TemporaryDirectory(prefix="projector-dedup-", ignore_cleanup_errors=True)
            url = URL.create("sqlite", database=str(Path(stack.enter_context(folder), "demo.sqlite3")))
        engine = open_engine(url)
        stack.callback(engine.dispose)
        Base.metadata.drop_all(engine)  # of a demo that was killed
        stack.callback(Base.metadata.drop_all, engine)
        Base.metadata.create_all(engine)
        yield engine


def run_rebuild(
    flights: Sequence[FlightScheduled], url: URL | None = None, *, workers: int = 3, seed: int = 2013, kills: int = 10
) -> rebuilding.Story:
    """Build a new generation beside live workers, print what comes of it, and return it; tables are as in ``run``."""
    expected = totals_of(flights)
    with _tables(url) as engine:
        _begin_at_zero(engine, expected)
        story = rebuilding.run(flights, engine.url, workers=workers, seed=seed, kills=kills)
    exact = [story.old == expected, story.new == expected, story.found == story.planted, not story.lacking_in_the_end]
    print(
        f"\nold generation = data file: {exact[0]}; new generation = data file: {exact[1]};\n"
        f"every omission named, and nothing else: {exact[2]}; nothing is lacking in the end: {exact[3]}"
    )
    if not all(exact):
        sys.exit("That is a bug in projector-dedup, please report it.")
    return story


def main() -> None:
    """Run the demo; raise `SystemExit`, with what to do, unless it showed what it is there to show."""
    options = _options()
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell has it ignored: both leave nothing behind
        signal.signal(number, signal.default_int_handler)
    flights = read_flights(options.flights)
    try:
        url = make_url(options.database_url) if options.database_url else None
        if options.rebuild:
            run_rebuild(flights, url, workers=options.workers, seed=options.seed, kills=options.kills)
            return
        print(
            f"{len(flights):,} of the {ALL_FLIGHTS:,} flights out of New York in 2013 are events.\n"
            f"{options.workers} processes deliver them, every fifth one twice, and are killed (seed {options.seed}).\n"
            f"Database: {url.render_as_string() if url else 'SQLite in a temporary folder'}\n",
            flush=True,
        )
        result = run(flights, url, workers=options.workers, seed=options.seed, kills=options.workers)
    except KeyboardInterrupt:
        sys.exit("Interrupted.")
    except SQLAlchemyError as error:
        sys.exit(f"The database failed: {str(error).splitlines()[0]}")
    if not result.exact:
        sys.exit("The idempotent projector is NOT exact: that is a bug in projector-dedup, please report it.")
    if result.naive == result.expected:
        sys.exit("The naive projector happened to be right, so this run did not show anything; try more --flights.")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = parser.add_argument
    number("--flights", type=int, default=6_000, help=f"how many, from 1 January on: 1 to {ALL_FLIGHTS} (6000)")
    number("--workers", type=int, default=3, help="processes that deliver at once (3)")
    number("--seed", type=int, default=2013, help="decides order, redeliveries and kills (2013)")
    number("--rebuild", action="store_true", help="build a new generation of the read model beside live workers")
    number("--kills", type=int, default=10, help="with --rebuild: how often processes are killed (10)")
    number("--database-url", help="where, in tables named projector_dedup_demo_... (SQLite)")
    options = parser.parse_args()
    if not (1 <= options.flights <= ALL_FLIGHTS and 1 <= options.workers <= 64):
        parser.error(f"--flights takes 1 to {ALL_FLIGHTS}, --workers 1 to 64")
    return options


def _begin_at_zero(engine: Engine, expected: dict[str, Totals]) -> None:
    with engine.begin() as connection:
        for table in (CarrierTotals, rebuilding.CarrierTotals2):
            connection.execute(delete(table))
            connection.execute(insert(table), [{"carrier": carrier, "flights": 0, "miles": 0} for carrier in expected])


def _totals(engine: Engine) -> dict[str, Totals]:
    with Session(engine) as session:
        return {row.carrier: Totals(row.flights, row.miles) for row in session.query(CarrierTotals)}


if __name__ == "__main__":
    main()
