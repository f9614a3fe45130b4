"""`@on(..., reads={...})`: what may be declared, which rows then come with the claim, and that it is only advice."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, ForeignKey, String, create_engine, delete, event, select, text, update
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    relationship,
    sessionmaker,
    with_loader_criteria,
)
from sqlalchemy.orm.loading import merge_frozen_result

from databases import Database
from first_row_rig import (
    BOTH,
    ROWS,
    WITH_CLAIM,
    Added,
    Delivered,
    Named,
    Other,
    Total,
    engine_of,
    kinds_of,
    totals,
)
from projector_dedup import Dispatcher, HandlerDefinitionError, Message, Outcome, UnitOfWork, on, projector
from projector_dedup.read_ahead import MOST_ROWS


@pytest.fixture(name="engine", params=["postgresql", "mariadb", "sqlite"])
def engine_fixture(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The tables, and rows of zeros."""
    with engine_of(request.getfixturevalue(request.param)) as engine:
        yield engine


# What may be declared ------------------------------------------------------------------------------------------------


async def _awaited(_event: object) -> list[int]:
    return []


class NoEntity:
    """Not mapped."""


@pytest.mark.parametrize(
    ("reads", "words"),
    [
        ({NoEntity: "id"}, "no mapped class"),
        ({"Total": "id"}, "no mapped class"),
        ({Total.__table__: "id"}, "no mapped class"),
        ({Total: 1}, "dotted path"),
        ({Total: None}, "dotted path"),
        ({Total: ""}, "dotted path"),
        ({Total: "row..id"}, "dotted path"),
        ({Total: b"row"}, "dotted path"),
        ({Total: ("row", "row")}, "is not for 1 column: write a tuple"),
        ({Named: "shop"}, "is not for 2 columns: write a tuple"),
        ({Named: ["shop", "number"]}, "2 columns"),
        ({Total: _awaited}, "not an async one"),
        ({Named: ("shop", 1)}, "dotted path"),
        ({Total: []}, "says nothing"),
        ({}, "takes a mapping"),
        ([Total], "takes a mapping"),
        ("row", "takes a mapping"),
    ],
    ids=[f"{number}" for number in range(17)],
)
def test_what_is_no_declaration_is_refused_where_it_stands(reads: Any, words: str) -> None:
    """Before anything is delivered, with words that say what to write."""
    with pytest.raises(HandlerDefinitionError, match=words):
        on(Added, reads=reads)


@dataclass(frozen=True)
class Moved:
    """From one row to another."""

    source: int
    target: int
    rows: tuple[Any, ...] = ()


def move(change: Moved, session: Session) -> None:
    """Two rows of one entity, then one of another."""
    source, target = session.get_one(Total, change.source), session.get_one(Total, change.target)
    other = session.get_one(Other, change.target)
    source.amount -= 1
    target.amount += 1
    other.amount += 1


def delivered(engine: Engine, body: Any, reads: Any, messages: list[Any]) -> list[list[str]]:
    """Deliver each; the statements of each, by their first words."""

    @projector(idempotent=True, name="first")
    @on(Moved, Added, dict, reads=reads)
    def handler(change: Any, session: Session) -> None:
        body(change, session)

    sent: list[str] = []

    def note(*given: Any) -> None:
        sent.append(given[2])

    event.listen(engine, "before_cursor_execute", note)
    dispatcher, found = Dispatcher(sessionmaker(engine), handler), []
    for number, message in enumerate(messages):
        sent.clear()
        assert dispatcher.deliver(message, message_id=f"m{number}").outcome is Outcome.APPLIED
        found.append(kinds_of(sent))
    event.remove(engine, "before_cursor_execute", note)
    for number, message in enumerate(messages):
        assert dispatcher.deliver(message, message_id=f"m{number}").outcome is Outcome.DUPLICATE
    return found


@pytest.mark.parametrize(
    "reads",
    [
        {Total: ["source", "target"], Other: "target"},
        {Other: lambda change: [change.target], Total: lambda change: {change.source, change.target}},
        {Total: lambda change: [(change.target,), change.source], Other: ["target", "target"]},
    ],
    ids=["paths", "functions", "both"],
)
def test_several_rows_of_several_entities(engine: Engine, reads: Any) -> None:
    """All of them come with the claim."""
    found = delivered(engine, move, reads, [Moved(0, 1), Moved(0, 1), Moved(2, 2)])
    assert found[1][0] == BOTH
    assert "SELECT" not in found[1] + found[2]
    assert (totals(engine), totals(engine, Other)) == ([-2, 2, 0, 0], [0, 2, 1, 0])


@pytest.mark.parametrize(
    "reads",
    [
        {Total: "source"},
        {Total: ["target", "source"]},
        {Other: "source"},
        {Total: lambda _change: [0, 1, 2, 3, 99], Other: "target"},
        {Named: lambda _change: [("a", UUID(int=1))]},
        {Total: lambda _change: []},
        {Total: lambda _change: range(MOST_ROWS + 1)},
    ],
    ids=["partly", "partly, too", "wrong", "more than is asked for", "another", "none", "too many"],
)
def test_a_declaration_that_is_not_right_changes_nothing(engine: Engine, reads: Any) -> None:
    """The handler gets its rows, and they are what they are."""
    delivered(engine, move, reads, [Moved(0, 1), Moved(0, 1), Moved(2, 2)])
    assert (totals(engine), totals(engine, Other)) == ([-2, 2, 0, 0], [0, 2, 1, 0])


def _raises(_change: object) -> list[int]:
    raise RuntimeError("a bug")


@pytest.mark.parametrize(
    "reads",
    [
        {Total: "nowhere"},
        {Total: "row.deeper"},
        {Total: lambda change: [str(change.row)]},
        {Total: lambda change: [float(change.row)]},
        {Total: lambda change: [True, change.row]},
        {Total: lambda change: [change.row, None]},
        {Total: lambda _change: [1 << 40]},
        {Total: lambda _change: 7},
        {Total: lambda _change: "1"},
        {Total: lambda _change: [[1]]},
        {Total: lambda _change: [(1, 2)]},
        {Named: lambda _change: [("a\0b", UUID(int=1))]},
        {Named: lambda _change: [("\udc80", UUID(int=1))]},
        {Named: lambda _change: [("a", str(UUID(int=1)))]},
        {Total: _raises},
    ],
    ids=[f"{number}" for number in range(15)],
)
def test_keys_that_are_none(engine: Engine, caplog: pytest.LogCaptureFixture, reads: Any, request: Any) -> None:
    """Found out before any SQL: the plain claim, and one warning for each handler that says what was wrong."""
    name = f"warned {request.node.callspec.id}"

    @projector(idempotent=True, name=name)
    @on(Added, reads=reads)
    def handler(change: Added, session: Session) -> None:
        session.get_one(Total, change.row).amount += 1

    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *given: sent.append(given[2]))
    dispatcher = Dispatcher(sessionmaker(engine), handler)
    with caplog.at_level(logging.WARNING, "projector_dedup"):
        for number in range(3):
            dispatcher.deliver(Added(1), message_id=f"m{number}")
    assert BOTH not in kinds_of(sent)
    assert totals(engine) == [0, 3, 0, 0]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"handler {name}: ")


def test_it_may_be_switched_off(engine: Engine) -> None:
    """No row is read before it is asked for, in a batch neither."""
    deliver = Delivered(engine)

    @projector(idempotent=True, name="switched off")
    @on(Added, reads={Total: "row"})
    def handler(change: Added, session: Session) -> None:
        session.get_one(Total, change.row).amount += 1

    dispatcher = Dispatcher(sessionmaker(engine), handler, read_ahead=False)
    deliver.sent.clear()
    dispatcher.deliver(Added(0), message_id="one")
    dispatcher.deliver_batch([Message(f"b{row}", Added(row)) for row in range(ROWS)])
    kinds = kinds_of(deliver.sent)
    assert BOTH not in kinds
    assert kinds.count("UPDATE") == 1 + ROWS
    assert totals(engine) == [2, 1, 1, 1]


def test_an_envelope_has_its_keys_in_its_body(engine: Engine) -> None:
    """A handler that gets the `Message` declares where they are in the event."""
    bodies: list[Any] = []

    @projector(idempotent=True, name="first")
    @on(Added, envelope=True, reads={Total: "row"})
    def handler(message: Message, session: Session) -> None:
        bodies.append(message.body)
        session.get_one(Total, message.body.row).amount += 1

    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *given: sent.append(given[2]))
    dispatcher = Dispatcher(sessionmaker(engine), handler)
    dispatcher.deliver(Added(1), message_id="one")
    assert BOTH in kinds_of(sent)
    dispatcher.deliver_batch([Message(f"b{row}", Added(row)) for row in range(ROWS)])
    assert totals(engine) == [1, 2, 1, 1]
    assert bodies == [Added(1), *map(Added, range(ROWS))]


def test_a_batch_reads_what_is_declared_at_once(postgresql: Database) -> None:
    """In one SELECT, for handlers whose keys are nowhere in the event too."""
    with engine_of(postgresql) as engine:

        @projector(idempotent=True, name="first")
        @on(Added, reads={Total: lambda change: [3 - change.row]})
        def handler(change: Added, session: Session) -> None:
            session.get_one(Total, 3 - change.row).amount += 1

        sent: list[str] = []
        event.listen(engine, "before_cursor_execute", lambda *given: sent.append(given[2]))
        dispatcher = Dispatcher(sessionmaker(engine), handler)
        dispatcher.deliver_batch([Message(f"m{number}", Added(number % ROWS)) for number in range(40)])
        reading = [statement for statement in sent if statement.startswith("SELECT first_total")]
        assert len(reading) == 1
        assert totals(engine) == [10] * ROWS


@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
def test_a_declared_row_is_locked_by_its_claim(request: pytest.FixtureRequest, database: str) -> None:
    """With `read_models`; a rival's write waits until the message is committed. A duplicate locks nothing."""
    with engine_of(request.getfixturevalue(database)) as engine:
        rival = create_engine(
            engine.url,
            connect_args={"options": "-c lock_timeout=200"}
            if database == "postgresql"
            else {"init_command": "SET innodb_lock_wait_timeout=1"},
        )
        write = update(Total).where(Total.id == 1).values(amount=Total.amount + 100)
        refused: list[bool] = []

        def rivals_write() -> None:
            try:
                with rival.begin() as connection:
                    connection.execute(write)
                refused.append(False)
            except Exception:  # noqa: BLE001  # of whichever driver
                refused.append(True)

        def body(change: Added, session: Session) -> None:
            rivals_write()
            session.get_one(Total, change.row).amount += 1

        deliver = Delivered(engine, read_models=[Total])
        deliver(Added(1))
        deliver.body = body
        assert deliver(Added(1)) == WITH_CLAIM
        assert refused == [True]
        with UnitOfWork(sessionmaker(engine)) as uow:
            uow.begin()
            deliver(Added(1), "m1")
            rivals_write()
        assert refused == [True, False]
        assert totals(engine) == [0, 102, 0, 0]
        rival.dispose()


@pytest.mark.parametrize("database", ["postgresql"])  # MariaDB stays at REPEATABLE READ, and locks the gap
def test_a_row_that_a_rival_adds_behind_the_claim_is_found(request: pytest.FixtureRequest, database: str) -> None:
    """At READ COMMITTED a row that was missing is not remembered as missing."""
    with engine_of(request.getfixturevalue(database)) as engine:
        rival = create_engine(engine.url)

        def body(change: Added, session: Session) -> None:
            with Session(rival) as other, other.begin():
                other.add(Total(id=change.row, amount=100))
            session.get_one(Total, change.row).amount += 1

        deliver = Delivered(engine, read_models=[Total])
        deliver(Added(1))
        deliver.body = body
        assert deliver(Added(9))[0] == BOTH
        assert totals(engine) == [0, 1, 0, 0, 101]
        rival.dispose()


def test_an_instance_that_the_handler_brought_along_is_the_one(engine: Engine) -> None:
    """Added or merged without a statement, it is in the session, and `get` returns it."""
    with Session(engine, expire_on_commit=False) as session:
        kept = session.get_one(Total, 1)
        session.expunge(kept)

    def body(_change: Added, session: Session) -> None:
        session.add(kept)
        assert session.get(Total, 1) is kept
        kept.amount += 1

    deliver = Delivered(engine)
    deliver(Added(0))
    deliver.body = body
    deliver(Added(1))
    assert totals(engine) == [1, 1, 0, 0]


def test_a_declared_row_that_is_locked_does_not_keep_a_message(postgresql: Database) -> None:
    """One that the handler does not ask for: the claim is made again without it."""
    with engine_of(postgresql) as engine:
        hasty = create_engine(engine.url, connect_args={"options": "-c lock_timeout=100"})
        deliver = Delivered(hasty, read_models=[Total])
        deliver(Added(0))
        deliver.body = lambda _change, session: session.get_one(Total, 0)
        with engine.begin() as rival:
            rival.execute(update(Total).where(Total.id == 2).values(amount=7))
            assert deliver(Added(2))[0] == BOTH
        deliver.body = lambda change, session: setattr(session.get_one(Total, change.row), "amount", 9)
        assert deliver(Added(1)) == WITH_CLAIM, "the next message is claimed with its row again"
        hasty.dispose()


def test_a_schema_that_may_not_be_used_keeps_no_message(postgresql: Database) -> None:
    """The role may not look into it: what is declared of it is not read ahead."""

    class Hidden(DeclarativeBase):
        pass

    class Secret(Hidden):
        __tablename__ = "secret"
        __table_args__ = {"schema": "hidden"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)

    with engine_of(postgresql) as engine:
        with engine.begin() as connection:
            connection.execute(text("CREATE SCHEMA hidden"))
            Hidden.metadata.create_all(connection)
            connection.execute(text("DROP ROLE IF EXISTS reads_outsider"))
            connection.execute(text("CREATE ROLE reads_outsider"))
            connection.execute(text("GRANT USAGE ON SCHEMA public TO reads_outsider"))
            connection.execute(text("GRANT ALL ON ALL TABLES IN SCHEMA public TO reads_outsider"))
        outsider = create_engine(engine.url, connect_args={"options": "-c role=reads_outsider"})
        deliver = Delivered(outsider, reads={Secret: "row", Total: "row"})
        deliver(Added(1))
        assert deliver(Added(1)) == WITH_CLAIM
        assert totals(engine) == [0, 2, 0, 0]
        outsider.dispose()
        with engine.begin() as connection:
            connection.execute(text("DROP OWNED BY reads_outsider; DROP ROLE reads_outsider"))


# Where the ORM's own loader would have lost messages -----------------------------------------------------------------


class Odd(DeclarativeBase):
    """Entities that are more than rows of a table."""


class Animal(Odd):
    """Of single-table inheritance: a SELECT has a condition more."""

    __tablename__ = "odd_animal"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(String(20))
    amount: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "animal"}  # noqa: RUF012


class Dog(Animal):
    """One of them."""

    __mapper_args__ = {"polymorphic_identity": "dog"}  # noqa: RUF012


class Owner(Odd):
    """Reached by an inner join, or by a SELECT of its own."""

    __tablename__ = "odd_owner"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class Eager(Odd):
    """Loads its owner by an inner join: a row without one is not found."""

    __tablename__ = "odd_eager"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    amount: Mapped[int] = mapped_column(default=0)
    owner_id: Mapped[int | None] = mapped_column(ForeignKey(Owner.id))
    owner: Mapped[Owner | None] = relationship(lazy="joined", innerjoin=True)


class Followed(Odd):
    """Loads its owner by a second SELECT, in which the first one is a subquery."""

    __tablename__ = "odd_followed"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    amount: Mapped[int] = mapped_column(default=0)
    owner_id: Mapped[int | None] = mapped_column(ForeignKey(Owner.id))
    owner: Mapped[Owner | None] = relationship(lazy="subquery")


class Plainest(Odd):
    """Nothing odd but what the session or the handler does."""

    __tablename__ = "odd_plainest"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    amount: Mapped[int] = mapped_column(default=0)
    hidden: Mapped[bool] = mapped_column(default=False)


def _usual(entity: Any, change: Added, session: Session) -> None:
    row = session.get(entity, change.row)
    if row is None:
        with session.begin_nested():
            session.execute(update(entity.__table__).where(entity.__table__.c.id == change.row).values(amount=1))
    else:
        row.amount += 1


def _after_core(entity: Any, change: Added, session: Session) -> None:
    table = entity.__table__
    session.execute(update(table).where(table.c.id == change.row).values(amount=table.c.amount + 10))
    session.get_one(entity, change.row).amount += 1


def _after_text(entity: Any, change: Added, session: Session) -> None:
    session.execute(text("UPDATE odd_plainest SET amount = amount + 10"))
    session.get_one(entity, change.row).amount += 1


def _collected(entity: Any, change: Added, session: Session) -> None:
    session.get_one(entity, change.row)  # nobody keeps it
    session.get_one(entity, change.row).amount += 1


def _with_options(entity: Any, change: Added, session: Session) -> None:
    criteria = with_loader_criteria(Plainest, Plainest.hidden.is_(True))
    assert session.get(entity, change.row, options=[criteria]) is None
    session.get_one(entity, change.row).amount += 1


def _hide(sessions: Any) -> None:
    @event.listens_for(sessions, "do_orm_execute")
    def criteria(state: Any) -> None:
        if state.is_select:
            state.statement = state.statement.options(with_loader_criteria(Plainest, Plainest.hidden.is_(False)))


def _cache(sessions: Any) -> None:
    kept: dict[str, Any] = {}

    @event.listens_for(sessions, "do_orm_execute")
    def cached(state: Any) -> Any:
        if state.is_column_load:
            return None
        key = str(state.statement)
        if key not in kept:
            kept[key] = state.invoke_statement().freeze()
        return merge_frozen_result(state.session, state.statement, kept[key], load=False)()  # type: ignore[no-untyped-call]  # SQLAlchemy's


def _pend(sessions: Any) -> None:
    @event.listens_for(sessions, "after_begin")
    def pending(session: Session, _transaction: object, _connection: object) -> None:
        if session.get_nested_transaction() is None:
            session.info["begun"] = True


CASES: dict[str, tuple[type[Any], Any, Any]] = {
    "single-table inheritance": (Animal, _usual, None),
    "a class of it": (Dog, _usual, None),
    "an inner eager join": (Eager, _usual, None),
    "a subquery": (Followed, _usual, None),
    "criteria of the session": (Plainest, _usual, _hide),
    "criteria of the handler": (Plainest, _with_options, None),
    "a cache of results": (Plainest, _usual, _cache),
    "a listener to its beginning": (Plainest, _usual, _pend),
    "an UPDATE by Core before": (Plainest, _after_core, None),
    "an UPDATE by text before": (Plainest, _after_text, None),
    "an entity that nobody keeps": (Plainest, _collected, None),
}


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")
@pytest.mark.parametrize("case", CASES)
def test_no_message_is_lost_for_its_entity(engine: Engine, case: str) -> None:
    """A new message is new, whatever its entity's SELECT would have found, and its handler finds the same."""
    entity, body, listen = CASES[case]
    Odd.metadata.create_all(engine)
    table, found = entity.__table__, []
    for read_ahead in (False, True):
        with Session(engine) as session, session.begin():
            session.execute(delete(table))
            session.add(entity(id=1, amount=0))
        sessions, seen = sessionmaker(engine), list[int]()
        if listen is not None:
            listen(sessions)

        @projector(idempotent=True, name=f"odd {read_ahead}")
        @on(Added, reads={entity: "row"})
        def handler(change: Added, session: Session, seen: list[int] = seen) -> None:
            seen.append(change.row)
            body(entity, change, session)

        dispatcher = Dispatcher(sessions, handler, read_ahead=read_ahead)
        for number in range(2):
            assert dispatcher.deliver(Added(1), message_id=f"m{number}").outcome is Outcome.APPLIED
            assert dispatcher.deliver(Added(1), message_id=f"m{number}").outcome is Outcome.DUPLICATE
        assert seen == [1, 1]
        with engine.connect() as connection:
            found.append(connection.scalar(select(table.c.amount).where(table.c.id == 1)))
    assert found[0] == found[1]


def test_a_session_that_routes_reads_elsewhere(postgresql: Database) -> None:
    """A replica that a session reads from gets no claim, and the row is read where the session would read it."""
    with engine_of(postgresql) as engine:
        follower = create_engine(engine.url)
        routed: list[str] = []

        class Routing(Session):
            def get_bind(self, *args: Any, **options: Any) -> Any:
                if options.get("mapper") is not None and options.get("clause") is None:
                    routed.append("follower")
                return super().get_bind(*args, **options)

        deliver = Delivered(engine, sessions=sessionmaker(engine, class_=Routing))
        for _ in range(3):
            assert BOTH not in deliver(Added(1)), "a class of the user's may do anything"
        assert totals(engine) == [0, 3, 0, 0]
        follower.dispose()


def test_the_library_delivers_without_the_package(tmp_path: Path) -> None:
    """With `read_ahead=False` nothing is imported from it."""
    import subprocess
    import sys

    program = (
        "import sys; sys.modules['projector_dedup.read_ahead'] = None\n"
        "from sqlalchemy import create_engine\n"
        "from sqlalchemy.orm import sessionmaker\n"
        "from projector_dedup import Dispatcher, on, projector\n"
        "from projector_dedup.tables import default_metadata\n"
        f"engine = create_engine('sqlite:///{tmp_path}/x.db')\n"
        "default_metadata.create_all(engine)\n"
        "@projector(idempotent=True, name='p')\n"
        "@on(dict)\n"
        "def handler(event, session): pass\n"
        "dispatcher = Dispatcher(sessionmaker(engine), handler, read_ahead=False)\n"
        "events = [{'message_id': 'a'}, {'message_id': 'b'}]\n"
        "print(dispatcher.deliver(events[0]).outcome, [each.outcome for each in dispatcher.deliver_batch(events)])\n"
    )
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert said.count("DUPLICATE") == 1
    assert said.count("APPLIED") == 2
