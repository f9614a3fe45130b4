"""Run by test_interrupts.py in a process of its own: signals reach the main thread only.

Each message's first delivery is interrupted by a timer, a little later each time; then it is redelivered until it
gets through, uninterrupted. Prints how many were interrupted, how many slots of the pool were lost, and how many
messages there were. A slot is lost when the exception is raised inside SQLAlchemy's pool, between its taking a
connection and its handing it out: nobody but the pool could prevent that, and nothing is held by it.
"""

import gc
import signal
import sys
import time
from types import FrameType

from sqlalchemy import make_url

from databases import DRIVERS, Database
from rig import Durable, Outside, Rig, add

MESSAGES = 120


class TerminatedAsException(Exception):  # noqa: N818  # it is no error
    """An exception that a worker may raise when it gets SIGTERM."""


class TerminatedAsBaseException(BaseException):
    """A BaseException that a worker may raise when it gets SIGTERM."""


KINDS = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "Exception": TerminatedAsException,
    "BaseException": TerminatedAsBaseException,
}


def timed(rig: Rig, message_id: str) -> float:
    """Seconds of a delivery."""
    begun = time.perf_counter()
    rig.deliver(add, message_id)
    return time.perf_counter() - begun


def main(drivername: str, url: str, kind: str) -> None:
    """Interrupt, look, redeliver."""
    interruption = KINDS[kind]
    armed = False

    def raise_it(_signal: int, _frame: FrameType | None) -> None:
        if armed:
            raise interruption

    def unraisable(unraisable: object) -> None:
        """An interruption that hit a __del__ or a callback, where Python can only report it."""

    sys.unraisablehook = unraisable
    signal.signal(signal.SIGALRM, raise_it)
    driver = next(driver for driver in DRIVERS if driver.drivername == drivername and not driver.is_async)
    outside = Outside(Database(driver.engine, make_url(url)))
    with Rig(driver, outside, pool_size=MESSAGES) as rig:
        # Of one that was slow by chance, all timers would come too late.
        takes = min(timed(rig, f"warm-{number}") for number in range(6))
        outside.empty()
        rig.deliver(add, "m-0")
        interrupted = 0
        gc.collect()
        gc.freeze()  # what is there already is no concern of the collections below, one for each message
        for number in range(1, MESSAGES):
            message_id = f"m-{number}"
            before = outside.durable()
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, 1.2 * takes * number / MESSAGES))
                rig.deliver(add, message_id)
                armed = False
            except (interruption, Exception):  # noqa: BLE001  # in a library's cleanup it may cause another one
                armed = False
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            gc.collect()
            after = outside.durable()
            assert after in (before, Durable(before.markers + 1, before.amount + 1)), (message_id, before, after)
            outside.assert_nothing_is_held()
            rig.deliver(add, message_id)
            assert outside.durable() == Durable(number + 1, number + 1), message_id
        lost = rig.sync_engine.pool.checkedout()  # type: ignore[attr-defined]  # a QueuePool
    print(interrupted, lost, MESSAGES)  # noqa: T201  # for the test


if __name__ == "__main__":
    main(*sys.argv[1:])
