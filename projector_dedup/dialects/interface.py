"""What a database must be able to say, so that the rest of the library need not know which one it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, ClassVar

from sqlalchemy import Table
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable


class Failure(Enum):
    """What a database error means for the unit of work that met it."""

    TRANSIENT = "transient"  #: nobody's fault: run the whole unit of work again
    LOCK_TIMEOUT = "lock timeout"  #: transient, but on a claim with claim_timeout it means InProgress
    UNIQUE = "unique"  #: a rival may have created the row: run again, a few times
    NO_TABLE = "no table"  #: on a claim: the marker table is missing, or not ours
    PERMANENT = "permanent"  #: running again would fail again


class Status(Enum):
    """The transaction, as the driver knows it without asking the server."""

    OPEN = "open"
    ABORTED = "aborted"
    NONE = "none"
    BUSY = "busy"  #: a statement was interrupted half-way, or the connection is gone


class Dialect(ABC):
    """One database. A dialect holds no state: one instance serves every engine."""

    name: ClassVar[str]
    drivers: ClassVar[frozenset[str]]

    detecting_isolation: ClassVar[str | None]
    """The isolation level at which the database itself refuses a lost update; None where writers are serialised."""

    @abstractmethod
    def prepare(self, engine: Engine) -> None:
        """What an engine needs once, before its first unit of work; again if that was interrupted."""

    @abstractmethod
    def refuse_unsafe(self, connection: Connection) -> None:
        """Raise ``RefusedError`` for an engine on which the promise would not hold. No statement is sent."""

    @abstractmethod
    def begin(self, connection: Connection, wait: float | None) -> None:
        """What must run before the claim; ``wait`` bounds it in seconds."""

    @abstractmethod
    def claim_statement(self, marker: Table, *, bounded: bool) -> Executable:
        """Insert ``:message_id, :handler, :occurred_at`` and return a row, or no row if the marker was there.

        ``bounded``: it also takes ``:wait_ms`` and fails with a lock timeout when it waited longer.
        """

    @abstractmethod
    def ownership_statement(self, marker: Table) -> Executable:
        """A row if ``:message_id, :handler`` was inserted by the transaction that is open now."""

    @abstractmethod
    def prune_statement(self, marker: Table) -> Executable:
        """Delete at most ``:batch_size`` markers older than ``:seconds``, by the database's clock."""

    @abstractmethod
    def advice(self, connection: Connection) -> list[tuple[str, str]]:
        """Settings of this database that are not wrong but could be better: what, and what to do."""

    @abstractmethod
    def status(self, driver_connection: Any) -> Status:
        """How the transaction stands. Reads the driver's memory: no round trip."""

    @abstractmethod
    def dooms(self, error: DBAPIError) -> bool:
        """Whether the server will refuse everything that follows in this transaction (outside a savepoint)."""

    @abstractmethod
    def classify(self, error: Exception) -> Failure:
        """By SQLSTATE or driver code, never by class or text; ``error`` may be the driver's own."""

    @abstractmethod
    def commit_refused(self, error: DBAPIError) -> bool:
        """Whether an error of COMMIT is the server's answer that it did *not* commit."""
