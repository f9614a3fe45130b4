"""Ctrl-C when it suits: whatever was begun is cleaned up first, and no child process hears of it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.resource_tracker import ensure_running
from types import FrameType

_INSISTING = 3  # times that Ctrl-C is pressed by someone who will not wait


@contextmanager
def noted() -> Iterator[Callable[[], bool]]:
    """In the block, Ctrl-C and SIGTERM are only noted; the function that it yields tells whether one came."""
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


@contextmanager
def deferred() -> Iterator[Callable[[], None]]:
    """The same, but the function raises `KeyboardInterrupt` then.

    Raised at just any instruction, in a driver's callback say, the exception could be swallowed, or interrupt the very
    cleanup that it is to set off.
    """
    with noted() as interrupted:

        def check() -> None:
            if interrupted():
                raise KeyboardInterrupt

        yield check


@contextmanager
def not_for_children() -> Iterator[None]:
    """Ctrl-C goes to all processes of a terminal, but not to those started in here: they inherit the blocked signal.

    We get it afterwards. On Windows, a process that is still importing when Ctrl-C comes may say so on stderr.
    """
    if sys.platform == "win32":
        yield
        return
    ensure_running()  # the tracker that multiprocessing starts with its first process would unblock the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
