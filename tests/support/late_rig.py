"""Late messages without waiting: a clock that is set ahead, and workers and cleanups that stop at every step."""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, delete, insert, select

from projector_dedup import Delivery, Message, ProjectorDedupError
from projector_dedup import late as late_module
from projector_dedup.late import Lines
from projector_dedup.maintenance import cleanup as cleanup_module
from projector_dedup.maintenance import rows as rows_module
from projector_dedup.maintenance.databases import Database
from projector_dedup.tables import default_tables
from projector_dedup.testing.kit import PATIENCE, Added, Total

MARKER, STATE = default_tables.marker, default_tables.state
HOUR = timedelta(hours=1, minutes=1)  #: after which a line has settled
DAY = timedelta(days=1)
OLD = datetime.now(UTC) - 10 * DAY  #: when the message occurred that is delivered again
ID = "m1"


class Clock:
    """The clocks of the databases and of the workers: they go as always, but tests set all of them ahead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = self.stood_still = timedelta()
        now = Database.now
        monkeypatch.setattr(Database, "now", lambda database, connection: now(database, connection) + self.ahead)
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


def stop_cleanups(monkeypatch: pytest.MonkeyPatch, *, after: tuple[str, ...] = ("write_lines", "write_known")) -> None:
    """Let a cleanup that is `Stepped` stop after these of its transactions."""
    attempt = cleanup_module._Run.attempt
    for module in (cleanup_module, rows_module):
        monkeypatch.setattr(module, "verify", lambda *_: None)  # it would find the clock wrong

    def stopping(run: Any, act: Callable[[Connection], Any]) -> Any:
        result = attempt(run, act)
        if isinstance(act, partial) and act.func.__name__ in after:
            Stepped.gate_of_thread()
        return result

    monkeypatch.setattr(cleanup_module._Run, "attempt", stopping)


class Worker:
    """A delivery that stops when it knows the lines, and again in its handler, if its claim was free."""

    def __init__(self, harness: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self._asked = False
        known = Lines.known

        def stopping(lines: Lines, session: Any, another: Any) -> Any:
            result = known(lines, session, another)
            if not self._asked:
                self._asked = True
                harness.blocking(self.stepped.gate)
            return result

        monkeypatch.setattr(Lines, "known", stopping)

        def add(happened: Added, session: Any) -> None:
            harness.blocking(self.stepped.gate)
            total = session.get(Total, "a")
            total.amount += happened.amount

        dispatcher = harness.dispatcher(harness.handler(add), **options)
        message = Message(ID, Added(), occurred_at=OLD)
        self.stepped = Stepped(lambda: harness.run(dispatcher.deliver, message))


def applied_once(engine: Engine, *, processed: datetime = OLD + DAY, occurred: datetime | None = OLD) -> None:
    """Bring the database to where the message was applied once, by `totals`, long ago; forget everything else."""
    with engine.begin() as connection:
        for table in (MARKER, STATE, Total):
            connection.execute(delete(table))
        connection.execute(insert(Total), {"key": "a", "amount": 1})
        row = {"message_id": ID, "handler": "totals", "processed_at": processed, "occurred_at": occurred}
        connection.execute(insert(MARKER), row)


def total(engine: Engine) -> int:
    """What the handler has added to the total, as another connection sees it."""
    with engine.connect() as connection:
        amount: int = connection.execute(select(Total.amount).where(Total.key == "a")).scalar_one()
        return amount


def outcome(result: Any) -> str:
    """What became of a delivery: its outcome, or the name of the error."""
    return result.outcome.value if isinstance(result, Delivery) else type(result).__name__
