"""Late messages without waiting: a clock that is set ahead, and workers and cleanups that stop at every step."""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, delete, insert, select

from kit import PATIENCE, Added, Total
from projector_dedup import Message
from projector_dedup import late as late_module
from projector_dedup.errors import ProjectorDedupError
from projector_dedup.maintenance import cleanup as cleanup_module
from projector_dedup.maintenance.databases import Database
from projector_dedup.maintenance.state import write_state
from projector_dedup.outcome import Delivery
from projector_dedup.tables import default_tables
from projector_dedup.unit_of_work import UnitOfWork

MARKER, STATE = default_tables.marker, default_tables.state
HOUR = timedelta(hours=1, minutes=1)  #: after which every worker knows a changed horizon
DAY = timedelta(days=1)
OLD = datetime.now(UTC) - 10 * DAY  #: when the message occurred that is delivered again
ID = "m1"


class Clock:
    """The clocks of the databases and of the workers: they go as always, but tests set all of them ahead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = self.stood_still = timedelta()
        now = Database.now
        monkeypatch.setattr(Database, "now", lambda database, connection: now(database, connection) + self.ahead)
        in_utc = late_module.in_utc
        monkeypatch.setattr(late_module, "in_utc", lambda now: in_utc(now) + self.ahead)
        monkeypatch.setattr(late_module, "time", self)

    def passes(self, span: timedelta = HOUR) -> None:
        """Let time pass."""
        self.ahead += span

    def suspended(self, span: timedelta) -> None:
        """Let time pass while the monotonic clocks of workers stand still."""
        self.ahead += span
        self.stood_still += span

    def monotonic(self) -> float:
        """A worker's monotonic clock."""
        return time.monotonic() + (self.ahead - self.stood_still).total_seconds()

    def time(self) -> float:
        """A worker's wall clock."""
        return time.time() + self.ahead.total_seconds()


class Stepped:
    """A function in a thread of its own, which runs from gate to gate."""

    _of_thread = threading.local()

    def __init__(self, function: Callable[[], Any]) -> None:
        self.result: Any = None  # what it returned or raised
        self.ended = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        Stepped._of_thread.current = self
        self._go.acquire()
        try:
            self.result = function()
        except Exception as error:  # noqa: BLE001  # the test looks at it
            self.result = error
        self.ended = True
        self._stopped.release()

    def gate(self) -> None:
        """Stop here until the next step."""
        self._stopped.release()
        assert self._go.acquire(timeout=PATIENCE)

    @classmethod
    def gate_of_thread(cls) -> None:
        """Stop the function of this thread here, if there is one."""
        if (current := getattr(cls._of_thread, "current", None)) is not None:
            current.gate()

    def step(self) -> None:
        """Run to the next gate, or to the end."""
        if not self.ended:
            self._go.release()
            assert self._stopped.acquire(timeout=PATIENCE), "it does not come to its next gate"

    def finish(self) -> Any:
        """Run to the end, and return the result; an error that nobody expects is raised."""
        while not self.ended:
            self.step()
        self._thread.join()
        if isinstance(self.result, Exception) and not isinstance(self.result, ProjectorDedupError):
            raise self.result
        return self.result


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any] = Stepped.gate_of_thread) -> None:
    """Call ``act`` in each cleanup, after it has announced what it deletes, and before it deletes.

    By default, a cleanup that is `Stepped` stops there.
    """
    attempt = cleanup_module._Run.attempt

    def stopping(run: Any, look: Callable[[Connection], Any]) -> Any:
        result = attempt(run, look)
        if isinstance(look, partial) and look.func.__name__ == "_announce":
            act()
        return result

    monkeypatch.setattr(cleanup_module._Run, "attempt", stopping)


class Claims:
    """What happens in a delivery between the answer to its claim and the moment when it knows what is late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.then: Callable[[], Any] | None = None  # happens once
        late_moment = UnitOfWork.late_moment

        def stopping(uow: Any, claimed: Any) -> Any:
            then, self.then = self.then, None
            if then is not None:
                then()
            return late_moment(uow, claimed)

        monkeypatch.setattr(UnitOfWork, "late_moment", stopping)


class Worker:
    """A worker that delivers another message first, then claims the old one, and stops before it knows what is late.

    On SQLite it does not stop: its claim holds the lock of the file.
    """

    def __init__(self, harness: Any, claims: Claims) -> None:
        dispatcher = harness.dispatcher(harness.handler())

        def work() -> Any:
            young = datetime.now(UTC)
            harness.run(dispatcher.deliver, Message("another", Added(("another",)), occurred_at=young))
            self.stepped.gate()
            if harness.engine.dialect.name != "sqlite":
                claims.then = lambda: harness.blocking(self.stepped.gate)
            return harness.run(dispatcher.deliver, Message(ID, Added(), occurred_at=OLD))

        self.stepped = Stepped(work)


def applied_once(
    engine: Engine,
    *,
    processed: datetime = OLD + DAY,
    occurred: datetime | None = OLD,
    horizon: float | None = None,
) -> None:
    """Bring the database to where the message was applied once, by `totals`, long ago; forget everything else.

    The ``horizon``, in hours, was declared long ago too.
    """
    with engine.begin() as connection:
        for table in (MARKER, STATE, Total):
            connection.execute(delete(table))
        connection.execute(insert(Total), {"key": "a", "amount": 1})
        row = {"message_id": ID, "handler": "totals", "processed_at": processed, "occurred_at": occurred}
        connection.execute(insert(MARKER), row)
        if horizon is not None:
            write_state(connection, default_tables, {late_module.REDELIVERY_HORIZON: repr(horizon)})


def total(engine: Engine) -> int:
    """What the handler has added to the total, as another connection sees it."""
    with engine.connect() as connection:
        amount: int = connection.execute(select(Total.amount).where(Total.key == "a")).scalar_one()
        return amount


def outcome(result: Any) -> str:
    """What became of a delivery: its outcome, or the name of the error."""
    return result.outcome.value if isinstance(result, Delivery) else type(result).__name__
