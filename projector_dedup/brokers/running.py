"""Run a consumer: log what it consumes, end it at SIGTERM and Ctrl-C, and name a broker that it cannot reach."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ..message import printable
from .settling import MAX_REASON, Settling, logger, named_in_log

__all__ = ["CONNECT_TIMEOUT", "Runs", "cannot_reach", "draining", "try_address"]

CONNECT_TIMEOUT = 4.0
"""The seconds after which a consumer gives up to connect: its error then appears within five."""

_INSISTING = 3  # signals after which the process ends at once

Stop = Callable[[], object]


class Runs:
    """The base of the consumers of all clients. The loop of ``run`` reads ``_stopping``."""

    _settling: Settling
    _stopping = False
    _batch: int

    def stop(self, *_: object) -> None:
        """Make ``run`` return after the current messages are settled. Any thread or signal handler may call this."""
        self._stopping = True

    def _log_start(self, place: str) -> None:
        """Log in one line what is consumed from ``place``, by which handlers, and into which database."""
        dispatcher = self._settling.dispatcher
        try:
            url = dispatcher.markers_engine.url.set(query={}).render_as_string(hide_password=True)
        except Exception:  # noqa: BLE001  # the first message tells what is wrong with the session factory
            url = "unknown"
        names = named_in_log([handler.identity for handler in dispatcher.handlers])
        logger.info(
            "consumes %s: handlers %s; database %s; batch %d", printable(place), names, printable(url), self._batch
        )


class _Draining:
    """The handler of SIGTERM and SIGINT while consumers run in the main thread: the signal stops all of them."""

    def __init__(self) -> None:
        self._stops: list[Stop] = []
        self._usual: dict[signal.Signals, Any] = {}
        self._came: list[signal.Signals] = []

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self._came.append(signal.Signals(number))
        if len(self._came) >= _INSISTING:
            raise KeyboardInterrupt
        for stop in self._stops:
            stop()

    @contextlib.contextmanager
    def stopping(self, stop: Stop) -> Iterator[None]:
        self._stops.append(stop)
        for number in (signal.SIGINT, signal.SIGTERM):
            if _is_default(usual := signal.getsignal(number)):
                self._usual[number] = usual
                signal.signal(number, self)
        try:
            yield
            if self._came:
                logger.info("%s: the consumer has settled its current messages, and ends", self._came[0].name)
        finally:
            self._stops.remove(stop)
            if not self._stops:
                self._came.clear()
                while self._usual:
                    number, usual = self._usual.popitem()
                    if signal.getsignal(number) is self:
                        signal.signal(number, usual)


def _is_default(handler: Any) -> bool:
    """Return True if Python or asyncio has installed the handler, and not the application."""
    of_asyncio = getattr(getattr(handler, "func", None), "__module__", None) == "asyncio.runners"
    return handler in (signal.SIG_DFL, signal.default_int_handler) or of_asyncio


_DRAINING = _Draining()


def draining(stop: Stop) -> contextlib.AbstractContextManager[None]:
    """Call ``stop`` at SIGTERM and SIGINT (Ctrl-C) during the block. The third signal raises ``KeyboardInterrupt``.

    Changes nothing outside the main thread, and leaves a signal alone for which the application has a handler of its
    own. The signal interrupts the code of the main thread: with asyncio, ``stop`` must be
    ``partial(loop.call_soon_threadsafe, consumer.stop)``.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return _DRAINING.stopping(stop) if is_main else contextlib.nullcontext()


def cannot_reach(broker: str, address: str, error: object) -> ConnectionError:
    """Return the error for a broker to which a consumer cannot connect. ``address`` contains no password."""
    reason = printable(str(error)[:MAX_REASON]) or type(error).__name__
    return ConnectionError(f"cannot connect to {broker} at {printable(address)}: {reason}")


def try_address(broker: str, host: str, port: int) -> None:
    """Open a connection and close it, for a client whose own limit is longer. Raises ``ConnectionError``."""
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT).close()
    except OSError as error:
        raise cannot_reach(broker, f"{host}:{port}", error) from error
