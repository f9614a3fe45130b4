"""What the contract is about: a database to run it against, and a read model that duplicates and losses make wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import URL, ForeignKey, String
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from ..outcome import Delivery

PATIENCE = 30.0
"""Seconds after which something that must happen is taken not to happen."""


class Base(DeclarativeBase):
    """The read model of the contract."""


class Total(Base):
    """What accumulates, and is wrong for good when a message counts twice or not at all."""

    __tablename__ = "contract_total"
    key: Mapped[str] = mapped_column(String(20), primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)


class Account(Base):
    """Reaches a total by way of a relationship."""

    __tablename__ = "contract_account"
    key: Mapped[str] = mapped_column(String(20), primary_key=True)
    total_key: Mapped[str] = mapped_column(String(20), ForeignKey(Total.key))
    total: Mapped[Total] = relationship()


@dataclass(frozen=True)
class Added:
    """An event: add ``amount`` to each of ``keys``."""

    keys: tuple[str, ...] = ("a",)
    amount: int = 1


def add(happened: Added, session: Session) -> None:
    """Ordinary ORM code: read, create if missing, add."""
    for key in happened.keys:
        total = session.get(Total, key)
        if total is None:
            total = Total(key=key, amount=0)
            session.add(total)
        total.amount += happened.amount


@dataclass(frozen=True)
class Subject:
    """What the contract is run against: an empty database, a driver, and where an isolation level is set, if any.

    The driver of ``url`` decides between sync and async; psycopg, which does both, is ``psycopg_async`` for async.
    """

    url: URL
    engine_isolation: str | None = None  #: create_engine(isolation_level=...)
    option_isolation: str | None = None  #: engine.execution_options(isolation_level=...)
    dispatcher_isolation: str | None = None  #: Dispatcher(isolation=...)
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] | None = None  #: called with the new engine, as configure_sqlite is
    read_ahead: bool = True  #: Dispatcher(read_ahead=...)
    one_writer: bool = False  #: whether a database that was not tried lets only one transaction write at a time

    @property
    def loses_updates(self) -> bool:
        """Whether the user chose READ COMMITTED, where invariant I6 needs ``read_models`` or atomic upserts."""
        chosen = self.dispatcher_isolation or self.option_isolation or self.engine_isolation
        return chosen == "READ COMMITTED"

    @property
    def has_snapshots(self) -> bool:
        """Whether the user's own transactions see the database as it was when they began."""
        return (self.option_isolation or self.engine_isolation) in ("REPEATABLE READ", "SERIALIZABLE")

    @property
    def exact(self) -> dict[str, Any]:
        """What a projector must say there for its totals to be exact."""
        return {"read_models": [Total]} if self.loses_updates else {}


def until_acknowledged(deliver: Callable[[], Delivery], *passing: type[Exception], times: int = 200) -> Delivery:
    """What a broker does: deliver again after every error of the kinds ``passing``, until it is acknowledged."""
    for _ in range(times):
        with contextlib.suppress(*passing):
            return deliver()
    raise AssertionError(f"still not acknowledged after {times} deliveries")
