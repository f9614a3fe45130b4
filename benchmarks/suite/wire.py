"""A proxy before a server that counts round trips, and can make each of them longer.

It reads no protocol: a round trip begins when the client speaks after the server has spoken. Each connection has a
process of its own, for threads would share one processor between all of them.
"""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import select
import signal
import socket
import time
from multiprocessing.sharedctypes import Synchronized
from types import TracebackType
from typing import Any, Self

from sqlalchemy import URL

_PORTS = {"postgresql": 5432, "mariadb": 3306}


class Wire:
    """Listens while its ``with`` block runs. ``delay`` is added to each round trip, in seconds."""

    def __init__(self, server: URL, delay: float = 0.0) -> None:
        context = multiprocessing.get_context("spawn")  # a clean process: what forks later has no threads
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._trips: Synchronized[int] = context.Value("q", 0)
        address = (server.host or "127.0.0.1", server.port or _PORTS[server.get_backend_name()])
        self._process = context.Process(target=_accept, args=(self._listener, address, delay, self._trips), daemon=True)

    @property
    def trips(self) -> int:
        """Round trips since the beginning, over all connections."""
        return self._trips.value

    def through(self, url: URL) -> URL:
        """The same URL, leading through this proxy."""
        host, port = self._listener.getsockname()
        return url.set(host=host, port=port)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.close()
        self._process.terminate()
        self._process.join()


def _accept(listener: socket.socket, server: tuple[str, int], delay: float, trips: Synchronized[int]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that have ended need no one to wait for them
    while True:
        client, _ = listener.accept()
        if os.fork():
            client.close()
            continue
        listener.close()
        with contextlib.suppress(OSError):  # either side has hung up
            _pass_on(client, socket.create_connection(server), delay, trips)
        os._exit(0)


def _pass_on(client: socket.socket, server: socket.socket, delay: float, trips: Synchronized[int]) -> None:
    for each in (client, server):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    waiting: collections.deque[tuple[float, bytes]] = collections.deque()  # what the server gets, and when
    spoke_last: Any = server
    while True:
        timeout = max(0.0, waiting[0][0] - time.perf_counter()) if waiting else None
        readable, _, _ = select.select([client, server], [], [], timeout)  # by the microsecond, unlike epoll
        for side in readable:
            data = side.recv(65_536)
            if not data:
                return
            if side is server:
                client.sendall(data)
            else:
                if spoke_last is server:
                    with trips.get_lock():
                        trips.value += 1
                waiting.append((time.perf_counter() + delay, data))
            spoke_last = side
        while waiting and waiting[0][0] <= time.perf_counter():
            server.sendall(waiting.popleft()[1])
