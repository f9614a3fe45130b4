"""Worker processes that deliver at the same time, each on a connection of its own."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple, Self

from sqlalchemy import make_url

from .contenders import on_engine
from .harness import Entry, Item

_WARM = 4


class Done(NamedTuple):
    """What a crew did together."""

    messages: int
    seconds: float
    raised: int
    """Deliveries that raised, and came again as a broker would bring them."""


class Crew:
    """``size`` processes, as long as its ``with`` block runs: each imports everybody, which takes seconds."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(size):
            mine, theirs = context.Pipe()
            self._processes.append(context.Process(target=_work, args=(theirs,), daemon=True))
            self._pipes.append(mine)

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def deliver(self, entry: Entry, workers: int, each: int) -> Done:
        """``each`` messages to each of so many workers, who begin together."""
        pipes = self._pipes[:workers]
        place = entry.place.by(entry.contender.drivers[entry.place.engine]).render_as_string(hide_password=False)
        for pipe in pipes:
            items = entry.stream.take(_WARM + each)
            pipe.send((entry.contender.name, place, items))
        _answers(pipes)
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send(None)
        raised = sum(_answers(pipes))
        return Done(workers * each, time.perf_counter() - began, raised)


def _answers(pipes: Sequence[Connection]) -> list[int]:
    answers = [pipe.recv() for pipe in pipes]
    for answer in answers:
        if isinstance(answer, str):
            raise RuntimeError(answer)
    return answers


def _work(pipe: Connection) -> None:
    everybody = on_engine("postgresql")
    while True:
        name, url, items = pipe.recv()
        contender = everybody[name]
        try:
            contender.connect(make_url(url))
            messages = [contender.messages([item]) for item in items]
            raised = _deliver(contender, messages[:_WARM])
            pipe.send(raised)
            pipe.recv()
            pipe.send(_deliver(contender, messages[_WARM:]))
            contender.disconnect()
        except Exception as error:  # noqa: BLE001  # told to whoever waits for the answer
            pipe.send(f"{name}: {type(error).__name__}: {error}")


def _deliver(contender: Any, messages: Sequence[Sequence[Item]]) -> int:
    """One by one; what raises is delivered again, until it does not."""
    raised = 0
    for message in messages:
        while True:
            try:
                contender.deliver(message)
                break
            except Exception:  # as a consumer would: not acknowledged, so it comes again
                raised += 1
                if raised > 100 * len(messages):
                    raise
    return raised
