"""`make kit-peers`: which planted mistakes of handlers do other test kits find, and in how many seconds?

The mistakes are those of `tests/support/kit_handlers.py`, unchanged. A kit finds a mistake if it reports a wrong read
model, or a message that no delivery applies. The last three handlers are right: no kit may report them.
- `frontrun` explores the orders of two workers, which deliver messages by our dispatcher to PostgreSQL.
- `protean` tests a Protean projector on PostgreSQL that calls the handler. `given(...).then(...)` has no word for a
  redelivery or for another order, so the test itself repeats the events, and reverses them.
"""

import asyncio
import logging
import multiprocessing
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import Any

from sqlalchemy import URL, MetaData, NullPool, create_engine, make_url, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from kit_handlers import MISTAKES, PAYMENTS, RIGHT, Base, Case, Paid
from projector_dedup import AsyncDispatcher, Dispatcher
from projector_dedup.handler import handlers_of
from projector_dedup.options import RetryPolicy
from projector_dedup.tables import default_tables

SERVER = os.environ.get("PROJECTOR_DEDUP_TEST_POSTGRESQL_URL", "postgresql://postgres@127.0.0.1:5432/postgres")
LIMIT, EXPLORING = 25.0, 2.5  # seconds for a mistake, and for each scenario and strategy of frontrun
CONTROLS = [each for each in RIGHT if str(each) in ("right_sums", "atomic", "sums_async")]
CASES = {str(each): each for each in [*MISTAKES, *CONTROLS]}
BATCHES = ("last_of_the_batch", "locks_only_one")  # mistakes that only a batch shows

Numbers = tuple[int, ...]  # positions in PAYMENTS; 0, 1, 3 and 4 are of one account
SCENARIOS: dict[str, tuple[Numbers, ...]] = {  # of frontrun: what was delivered before, and by each worker
    "one message twice": ((), (0,), (0,)),
    "two messages": ((), (0,), (1,)),
    "two messages, the row exists": ((0,), (1,), (3,)),
    "two batches": ((), (0, 1), (3, 4)),
}
ALL: Numbers = (0, 1, 2, 3, 4, 5)
SEQUENCES = {"in order": ALL, "each twice": tuple(sorted(ALL * 2)), "all again": ALL * 2, "reversed": ALL[::-1]}


def fresh(case: Case, url: URL, *tables: MetaData) -> None:
    """Empty the tables, and what the handler keeps outside the database."""
    case.options.get("reset", lambda: None)()
    with create_engine(url, poolclass=NullPool).begin() as connection:
        for metadata in (Base.metadata, *tables):
            metadata.create_all(connection)
            for table in metadata.sorted_tables:
                connection.execute(table.delete())


def wrong(case: Case, url: URL, numbers: Numbers) -> str:
    """Return how the read model differs from the value computed from the messages, or nothing."""
    expected = case.expected([PAYMENTS[number] for number in sorted({*numbers})])
    with Session(create_engine(url, poolclass=NullPool)) as session:
        value = case.read(session)
    return "" if value == expected else f"expected {expected}, got {value}"


class Run:
    """One order of the workers: an empty read model, a new dispatcher, and what the broker delivers again."""

    def __init__(self, case: Case, engine: Any, url: URL, before: Numbers) -> None:
        fresh(case, url, default_tables.marker.metadata)
        options = {name: value for name, value in case.options.items() if name not in ("reset", "ordered")}
        self.is_async = engine.dialect.is_async
        make, factory = (AsyncDispatcher, async_sessionmaker) if self.is_async else (Dispatcher, sessionmaker)
        self.dispatcher: Any = make(factory(engine), case.make(), retry=RetryPolicy(base=0.001, within=0.3), **options)
        self.waiting: list[tuple[Numbers, object]] = [(before, None)] if before else []
        self.settle()

    async def deliver(self, numbers: Numbers) -> None:
        """Deliver one message, or a batch. After an error it waits for its redelivery."""
        messages = [PAYMENTS[number] for number in numbers]
        try:
            done = self.dispatcher.deliver_batch(messages) if messages[1:] else self.dispatcher.deliver(messages[0])
            if self.is_async:
                await done
        except Exception as error:  # noqa: BLE001  # reported if no delivery applies the message
            self.waiting.append((numbers, error))

    def deliver_now(self, numbers: Numbers) -> None:
        """Deliver in this thread. A coroutine that awaits nothing ends at once."""
        next(self.deliver(numbers).__await__(), None)

    def settle(self) -> str:
        """Deliver again what waits, while no worker runs; return the error of what still waits, or nothing."""
        waiting, self.waiting = self.waiting, []
        for numbers, _error in waiting:
            if self.is_async:  # frontrun calls this inside a loop that runs
                ThreadPoolExecutor(1).submit(asyncio.run, self.deliver(numbers)).result()
            else:
                self.deliver_now(numbers)
        return f"never applied: {self.waiting[0][1]!r}" if self.waiting else ""


def frontrun(name: str, url: URL) -> tuple[str, str]:
    """Explore the orders of two workers with `frontrun.explore`, as its page on SQLAlchemy does."""
    import frontrun

    case, wait = CASES[name], handlers_of(CASES[name].make())[0].is_async
    make, deliver = (create_async_engine, Run.deliver) if wait else (create_engine, Run.deliver_now)
    # frontrun's scheduler stands still while a statement waits for a lock. Its own lock_timeout= fails with psycopg 3.
    engine: Any = make(url, poolclass=NullPool, connect_args={"options": "-c lock_timeout=300"}, **case.engine)
    chosen = {each: SCENARIOS[each] for each in SCENARIOS if (each == "two batches") == (name in BATCHES)}
    for strategy, (scenario, (before, *workers)) in product(("dpor", "random"), chosen.items()):
        told: list[str] = []
        # Without the second option, frontrun refuses each INSERT without RETURNING. Async "random" has neither.
        options = {"reproduce_on_failure": 0, "warn_nondeterministic_sql": False}

        def holds(run: Run, numbers: Numbers = (*before, *workers[0], *workers[1]), told: Any = told) -> bool:
            told.append(run.settle() or wrong(case, url, numbers))
            return not told[-1]

        result: Any = frontrun.explore(
            setup=partial(Run, case, engine, url, before),
            workers=[partial(deliver, numbers=each) for each in workers],
            invariant=holds,
            strategy=strategy,
            total_timeout=EXPLORING,
            **({} if wait and strategy == "random" else options),
        )
        _ = asyncio.run(result) if wait else None
        if any(told):
            return "found", f"{scenario}, {strategy}, order {len(told)}: {next(filter(None, told))}"
    return "not found", ""


def protean(name: str, url: URL) -> tuple[str, str]:
    """Test a Protean projector that calls the handler with the session of Protean's unit of work."""
    from protean import Domain, fields
    from protean.core.projector import on
    from protean.testing import given
    from protean.utils.eventing import MessageHeaders, Metadata
    from protean.utils.globals import current_uow

    case, handler = CASES[name], handlers_of(CASES[name].make())[0]
    if handler.is_async or name in BATCHES or "message_id" in case.options:
        why = "Protean itself makes the ids" if "message_id" in case.options else "no batches in its projectors"
        return "cannot be asked", "no async def in its projectors" if handler.is_async else why
    uri = url.set(drivername="postgresql").render_as_string(hide_password=False)
    database = {"provider": "postgresql", "database_uri": uri, **case.engine}
    domain: Any = Domain(name="kit", config={"databases": {"default": database}})
    account = domain.aggregate(type("Account", (), {"name": fields.Identifier()}))
    columns = {"account": fields.Identifier(identifier=True), "amount": fields.Integer(), "last": fields.Integer()}
    total = domain.projection(type("Total", (), columns), schema_name="kit_totals")
    payload = {"message_id": fields.Identifier(), "account": fields.Identifier(), "amount": fields.Integer()}
    received = domain.event(type("Received", (), payload), part_of=account)

    class Planted:
        @on(received)
        def apply(self, event: Any) -> None:  # Protean makes a projector for each event
            paid = Paid(event.message_id, event.account, event.amount)
            handlers_of(case.make())[0].function(paid, current_uow.get_session("default")())

    domain.projector(Planted, projector_for=total, aggregates=[account], idempotent=handler.idempotent)
    domain.init(traverse=False)
    for sequence, numbers in SEQUENCES.items():
        fresh(case, url)
        with domain.domain_context():
            domain.setup_database()
            heads = {number: Metadata(headers=MessageHeaders(id=f"{sequence} {number}")) for number in numbers}
            try:
                given(*(received(**vars(PAYMENTS[n]), _metadata=heads[n]) for n in numbers)).then(total, account="a")
                how = wrong(case, url, numbers)
            except Exception as error:  # noqa: BLE001  # a test fails with any error
                how = repr(error)
        if how:
            return "found", f"{sequence}: {how}"
    return "not found", ""


def main() -> None:
    """Print a row for each mistake: the verdict of the kit that is named, how it came about, and the seconds."""
    kit, *names = sys.argv[1:]
    print(f"{kit} {version(kit)}, SQLAlchemy {version('SQLAlchemy')}, Python {sys.version.split()[0]}", end="\n\n")
    print("| handler | verdict | how, or why | seconds |\n| --- | --- | --- | ---: |")
    logging.disable(logging.CRITICAL)
    server, database = make_url(SERVER).set(drivername="postgresql+psycopg"), f"kit_peers_{os.getpid()}"
    for name in names or CASES:
        began, admin = time.monotonic(), create_engine(server, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with admin.connect() as connection, multiprocessing.get_context("fork").Pool(1) as pool:
            connection.execute(text(f"CREATE DATABASE {database}"))
            try:
                verdict, how = pool.apply_async(globals()[kit], [name, server.set(database=database)]).get(LIMIT)
            except Exception as error:  # noqa: BLE001  # of the kit, or the time is over: it is shown
                verdict, how = "failed", repr(error)
            connection.execute(text(f"DROP DATABASE {database} WITH (FORCE)"))
        print(f"| {name} | {verdict} | {' '.join(how.split())[:90]} | {time.monotonic() - began:.1f} |", flush=True)


if __name__ == "__main__":
    main()
