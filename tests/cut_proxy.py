"""A TCP proxy before a database server that counts round trips, and cuts the line at COMMIT.

    with CutProxy(database.url()) as proxy:
        engine = create_engine(proxy.through(database.url()))
        ...
        proxy.trips                      # [["Query: BEGIN"], ["Query: insert ..."], ["Query: COMMIT"]]
        proxy.cut_commit("after")        # the next COMMIT happens, and the client never hears of it

It reads as much of the protocol as that needs: PostgreSQL's (its documentation, "Message Formats") or MariaDB's
(MariaDB documentation, "Client/Server Protocol"). It declines TLS, so the client must not insist on it.
"""

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

from sqlalchemy import URL, make_url

Cut = Literal["before", "after"]

_PORTS = {"postgresql": 5432, "mariadb": 3306, "mysql": 3306}
_SSL_REQUEST, _GSSENC_REQUEST, _CANCEL_REQUEST = 80877103, 80877104, 80877102
_COMMIT = re.compile(r"(^|;)\s*commit\b|^\s*end\b", re.IGNORECASE)
_NAMES = {
    b"B": "Bind", b"C": "Close", b"D": "Describe", b"E": "Execute", b"F": "FunctionCall", b"H": "Flush",
    b"P": "Parse", b"Q": "Query", b"S": "Sync", b"c": "CopyDone", b"d": "CopyData", b"f": "CopyFail",
}  # fmt: skip
_COM_QUERY, _CLIENT_SSL = b"\x03", 0x800
_COMMANDS = {_COM_QUERY: "Query", b"\x0e": "Ping", b"\x16": "Prepare", b"\x17": "Execute", b"\x1f": "Reset"}


class CutProxy:
    """Listens on a port of its own while its `with` block runs, and forwards to the server of `url`."""

    def __init__(self, url: str | URL) -> None:
        server = make_url(url)
        engine = server.get_backend_name()
        self.server = (server.host or "127.0.0.1", server.port or _PORTS[engine])
        self._speaks = _PostgreSQLLine if engine == "postgresql" else _MariaDBLine
        self.trips: list[list[str]] = []
        """For every round trip the messages that the client sent, in order, over all connections. A trip begins
        when a client speaks after the server has answered all; login and goodbye are not counted."""
        self.cuts = 0
        """How many COMMITs have been cut so far."""
        self._armed: list[Cut] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lines: list[_Line] = []

    def through(self, url: URL) -> URL:
        """The same URL, leading through this proxy."""
        host, port = self._listener.getsockname()
        return url.set(host=host, port=port)

    def cut_commit(self, where: Cut, times: int = 1) -> None:
        """Cut the line at the next `times` COMMITs, of whichever connection.

        `before`: the server never sees it and rolls back as soon as it notices. `after`: the server has answered,
        and the answer is lost. Either way the client finds its connection closed.
        """
        with self._lock:
            self._armed += [where] * times

    def next_cut(self) -> Cut | None:
        """What is to be done with the COMMIT that has just come."""
        with self._lock:
            if not self._armed:
                return None
            self.cuts += 1
            return self._armed.pop(0)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed: this is the end
            while True:
                client, _ = self._listener.accept()
                try:
                    self._lines.append(self._speaks(self, client))
                except ConnectionError:  # the server is down, and so is the line
                    client.close()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _hang_up(self._listener)
        for line in self._lines:
            line.cut()


class _Line:
    """One client's connection and the server connection behind it, each read by a thread."""

    def __init__(self, proxy: CutProxy, client: socket.socket) -> None:
        self.proxy = proxy
        self.client = client
        self.server = socket.create_connection(proxy.server)
        for each in (client, self.server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.mute = False  # COMMIT is on its way, and its answer is to be lost
        self._prepare()
        for pump in (self._from_client, self._from_server):
            threading.Thread(target=self._run, args=(pump,), daemon=True).start()

    def _run(self, pump: Callable[[], None]) -> None:
        with contextlib.suppress(OSError, EOFError):  # either side has hung up
            pump()
        self.cut()

    def cut(self) -> None:
        """Close both connections."""
        _hang_up(self.client)
        _hang_up(self.server)

    def _prepare(self) -> None:
        """What a protocol must remember."""

    def _from_client(self) -> None:
        """Pass on what the client says, until COMMIT is to be cut."""
        raise NotImplementedError

    def _from_server(self) -> None:
        """Pass on what the server answers, but for the answer to a COMMIT that is cut."""
        raise NotImplementedError

    def _is_cut_before(self, sql: str | None) -> bool:
        """Whether this is where the line is cut; a COMMIT that is to be cut after it happened is let pass."""
        if not sql or not _COMMIT.search(sql):
            return False
        cut = self.proxy.next_cut()
        self.mute = cut == "after"
        return cut == "before"


class _PostgreSQLLine(_Line):
    def _prepare(self) -> None:
        self.statements: dict[bytes, str] = {}  # name of a prepared statement -> SQL
        self.portals: dict[bytes, str] = {}
        self.logged_in = False
        self.turn = threading.Lock()  # guards the three below, which both threads change
        self.trip: list[str] | None = None  # the trip under way
        self.awaited = 0  # ReadyForQuery messages still to come
        self.flushed = False  # the client has asked for an answer short of ReadyForQuery

    def _from_client(self) -> None:
        self._greet()
        while True:
            kind, body = _read_message(self.client)
            sql = self._sql(kind, body)
            if self.logged_in and kind in _NAMES:
                self._record(kind, sql if kind != b"B" else None)
            if kind in b"QE" and self._is_cut_before(sql):
                return
            self.server.sendall(_packed(kind, body))

    def _greet(self) -> None:
        """Decline encryption, then pass on the first message, which has no type byte."""
        while True:
            (length,) = struct.unpack("!I", _read(self.client, 4))
            body = _read(self.client, length - 4)
            (code,) = struct.unpack("!I", body[:4])
            if code in (_SSL_REQUEST, _GSSENC_REQUEST):
                self.client.sendall(b"N")
                continue
            self.server.sendall(struct.pack("!I", length) + body)
            if code == _CANCEL_REQUEST:
                raise EOFError
            return

    def _sql(self, kind: bytes, body: bytes) -> str | None:
        """The SQL that a message carries, or names."""
        match kind, body.split(b"\0"):
            case b"Q", [query, *_]:
                return query.decode()
            case b"P", [name, query, *_]:
                self.statements[name] = query.decode()
                return self.statements[name]
            case b"B", [portal, name, *_]:
                self.portals[portal] = self.statements.get(name, "?")
                return self.portals[portal]
            case b"E", [portal, *_]:
                return self.portals.get(portal, "?")
        return None

    def _record(self, kind: bytes, sql: str | None) -> None:
        with self.turn:
            if self.trip is None:
                self.trip = []
                self.proxy.trips.append(self.trip)
            self.trip.append(f"{_NAMES[kind]}: {sql}" if sql else _NAMES[kind])
            self.awaited += kind in b"QSF"
            self.flushed = kind == b"H"

    def _from_server(self) -> None:
        while True:
            kind, body = _read_message(self.server)
            with self.turn:  # before the client gets the answer: it may speak again at once
                if kind == b"Z":
                    self.logged_in = True
                    self.awaited = max(0, self.awaited - 1)
                if self.awaited == 0 and (kind == b"Z" or self.flushed):
                    self.trip = None
            if not self.mute:
                self.client.sendall(_packed(kind, body))
            elif kind == b"Z":
                return


class _MariaDBLine(_Line):
    """Every command waits for its answer, so each is a round trip. Its packet has the number 0; login begins at 1."""

    def _from_client(self) -> None:
        while True:
            number, body = _read_packet(self.client)
            if number == 0 and body[:1] in _COMMANDS:
                sql = body[1:].decode(errors="replace") if body[:1] == _COM_QUERY else None
                self.proxy.trips.append([f"{_COMMANDS[body[:1]]}: {sql}" if sql else _COMMANDS[body[:1]]])
                if self._is_cut_before(sql):
                    return
            self.server.sendall(_packet(number, body))

    def _from_server(self) -> None:
        self.client.sendall(_packet(*self._without_tls(*_read_packet(self.server))))
        while True:
            number, body = _read_packet(self.server)
            if self.mute:
                return
            self.client.sendall(_packet(number, body))

    def _without_tls(self, number: int, greeting: bytes) -> tuple[int, bytes]:
        """The server's greeting, as if it could not encrypt."""
        capabilities = greeting.index(b"\0", 1) + 14  # after version, connection id, and the salt with its filler
        low = greeting[capabilities] | greeting[capabilities + 1] << 8
        return number, greeting[:capabilities] + struct.pack("<H", low & ~_CLIENT_SSL) + greeting[capabilities + 2 :]


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _read_message(connection: socket.socket) -> tuple[bytes, bytes]:
    kind, length = struct.unpack("!cI", _read(connection, 5))
    return kind, _read(connection, length - 4)


def _packed(kind: bytes, body: bytes) -> bytes:
    return struct.pack("!cI", kind, len(body) + 4) + body


def _read_packet(connection: socket.socket) -> tuple[int, bytes]:
    head = _read(connection, 4)
    return head[3], _read(connection, int.from_bytes(head[:3], "little"))


def _packet(number: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "little") + bytes([number]) + body


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may be closed already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
