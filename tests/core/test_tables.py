"""The tables: named as the user likes, refused where they could not keep the promise, and queried as an entity."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import Engine, MetaData, Table, inspect, select, text
from sqlalchemy.orm import DeclarativeBase, Session, sessionmaker

from marked import one_of_each_engine  # noqa: F401  # a fixture
from projector_dedup import Dispatcher, Message, Outcome, make_tables, on, projector
from projector_dedup.commands import make_command_tables
from projector_dedup.effects import make_effect_tables
from projector_dedup.errors import BatchFailed, MissingTableError, RefusedError
from projector_dedup.http.parked import make_parked_tables
from projector_dedup.markers import claim
from projector_dedup.tables import DedupTables, ProcessedMessage
from projector_dedup.unit_of_work import UnitOfWork

AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=5, minutes=30)))


@projector(idempotent=True, name="h")
@on(dict)
def handler(event: dict[str, Any], session: Session) -> None:
    """Do nothing."""


def created(engine: Engine, name: str = "processed_message", schema: str | None = None) -> DedupTables:
    """Make the tables, as a user would in a MetaData of theirs."""
    metadata = MetaData()
    tables = make_tables(metadata, name, schema)
    metadata.create_all(engine)
    return tables


def test_tables_may_be_called_otherwise(engine: Engine) -> None:
    """`tables=` leads dispatcher, unit of work and claim to the same table, and the default one is not touched."""
    tables = created(engine, "seen")
    assert sorted(inspect(engine).get_table_names()) == ["seen", "seen_state"]
    dispatcher = Dispatcher(sessionmaker(engine), handler, tables=tables)
    assert dispatcher.deliver({}, message_id="m1").outcome is Outcome.APPLIED
    assert dispatcher.deliver({}, message_id="m1").outcome is Outcome.DUPLICATE
    with UnitOfWork(sessionmaker(engine), tables=tables) as uow:
        assert not uow.claim("m1", "h")
    with Session(engine) as session:
        assert not claim(session, "m1", "h", tables=tables)
        assert session.execute(select(tables.marker.c.message_id, tables.marker.c.handler)).all() == [("m1", "h")]


def test_a_missing_table_is_named(engine: Engine) -> None:
    """With its schema if it has one, and the commands that make it."""
    with pytest.raises(MissingTableError, match=r"processed_message is missing.*make_tables.*idempotency check"):
        handler.deliver({}, message_id="m1", session_factory=sessionmaker(engine))
    tables = make_tables(MetaData(), "seen", "elsewhere")
    with pytest.raises(MissingTableError, match=r"elsewhere\.seen is missing"):
        Dispatcher(sessionmaker(engine), handler, tables=tables).deliver({}, message_id="m1")


@pytest.mark.parametrize(
    "columns",
    [
        "message_id varchar(100) not null, handler varchar(100) not null, occurred_at varchar(100)",
        "message_id varchar(100) not null, handler varchar(100) not null, occurred_at varchar(100), "
        "primary key (handler, occurred_at)",
        "message_id varchar(100) primary key, handler varchar(100) not null, occurred_at varchar(100)",
        "message_id varchar(100) not null, handler varchar(100) not null, occurred_at varchar(100), "
        "primary key (message_id, handler, processed_at)",
        "message_id varchar(100) not null, handler varchar(100) not null, primary key (message_id, handler)",
        "id varchar(100) not null, handler varchar(100) not null, occurred_at varchar(100), primary key (id, handler)",
    ],
    ids=["no index", "another index", "unique by message alone", "unique with the time", "no occurred_at", "no id"],
)
def test_a_table_that_cannot_tell_duplicates_is_refused(engine: Engine, columns: str) -> None:
    """Without a unique index on exactly (message_id, handler) every redelivery would be new: an error, not that."""
    with engine.begin() as connection:
        connection.execute(text(f"create table processed_message (processed_at timestamp, {columns})"))
    with pytest.raises(MissingTableError, match=r"does not have the columns|has no unique index"):
        handler.deliver({}, message_id="m1", session_factory=sessionmaker(engine))
    with pytest.raises(BatchFailed) as raised:
        Dispatcher(sessionmaker(engine), handler).deliver_batch([Message("m1", {}), Message("m2", {})])
    assert [type(error) for error in raised.value.exceptions] == [MissingTableError]
    with engine.connect() as connection:
        assert connection.scalar(text("select count(*) from processed_message")) == 0


def test_the_marker_can_be_queried(engine: Engine) -> None:
    """`ProcessedMessage` says which message was applied by whom and when; `occurred_at` is the same moment, in UTC."""
    created(engine)
    Dispatcher(sessionmaker(engine), handler).deliver(Message("m1", {}, occurred_at=AT))
    handler.deliver({}, message_id="m2", session_factory=sessionmaker(engine))
    with Session(engine) as session:
        first, second = session.scalars(select(ProcessedMessage).order_by(ProcessedMessage.message_id))
        assert (first.message_id, first.handler, second.message_id) == ("m1", "h", "m2")
        assert first.occurred_at is not None
        assert _in_utc(first.occurred_at) == AT
        assert second.occurred_at is None
        assert abs(_in_utc(first.processed_at) - datetime.now(UTC)) < timedelta(minutes=5)


def test_a_redelivery_does_not_move_the_marker_in_time(engine: Engine) -> None:
    """Retention counts from the first time that a message was applied."""
    created(engine)
    dispatcher = Dispatcher(sessionmaker(engine), handler)
    dispatcher.deliver(Message("m1", {}, occurred_at=AT))
    with engine.begin() as connection:
        connection.execute(text("update processed_message set processed_at = '2020-01-01 00:00:00'"))
    dispatcher.deliver(Message("m1", {}, occurred_at=AT + timedelta(days=1)))
    with Session(engine) as session:
        marker = session.scalars(select(ProcessedMessage)).one()
        assert marker.processed_at.year < 2021
        assert marker.occurred_at is not None
        assert _in_utc(marker.occurred_at) == AT


def test_a_base_in_place_of_its_metadata_is_named() -> None:
    """The usual mistake."""

    class Base(DeclarativeBase):
        pass

    with pytest.raises(TypeError, match=r"takes a MetaData, such as Base\.metadata, not <class"):
        make_tables(Base)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("make", [make_tables, make_command_tables, make_effect_tables, make_parked_tables])
@pytest.mark.parametrize("schema", [None, "elsewhere"])
def test_tables_that_are_there_already_are_named(make: Callable[..., object], schema: str | None) -> None:
    """Whether they are of an earlier call or the user's own; a name in another schema is another table."""
    metadata = MetaData()
    make(metadata, "seen", schema)
    make(metadata, "seen", "third")
    full = "seen" if schema is None else f"{schema}.seen"
    with pytest.raises(RefusedError, match=rf"already has a table {full}: add these tables once and keep the result"):
        make(metadata, "seen", schema)
    Table("taken_state", metadata, schema=schema)
    with pytest.raises(RefusedError, match=f"already has a table {full.replace('seen', 'taken')}_state"):
        make(metadata, "taken", schema)
    assert "taken" not in {table.name for table in metadata.tables.values()}


def test_the_schema_of_the_metadata_counts() -> None:
    """As SQLAlchemy puts it before each name without one."""
    metadata = MetaData(schema="of_all")
    make_tables(metadata)
    with pytest.raises(RefusedError, match=r"of_all\.processed_message"):
        make_tables(metadata)


def _in_utc(moment: datetime) -> datetime:
    """SQLite gives back what was stored, without the zone."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
