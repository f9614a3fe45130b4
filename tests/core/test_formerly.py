"""`formerly=[...]`: which names a handler has had, what is refused, and what a claim of several names is."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import URL, create_engine, insert, select, text
from sqlalchemy.orm import Session, sessionmaker

from contract import NEW, OLD, deployed
from cut_proxy import CutProxy
from databases import Database, Driver, each_driver
from kit import Added, Harness, Held, Subject, Total, add
from projector_dedup import Dispatcher, Outcome, on, projector
from projector_dedup.errors import HandlerDefinitionError, InProgress, MissingTableError, RefusedError
from projector_dedup.markers import claim
from projector_dedup.tables import default_tables
from projector_dedup.unit_of_work import AsyncUnitOfWork, UnitOfWork
from reach import reach
from ready import ready

FACTORY = sessionmaker(create_engine("sqlite://"))  # nothing connects where a definition is refused
HERE = __name__


class Removed:
    """Another event."""


class AddedMore(Added):
    """An event of a derived class."""


def made(
    *,
    base: type = object,
    name: str | None = "totals",
    formerly: Sequence[str] = (),
    part: str | None = None,
    parts: Sequence[str] = (),
    events: Sequence[Any] = (Added,),
    subclasses: bool = False,
    idempotent: bool = True,
) -> Any:
    """A projector of one handler, `add`."""
    handler = on(*events, name=part, formerly=parts, subclasses=subclasses)(lambda _self, _event, _session: None)
    return projector(idempotent=idempotent, name=name, formerly=formerly)(type("Made", (base,), {"add": handler}))()


def names(*targets: object) -> dict[str, tuple[str, ...]]:
    """What a dispatcher finds: each handler and its former identities."""
    return {name: handler.formerly for name, handler in Dispatcher(FACTORY, *targets)._handlers.items()}


# Former identities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (made(), ()),
        (made(formerly=["b.Old", "a.Old"]), ("a.Old.add", "b.Old.add")),
        (made(parts=["plus"]), ("totals.plus",)),
        (made(formerly=["Old"], parts=["plus"]), ("Old.add", "Old.plus", "totals.plus")),
        (made(parts=["other.Projector.add"]), ("other.Projector.add",)),
        (made(formerly=["Old"], parts=["other.add"]), ("Old.add", "other.add")),
        (made(formerly=["totals", "Old", "Old"], parts=["add"]), ("Old.add",)),
        (made(formerly=["Ä", "a", "Z"]), ("Z.add", "a.add", "Ä.add")),
    ],
)
def test_former_identities_are_every_owner_with_every_part(target: object, expected: tuple[str, ...]) -> None:
    """But not the handler's own; a name with a dot is a whole identity; in the order of code points, each once."""
    assert names(target) == {"totals.add": expected}


def test_a_pinned_part_has_been_the_methods_name() -> None:
    """`@on(name=)` is the part as it is now."""
    assert names(made(part="pay", parts=["add"])) == {"totals.pay": ("totals.add",)}


def test_former_names_of_a_function_are_whole() -> None:
    """`@projector(formerly=)` has whole identities; `@on(formerly=)` parts, beside the module or the pinned name."""

    def count(_event: Added, _session: Session) -> None:
        """Do nothing."""

    def formerly(*, of_the_projector: Sequence[str], of_the_handler: Sequence[str], name: str) -> tuple[str, ...]:
        made = projector(idempotent=True, name=name, formerly=of_the_projector)(
            on(Added, formerly=of_the_handler)(count)
        )
        return made.handler.formerly

    assert formerly(of_the_projector=["old", "m.count"], of_the_handler=[], name="n") == ("m.count", "old")
    assert formerly(of_the_projector=["old"], of_the_handler=["part", "a.b"], name="n") == ("a.b", "n.part", "old")


@projector(idempotent=True, name="parent", formerly=["Older"])
class Parent:
    """Was renamed, and took a handler over from another projector."""

    @on(Added, formerly=["plus", "other.Projector.add"])
    def add(self, event: Added, session: Session) -> None:
        """Do nothing."""


class Child(Parent):
    """A projector by inheritance."""


@projector(idempotent=True, name="pinned", formerly=["OldChild"])
class PinnedChild(Parent):
    """One with names of its own."""


class Mixin:
    """Handlers for projectors; itself none."""

    @on(Added, formerly=["other.Projector.add"])
    def add(self, event: Added, session: Session) -> None:
        """Do nothing."""


@projector(idempotent=True, name="mixed")
class Mixed(Mixin):
    """Takes the handler, and what it was called."""


def test_former_names_stay_with_the_class_that_they_were_given_to() -> None:
    """An heir applied nothing as its parent was called; that a method was renamed holds for it too."""
    assert names(Parent(), Child(), PinnedChild()) == {
        "parent.add": ("Older.add", "Older.plus", "other.Projector.add", "parent.plus"),
        f"{HERE}.Child.add": (f"{HERE}.Child.plus",),
        "pinned.add": ("OldChild.add", "OldChild.plus", "pinned.plus"),
    }
    assert names(Mixed()) == {"mixed.add": ("other.Projector.add",)}


# What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"formerly": "Old"}, "list of names"),
        ({"parts": "plus"}, "list of names"),
        ({"formerly": 7}, "list of names"),
        ({"formerly": [7]}, "list of names"),
        ({"formerly": [""]}, "must not be empty"),
        ({"formerly": ["a.Old.add"]}, "there, 'a.Old', or write 'a.Old.add' in"),
        ({"formerly": ["Old.plus"], "part": "plus"}, "but that is the name of a handler"),
        ({"parts": ["a\0b"]}, "NUL"),
        ({"formerly": ["x" * 250], "parts": ["y" * 10]}, "must have at most 255 bytes"),
        ({"formerly": ["Old"], "idempotent": False}, "idempotent=True"),
        ({"parts": ["plus"], "idempotent": False}, "idempotent=True"),
    ],
)
def test_what_could_be_no_former_name_is_refused(arguments: dict[str, Any], says: str) -> None:
    """At start-up, before a message comes."""
    with pytest.raises(HandlerDefinitionError, match=says):
        Dispatcher(FACTORY, made(**arguments))


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (made(formerly=["rest"]), made(name="rest"), "rest.add"),
        (made(formerly=["Old"]), made(name="rest", formerly=["Old"]), "Old.add"),
        (made(formerly=["Old"]), made(name="rest", formerly=["Old"], events=[Removed, Added]), "Old.add"),
        (made(formerly=["Old"], subclasses=True), made(name="r", formerly=["Old"], events=[AddedMore]), "Old.add"),
    ],
)
def test_two_handlers_of_one_former_name_are_refused(one: object, other: object, shared: str) -> None:
    """Of a message that both want, the second would find the marker of the first: it would be lost there."""
    for pair in ((one, other), (other, one)):
        with pytest.raises(HandlerDefinitionError, match=f"both claim messages under the name {shared}"):
            Dispatcher(FACTORY, *pair)


def test_a_handler_that_was_split_by_event_is_fine() -> None:
    """No message comes to both, whether one of the two goes on under the old name or none does."""
    split = made(name="a", formerly=["Old"]), made(name="b", formerly=["Old"], events=[Removed])
    assert names(*split) == {"a.add": ("Old.add",), "b.add": ("Old.add",)}
    kept = made(name="Old"), made(name="b", formerly=["Old"], events=[Removed])
    assert names(*kept) == {"Old.add": (), "b.add": ("Old.add",)}


def test_a_handler_without_markers_shares_nothing() -> None:
    """It claims under no name."""
    assert len(names(made(formerly=["rest"]), made(name="rest", idempotent=False))) == 2


@pytest.mark.parametrize("formerly", ["old", [""], ["old", 7], 7])
def test_a_claim_refuses_them_too(formerly: Any) -> None:
    """`claim` and the unit of work, before any SQL."""
    with FACTORY() as session, pytest.raises(RefusedError, match="former"):
        claim(session, "m1", "new", formerly=formerly)
    with UnitOfWork(FACTORY) as uow, pytest.raises(RefusedError, match="former"):
        uow.claim("m1", "new", formerly=formerly)


# The claim -------------------------------------------------------------------------------------------------------


@pytest.fixture
def harness(sync_url: URL) -> Iterator[Harness]:
    """The contract's tables, through each synchronous driver."""
    with ready(sync_url) as harness:
        yield harness


@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_any_marker_of_any_name_makes_a_duplicate(harness: Harness, known: int) -> None:
    """Of four names, the lowest or the highest; with a bound and without. The loser leaves nothing behind."""
    four = ["d", "b", "a", "c"]
    harness.transact(lambda session: claim(session, "m1", four[known]))
    for timeout in (None, 5.0):
        with UnitOfWork(harness.factory, claim_timeout=timeout) as uow:
            assert not uow.claim("m1", "b", formerly=four)
        with UnitOfWork(harness.factory, claim_timeout=timeout) as uow:
            assert uow.claim(f"m2 {timeout}", "b", formerly=four, occurred_at=datetime(2026, 1, 2, tzinfo=UTC))
            uow.commit()
    others = [(f"m2 {timeout}", name) for timeout in (None, 5.0) for name in four]
    assert harness.markers() == sorted([("m1", four[known]), *others])
    marker = default_tables.marker
    rows = harness.transact(lambda session: session.execute(select(marker.c.occurred_at).distinct()).all())
    assert sorted(str(moment)[:10] for (moment,) in rows) == ["2026-01-02", "None"]


def test_a_callers_own_claim_knows_former_names(harness: Harness) -> None:
    """`claim(session, ..., formerly=[...])`; the same message twice in one transaction is a duplicate, too."""
    harness.transact(lambda session: claim(session, "m1", OLD))
    assert harness.transact(lambda session: claim(session, "m1", NEW, formerly=[OLD])) is False
    assert harness.transact(lambda session: [claim(session, "m2", NEW, formerly=[OLD]) for _ in "12"]) == [True, False]
    assert harness.transact(lambda session: claim(session, "m2", OLD)) is False


@pytest.mark.parametrize(("first", "second"), [(OLD, NEW), (NEW, OLD), (NEW, NEW)])
def test_claim_timeout_bounds_the_wait_for_any_name(harness: Harness, first: str, second: str) -> None:
    """`InProgress`, not a duplicate; and the next delivery finds out."""
    held = Held(harness)
    winner = harness.start(harness.deliver, deployed(harness, first, held))
    held.gate.arrival()
    name, formerly = second, [OLD] if second == NEW else []
    with UnitOfWork(harness.factory, claim_timeout=0.1) as uow, pytest.raises(InProgress):
        uow.claim("m1", name, formerly=formerly)
    held.gate.open()
    assert winner.result().outcome is Outcome.APPLIED
    assert harness.deliver(deployed(harness, second)).outcome is Outcome.DUPLICATE
    assert harness.totals() == {"a": 1}


@pytest.mark.parametrize("own", ["a", "b", "c"])
@pytest.mark.parametrize("timeout", [None, 60.0])
@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_who_waits_for_the_first_name_holds_no_other(
    request: pytest.FixtureRequest, server: str, own: str, timeout: float | None
) -> None:
    """Every version takes the names in one order, whichever is its own, so that no two can wait for each other."""
    database: Database = request.getfixturevalue(server)
    with ready(database.url()) as harness:
        dispatcher = harness.dispatcher(harness.handler(add, own, formerly=["c", "a", "b"]), claim_timeout=timeout)
        with UnitOfWork(harness.factory) as first:
            assert first.claim("m1", "a")
            waiting = harness.start(harness.deliver, dispatcher)
            harness.waits()
            for other in ("b", "c"):
                with UnitOfWork(harness.factory, claim_timeout=1.0) as uow:
                    assert uow.claim("m1", other)  # InProgress, if it were held
            first.commit()
        assert waiting.result().outcome is Outcome.DUPLICATE


def test_a_duplicate_does_not_wait_for_the_names_behind_it(mariadb: Database) -> None:
    """The INSERT fails at the first marker that is there; what a rival holds after it, nobody need ask."""
    impatient = {"connect_args": {"init_command": "SET SESSION innodb_lock_wait_timeout = 1"}}
    with ready(mariadb.url(), engine_arguments=impatient) as harness:
        harness.transact(lambda session: claim(session, "m1", "b"))
        with UnitOfWork(harness.factory) as rival, UnitOfWork(harness.factory) as uow:
            assert rival.claim("m1", "c")
            assert not uow.claim("m1", "a", formerly=["b", "c"])


@pytest.mark.parametrize("first", [OLD, NEW])
def test_a_marker_that_only_looks_alike_is_no_duplicate(mariadb: Database, first: str) -> None:
    """I7: on a table whose columns take "a" for "A" the claim of several names raises, too."""
    with ready(mariadb.url()) as harness:
        with harness.engine.begin() as connection:
            connection.execute(text("alter table processed_message modify message_id varchar(191) not null"))
        with harness.engine.begin() as connection:
            connection.execute(insert(default_tables.marker).values(message_id="M1", handler=first))
        with UnitOfWork(harness.factory) as uow, pytest.raises(MissingTableError, match="byte for byte"):
            uow.claim("m1", NEW, formerly=[OLD])


def add_by_query(happened: Added, session: Session) -> None:
    """By a SELECT that does not come with the claim: with former names none does."""
    total = session.scalars(select(Total).where(Total.key == happened.keys[0])).one_or_none() or Total(amount=0)
    total.key = happened.keys[0]
    total.amount += happened.amount
    session.add(total)


def test_it_costs_no_round_trip(postgresql: Database) -> None:
    """One statement for two names, as for one: new and redelivered."""
    counts = {}
    with Harness(Subject(postgresql.url())) as harness, CutProxy(postgresql.url()) as proxy:
        harness.create_tables()
        sessions = sessionmaker(create_engine(proxy.through(postgresql.url())))
        for name, formerly in {"one": [], "two": ["former"]}.items():
            target = projector(idempotent=True, name=name, formerly=formerly)(on(Added)(add_by_query))
            dispatcher = Dispatcher(sessions, target)
            for number in range(8):  # drivers prepare their statements
                dispatcher.deliver(Added(), message_id=f"m{number}")
                dispatcher.deliver(Added(), message_id=f"m{number}")
            before = len(proxy.trips)
            dispatcher.deliver(Added(), message_id="m8")
            new = len(proxy.trips) - before
            dispatcher.deliver(Added(), message_id="m8")
            counts[name] = (new, len(proxy.trips) - before - new)
        sessions.kw["bind"].dispose()
    assert counts["one"] == counts["two"] == (4, 2)


@each_driver(is_async=True)
def test_asyncio(request: pytest.FixtureRequest, driver: Driver) -> None:
    """`AsyncUnitOfWork.claim` and an `async def` handler, by each asynchronous driver."""

    async def outcomes() -> list[bool]:
        found = []
        for name, formerly in ((OLD, []), (NEW, [OLD]), (OLD, [NEW])):
            for timeout in (None, 5.0):
                async with AsyncUnitOfWork(there.factory, claim_timeout=timeout) as uow:
                    found.append(await uow.claim(str(timeout), name, formerly=formerly))
                    if found[-1]:
                        await uow.commit()
        return found

    with ready(reach(request, driver)) as there:
        assert there.run(outcomes) == [True, True, False, False, False, False]
