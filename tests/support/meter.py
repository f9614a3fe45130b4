"""Counts what a delivery costs, whatever the engine: the statements of SQLAlchemy, and the round trips at the wire.

Where there is no wire, on SQLite, what SQLite itself says that it executes stands for the round trips.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import URL, event

from cut_proxy import CutProxy
from kit import Harness, Subject

WARM = 8
"""Deliveries after which drivers have prepared their statements (psycopg after five uses)."""
SMALL, LARGE = 10, 100
SHOWN = 16


@dataclass(frozen=True)
class Cost:
    """The cost of one delivery: statements, round trips, and the text of what was sent."""

    statements: int
    trips: int
    sent: str

    def __str__(self) -> str:
        return f"{self.statements} / {self.trips}"


Deliver = Callable[[int, int], object]
"""Takes a number, which makes its messages new, and how many there are in a batch."""


class Meter:
    """Counts all that goes through the engine of a harness, the `trips` of its proxy too."""

    def __init__(self, harness: Harness, trips: list[list[str]]) -> None:
        self.harness = harness
        self._trips = trips
        self._statements: list[str] = []
        event.listen(harness.engine, "before_cursor_execute", lambda *given: self._statements.append(given[2]))

    def cost_of(self, deliver: Deliver) -> Cost:
        """Return the cost of a large delivery, after small ones have warmed up: the last two of those must agree."""
        small = [self._counted(deliver, number, SMALL) for number in range(WARM)][-2:]
        assert str(small[0]) == str(small[1]), (
            f"{small[0]}, then {small[1]}: not warm, or not the same\n{small[1].sent}"
        )
        return self._counted(deliver, WARM, LARGE)

    def _counted(self, deliver: Deliver, number: int, size: int) -> Cost:
        self._statements.clear()
        self._trips.clear()
        deliver(number, size)
        lines = ["  " + " + ".join(" ".join(message.split()) for message in trip)[:100] for trip in self._trips]
        if len(lines) > SHOWN:
            lines[SHOWN // 2 : -SHOWN // 2] = [f"  ... {len(lines) - SHOWN} more ..."]
        return Cost(len(self._statements), len(self._trips), "\n".join(lines))


@contextmanager
def metered(url: URL) -> Iterator[Meter]:
    """A meter before a database."""
    if url.get_backend_name().endswith("sqlite"):
        with Harness(Subject(url)) as harness:
            executed: list[list[str]] = []
            event.listen(harness.engine, "connect", lambda driver, _: _trace(driver, executed, harness.asynchronous))
            yield Meter(harness, executed)
    else:
        with (
            CutProxy(url) as proxy,
            Harness(Subject(proxy.through(url))) as harness,
        ):
            yield Meter(harness, proxy.trips)


def _trace(connection: Any, executed: list[list[str]], asynchronous: bool) -> None:
    def executes(sql: str) -> None:
        executed.append([sql])

    if asynchronous:
        connection.run_async(lambda driver: driver.set_trace_callback(executes))
    else:
        connection.set_trace_callback(executes)
