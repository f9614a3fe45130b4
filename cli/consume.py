"""`idempotency consume` runs the consumer that a module names, in processes that it starts again."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import click

from projector_dedup.errors import ProjectorDedupError
from projector_dedup.message import traced

from .consumer_named import Misnamed, consumer_named
from .options import EXIT_CODES, WholeNumber, debug_option
from .output import fitted, noted, one_line, reason, without_secrets

_INSTEAD = {
    "celery": "run it with `celery --app MODULE worker`",
    "faststream": "run it with `faststream run MODULE:APP`",
}
_LOADED = b"+"  # what a worker sends when it has its consumer; behind it, the reason if it ends by an error
_MISNAMED = 2  # the exit code of a worker that has not found its consumer
_TICK = 0.1  # seconds between two looks at the workers
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds before a worker is started again
_STEADY = 60.0  # seconds after which a worker that ends gets the first pause again
_ENDED_BY_US = (0, -signal.SIGTERM)  # SIGTERM itself ends a worker that has no consumer yet


@click.command(epilog=EXIT_CODES)
@click.argument("consumer", metavar="MODULE:CONSUMER")
@click.option(
    "--processes",
    type=WholeNumber(min=1),
    default=1,
    show_default=True,
    help="How many processes consume side by side.",
)
@debug_option
def consume(consumer: str, processes: int, debug: bool) -> None:
    """Run a consumer of your application until SIGTERM or Ctrl-C.

    MODULE:CONSUMER is a consumer of projector_dedup.brokers, or a function without arguments that returns one. Each
    process imports the module itself. At SIGTERM or Ctrl-C, each process settles its current messages, and the exit
    code is 0. The third signal kills the processes; their messages are delivered again. A process that ends in any
    other way is started again, after a second at first and after a minute at last.

    \b
    Examples:
      idempotency consume payments:consumer
      idempotency consume payments:consumer --processes 4
    """
    words = [consumer, "--debug"] if debug else [consumer]
    workers = [_Worker(words, number) for number in range(1, processes + 1)]
    with one_line(debug=debug), noted() as interrupted:
        try:
            _keep_running(workers, interrupted)
            for worker in workers:
                worker.terminate()
            while any(worker.is_running() for worker in workers):
                time.sleep(_TICK)
        finally:  # of an error, or the third signal
            for worker in workers:
                worker.kill()
        for worker in workers:
            if worker.has_failed():  # the broker delivers its messages again
                click.echo(fitted(worker.end(), sys.stderr), err=True)


def _keep_running(workers: list[_Worker], interrupted: Callable[[], bool]) -> None:
    """Start the workers, and start them again, until a signal. The others wait until the first has its consumer."""
    loaded = False
    while not interrupted():
        for worker in workers if loaded else workers[:1]:
            worker.keep_running(loaded=loaded)
        loaded = loaded or workers[0].has_loaded()
        time.sleep(_TICK)


class _Worker:
    """One process that consumes, and what the command knows of it."""

    def __init__(self, words: list[str], number: int) -> None:
        self._words, self._number = words, number
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._due, self._pause = 0.0, _FIRST_PAUSE
        self.code = 0

    def keep_running(self, *, loaded: bool) -> None:
        """Start the process if it is time. If it has ended, say so, and choose the time of the next start.

        Raises `Misnamed` if no worker has ``loaded`` the consumer, and this one cannot.
        """
        if self._process is None:
            if time.monotonic() >= self._due:
                self._start()
        elif not self.is_running():
            if self.code == _MISNAMED and not loaded:
                raise Misnamed(self._reason() or self.end())
            if time.monotonic() - self._began >= _STEADY:
                self._pause = _FIRST_PAUSE
            click.echo(fitted(f"{self.end()}; it is started again in {self._pause:g} s", sys.stderr), err=True)
            self._due, self._process = time.monotonic() + self._pause, None
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _start(self) -> None:
        """Start a new interpreter, which ends when this process does: the line between them is closed then."""
        self._line, theirs = socket.socketpair()
        self._line.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  # this file, with the name that the user gave
                [sys.executable, "-c", f"from {__name__} import work; work()", str(theirs.fileno()), *self._words],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # the Ctrl-C of a terminal reaches this process only, which passes it on
            )
        self._began, self._said = time.monotonic(), b""

    def is_running(self) -> bool:
        """True if the process runs. Otherwise ``code`` is its exit code."""
        if self._process is None or (code := self._process.poll()) is None:
            return self._process is not None
        self.code = code
        return False

    def has_loaded(self) -> bool:
        """True if the process has imported the module and found its consumer."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._process is not None and (more := self._line.recv(4096)):
                self._said += more
        return self._said.startswith(_LOADED)

    def has_failed(self) -> bool:
        """True if the process has ended in another way than by the signal. One that had ended before was told."""
        return self._process is not None and self.code not in _ENDED_BY_US

    def end(self) -> str:
        """Return in one line how the process has ended."""
        process = 0 if self._process is None else self._process.pid
        by = f"signal {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"
        return f"worker {self._number} (process {process}) has ended: {self._reason() or by}"

    def _reason(self) -> str:
        self.has_loaded()
        return self._said.removeprefix(_LOADED).decode(errors="replace")

    def terminate(self) -> None:
        """Let the process settle its current messages and end."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """End the process now."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


# In the process of a worker ------------------------------------------------------------------------------------------


def work() -> None:
    """Run a consumer. The arguments are the number of the socket to the command, the consumer, and perhaps --debug."""
    line, consumer, debug = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], "--debug" in sys.argv[3:]
    threading.Thread(target=_end_with, args=(line,), daemon=True).start()
    try:
        if (plain := asyncio.run(_run(consumer, line))) is not None:
            plain.run()
    except Misnamed as error:
        if debug:
            click.echo(without_secrets(traced(error)), err=True)
        line.send(error.message.encode())
        sys.exit(_MISNAMED)
    except Exception as error:  # noqa: BLE001  # the last place to tell the command why
        while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if not isinstance(error, (ConnectionError, ProjectorDedupError)):
            click.echo(without_secrets(traced(error)), err=True)
        line.send(reason(error).encode())
        sys.exit(1)


async def _run(place: str, line: socket.socket) -> Any:
    """Run a consumer that awaits, in the event loop in which it is made. Return any other, which is to be run."""
    consumer = await consumer_named(place, _INSTEAD)
    line.send(_LOADED)
    _show_log()
    if not inspect.iscoroutinefunction(consumer.run):
        return consumer
    await consumer.run()
    return None


def _end_with(line: socket.socket) -> None:
    """Drain when the command has ended without a word: nobody would start this process again, or stop it."""
    line.recv(1)
    os.kill(os.getpid(), signal.SIGTERM)


def _show_log() -> None:
    """Show the library's log on stderr, unless the application has configured logging."""
    if not logging.getLogger().handlers:
        logging.basicConfig(format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
        logging.getLogger("projector_dedup").setLevel(logging.INFO)
        for client in ("pika", "aiormq"):  # what they log before they raise it, in up to ten lines
            logging.getLogger(client).setLevel(logging.CRITICAL)
