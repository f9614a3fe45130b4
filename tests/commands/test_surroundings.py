"""A command where the surroundings are hostile: engines, tenants, outer transactions, handlers inside handlers."""

import pytest
from sqlalchemy import Connection, create_engine, event, select
from sqlalchemy.orm import Session, sessionmaker

from command_rig import START, SYNC_ONES, Balance, Base, Desk, Order, Placed, PlaceOrder, desks, place
from databases import Database
from projector_dedup import make_tables
from projector_dedup.commands import Call, Commands, Handled, command, default_command_tables, make_command_tables
from projector_dedup.errors import MissingTableError
from projector_dedup.testing import external_transaction

placing = command(name="desk.place")(place)


desk = desks(SYNC_ONES)


def test_a_missing_table_says_how_to_make_it(database: Database) -> None:
    """By the maker of such tables, and by the command with the option that means them."""
    engine = create_engine(database.url())
    Base.metadata.create_all(engine)
    with pytest.raises(MissingTableError, match=r"make_command_tables\(metadata\).*idempotency schema --commands"):
        Commands(sessionmaker(engine)).handle(placing, PlaceOrder(), key="k1")
    engine.dispose()


def test_without_a_key_nothing_more_is_sent_and_no_table_is_needed(database: Database) -> None:
    """A command that nobody can ask for again is its handler in a transaction, which on SQLite is begun by name."""
    engine, sent, plain = create_engine(database.url()), list[str](), list[str]()
    Base.metadata.create_all(engine)
    factory = sessionmaker(engine)
    with factory.begin() as session:
        session.add(Balance(customer="alice", amount=START))
    event.listen(engine, "before_cursor_execute", lambda _c, _u, statement, *_: sent.append(statement))
    for _ in range(2):  # the first one asks the server what it is
        sent.clear()
        with factory.begin() as session:
            place(PlaceOrder(), Call(session, None))
        plain = sent.copy()
        sent.clear()
        Commands(factory).handle(placing, PlaceOrder(), key=None)
    assert [statement for statement in sent if statement != "BEGIN IMMEDIATE"] == plain
    engine.dispose()


def test_tables_of_markers_are_refused() -> None:
    """They have no columns for answers."""
    with pytest.raises(ValueError, match="make_command_tables"):
        Commands(sessionmaker(create_engine("sqlite://")), tables=make_tables(Base.metadata))  # type: ignore[arg-type]


def test_an_outer_transaction_takes_the_record_with_it(desk: Desk) -> None:
    """In tests whose transaction is rolled back, answers are recorded, and are gone with it."""
    with desk.harness.outer_transaction() as factory:
        commands = Commands(factory)
        with external_transaction(commands):
            answers = [commands.handle(placing, PlaceOrder(3), key="k1") for _ in range(2)]
    assert [(answer.result.left, answer.replayed, answer.durable) for answer in answers] == [
        (START - 3, False, False),
        (START - 3, True, False),
    ]
    assert (desk.orders(), desk.records()) == ([], [])


def test_a_result_that_a_listener_changes_at_the_last_moment_is_the_recorded_one(desk: Desk) -> None:
    """What a listener to the flush adds commits with the record, whichever is written first."""
    added: list[str] = []

    def add_one(session: Session, *_: object) -> None:
        if not added:
            added.append("x")
            session.add(Order(note="by a listener", amount=0))

    factory = sessionmaker(desk.harness.engine)
    event.listen(factory, "before_commit", add_one)
    commands = Commands(factory)
    assert (
        commands.handle(placing, PlaceOrder(), key="k1").result
        == commands.handle(placing, PlaceOrder(), key="k1").result
    )
    assert desk.orders() == ["by a listener", "k1"]


def test_several_tables_of_records_do_not_know_each_other(desk: Desk) -> None:
    """Each has its own keys; a retention each, say."""
    payments = make_command_tables(Base.metadata.__class__(), "payment_record")
    payments.marker.metadata.create_all(desk.harness.engine)
    try:
        assert not desk.handle(desk.operation()).replayed
        assert not desk.handle(desk.operation(), commands=desk.commands(tables=payments)).replayed
        assert desk.handle(desk.operation(), commands=desk.commands(tables=payments)).replayed
    finally:
        payments.marker.metadata.drop_all(desk.harness.engine)
    assert len(desk.orders()) == 2


@pytest.mark.parametrize("level", [None, "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_record_that_is_younger_than_the_snapshot_is_found(desk: Desk, level: str | None) -> None:
    """A listener reads, a rival commits, and the claim meets a record that its transaction cannot see."""
    serializable = {("mariadb", "SERIALIZABLE"), ("mysql", "SERIALIZABLE"), ("mysql", None)}
    if (desk.harness.engine.dialect.name, level) in serializable:
        pytest.skip("what is read is locked, so that nobody commits a record there")
    if desk.harness.engine.dialect.name == "sqlite":
        pytest.skip("one writer: nobody commits while another transaction has begun to write")
    factory, rivals = sessionmaker(desk.harness.engine), list[Handled[Placed]]()

    def read_then_be_overtaken(_session: Session, _transaction: object, connection: Connection) -> None:
        connection.execute(select(default_command_tables.marker.c.codec)).all()
        if not rivals:
            rivals.append(desk.handle(desk.operation(), PlaceOrder(3)))

    event.listen(factory, "after_begin", read_then_be_overtaken)
    answer = Commands(factory, isolation=level).handle(placing, PlaceOrder(3), key="k1")
    assert (answer.result, answer.replayed) == (rivals[0].result, True)
    assert (desk.orders(), desk.spent()) == (["k1"], 3)
