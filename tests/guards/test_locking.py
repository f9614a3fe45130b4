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
from projector_dedup import Dispatcher, Message, Outcome, UnitOfWork, UnlockedWriteError, make_tables, on, projector
from projector_dedup.commands import Call, Commands, command
from projector_dedup.dialects import Failure, dialect_of


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
Body = Callable[[Session], None]
LOCK = {"postgresql": "FOR NO KEY UPDATE OF", "mariadb": "FOR UPDATE"}  # MariaDB cannot say which of joined tables


def _by_get(session: Session) -> None:
    session.get_one(Totals, "a").amount += 1


def _by_select(session: Session) -> None:
    session.scalars(select(Totals).where(Totals.id == "a")).one().amount += 1


def _by_query(session: Session) -> None:
    session.query(Totals).filter_by(id="a").one().amount += 1


def _by_alias(session: Session) -> None:
    alias = aliased(Totals)
    session.scalars(select(alias).where(alias.id == "a")).one().amount += 1


def _by_column(session: Session) -> None:
    amount = session.scalar(select(Totals.amount).where(Totals.id == "a")) or 0
    session.execute(update(Totals).where(Totals.id == "a").values(amount=amount + 1))


def _by_core(session: Session) -> None:
    table = Totals.__table__
    amount = session.scalar(select(table.c.amount).where(table.c.id == "a")) or 0
    session.execute(update(Totals).where(Totals.id == "a").values(amount=amount + 1))


def _beside_a_column(session: Session) -> None:
    row = session.execute(select(Totals, Customer.id).join(Customer).where(Totals.id == "a")).one()
    row[0].amount += 1


def _beside_an_entity(session: Session) -> None:
    row = session.execute(select(Customer, Totals).join(Totals)).one()
    row[1].amount += 1


def _with_joined_customer(session: Session) -> None:
    session.scalars(select(Totals).options(joinedload(Totals.customer))).one().amount += 1


def _by_lazy_load(session: Session) -> None:
    session.get_one(Customer, 1).totals[0].amount += 1


def _by_selectin(session: Session) -> None:
    session.scalars(select(Customer).options(selectinload(Customer.totals))).one().totals[0].amount += 1


def _by_merge(session: Session) -> None:
    session.merge(Totals(id="a", amount=1, customer_id=1))


def _joined_from_elsewhere(session: Session) -> None:
    session.scalars(select(Customer).options(joinedload(Customer.totals))).unique().one().totals[0].amount += 1


def _deleted_unlocked(session: Session) -> None:
    session.delete(session.scalars(select(Customer).options(joinedload(Customer.totals))).unique().one().totals[0])


def _locked_too_late(session: Session) -> None:
    stale = session.scalars(select(Customer).options(joinedload(Customer.totals))).unique().one().totals[0]
    session.scalars(select(Totals)).one()  # locks the row, but keeps the values that were read before
    stale.amount += 1


def _on_the_nullable_side(session: Session) -> None:
    session.execute(select(Customer, Totals).outerjoin(Totals)).all()


def _in_a_subquery(session: Session) -> None:
    inner = select(Totals).subquery()
    session.execute(select(inner.c.amount)).all()


def _in_a_union(session: Session) -> None:
    session.scalars(select(Totals).from_statement(select(Totals).union_all(select(Totals)))).all()


def _aggregated(session: Session) -> None:
    session.scalar(select(func.sum(Totals.amount)))


def _distinct(session: Session) -> None:
    session.scalars(select(Totals).distinct()).one()


def _with_a_shared_lock(session: Session) -> None:
    session.scalars(select(Totals).with_for_update(read=True)).one().amount += 1


def _by_get_with_a_shared_lock(session: Session) -> None:
    session.get_one(Totals, "a", with_for_update={"read": True}).amount += 1


def _with_a_lock_of_another(session: Session) -> None:
    session.scalars(select(Totals).join(Customer).with_for_update(of=Customer)).one().amount += 1


def _after_a_savepoint_was_rolled_back(session: Session) -> None:
    with session.begin_nested() as savepoint:
        kept = session.get_one(Totals, "a")
        savepoint.rollback()
    assert session.get_one(Totals, "a") is kept  # from the session, without a SELECT
    kept.amount += 1


def _after_an_outer_savepoint_was_rolled_back(session: Session) -> None:
    with session.begin_nested() as savepoint:
        with session.begin_nested():
            kept = session.get_one(Totals, "a")
        savepoint.rollback()
    kept.amount += 1


def _undeclared_by_get(session: Session) -> None:
    session.get_one(Customer, 1).visits += 1


def _undeclared_deleted(session: Session) -> None:
    session.delete(session.get_one(Profile, 100))


def _undeclared_beside_the_declared(session: Session) -> None:
    session.scalars(select(Totals).options(joinedload(Totals.customer))).one().customer.visits += 1


def _undeclared_by_a_shared_lock(session: Session) -> None:
    session.get_one(Customer, 1, with_for_update={"read": True}).visits += 1


def _undeclared_by_a_lock_of_another(session: Session) -> None:
    session.scalars(select(Customer).join(Totals).with_for_update(of=Totals)).one().visits += 1


def _undeclared_locked_too_late(session: Session) -> None:
    stale = session.get_one(Customer, 1)
    session.get_one(Customer, 1, with_for_update=True)  # locks the row, but keeps the values that were read before
    stale.visits += 1


def _inserted_in_a_savepoint_that_was_rolled_back(session: Session) -> None:
    with session.begin_nested() as savepoint:
        session.add(Customer(id=9))
        session.flush()
        savepoint.rollback()
    with Session(session.get_bind()) as rival:
        rival.add(Customer(id=9))
        rival.commit()
    session.get_one(Customer, 9).visits += 1


UNDECLARED = [
    _undeclared_by_get, _undeclared_deleted, _undeclared_beside_the_declared, _undeclared_by_a_shared_lock,
    _undeclared_by_a_lock_of_another, _undeclared_locked_too_late, _inserted_in_a_savepoint_that_was_rolled_back,
]  # fmt: skip


def _asked_for_by_get(session: Session) -> None:
    session.get_one(Customer, 1, with_for_update=True).visits += 1


def _asked_for_by_select(session: Session) -> None:
    session.scalars(select(Customer).with_for_update()).first().visits += 1  # type: ignore[union-attr]


def _asked_for_by_refresh(session: Session) -> None:
    stale = session.get_one(Customer, 1)
    session.refresh(stale, with_for_update=True)
    stale.visits += 1


def _asked_for_of_the_entity(session: Session) -> None:
    session.scalars(select(Customer).join(Totals).with_for_update(of=[Customer, Totals])).one().visits += 1


def _counted_by_versions(session: Session) -> None:
    session.get_one(Counted, 1).visits += 1


def _returned_by_an_update(session: Session) -> None:
    counted = update(Customer).where(Customer.id == 1).values(visits=Customer.visits).returning(Customer)
    session.scalars(counted).one().visits += 1


def _flushed_before(session: Session) -> None:
    new = Customer(id=9)
    session.add(new)
    session.flush()
    new.visits += 1


def _with_the_server_s_key(session: Session) -> None:
    new = Profile(customer_id=1)
    session.add(new)
    session.flush()
    session.expire(new)
    new.visits += 1


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
    session.add(Customer(id=9))
    session.flush()
    session.expunge_all()
    session.get_one(Customer, 9).visits += 1


def _new_before_a_savepoint(session: Session) -> None:
    new = Customer(id=9)
    session.add(new)
    with session.begin_nested() as savepoint:  # writes what is new before it begins
        new.visits += 5
        session.flush()
        savepoint.rollback()
    new.visits += 1


def _new_in_a_savepoint(session: Session) -> None:
    with session.begin_nested():
        session.add(Customer(id=9))
    session.get_one(Customer, 9).visits += 1


def _merged_twice(session: Session) -> None:
    for visits in (1, 2):
        session.merge(Customer(id=9, visits=visits))
        session.flush()


def _with_new_rows_that_point_to_it(session: Session) -> None:
    customer = session.get_one(Customer, 1)
    session.add(Totals(id="b", customer=customer))  # changes the collection, which is in no column of customer
    session.add(Profile(customer=customer))


SAFE = [
    _asked_for_by_get, _asked_for_by_select, _asked_for_by_refresh, _asked_for_of_the_entity, _counted_by_versions,
    _flushed_before, _with_the_server_s_key, _transferred_between_new_rows, _read_again, _new_before_a_savepoint,
    _new_in_a_savepoint, _merged_twice, _with_new_rows_that_point_to_it,
]  # fmt: skip

LOCKED = [
    _by_get, _by_select, _by_query, _by_alias, _by_column, _by_core, _beside_a_column, _beside_an_entity,
    _with_joined_customer, _by_lazy_load, _by_selectin, _by_merge,
]  # fmt: skip
REFUSED = [
    _joined_from_elsewhere, _deleted_unlocked, _locked_too_late, _on_the_nullable_side, _in_a_subquery, _in_a_union,
    _with_a_shared_lock, _by_get_with_a_shared_lock, _with_a_lock_of_another, _after_a_savepoint_was_rolled_back,
    _after_an_outer_savepoint_was_rolled_back,
]  # fmt: skip


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


@pytest.mark.parametrize("body", LOCKED, ids=lambda body: body.__name__.strip("_"))
def test_reads_of_a_declared_entity_lock_its_rows(server: Engine, body: Body) -> None:
    """However a handler reads a declared entity, the row is locked, and only its row."""
    outcome, statements = _deliver(server, body, read_models=[Totals])
    assert outcome is Outcome.APPLIED
    (locking,) = _locks(server, statements)
    assert "customer" not in locking.split(LOCK[server.dialect.name])[1]


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__.strip("_"))
def test_what_cannot_be_locked_is_refused(server: Engine, body: Body) -> None:
    """A read that cannot lock, and a change to what was not read under lock, raise; nothing is written."""
    with pytest.raises(UnlockedWriteError):
        _deliver(server, body, read_models=[Totals])
    with Session(server) as session:
        assert session.get_one(Totals, "a").amount == 0
        assert session.scalar(select(func.count()).select_from(tables.marker)) == 0


@pytest.mark.parametrize("isolation", [None, "READ COMMITTED"])
@pytest.mark.parametrize("body", UNDECLARED, ids=lambda body: body.__name__.strip("_"))
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
        _undeclared_by_get(session)

    with pytest.raises(UnlockedWriteError, match="Customer was changed without a lock"):
        Dispatcher(sessionmaker(server), handler).deliver("e")


def test_units_of_work_and_commands_refuse_it_too(postgresql_engine: Engine) -> None:
    """Both take `read_models`, and both run at READ COMMITTED with it."""

    @command(name="locking", read_models=[Totals])
    def run(_asked: dict[str, str], call: Call) -> None:
        _undeclared_by_get(call.session)

    factory = sessionmaker(postgresql_engine)
    with UnitOfWork(factory, read_models=[Totals]) as uow:
        assert uow.claim("1", "locking")
        _undeclared_by_get(uow.session)
        with pytest.raises(UnlockedWriteError):
            uow.commit()
    with pytest.raises(UnlockedWriteError):
        Commands(factory).handle(run, {}, key=None, scope="tenant")
    with Session(postgresql_engine) as session:
        assert session.get_one(Customer, 1).visits == 0


@pytest.mark.parametrize("read_models", [[Totals], [Totals, Customer, Profile, Counted]], ids=["one", "all"])
@pytest.mark.parametrize("body", SAFE, ids=lambda body: body.__name__.strip("_"))
def test_a_row_that_nobody_else_can_change_unnoticed_is_written(
    server: Engine, body: Body, read_models: list[type[Any]]
) -> None:
    """Locked by the handler, counted by versions, or inserted by this transaction: declared or not, it may change."""
    outcome, _ = _deliver(server, body, read_models=read_models, isolation="READ COMMITTED")
    assert outcome is Outcome.APPLIED


def test_a_row_that_an_update_returns_is_written(postgresql_engine: Engine) -> None:
    """It is as this transaction has written it; MariaDB has no UPDATE ... RETURNING."""
    outcome, _ = _deliver(postgresql_engine, _returned_by_an_update, read_models=[Totals])
    assert outcome is Outcome.APPLIED


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_where_the_database_finds_conflicts_undeclared_rows_need_no_lock(server: Engine, isolation: str) -> None:
    """A level at which a stale write is refused protects every entity, as it does without `read_models`."""
    outcome, _ = _deliver(server, _undeclared_by_get, read_models=[Totals], isolation=isolation)
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


@pytest.mark.parametrize("body", [_aggregated, _distinct], ids=lambda body: body.__name__.strip("_"))
def test_postgresql_itself_refuses_to_lock_aggregates(postgresql_engine: Engine, body: Body) -> None:
    """Where the rows of a result are not rows of the table, PostgreSQL says so (0A000), and nothing is lost."""
    with pytest.raises(DBAPIError) as refusal:
        _deliver(postgresql_engine, body, read_models=[Totals])
    assert getattr(refusal.value.orig, "sqlstate", None) == "0A000"


@pytest.mark.parametrize("body", [_aggregated, _distinct], ids=lambda body: body.__name__.strip("_"))
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


def test_core_on_the_connection_is_not_seen(server: Engine) -> None:
    """docs/concurrency.md says so: it does not pass through the session."""

    def body(session: Session) -> None:
        session.connection().execute(select(Totals.__table__.c.amount)).all()

    _, statements = _deliver(server, body, read_models=[Totals])
    assert not _locks(server, statements)


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


def test_undeclared_entities_are_not_locked(server: Engine) -> None:
    """Reference data that every handler reads must not become a queue."""

    def body(session: Session) -> None:
        session.scalars(select(Customer)).all()

    _, statements = _deliver(server, body, read_models=[Totals])
    assert not _locks(server, statements)


def test_textual_sql_is_not_seen(server: Engine) -> None:
    """docs/concurrency.md says so: a textual SELECT is neither locked nor refused."""

    def body(session: Session) -> None:
        session.execute(text("SELECT amount FROM totals")).all()

    outcome, statements = _deliver(server, body, read_models=[Totals])
    assert outcome is Outcome.APPLIED
    assert not _locks(server, statements)


def test_sessions_outside_are_left_alone(server: Engine) -> None:
    """Declaring an entity changes nothing for the user's own sessions."""
    _deliver(server, _by_get, read_models=[Totals])
    with Session(server) as session:
        _joined_from_elsewhere(session)
        session.commit()
    with Session(server) as session:
        assert session.get_one(Totals, "a").amount == 2


@pytest.mark.parametrize("body", LOCKED + REFUSED[:1], ids=lambda body: body.__name__.strip("_"))
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


def _parent_by_joinedload(session: Session) -> None:
    child = session.scalars(select(Node).where(Node.id == 2).options(joinedload(Node.parent))).one()
    child.parent.amount += 1  # type: ignore[union-attr]


def _parent_by_get_with_joinedload(session: Session) -> None:
    session.get_one(Node, 2, options=[joinedload(Node.parent)]).parent.amount += 1  # type: ignore[union-attr]


def _parent_by_selectinload_of_a_locked_read(session: Session) -> None:
    locked = select(Node).where(Node.id == 2).with_for_update().options(selectinload(Node.parent))
    session.scalars(locked).one().parent.amount += 1  # type: ignore[union-attr]


def _child_that_the_flush_deletes(session: Session) -> None:
    parent = session.get_one(Node, 1, with_for_update=True)
    del parent.children[:]


def _lock_that_a_savepoint_of_the_connection_took(session: Session) -> None:
    savepoint = session.connection().begin_nested()
    node = session.get_one(Node, 1, with_for_update=True)
    savepoint.rollback()
    node.amount += 1


@pytest.mark.parametrize("read_models", [[Totals], [Node]], ids=["undeclared", "declared"])
@pytest.mark.parametrize(
    "body",
    [
        _parent_by_joinedload,
        _parent_by_get_with_joinedload,
        _parent_by_selectinload_of_a_locked_read,
        _child_that_the_flush_deletes,
        _lock_that_a_savepoint_of_the_connection_took,
    ],
    ids=lambda body: body.__name__.strip("_"),
)
def test_a_row_that_came_with_another_has_no_lock(
    postgresql_engine: Engine, body: Body, read_models: list[type[Any]]
) -> None:
    """An eager load, a cascade of the flush, a savepoint of the connection: none of them locks the row."""
    with Session(postgresql_engine) as session:
        session.add(Node(id=1, children=[Node(id=2)]))
        session.commit()
    if read_models == [Node] and body in (_parent_by_selectinload_of_a_locked_read, _child_that_the_flush_deletes):
        pytest.skip("a declared entity is locked by the second SELECT too")
    with pytest.raises(UnlockedWriteError, match="Node"):
        _deliver(postgresql_engine, body, read_models=read_models)
    with Session(postgresql_engine) as session:
        assert [(node.id, node.amount) for node in session.scalars(select(Node).order_by(Node.id))] == [(1, 0), (2, 0)]
