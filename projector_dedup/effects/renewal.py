"""Renew the lease of an attempt while its function runs: in a thread, or in a task of asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from sqlalchemy.util import await_only, greenlet_spawn

from ..waiting import AWAITING


def renewing(every: float, renew: Callable[[], bool], *, asynchronous: bool) -> AbstractContextManager[None]:
    """Call ``renew`` every ``every`` seconds while the block runs, until ``renew`` returns False.

    ``renew`` must not raise. The block waits for the last call, so no renewal comes after the outcome.
    """
    return _in_task(every, renew) if asynchronous else _in_thread(every, renew)


@contextmanager
def _in_thread(every: float, renew: Callable[[], bool]) -> Iterator[None]:
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every) and renew():
            pass

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _in_task(every: float, renew: Callable[[], bool]) -> Iterator[None]:
    ended = asyncio.Event()

    async def repeat() -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), every)
            if not ended.is_set() and not await greenlet_spawn(renew):
                return

    task = asyncio.ensure_future(repeat())
    try:
        yield
    finally:
        ended.set()
        AWAITING.to_the_end(lambda: await_only(task))
