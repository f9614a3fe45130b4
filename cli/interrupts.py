"""Handle Ctrl-C and SIGTERM where a command chooses, so that it can clean up."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_ALERT = 0.1  # seconds after which a rest looks for a signal again
_INSISTING = 3  # signals after which the user is taken not to want to wait


@contextmanager
def noted() -> Iterator[Callable[[], bool]]:
    """Only note Ctrl-C and SIGTERM during the block; yield a function that returns True if one came.

    The third one raises `KeyboardInterrupt` at once.
    """
    count = 0

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count >= _INSISTING:
            raise KeyboardInterrupt

    usual = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: count > 0
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def rest(seconds: float, interrupted: Callable[[], bool]) -> None:
    """Sleep for so many seconds, or until ``interrupted``, as ``noted`` yields it, returns True."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not interrupted():
        time.sleep(min(left, _ALERT))


@contextmanager
def deferred() -> Iterator[Callable[[], None]]:
    """Only note Ctrl-C and SIGTERM during the block; yield a function that raises `KeyboardInterrupt` if one came.

    Raised at any instruction, in a driver's callback say, the exception could be swallowed, or interrupt the very
    cleanup that it should start.
    """
    with noted() as interrupted:

        def check() -> None:
            if interrupted():
                raise KeyboardInterrupt

        yield check
