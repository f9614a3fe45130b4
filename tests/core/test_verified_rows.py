"""The lowered run compares each unlocked row that it changes with what it has read (docs/adr/0004-lost-updates.md).

A difference runs the handler again. A value that cannot be compared must not, because no later run would end.
"""

import decimal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import (
    JSON,
    Float,
    ForeignKey,
    Index,
    Numeric,
    PickleType,
    String,
    UniqueConstraint,
    select,
    text,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.mutable import MutableDict
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, deferred, mapped_column, relationship

from databases import DRIVERS, USUAL_DRIVERS
from harm import Parent, Scene, append, scene_on
from projector_dedup.errors import UnlockedWriteError
from projector_dedup.options import RetryPolicy


class Base(DeclarativeBase):
    """The read model."""


class Opaque:
    """A value of the user's that has no equality: a copy of it differs from it."""


class Box(Base):
    """A parent of things."""

    __tablename__ = "verified_box"
    id: Mapped[str] = mapped_column(String(20), primary_key=True)
    things: Mapped[list["Thing"]] = relationship()  # without a way back, only the box knows what was removed


class Thing(Base):
    """A row that a handler changes without a lock."""

    __tablename__ = "verified_thing"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(20), default="thing")
    amount: Mapped[int] = mapped_column(default=0)
    ratio: Mapped[float] = mapped_column(Float, default=0.0)
    price: Mapped[decimal.Decimal] = mapped_column(Numeric(12, 2), default=decimal.Decimal(0))
    note: Mapped[Any] = mapped_column(JSON, nullable=True)
    stored: Mapped[Any] = mapped_column(PickleType, nullable=True)
    tags: Mapped[dict[str, Any] | None] = mapped_column(MutableDict.as_mutable(JSON))
    long: Mapped[Any] = deferred(mapped_column(JSON, nullable=True))
    box_id: Mapped[str | None] = mapped_column(ForeignKey(Box.id))
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "thing"}  # noqa: RUF012  # SQLAlchemy's form


class Sized(Thing):
    """A thing with a second table."""

    __tablename__ = "verified_sized"
    id: Mapped[int] = mapped_column(ForeignKey(Thing.id), primary_key=True)
    size: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"polymorphic_identity": "sized"}  # noqa: RUF012  # SQLAlchemy's form


class Named(Base):
    """A row with three unique keys."""

    __tablename__ = "verified_named"
    id: Mapped[int] = mapped_column(primary_key=True)
    constrained: Mapped[str | None] = mapped_column(String(20))
    indexed: Mapped[str | None] = mapped_column(String(20))
    __table_args__ = (UniqueConstraint("constrained"), Index("verified_indexed", "indexed", unique=True))


(PSYCOPG,) = (each for each in DRIVERS if each.engine == "postgresql" and each in USUAL_DRIVERS and not each.is_async)
Change = Callable[[Session], object]


def nothing(_session: Session) -> None:
    """The rival does nothing."""


class Verified:
    """A handler that locks, reads, and then changes other rows, and a rival that commits within the lowered run."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.stored, self.read = scene.store, scene.read
        scene.begins = 0

    @property
    def runs(self) -> int:
        """How often the handler was called."""
        return self._scene.runs

    def deliver(self, read: Callable[[Session], Any], change: Callable[[Any], object], rival: Change = nothing) -> None:
        """Deliver a message whose handler changes what it has read. The rival comes between the two."""

        def body(session: Session, account: str, amount: int) -> None:
            session.get_one(Parent, account, with_for_update=True)
            append(session, account, amount)
            found = read(session)
            if self.runs == 2:
                self._by_rival(rival)
            change(found)

        self._scene.body = body
        self._scene.deliver(retry=RetryPolicy(attempts=3, base=0.001))

    def _by_rival(self, rival: Change) -> None:
        with Session(self._scene.engine) as session:
            rival(session)
            session.commit()


@pytest.fixture(name="verified")
def verified_fixture(request: pytest.FixtureRequest) -> Iterator[Verified]:
    """A scene with the tables of this file."""
    with scene_on(request, PSYCOPG, append) as scene:
        Base.metadata.create_all(scene.engine)
        yield Verified(scene)


def _thing(session: Session) -> Thing:
    return session.get_one(Thing, 1)


def _counts(thing: Thing) -> None:
    thing.amount += 1


SAME: dict[str, dict[str, Any]] = {
    "NaN": {"ratio": float("nan")},
    "a number that is not exact": {"ratio": 0.1 + 0.2},
    "a decimal": {"price": decimal.Decimal("1.10")},
    "a dictionary": {"note": {"b": [1, {"c": None}], "a": 1.5}},
    "no equality": {"stored": Opaque()},
    "no equality, in a list": {"stored": [Opaque()]},
    "NaN, in a list": {"stored": [float("nan")]},
    "a mutable dictionary that nobody has changed": {"tags": {"a": 1}},
}


@pytest.mark.parametrize("values", SAME.values(), ids=SAME)
def test_a_value_that_nobody_has_changed_is_no_conflict(verified: Verified, values: dict[str, Any]) -> None:
    """The lowered run, which overwrites the value, is the last one."""

    def overwrites(thing: Thing) -> None:
        _counts(thing)
        for name in values:
            setattr(thing, name, 1 if name in ("ratio", "price") else None)

    verified.stored(Thing(id=1, **values))
    verified.deliver(_thing, overwrites)
    assert (verified.runs, verified.read(select(Thing.amount))) == (2, 1)


CHANGED: dict[str, Change] = {
    "amount": lambda session: session.execute(update(Thing).values(amount=Thing.amount + 10)),
    "price": lambda session: session.execute(update(Thing).values(price=7)),
    "note": lambda session: session.execute(update(Thing).values(note={"a": 2})),
    "stored": lambda session: session.execute(update(Thing).values(stored=[2])),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_value_that_a_rival_has_changed_is_a_conflict(verified: Verified, name: str) -> None:
    """The handler overwrites the value that the rival has changed, so it runs again."""

    def overwrites(thing: Thing) -> None:
        setattr(thing, name, thing.amount + 1 if name == "amount" else None if name in ("note", "stored") else 3)

    verified.stored(Thing(id=1, note={"a": 1}, stored=[1]))
    verified.deliver(_thing, overwrites, CHANGED[name])
    assert (verified.runs, verified.read(select(Thing.amount))) == (3, 11 if name == "amount" else 0)


@pytest.mark.parametrize("name", ["price", "note", "stored"])
def test_a_value_that_the_flush_leaves_is_no_conflict(verified: Verified, name: str) -> None:
    """The rival has changed another column, and both changes are kept."""
    verified.stored(Thing(id=1, note={"a": 1}, stored=[1]))
    before = verified.read(select(getattr(Thing, name)))
    verified.deliver(_thing, _counts, CHANGED[name])
    assert (verified.runs, verified.read(select(Thing.amount))) == (2, 1)
    assert verified.read(select(getattr(Thing, name))) != before


def test_each_flush_compares_what_it_overwrites(verified: Verified) -> None:
    """The first flush writes the amount. The second one overwrites the price, which the rival has changed."""

    def overwrites(thing: Thing) -> None:
        session = Session.object_session(thing)
        assert session is not None
        thing.amount += 1
        session.flush()
        thing.price += 1

    verified.stored(Thing(id=1))
    verified.deliver(_thing, overwrites, CHANGED["price"])
    assert (verified.runs, verified.read(select(Thing.price))) == (3, 8)


def test_an_sql_expression_is_no_conflict(verified: Verified) -> None:
    """The database itself adds to the newest value."""

    def adds(thing: Thing) -> None:
        thing.amount = Thing.amount + 1

    verified.stored(Thing(id=1))
    verified.deliver(_thing, adds, CHANGED["amount"])
    assert (verified.runs, verified.read(select(Thing.amount))) == (2, 11)


def _tags(thing: Thing) -> None:
    assert thing.tags is not None
    thing.tags["mine"] = 1


def test_a_value_that_is_changed_in_place_is_refused(verified: Verified) -> None:
    """SQLAlchemy keeps no copy of what was read, so there is nothing to compare."""
    verified.stored(Thing(id=1, tags={}))
    with pytest.raises(UnlockedWriteError, match=r"Thing\.tags was changed in place"):
        verified.deliver(_thing, _tags)
    assert verified.read(select(Thing.tags)) == {}


def test_a_value_that_is_changed_in_place_in_a_locked_row_is_right(verified: Verified) -> None:
    """Both changes are kept."""

    def locked(session: Session) -> Thing:
        if verified.runs == 2:  # before the lock, for which the rival would wait
            verified._by_rival(lambda rival: _theirs(rival.get_one(Thing, 1)))
        return session.get_one(Thing, 1, with_for_update=True)

    def _theirs(thing: Thing) -> None:
        assert thing.tags is not None
        thing.tags["theirs"] = 1

    verified.stored(Thing(id=1, tags={}))
    verified.deliver(locked, _tags)
    assert (verified.runs, verified.read(select(Thing.tags))) == (2, {"mine": 1, "theirs": 1})


def test_a_column_that_was_never_read_gets_no_dictionary(verified: Verified) -> None:
    """SQLAlchemy does not tell it from a dictionary that was changed in place."""

    def sets(thing: Thing) -> None:
        thing.long = {"a": 1}

    verified.stored(Thing(id=1))
    with pytest.raises(UnlockedWriteError, match="with_for_update=True"):
        verified.deliver(_thing, sets)


def test_a_removed_child_that_a_rival_has_moved_is_a_conflict(verified: Verified) -> None:
    """The third run does not find the child, which stays where the rival has put it."""

    def removes(box: Box) -> None:
        for thing in list(box.things):
            box.things.remove(thing)

    def moves(session: Session) -> None:
        session.get_one(Thing, 1).box_id = "theirs"

    def box(session: Session) -> Box:
        found = session.get_one(Box, "mine")
        assert found.things is not None  # reads them
        return found

    verified.stored(Box(id="mine"), Box(id="theirs"), Thing(id=1, box_id="mine"))
    verified.deliver(box, removes, moves)
    assert (verified.runs, verified.read(select(Thing.box_id))) == (3, "theirs")


@pytest.mark.parametrize("column", ["amount", "size"])
def test_each_table_of_a_row_is_compared(verified: Verified, column: str) -> None:
    """Handler and rival change the first or the second table of joined inheritance."""

    def grows(sized: Sized) -> None:
        setattr(sized, column, getattr(sized, column) + 1)

    def raises(session: Session) -> None:
        setattr(session.get_one(Sized, 1), column, 10)

    verified.stored(Sized(id=1))
    verified.deliver(lambda session: session.get_one(Sized, 1), grows, raises)
    assert (verified.runs, verified.read(select(getattr(Sized, column)))) == (3, 11)


def test_a_deleted_row_that_a_rival_has_changed_is_a_conflict(verified: Verified) -> None:
    """The handler deletes what is empty, and the third run finds that it is not."""

    def deletes(thing: Thing) -> None:
        if thing.amount == 0:
            session = Session.object_session(thing)
            assert session is not None
            session.delete(thing)

    verified.stored(Thing(id=1))
    verified.deliver(_thing, deletes, CHANGED["amount"])
    assert (verified.runs, verified.read(select(Thing.amount))) == (3, 10)


def test_a_row_that_a_rival_has_deleted_is_a_conflict(verified: Verified) -> None:
    """The third run finds no row."""
    verified.stored(Thing(id=1))

    def counts(thing: Thing | None) -> None:
        if thing is not None:
            thing.amount += 1

    rival: Change = lambda session: session.execute(text("delete from verified_thing"))  # noqa: E731  # one call
    verified.deliver(lambda session: session.get(Thing, 1), counts, rival)
    assert (verified.runs, verified.read(select(Thing.amount))) == (3, None)


def test_a_row_that_the_handler_has_changed_by_sql_is_no_conflict(verified: Verified) -> None:
    """The difference is the handler's own."""

    def changes(thing: Thing) -> None:
        session = Session.object_session(thing)
        assert session is not None
        session.execute(text("update verified_thing set price = 3 where id = 1"))
        thing.amount += 1

    verified.stored(Thing(id=1))
    verified.deliver(_thing, changes)
    assert (verified.runs, verified.read(select(Thing.amount))) == (2, 1)


def test_a_row_that_a_trigger_has_changed_may_be_deleted(verified: Verified) -> None:
    """The row is locked since the first flush, so the difference is the handler's own."""

    def changes_and_deletes(thing: Thing) -> None:
        session = Session.object_session(thing)
        assert session is not None
        thing.amount += 1
        session.flush()
        session.execute(text("update verified_thing set price = 3 where id = 1"))  # as a trigger would
        session.delete(thing)

    verified.stored(Thing(id=1))
    verified.deliver(_thing, changes_and_deletes)
    assert (verified.runs, verified.read(select(Thing.id))) == (2, None)


# The row of a unique violation, by each unique key of the table -------------------------------------------------------


@pytest.mark.parametrize("column", ["id", "constrained", "indexed"])
def test_a_visible_row_is_found_by_each_unique_key(verified: Verified, column: str) -> None:
    """So a handler that inserts or ignores runs once."""
    value: Any = 1 if column == "id" else "a"

    def inserts_or_ignores(session: Session, _account: str, _amount: int) -> None:
        with pytest.raises(IntegrityError), session.begin_nested():
            session.add(Named(**{column: value}))

    verified.stored(Named(**{column: value}))
    verified._scene.body = inserts_or_ignores
    verified._scene.deliver()
    assert verified.runs == 1
