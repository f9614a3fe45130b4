"""`read_models=[...]`: what is declared is read under lock, and what cannot be locked is refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, ForeignKey, String, create_engine, event, func, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    aliased,
    joinedload,
    mapped_column,
    relationship,
    selectinload,
    sessionmaker,
)

from databases import Database
from projector_dedup import Dispatcher, Message, Outcome, make_tables, on, projector
from projector_dedup.commands import Call, Commands, command
from projector_dedup.dialects import Failure, dialect_of
from projector_dedup.errors import UnlockedWriteError
from projector_dedup.unit_of_work import UnitOfWork


class Base(DeclarativeBase):
    """The read model of these tests."""


class Customer(Base):
    """Not declared: only its handler can lock it."""

    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)
    visits: Mapped[int] = mapped_column(default=0)
    totals: Mapped[list["Totals"]] = relationship(back_populates="customer")
    profile: Mapped["Profile | None"] = relationship(back_populates="customer")


class Profile(Base):
    """Not declared; one for each customer, with a number that the server gives."""

    __tablename__ = "profile"
    id: Mapped[int] = mapped_column(primary_key=True)
    visits: Mapped[int] = mapped_column(default=0)
    customer_id: Mapped[int | None] = mapped_column(ForeignKey("customer.id"))
    customer: Mapped[Customer | None] = relationship(back_populates="profile")


class Counted(Base):
    """Not declared; its version counter finds a rival's change."""

    __tablename__ = "counted"
    id: Mapped[int] = mapped_column(primary_key=True)
    visits: Mapped[int] = mapped_column(default=0)
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  # SQLAlchemy's way


class Totals(Base):
    """Declared in `read_models`."""

    __tablename__ = "totals"
    id: Mapped[str] = mapped_column(String(20), primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)
    customer_id: Mapped[int] = mapped_column(ForeignKey("customer.id"))
    customer: Mapped[Customer] = relationship(back_populates="totals")


tables = make_tables(Base.metadata)
Body = Callable[[Session], Any]
LOCK = {"postgresql": "FOR NO KEY UPDATE OF", "mariadb": "FOR UPDATE"}  # MariaDB cannot say which of joined tables


def count(totals: Any) -> None:
    """Change a declared row."""
    totals.amount += 1


def visit(undeclared: Any) -> None:
    """Change a row of another entity."""
    undeclared.visits += 1


def of_joined_customer(session: Session) -> Any:
    """A declared row that came with an undeclared one, in one SELECT."""
    return session.scalars(select(Customer).options(joinedload(Customer.totals))).unique().one().totals[0]


def _by_column(session: Session, column: Any) -> None:
    amount = session.scalar(select(column).where(column.table.c.id == "a")) or 0
    session.execute(update(Totals).where(Totals.id == "a").values(amount=amount + 1))


ALIAS, CORE = aliased(Totals), Totals.__table__
LOCKED: dict[str, Body] = {
    "by_get": lambda s: count(s.get_one(Totals, "a")),
    "by_select": lambda s: count(s.scalars(select(Totals).where(Totals.id == "a")).one()),
    "by_query": lambda s: count(s.query(Totals).filter_by(id="a").one()),
    "by_alias": lambda s: count(s.scalars(select(ALIAS).where(ALIAS.id == "a")).one()),
    "by_column": lambda s: _by_column(s, Totals.amount),
    "by_core": lambda s: _by_column(s, CORE.c.amount),
    "beside_a_column": lambda s: count(s.execute(select(Totals, Customer.id).join(Customer)).one()[0]),
    "beside_an_entity": lambda s: count(s.execute(select(Customer, Totals).join(Totals)).one()[1]),
    "with_joined_customer": lambda s: count(s.scalars(select(Totals).options(joinedload(Totals.customer))).one()),
    "by_lazy_load": lambda s: count(s.get_one(Customer, 1).totals[0]),
    "by_selectin": lambda s: count(s.scalars(select(Customer).options(selectinload(Customer.totals))).one().totals[0]),
    "by_merge": lambda s: s.merge(Totals(id="a", amount=1, customer_id=1)),
}


def _locked_too_late(session: Session) -> None:
    stale = of_joined_customer(session)
    session.scalars(select(Totals)).one()  # locks the row, but keeps the values that were read before
    count(stale)


def _in_a_subquery(session: Session) -> None:
    session.execute(select(select(Totals).subquery().c.amount)).all()


def _in_a_union(session: Session) -> None:
    session.scalars(select(Totals).from_statement(select(Totals).union_all(select(Totals)))).all()


def _with_a_lock_of_another(session: Session) -> None:
    count(session.scalars(select(Totals).join(Customer).with_for_update(of=Customer)).one())


def _after_a_savepoint_was_rolled_back(session: Session) -> None:
    with session.begin_nested() as savepoint:
        kept = session.get_one(Totals, "a")
        savepoint.rollback()
    assert session.get_one(Totals, "a") is kept  # from the session, without a SELECT
    count(kept)


def _after_an_outer_savepoint_was_rolled_back(session: Session) -> None:
    with session.begin_nested() as savepoint:
        with session.begin_nested():
            kept = session.get_one(Totals, "a")
        savepoint.rollback()
    count(kept)


REFUSED: dict[str, Body] = {
    "joined_from_elsewhere": lambda s: count(of_joined_customer(s)),
    "deleted_unlocked": lambda s: s.delete(of_joined_customer(s)),
    "locked_too_late": _locked_too_late,
    "on_the_nullable_side": lambda s: s.execute(select(Customer, Totals).outerjoin(Totals)).all(),
    "in_a_subquery": _in_a_subquery,
    "in_a_union": _in_a_union,
    "with_a_shared_lock": lambda s: count(s.scalars(select(Totals).with_for_update(read=True)).one()),
    "by_get_with_a_shared_lock": lambda s: count(s.get_one(Totals, "a", with_for_update={"read": True})),
    "with_a_lock_of_another": _with_a_lock_of_another,
    "after_a_savepoint_was_rolled_back": _after_a_savepoint_was_rolled_back,
    "after_an_outer_savepoint_was_rolled_back": _after_an_outer_savepoint_was_rolled_back,
}


def _undeclared_locked_too_late(session: Session) -> None:
    stale = session.get_one(Customer, 1)
    session.get_one(Customer, 1, with_for_update=True)  # locks the row, but keeps the values that were read before
    visit(stale)


def _inserted_in_a_savepoint_that_was_rolled_back(session: Session) -> None:
    with session.begin_nested() as savepoint:
        session.add(Customer(id=9))
        session.flush()
        savepoint.rollback()
    with Session(session.get_bind()) as rival:
        rival.add(Customer(id=9))
        rival.commit()
    visit(session.get_one(Customer, 9))


UNDECLARED: dict[str, Body] = {
    "undeclared_by_get": lambda s: visit(s.get_one(Customer, 1)),
    "undeclared_deleted": lambda s: s.delete(s.get_one(Profile, 100)),
    "undeclared_beside_the_declared": lambda s: visit(
        s.scalars(select(Totals).options(joinedload(Totals.customer))).one().customer
    ),
    "undeclared_by_a_shared_lock": lambda s: visit(s.get_one(Customer, 1, with_for_update={"read": True})),
    "undeclared_by_a_lock_of_another": lambda s: visit(
        s.scalars(select(Customer).join(Totals).with_for_update(of=Totals)).one()
    ),
    "undeclared_locked_too_late": _undeclared_locked_too_late,
    "inserted_in_a_savepoint_that_was_rolled_back": _inserted_in_a_savepoint_that_was_rolled_back,
}


def _asked_for_by_refresh(session: Session) -> None:
    stale = session.get_one(Customer, 1)
    session.refresh(stale, with_for_update=True)
    visit(stale)


def _flushed_before(session: Session) -> None:
    visit(_got_or_created(session, 9))


def _with_the_server_s_key(session: Session) -> None:
    new = Profile(customer_id=1)
    session.add(new)
    session.flush()
    session.expire(new)
    visit(new)


def _transferred_between_new_rows(session: Session) -> None:
    giver, taker = _got_or_created(session, 8), _got_or_created(session, 9)
    giver.visits -= 1
    taker.visits += 1


def _got_or_created(session: Session, number: int) -> Customer:
    customer = session.get(Customer, number)
    if customer is None:
        customer = Customer(id=number, visits=0)
        session.add(customer)
        session.flush()
    return customer


def _read_again(session: Session) -> None:
    _got_or_created(session, 9)
    session.expunge_all()
    visit(session.get_one(Customer, 9))


def _new_before_a_savepoint(session: Session) -> None:
    new = Customer(id=9)
    session.add(new)
    with session.begin_nested() as savepoint:  # writes what is new before it begins
        new.visits += 5
        session.flush()
        savepoint.rollback()
    visit(new)


def _new_in_a_savepoint(session: Session) -> None:
    with session.begin_nested():
        session.add(Customer(id=9))
    visit(session.get_one(Customer, 9))


def _merged_twice(session: Session) -> None:
    for visits in (1, 2):
        session.merge(Customer(id=9, visits=visits))
        session.flush()


def _with_new_rows_that_point_to_it(session: Session) -> None:
    customer = session.get_one(Customer, 1)
    session.add(Totals(id="b", customer=customer))  # changes the collection, which is in no column of customer
    session.add(Profile(customer=customer))


SAFE: dict[str, Body] = {
    "asked_for_by_get": lambda s: visit(s.get_one(Customer, 1, with_for_update=True)),
    "asked_for_by_select": lambda s: visit(s.scalars(select(Customer).with_for_update()).one()),
    "asked_for_by_refresh": _asked_for_by_refresh,
    "asked_for_of_the_entity": lambda s: visit(
        s.scalars(select(Customer).join(Totals).with_for_update(of=[Customer, Totals])).one()
    ),
    "counted_by_versions": lambda s: visit(s.get_one(Counted, 1)),
    "flushed_before": _flushed_before,
    "with_the_server_s_key": _with_the_server_s_key,
    "transferred_between_new_rows": _transferred_between_new_rows,
    "read_again": _read_again,
    "new_before_a_savepoint": _new_before_a_savepoint,
    "new_in_a_savepoint": _new_in_a_savepoint,
    "merged_twice": _merged_twice,
    "with_new_rows_that_point_to_it": _with_new_rows_that_point_to_it,
}


def each_of(bodies: dict[str, Body]) -> pytest.MarkDecorator:
    """Run a test for each of these handlers, by its name."""
    return pytest.mark.parametrize("body", bodies.values(), ids=bodies)


@pytest.fixture
def postgresql_engine(postgresql: Database) -> Iterator[Engine]:
    """One customer with one row of totals."""
    engine = create_engine(postgresql.url())
    _create(engine)
    yield engine
    engine.dispose()


@pytest.fixture(params=list(LOCK))
def server(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The same, on each server that locks rows."""
    database: Database = request.getfixturevalue(request.param)
    engine = create_engine(database.url())
    _create(engine)
    yield engine
    engine.dispose()


def _locks(engine: Engine, statements: list[str]) -> list[str]:
    """The reads that took our lock."""
    return [statement for statement in statements if LOCK[engine.dialect.name] in statement]


def _create(engine: Engine) -> None:
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Customer(id=1, totals=[Totals(id="a")]), Profile(id=100), Counted(id=1)])
        session.commit()


def _deliver(
    engine: Engine, body: Body, *, read_models: list[type[Any]], message_id: str = "1", isolation: str | None = None
) -> tuple[Outcome, list[str]]:
    statements: list[str] = []
    listener = lambda _c, _cursor, statement, *_: statements.append(statement)  # noqa: E731  # to remove it again

    @projector(idempotent=True, name="locking", read_models=read_models, isolation=isolation)
    @on(str)
    def handler(_event: str, session: Session) -> None:
        body(session)

    event.listen(engine, "before_cursor_execute", listener)
    try:
        return Dispatcher(sessionmaker(engine), handler).deliver("e", message_id=message_id).outcome, statements
    finally:
        event.remove(engine, "before_cursor_execute", listener)


@each_of(LOCKED)
def test_reads_of_a_declared_entity_lock_its_rows(server: Engine, body: Body) -> None:
    """However a handler reads a declared entity, the row is locked, and only its row."""
    outcome, statements = _deliver(server, body, read_models=[Totals])
    assert outcome is Outcome.APPLIED
    (locking,) = _locks(server, statements)
    assert "customer" not in locking.split(LOCK[server.dialect.name])[1]


@each_of(REFUSED)
def test_what_cannot_be_locked_is_refused(server: Engine, body: Body) -> None:
    """A read that cannot lock, and a change to what was not read under lock, raise; nothing is written."""
    with pytest.raises(UnlockedWriteError):
        _deliver(server, body, read_models=[Totals])
    with Session(server) as session:
        assert session.get_one(Totals, "a").amount == 0
        assert session.scalar(select(func.count()).select_from(tables.marker)) == 0


@pytest.mark.parametrize("isolation", [None, "READ COMMITTED"])
@each_of(UNDECLARED)
def test_an_undeclared_row_is_not_written_without_a_lock(server: Engine, body: Body, isolation: str | None) -> None:
    """At READ COMMITTED nothing would refuse a stale write of it, so the flush does, and names the entity."""
    if isolation is None and server.dialect.name == "mariadb":
        pytest.skip("this server runs at REPEATABLE READ, and refuses a stale write by itself")
    with pytest.raises(UnlockedWriteError, match=r"(Customer|Profile) was changed without a lock"):
        _deliver(server, body, read_models=[Totals], isolation=isolation)
    with Session(server) as session:
        assert session.scalar(select(func.sum(Customer.visits))) == 0
        assert session.scalar(select(func.count()).select_from(tables.marker)) == 0


def test_a_projector_without_markers_refuses_it_too(server: Engine) -> None:
    """On MariaDB as well, where the setting that refuses stale writes is switched on for idempotent projectors only."""

    @projector(name="plain", read_models=[Totals])
    @on(str)
    def handler(_event: str, session: Session) -> None:
        UNDECLARED["undeclared_by_get"](session)

    with pytest.raises(UnlockedWriteError, match="Customer was changed without a lock"):
        Dispatcher(sessionmaker(server), handler).deliver("e")


def test_units_of_work_and_commands_refuse_it_too(postgresql_engine: Engine) -> None:
    """Both take `read_models`, and both run at READ COMMITTED with it."""

    @command(name="locking", read_models=[Totals])
    def run(_asked: dict[str, str], call: Call) -> None:
        UNDECLARED["undeclared_by_get"](call.session)

    factory = sessionmaker(postgresql_engine)
    with UnitOfWork(factory, read_models=[Totals]) as uow:
        assert uow.claim("1", "locking")
        UNDECLARED["undeclared_by_get"](uow.session)
        with pytest.raises(UnlockedWriteError):
            uow.commit()
    with pytest.raises(UnlockedWriteError):
        Commands(factory).handle(run, {}, key=None, scope="tenant")
    with Session(postgresql_engine) as session:
        assert session.get_one(Customer, 1).visits == 0


@pytest.mark.parametrize("read_models", [[Totals], [Totals, Customer, Profile, Counted]], ids=["one", "all"])
@each_of(SAFE)
def test_a_row_that_nobody_else_can_change_unnoticed_is_written(
    server: Engine, body: Body, read_models: list[type[Any]]
) -> None:
    """Locked by the handler, counted by versions, or inserted by this transaction: declared or not, it may change."""
    outcome, _ = _deliver(server, body, read_models=read_models, isolation="READ COMMITTED")
    assert outcome is Outcome.APPLIED


def test_a_row_that_an_update_returns_is_written(postgresql_engine: Engine) -> None:
    """It is as this transaction has written it; MariaDB has no UPDATE ... RETURNING."""

    def body(session: Session) -> None:
        counted = update(Customer).where(Customer.id == 1).values(visits=Customer.visits).returning(Customer)
        visit(session.scalars(counted).one())

    outcome, _ = _deliver(postgresql_engine, body, read_models=[Totals])
    assert outcome is Outcome.APPLIED


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_where_the_database_finds_conflicts_undeclared_rows_need_no_lock(server: Engine, isolation: str) -> None:
    """A level at which a stale write is refused protects every entity, as it does without `read_models`."""
    outcome, _ = _deliver(server, UNDECLARED["undeclared_by_get"], read_models=[Totals], isolation=isolation)
    assert outcome is Outcome.APPLIED


def test_a_later_message_of_a_batch_may_change_what_an_earlier_one_has_inserted(server: Engine) -> None:
    """They share a transaction, and the session was emptied between them."""

    @projector(idempotent=True, name="batched", read_models=[Totals], isolation="READ COMMITTED")
    @on(str)
    def get_or_create(_event: str, session: Session) -> None:
        if session.get(Customer, 9) is None:
            session.add(Customer(id=9))
            session.flush()
        session.get_one(Customer, 9).visits += 1

    batch = [Message(str(number), "e") for number in range(3)]
    Dispatcher(sessionmaker(server), get_or_create).deliver_batch(batch)
    with Session(server) as session:
        assert session.get_one(Customer, 9).visits == 3


def test_a_lock_that_comes_with_fresh_values_loses_no_update(server: Engine) -> None:
    """What a rival has committed since the row was first read is counted, too."""

    def body(session: Session) -> None:
        customer = session.get_one(Customer, 1)
        with Session(server) as rival:
            rival.get_one(Customer, 1).visits += 10
            rival.commit()
        session.refresh(customer, with_for_update=True)
        customer.visits += 1

    _deliver(server, body, read_models=[Totals], isolation="READ COMMITTED")
    with Session(server) as session:
        assert session.get_one(Customer, 1).visits == 11


AGGREGATES: dict[str, Body] = {
    "aggregated": lambda s: s.scalar(select(func.sum(Totals.amount))),
    "distinct": lambda s: s.scalars(select(Totals).distinct()).one(),
}


@each_of(AGGREGATES)
def test_postgresql_itself_refuses_to_lock_aggregates(postgresql_engine: Engine, body: Body) -> None:
    """Where the rows of a result are not rows of the table, PostgreSQL says so (0A000), and nothing is lost."""
    with pytest.raises(DBAPIError) as refusal:
        _deliver(postgresql_engine, body, read_models=[Totals])
    assert getattr(refusal.value.orig, "sqlstate", None) == "0A000"


@each_of(AGGREGATES)
def test_mariadb_locks_what_aggregates_are_made_of(mariadb: Database, body: Body) -> None:
    """There the rows that were read are locked, whatever the result is made of."""
    engine = create_engine(mariadb.url())
    _create(engine)
    refused: list[DBAPIError] = []

    def reads_and_looks(session: Session) -> None:
        body(session)
        with Session(engine) as other, pytest.raises(DBAPIError) as refusal:
            other.execute(text("SELECT * FROM totals WHERE id = 'a' FOR UPDATE NOWAIT"))
        refused.append(refusal.value)

    assert _deliver(engine, reads_and_looks, read_models=[Totals])[0] is Outcome.APPLIED
    assert dialect_of(engine).classify(refused[0]) is Failure.LOCK_TIMEOUT
    engine.dispose()


def test_a_lock_that_the_user_asked_for_is_kept(server: Engine) -> None:
    """`with_for_update()` in the handler is stronger than ours, and stays."""

    def body(session: Session) -> None:
        session.scalars(select(Totals).with_for_update()).one().amount += 1

    outcome, statements = _deliver(server, body, read_models=[Totals])
    assert outcome is Outcome.APPLIED
    assert any(statement.endswith("FOR UPDATE") for statement in statements)


@pytest.mark.parametrize("of", [Totals, Totals.id, (Customer, Totals)], ids=["entity", "column", "both"])
def test_a_lock_of_the_declared_entity_is_kept(postgresql_engine: Engine, of: Any) -> None:
    """`of=` that names it, by itself, by a column or among others, needs nothing of ours."""

    def body(session: Session) -> None:
        session.scalars(select(Totals).join(Customer).with_for_update(of=of)).one().amount += 1

    outcome, statements = _deliver(postgresql_engine, body, read_models=[Totals])
    assert outcome is Outcome.APPLIED
    assert not _locks(postgresql_engine, statements)


def test_a_savepoint_gives_back_only_the_locks_that_it_took(server: Engine) -> None:
    """What was locked before it stays locked; what was locked in it is read again by `populate_existing`."""

    def before(session: Session) -> None:
        kept = session.get_one(Totals, "a")
        with session.begin_nested() as savepoint:
            kept.amount += 5
            session.flush()
            savepoint.rollback()
        kept.amount += 1

    def again(session: Session) -> None:
        with session.begin_nested() as savepoint:
            kept = session.get_one(Totals, "a")
            savepoint.rollback()
        assert session.get_one(Totals, "a") is kept
        session.get_one(Totals, "a", populate_existing=True).amount += 1

    def released(session: Session) -> None:
        with session.begin_nested():
            kept = session.get_one(Totals, "a")
        kept.amount += 1

    for body, expected in ((before, 1), (again, 2), (released, 1)):
        outcome, statements = _deliver(server, body, read_models=[Totals], message_id=body.__name__)
        assert outcome is Outcome.APPLIED
        assert len(_locks(server, statements)) == expected
    with Session(server) as session:
        assert session.get_one(Totals, "a").amount == 3


def test_factories_do_not_pile_up_listeners(sqlite: Database) -> None:
    """A sessionmaker made for each message leaves nothing behind in SQLAlchemy's registry of events."""
    engine = create_engine(sqlite.url())
    _create(engine)
    handler = projector(name="many", idempotent=True, read_models=[Totals])(on(str)(lambda _event, _session: None))
    sizes: list[int] = []
    for number in range(60):
        Dispatcher(sessionmaker(engine), handler).deliver("e", message_id=str(number))
        sizes.append(len(event.registry._key_to_collection))
    assert sizes[-1] <= sizes[0]
    with Session(engine) as session:
        assert not session.dispatch.before_commit
        assert not session.dispatch.do_orm_execute
    engine.dispose()


NOT_LOCKED: dict[str, Body] = {
    "core_on_the_connection": lambda s: s.connection().execute(select(CORE.c.amount)).all(),
    "text": lambda s: s.execute(text("SELECT amount FROM totals")).all(),
    "undeclared": lambda s: s.scalars(select(Customer)).all(),
}


@each_of(NOT_LOCKED)
def test_what_does_not_read_a_declared_entity_through_the_session_is_not_locked(server: Engine, body: Body) -> None:
    """docs/concurrency.md says so of Core and of text; reference data that every handler reads must not be a queue."""
    outcome, statements = _deliver(server, body, read_models=[Totals])
    assert outcome is Outcome.APPLIED
    assert not _locks(server, statements)


def test_sessions_outside_are_left_alone(server: Engine) -> None:
    """Declaring an entity changes nothing for the user's own sessions."""
    _deliver(server, LOCKED["by_get"], read_models=[Totals])
    with Session(server) as session:
        count(of_joined_customer(session))
        session.commit()
    with Session(server) as session:
        assert session.get_one(Totals, "a").amount == 2


@each_of({**LOCKED, "joined_from_elsewhere": REFUSED["joined_from_elsewhere"]})
def test_on_sqlite_nothing_needs_a_lock(sqlite: Database, body: Body) -> None:
    """Writers are serialised there, so every way of reading is safe and allowed."""
    engine = create_engine(sqlite.url())
    _create(engine)
    outcome, _ = _deliver(engine, body, read_models=[Totals])
    assert outcome is Outcome.APPLIED
    with Session(engine) as session:
        assert session.get_one(Totals, "a").amount == 1
    engine.dispose()


class Node(Base):
    """Declared; it refers to others of its own table, which belong to it."""

    __tablename__ = "node"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("node.id"))
    parent: Mapped["Node | None"] = relationship(remote_side="Node.id")
    children: Mapped[list["Node"]] = relationship(cascade="all, delete-orphan", overlaps="parent")


def _child_that_the_flush_deletes(session: Session) -> None:
    parent = session.get_one(Node, 1, with_for_update=True)
    del parent.children[:]


def _lock_that_a_savepoint_of_the_connection_took(session: Session) -> None:
    savepoint = session.connection().begin_nested()
    node = session.get_one(Node, 1, with_for_update=True)
    savepoint.rollback()
    node.amount += 1


CHILD = select(Node).where(Node.id == 2)
WITH_ANOTHER: dict[str, Body] = {
    "parent_by_joinedload": lambda s: count(s.scalars(CHILD.options(joinedload(Node.parent))).one().parent),
    "parent_by_get_with_joinedload": lambda s: count(s.get_one(Node, 2, options=[joinedload(Node.parent)]).parent),
    "parent_by_selectinload_of_a_locked_read": lambda s: count(
        s.scalars(CHILD.with_for_update().options(selectinload(Node.parent))).one().parent
    ),
    "child_that_the_flush_deletes": _child_that_the_flush_deletes,
    "lock_that_a_savepoint_of_the_connection_took": _lock_that_a_savepoint_of_the_connection_took,
}
LOCKED_TOO = [
    WITH_ANOTHER[name] for name in ("parent_by_selectinload_of_a_locked_read", "child_that_the_flush_deletes")
]


@pytest.mark.parametrize("read_models", [[Totals], [Node]], ids=["undeclared", "declared"])
@each_of(WITH_ANOTHER)
def test_a_row_that_came_with_another_has_no_lock(
    postgresql_engine: Engine, body: Body, read_models: list[type[Any]]
) -> None:
    """An eager load, a cascade of the flush, a savepoint of the connection: none of them locks the row."""
    with Session(postgresql_engine) as session:
        session.add(Node(id=1, children=[Node(id=2)]))
        session.commit()
    if read_models == [Node] and body in LOCKED_TOO:
        pytest.skip("a declared entity is locked by the second SELECT too")
    with pytest.raises(UnlockedWriteError, match="Node"):
        _deliver(postgresql_engine, body, read_models=read_models)
    with Session(postgresql_engine) as session:
        assert [(node.id, node.amount) for node in session.scalars(select(Node).order_by(Node.id))] == [(1, 0), (2, 0)]
