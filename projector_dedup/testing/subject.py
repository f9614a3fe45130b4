"""The subject of the contract: a database, and a read model that a duplicate or a loss makes wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import URL, ForeignKey, String
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from ..outcome import Delivery

PATIENCE = 30.0
"""Seconds to wait for something that must happen, before the test fails."""


class Base(DeclarativeBase):
    """The base of the entities in the contract's read model."""


class Total(Base):
    """A sum, which stays wrong for good once a message counts twice or not at all."""

    __tablename__ = "contract_total"
    key: Mapped[str] = mapped_column(String(20), primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)


class Account(Base):
    """A row that has a relationship to a total, so that handlers can reach the total through it."""

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
    """A handler of ordinary ORM code: read each total, create it if missing, add."""
    for key in happened.keys:
        total = session.get(Total, key)
        if total is None:
            total = Total(key=key, amount=0)
            session.add(total)
        total.amount += happened.amount


@dataclass(frozen=True)
class Subject:
    """The database that the contract is run against: its URL and driver, and where an isolation level is set, if any.

    The database must be empty. The driver of ``url`` decides between sync and async; psycopg, which does both, is
    ``psycopg_async`` for async.
    """

    url: URL
    engine_isolation: str | None = None  #: create_engine(isolation_level=...)
    option_isolation: str | None = None  #: engine.execution_options(isolation_level=...)
    dispatcher_isolation: str | None = None  #: Dispatcher(isolation=...)
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] | None = None  #: called with the new engine, as configure_sqlite is
    one_writer: bool = False  #: True if a database unknown to the library lets only one transaction write at a time

    @property
    def loses_updates(self) -> bool:
        """True if READ COMMITTED was chosen, where invariant I6 needs ``read_models`` or atomic upserts."""
        chosen = self.dispatcher_isolation or self.option_isolation or self.engine_isolation
        return chosen == "READ COMMITTED"

    @property
    def has_snapshots(self) -> bool:
        """True if transactions of the test's own see the database as it was when they began."""
        return (self.option_isolation or self.engine_isolation) in ("REPEATABLE READ", "SERIALIZABLE")

    @property
    def exact(self) -> dict[str, Any]:
        """The arguments of ``@projector`` with which totals are exact on this subject."""
        return {"read_models": [Total]} if self.loses_updates else {}


def until_acknowledged(deliver: Callable[[], Delivery], *passing: type[Exception], times: int = 200) -> Delivery:
    """Deliver again after every error of the kinds ``passing``, as a broker would, and return the first delivery."""
    for _ in range(times):
        with contextlib.suppress(*passing):
            return deliver()
    raise AssertionError(f"still not acknowledged after {times} deliveries")
