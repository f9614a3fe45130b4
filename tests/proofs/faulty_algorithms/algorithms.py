"""Small versions of algorithms for idempotent commands that were published, each with the fault that it has there.

The races of `test_faulty_algorithms.py` break them: so those races are known to bite. Each takes sessions from a
factory, and its `handle` returns the answer to the command.
"""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Column, MetaData, String, Table, insert, select, update
from sqlalchemy.orm import Session

from command_rig import Placed, PlaceOrder
from projector_dedup.commands import Call

Handler = Callable[[PlaceOrder, Call], Placed]
DAY = 86_400.0
DONE = Placed(0, 0)
"""The default result of an algorithm that stores none."""

REQUEST = Table(
    "faulty_request",
    MetaData(),
    Column("key", String(40), primary_key=True),  # and (key, scope) is unique too, which does not help
    Column("scope", String(40)),
    Column("answer", String(200)),
)


class InProgressError(Exception):
    """Somebody is said to be at it."""


class Clock:
    """The time in seconds, which goes on when a race says so."""

    def __init__(self) -> None:
        self.now = 0.0


class Store:
    """A second store beside the database, as Redis is: each call is durable at once, and entries expire."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._clock = path, clock
        self._execute("CREATE TABLE entry (key TEXT PRIMARY KEY, value TEXT, expires REAL)")

    def get(self, key: str) -> str | None:
        """Return the value of an entry that has not expired."""
        found = self._execute("SELECT value FROM entry WHERE key = ? AND expires > ?", key, self._clock.now)
        return str(found[0][0]) if found else None

    def put(
        self, key: str, value: str, *, seconds: float = DAY, only_if: Literal["absent", "present"] | None = None
    ) -> bool:
        """Write an entry, as `SET key value EX seconds` with NX or XX does; return True if it was written."""
        if only_if is not None and (self.get(key) is None) != (only_if == "absent"):
            return False
        self._execute("REPLACE INTO entry VALUES (?, ?, ?)", key, value, self._clock.now + seconds)
        return True

    def delete(self, key: str) -> None:
        """Delete an entry, whoever has written it."""
        self._execute("DELETE FROM entry WHERE key = ?", key)

    def _execute(self, sql: str, *values: object) -> list[Any]:
        with closing(sqlite3.connect(self._path, isolation_level=None)) as connection:
            return connection.execute(sql, values).fetchall()


def stored(answer: Placed) -> str:
    """Return the text under which an answer is stored."""
    return json.dumps(asdict(answer))


def loaded(text: str) -> Placed:
    """Return the answer of which this is the text."""
    return Placed(**json.loads(text))


class Faulty:
    """One algorithm."""

    engines: tuple[str, ...] = ("postgresql", "mariadb", "sqlite")

    def __init__(self, factory: Any, store: Store) -> None:
        self.factory, self.store = factory, store

    def handle(self, handler: Handler, order: PlaceOrder, key: str, scope: str | None) -> Placed:
        """Handle the command, or answer as it was answered before."""
        raise NotImplementedError

    def in_a_transaction(self, handler: Handler, order: PlaceOrder, key: str) -> Placed:
        """Run the handler, and commit what it wrote."""
        with self.factory.begin() as session:
            return handler(order, Call(session, key))


class CachedAfterTheCommit(Faulty):
    """The answer goes to a cache behind the handler's COMMIT, and nobody claims the key before."""

    def handle(self, handler: Handler, order: PlaceOrder, key: str, scope: str | None) -> Placed:
        """Look into the cache, run, commit, and fill the cache."""
        if (known := self.store.get(f"{scope}:{key}")) is not None:
            return loaded(known)
        placed = self.in_a_transaction(handler, order, key)
        self.store.put(f"{scope}:{key}", stored(placed))
        return placed


class HandlerOnAnotherConnection(Faulty):
    """The record is claimed and finished in one transaction, and the handler writes in another one.

    Nobody ever sees the record unfinished: a rival meets the unique index, and has no answer then.
    """

    engines = ("postgresql", "mariadb")  # where one transaction writes at a time, the handler waits for its own caller

    def handle(self, handler: Handler, order: PlaceOrder, key: str, scope: str | None) -> Placed:
        """Claim, run elsewhere, and finish the record in the transaction of the claim."""
        with self.factory.begin() as session:
            if (known := _answer(session, key, scope)) is not None:
                return loaded(known)
            session.execute(insert(REQUEST).values(key=key, scope=scope))
            placed = self.in_a_transaction(handler, order, key)
            session.execute(update(REQUEST).where(REQUEST.c.key == key).values(answer=stored(placed)))
        return placed


class KeyWithoutItsScope(Faulty):
    """The key alone is the primary key; the scope stands beside it."""

    def handle(self, handler: Handler, order: PlaceOrder, key: str, scope: str | None) -> Placed:
        """Claim, run and record in one transaction, under a key that all scopes share."""
        with self.factory.begin() as session:
            if (known := _answer(session, key, scope)) is not None:
                return loaded(known)
            session.execute(insert(REQUEST).values(key=key, scope=scope))
            placed = handler(order, Call(session, key, scope))
            session.execute(update(REQUEST).where(REQUEST.c.key == key).values(answer=stored(placed)))
        return placed


def _answer(session: Session, key: str, scope: str | None) -> str | None:
    known = select(REQUEST.c.answer).where(REQUEST.c.key == key, REQUEST.c.scope == scope)
    return session.execute(known).scalar_one_or_none()


class LockStore(Faulty):
    """Whoever gets the lock runs; everybody else is told the default result, whether the first has finished or not.

    The lock expires while its handler runs. It is released by a DELETE that does not look whose lock it is; and to
    accept writes nothing where the lock is gone, and reports success.
    """

    lock = 1.0  # seconds

    def handle(self, handler: Handler, order: PlaceOrder, key: str, scope: str | None) -> Placed:
        """Lock, run, commit, accept; release where that fails."""
        entry = f"{scope}:{key}"
        if not self.store.put(entry, "locked", seconds=self.lock, only_if="absent"):
            return DONE
        try:
            placed = self.in_a_transaction(handler, order, key)
        except Exception:
            self.store.delete(entry)
            raise
        self.store.put(entry, "accepted", only_if="present")
        return placed


class MillisecondsTakenForSeconds(LockStore):
    """The same, where a timeout in milliseconds is handed to a store that counts seconds."""

    lock = 1_000.0


class InProgressUntilItExpires(Faulty):
    """A failure leaves the record in progress, and so does a process that dies: both refuse the key for a day."""

    def handle(self, handler: Handler, order: PlaceOrder, key: str, scope: str | None) -> Placed:
        """Write that it is in progress, run, commit, and write the answer."""
        entry = f"{scope}:{key}"
        if not self.store.put(entry, "in progress", only_if="absent"):
            known = self.store.get(entry)
            if known in (None, "in progress"):
                raise InProgressError
            return loaded(str(known))
        placed = self.in_a_transaction(handler, order, key)
        self.store.put(entry, stored(placed))
        return placed


class DeletedOnAnyError(InProgressUntilItExpires):
    """Any error deletes the record, that of a COMMIT which has happened included."""

    def in_a_transaction(self, handler: Handler, order: PlaceOrder, key: str) -> Placed:
        """Run the handler and commit; whatever goes wrong, take the record back."""
        try:
            return super().in_a_transaction(handler, order, key)
        except Exception:
            self.store.delete(f"None:{key}")
            raise
