"""Workers that are killed right after the handler's COMMIT: what is done twice when the caller asks again."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from . import model
from .contenders import Asked
from .races import Entry, commands

_PATIENCE = 60  # seconds for which a caller asks again


@dataclass(frozen=True)
class Crashes:
    """What became of commands whose worker was killed."""

    killed: int
    twice: int
    unanswered: int
    waited: float

    def cells(self) -> list[str]:
        """Return the cells of a table."""
        return [f"{self.killed}", f"{self.twice}", f"{self.unanswered}", f"{self.waited:.1f} s"]


def crashes(entry: Entry, redis: str | None, number: int) -> Crashes:
    """Have ``number`` commands killed, and ask for each again, in new processes, until it is answered."""
    before, killed, answered, waits = entry.place.total(), 0, 0, []
    for one in commands(number):
        killed += _in_a_child(_killed, entry, redis, [one]) == -signal.SIGKILL
        began = time.monotonic()
        answered += _in_a_child(_asked_again, entry, redis, [one]) == 0
        waits.append(time.monotonic() - began)
    twice = entry.place.total() - before - number
    return Crashes(killed, twice, number - answered, statistics.median(waits))


def _killed(entry: Entry, redis: str | None, asked: Asked) -> None:
    entry.contender.connect(entry.place.url, redis)
    model.die_after_commit()
    entry.contender.ask(asked)


def _asked_again(entry: Entry, redis: str | None, asked: Asked) -> None:
    entry.contender.connect(entry.place.url, redis)
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            entry.contender.ask(asked)
            return
        except Exception:  # refused for now, whatever its name is
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def _in_a_child(work: Callable[[Entry, str | None, Asked], None], entry: Entry, redis: str | None, asked: Asked) -> int:
    """Do the work in a process of its own; return its exit code, negative if it was killed."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(Exception):
            work(entry, redis, asked)
            code = 0
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
