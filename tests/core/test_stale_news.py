"""docs/stale-news.md: an older message arrives after a newer one, and does not overwrite its state."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, select, update
from sqlalchemy.dialects import postgresql as postgresql_dialect
from sqlalchemy.orm import Session, sessionmaker

from databases import Database
from pages import snippets, typed
from projector_dedup import Defer, Dispatcher, Message, Outcome, on, projector

MARKERS = "processed_message"
ROUNDS = 12
"""The page tells of 150."""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the page defines."""
    return typed(snippets("docs/stale-news.md"), tmp_path, monkeypatch)


@pytest.fixture
def shop(database: Database, page: Any) -> Iterator[Engine]:
    """An engine on each database in turn, with the tables of the page."""
    yield from _shop(database, page)


@pytest.fixture
def server(request: pytest.FixtureRequest, page: Any) -> Iterator[Engine]:
    """The same on a server, where two transactions may write at once."""
    yield from _shop(request.getfixturevalue(request.param), page)


on_servers = pytest.mark.parametrize("server", ["postgresql", "mariadb"], indirect=True)


def _shop(database: Database, page: Any) -> Iterator[Engine]:
    engine = create_engine(database.url())
    page.Base.metadata.create_all(engine)
    if database.engine == "postgresql":
        page.insert = postgresql_dialect.insert  # as the comment of the page says
    yield engine
    engine.dispose()


def price(sku: str, version: int) -> dict[str, Any]:
    """An event; the amount tells which one was applied."""
    return {"sku": sku, "version": version, "amount": version * 10}


def message(body: dict[str, Any], number: object, type_: str) -> Message:
    """A message with an id of its own."""
    return Message(f"{type_}-{body}-{number}", body, type=type_)


def compared(page: Any, _engine: Engine) -> Callable[[Any, Session], None]:
    """Return the handler that compares in Python."""
    handler: Callable[[Any, Session], None] = page.ComparedPrices().keep_newest
    return handler


def in_the_statement(page: Any, engine: Engine) -> Callable[[Any, Session], None]:
    """Return the handler whose upsert compares."""
    handler: Callable[[Any, Session], None]
    handler = page.keep_newest if engine.dialect.name in ("mariadb", "mysql") else page.UpsertedPrices().keep_newest
    return handler


def dispatcher_of(handler: Callable[[Any, Session], None], engine: Engine, **options: Any) -> Dispatcher:
    """Return a dispatcher of the handler; the options are those of projector."""

    @projector(idempotent=True, name="prices", **options)
    @on("price.set")
    def prices(event: dict[str, Any], session: Session) -> None:
        handler(event, session)

    return Dispatcher(sessionmaker(engine), prices)


def prices_of(page: Any, engine: Engine) -> list[tuple[str, int, int | None]]:
    """Return the rows that another connection sees."""
    with Session(engine) as session:
        rows = session.scalars(select(page.Price).order_by(page.Price.sku))
        return [(row.sku, row.version, row.amount) for row in rows]


def markers(engine: Engine) -> int:
    """Return how many markers another connection sees."""
    with engine.connect() as connection:
        return len(connection.exec_driver_sql(f"SELECT 1 FROM {MARKERS}").all())


@contextmanager
def meeting(engine: Engine, threads: int) -> Iterator[Callable[[], None]]:
    """Let so many threads meet once: each has read the row, and none has written, where two may write at once."""
    barrier, met = threading.Barrier(threads), set[int]()

    def meet() -> None:
        if threading.get_ident() not in met:
            met.add(threading.get_ident())
            barrier.wait(20)

    def before(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(("INSERT INTO price", "UPDATE price")):
            meet()

    def after(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("SELECT price."):
            meet()

    if engine.dialect.name == "sqlite":
        yield meet
        return
    event.listen(engine, "before_cursor_execute", before)
    event.listen(engine, "after_cursor_execute", after)
    yield lambda: None
    event.remove(engine, "before_cursor_execute", before)
    event.remove(engine, "after_cursor_execute", after)


def race(engine: Engine, sku: str, deliver: Callable[[dict[str, Any]], object]) -> None:
    """Deliver three events of one row at once."""
    with meeting(engine, 3) as start, ThreadPoolExecutor(3) as pool:

        def delivered(version: int) -> None:
            start()
            deliver(price(sku, version))

        list(pool.map(delivered, (4, 2, 3)))


@pytest.mark.parametrize("recipe", [compared, in_the_statement], ids=lambda each: each.__name__)
@pytest.mark.parametrize("known", [True, False], ids=["row-exists", "row-is-missing"])
def test_the_newest_of_three_racing_events_remains(page: Any, shop: Engine, recipe: Any, known: bool) -> None:
    """At the default level of the library, on each database, in every round; each event leaves a marker."""
    dispatcher = dispatcher_of(recipe(page, shop), shop)
    skus = [f"sku-{number:03}" for number in range(ROUNDS)]
    for sku in skus:
        if known:
            dispatcher.deliver(message(price(sku, 1), 0, "price.set"))
        race(shop, sku, lambda body: dispatcher.deliver(message(body, 0, "price.set")))
    assert prices_of(page, shop) == [(sku, 4, 40) for sku in skus]
    assert markers(shop) == len(skus) * (4 if known else 3)


@on_servers
@pytest.mark.parametrize("known", [True, False], ids=["row-exists", "row-is-missing"])
def test_the_statement_compares_at_read_committed(page: Any, server: Engine, known: bool) -> None:
    """The upsert needs no help of the isolation level."""
    dispatcher = dispatcher_of(in_the_statement(page, server), server, isolation="READ COMMITTED")
    for number in range(ROUNDS):
        if known:
            dispatcher.deliver(message(price(str(number), 1), 0, "price.set"))
        race(server, str(number), lambda body: dispatcher.deliver(message(body, 0, "price.set")))
    assert {row[1:] for row in prices_of(page, server)} == {(4, 40)}


@contextmanager
def overtaken(engine: Engine, newer: Callable[[], object]) -> Iterator[list[str]]:
    """Commit a newer event just after an older one has read the row; yields the older one's reads."""
    reads: list[str] = []
    thread = threading.get_ident()

    def after(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("SELECT price.") and threading.get_ident() == thread:
            reads.append(statement)
            if len(reads) == 1:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(newer).result(20)

    event.listen(engine, "after_cursor_execute", after)
    yield reads
    event.remove(engine, "after_cursor_execute", after)


@on_servers
def test_an_older_event_that_has_read_before_is_compared_again(page: Any, server: Engine) -> None:
    """The library runs its handler again, which then skips it."""
    dispatcher = dispatcher_of(compared(page, server), server)
    dispatcher.deliver(message(price("a", 1), 0, "price.set"))
    newer = lambda: dispatcher.deliver(message(price("a", 3), 0, "price.set"))  # noqa: E731
    with overtaken(server, newer) as reads:
        assert dispatcher.deliver(message(price("a", 2), 0, "price.set")).outcome is Outcome.APPLIED
    assert prices_of(page, server) == [("a", 3, 30)]
    assert len(reads) == 2


@on_servers
def test_by_hand_at_read_committed_the_older_event_wins(page: Any, server: Engine) -> None:
    """The same handler without the library: the comparison alone is not enough."""
    handler = compared(page, server)
    by_hand = create_engine(server.url, isolation_level="READ COMMITTED")

    def deliver(version: int) -> None:
        with Session(by_hand) as session, session.begin():
            handler(price("a", version), session)

    deliver(1)
    with overtaken(by_hand, lambda: deliver(3)):
        deliver(2)
    by_hand.dispose()
    assert prices_of(page, server) == [("a", 2, 20)]


@on_servers
@pytest.mark.parametrize("known", [True, False], ids=["row-exists", "row-is-missing"])
def test_at_read_committed_declared_read_models_compare(page: Any, server: Engine, known: bool) -> None:
    """The row is locked before it is compared."""
    options = {"isolation": "READ COMMITTED", "read_models": [page.Price]}
    dispatcher = dispatcher_of(compared(page, server), server, **options)
    for number in range(ROUNDS):
        if known:
            dispatcher.deliver(message(price(str(number), 1), 0, "price.set"))
        barrier = threading.Barrier(3)

        def deliver(version: int, sku: str = str(number), barrier: threading.Barrier = barrier) -> None:
            barrier.wait(20)
            dispatcher.deliver(message(price(sku, version), 0, "price.set"))

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(deliver, (4, 2, 3)))
    assert {row[1:] for row in prices_of(page, server)} == {(4, 40)}


@on_servers
def test_an_update_with_a_version_is_enough_for_a_row_that_exists(page: Any, server: Engine) -> None:
    """It changes nothing for an older message, at READ COMMITTED too."""

    def keep_newest(event: dict[str, Any], session: Session) -> None:
        older = (page.Price.sku == event["sku"], page.Price.version < event["version"])
        session.execute(update(page.Price).where(*older).values(event))

    dispatcher = dispatcher_of(keep_newest, server, isolation="READ COMMITTED")
    with Session(server) as session, session.begin():
        session.add_all(page.Price(**price(str(number), 1)) for number in range(ROUNDS))
    for number in range(ROUNDS):
        race(server, str(number), lambda body: dispatcher.deliver(message(body, 0, "price.set")))
    assert {row[1:] for row in prices_of(page, server)} == {(4, 40)}


@pytest.mark.parametrize("recipe", [compared, in_the_statement], ids=lambda each: each.__name__)
def test_a_skipped_message_leaves_a_marker(page: Any, shop: Engine, recipe: Any) -> None:
    """It was handled: `APPLIED`, and a redelivery is a duplicate; a deleted row that was kept stays deleted."""
    dispatcher = dispatcher_of(recipe(page, shop), shop)
    deleted = {**price("a", 2), "amount": None}
    dispatcher.deliver(message(deleted, 0, "price.set"))
    outcomes = [dispatcher.deliver(message(price("a", 1), 0, "price.set")).outcome for _ in range(2)]
    assert outcomes == [Outcome.APPLIED, Outcome.DUPLICATE]
    assert (prices_of(page, shop), markers(shop)) == ([("a", 2, None)], 2)


def test_of_two_equal_versions_the_first_remains(page: Any, shop: Engine) -> None:
    """So `<=` does not decide between two events of one second."""
    dispatcher = dispatcher_of(compared(page, shop), shop)
    for amount in (1, 2):
        dispatcher.deliver(message({"sku": "a", "version": 7, "amount": amount}, 0, "price.set"))
    assert prices_of(page, shop) == [("a", 7, 1)]


# Two events with the same time -------------------------------------------------------------------------------------


def changed(created: int, status: str) -> Message:
    """An event as Stripe sends it: its time has whole seconds."""
    return message({"id": "sub", "created": created, "status": status}, 0, "subscription.updated")


def status_of(page: Any, engine: Engine) -> tuple[int, str]:
    """Return the time and the status that another connection sees."""
    with Session(engine) as session:
        row = session.get_one(page.Subscription, "sub")
        return row.created, row.status


@pytest.mark.parametrize("order", list(permutations(["trialing", "active", "canceled"])), ids="-".join)
def test_of_two_events_of_one_second_the_provider_decides(page: Any, shop: Engine, order: tuple[str, ...]) -> None:
    """The present state remains in every order of arrival; an event of an earlier second is skipped."""
    times = {"trialing": 99, "active": 100, "canceled": 100}
    asked: list[str] = []

    def fetch_status(id_: str) -> str:
        asked.append(id_)
        return "canceled"

    dispatcher = Dispatcher(sessionmaker(shop), page.Subscriptions(fetch_status))
    for status in order:
        assert dispatcher.deliver(changed(times[status], status)).outcome is Outcome.APPLIED
    assert (status_of(page, shop), asked) == ((100, "canceled"), ["sub"])


@on_servers
def test_a_state_that_was_fetched_before_another_event_is_fetched_again(page: Any, server: Engine) -> None:
    """The handler has read the row first, so a commit between its request and its own forbids the write."""
    at_the_provider = {"status": "active"}
    asked: list[str] = []

    def fetch_status(_id: str) -> str:
        asked.append(answer := at_the_provider["status"])
        if len(asked) == 1:
            at_the_provider["status"] = "canceled"
            with ThreadPoolExecutor(1) as pool:
                pool.submit(dispatcher.deliver, changed(100, "canceled")).result(20)
        return answer

    dispatcher = Dispatcher(sessionmaker(server), page.Subscriptions(fetch_status))
    dispatcher.deliver(changed(100, "trialing"))
    assert dispatcher.deliver(changed(100, "active")).outcome is Outcome.APPLIED
    assert (status_of(page, server), asked) == ((100, "canceled"), ["active", "canceled", "canceled"])


# A gap -------------------------------------------------------------------------------------------------------------


def moved(number: int) -> Message:
    """The event with this number adds ten to the power of it."""
    return message({"sku": "a", "number": number, "change": 10**number}, 0, "stock.moved")


def test_a_change_before_its_predecessor_is_deferred(page: Any, shop: Engine) -> None:
    """It leaves no marker and no row, and a redelivery after the predecessor applies it."""
    dispatcher = Dispatcher(sessionmaker(shop), page.Stocks())
    with pytest.raises(Defer, match="2 came before 1"):
        dispatcher.deliver(moved(2))
    assert markers(shop) == 0
    assert [dispatcher.deliver(moved(number)).outcome for number in (1, 2, 2)] == [
        Outcome.APPLIED,
        Outcome.APPLIED,
        Outcome.DUPLICATE,
    ]
    with Session(shop) as session:
        row = session.get_one(page.Stock, "a")
        assert (row.number, row.amount, markers(shop)) == (2, 110, 2)


def test_a_change_whose_marker_is_gone_is_not_added_twice(page: Any, shop: Engine) -> None:
    """Its number says that it was added."""
    dispatcher = Dispatcher(sessionmaker(shop), page.Stocks())
    for number in (1, 2):
        dispatcher.deliver(moved(number))
    with shop.begin() as connection:
        connection.exec_driver_sql(f"DELETE FROM {MARKERS}")
    assert dispatcher.deliver(moved(1)).outcome is Outcome.APPLIED
    with Session(shop) as session:
        row = session.get_one(page.Stock, "a")
        assert (row.number, row.amount) == (2, 110)
