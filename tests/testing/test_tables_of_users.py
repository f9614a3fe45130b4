"""What the checks do with the tables of a database: those that were there stay."""

from typing import Any

import pytest
from sqlalchemy import (
    CheckConstraint,
    Column,
    Enum,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    func,
    inspect,
    select,
)
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from databases import Database
from kit_handlers import PAYMENTS, Base, Paid, Totals, add, check_of, read_sums
from projector_dedup import on, projector
from projector_dedup.testing.checking import UnusableError


def check_on(engine: Any, function: Any, **arguments: Any) -> None:
    """Check a handler by the usual schedules."""
    made = projector(idempotent=True, name="tables")(on(Paid)(function))
    assert check_of(made, PAYMENTS[:2], engine=engine, kills=False, **arguments).run(1, 0) is None


def test_tables_in_the_schema_of_a_tenant_stay(postgresql: Database) -> None:
    """They are there, though not under the name that the metadata has."""
    plain = create_engine(postgresql.url())
    with plain.begin() as connection:
        connection.exec_driver_sql("create schema tenant_a")
    engine = plain.execution_options(schema_translate_map={None: "tenant_a"})
    Base.metadata.create_all(engine)
    before = inspect(plain).get_table_names("tenant_a")
    check_on(engine, add)
    assert inspect(plain).get_table_names("tenant_a") == before
    assert inspect(plain).get_table_names() == []
    plain.dispose()


def test_a_database_that_is_refused_stays_as_it_is(database: Database) -> None:
    """It has the table with rows, and nothing else: no table of the library, and none that the metadata also names."""
    engine = create_engine(database.url())
    Totals.__table__.create(engine)  # type: ignore[attr-defined]  # of FromClause
    with Session(engine) as session, session.begin():
        session.add(Totals(account="a", amount=5))
    with pytest.raises(UnusableError, match="deletes all rows of the table kit_totals, which is not empty"):
        check_on(engine, add)
    assert inspect(engine).get_table_names() == ["kit_totals"]
    with Session(engine) as session:
        assert read_sums(session) == {"a": 5}
    engine.dispose()


def test_nothing_stays_if_a_table_cannot_be_created(database: Database) -> None:
    """Those that were created before it are dropped, also where CREATE TABLE commits."""
    broken = MetaData()
    Table("kit_a", broken, Column("id", Integer, primary_key=True))
    Table("kit_b", broken, Column("id", Integer, primary_key=True), CheckConstraint("no condition ("))
    engine = create_engine(database.url())
    with pytest.raises(SQLAlchemyError, match="kit_b"):
        check_on(engine, add, metadata=broken)
    assert inspect(engine).get_table_names() == []
    engine.dispose()


class OfTrees(DeclarativeBase):
    """Metadata of a table that refers to itself, and has a type of its own."""

    metadata = MetaData()


class Node(OfTrees):
    """A row below another one."""

    __tablename__ = "kit_node"
    id: Mapped[str] = mapped_column(String(20), primary_key=True)
    parent_id: Mapped[str | None] = mapped_column(String(20), ForeignKey("kit_node.id"))
    kind: Mapped[str] = mapped_column(Enum("root", "leaf", name="kit_kind"))


def test_a_table_that_refers_to_itself_is_emptied(database: Database) -> None:
    """Whichever row comes first; nothing stays, neither the tables nor the type."""

    def plant(paid: Paid, session: Session) -> None:
        if session.get(Node, "a-root", with_for_update=True) is None:
            session.add(Node(id="a-root", kind="root"))
            session.flush()
        session.add(Node(id=paid.message_id, parent_id="a-root", kind="leaf"))

    def leaves(session: Session) -> int | None:
        return session.scalar(select(func.count()).where(Node.kind == "leaf"))

    engine = create_engine(database.url())
    check_on(engine, plant, metadata=OfTrees.metadata, expected=len, read=leaves)
    check_on(engine, plant, metadata=OfTrees.metadata, expected=len, read=leaves)
    assert inspect(engine).get_table_names() == []
    if database.engine == "postgresql":
        assert inspect(engine).get_enums() == []  # type: ignore[attr-defined]  # of PostgreSQL's inspector
    engine.dispose()


class OfCycles(DeclarativeBase):
    """Metadata of two tables that refer to each other."""

    metadata = MetaData()


class One(OfCycles):
    """A row that refers to another table."""

    __tablename__ = "kit_one"
    id: Mapped[int] = mapped_column(primary_key=True)
    other: Mapped[int | None] = mapped_column(ForeignKey("kit_other.id", use_alter=True, name="fk_other"))


class Other(OfCycles):
    """A row of that table, which refers back."""

    __tablename__ = "kit_other"
    id: Mapped[int] = mapped_column(primary_key=True)
    one: Mapped[int] = mapped_column(ForeignKey("kit_one.id"))


def test_tables_in_a_cycle_are_refused_on_postgresql(postgresql: Database) -> None:
    """Before anything is created."""
    engine = create_engine(postgresql.url())
    with pytest.raises(UnusableError, match="cannot delete the rows of kit_one, whose foreign keys form a cycle"):
        check_on(engine, add, metadata=OfCycles.metadata)
    assert inspect(engine).get_table_names() == []
    engine.dispose()
