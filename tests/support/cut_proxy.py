"""A TCP proxy before a database server that counts round trips, stops at each of them, and can refuse or cut there.

    with CutProxy(database.url()) as proxy:
        engine = create_engine(proxy.through(database.url()))
        ...
        proxy.trips                      # [["Query: BEGIN"], ["Query: insert ..."], ["Query: COMMIT"]]
        proxy.cut_commit("after")        # the next COMMIT happens, and the client never hears of it
        with proxy.refusing("rollback"): # the server never sees one, and the client gets an error
        proxy.at_trip = look             # called before each trip, and after it, as look("before", ["Query: BEGIN"])
        proxy.kill()                     # as if the client's process had ended: no connection is left, none is accepted

It reads as much of the protocol as that needs: PostgreSQL's (its documentation, "Message Formats") or MariaDB's
(MariaDB documentation, "Client/Server Protocol"). It declines TLS, so the client must not insist on it.
"""

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Literal, Self

from sqlalchemy import URL, make_url

Cut = Literal["before", "after"]
AtTrip = Callable[[Cut, list[str]], object]
"""Called `before` the server gets the messages of a round trip, and `after` it has answered and before the client gets
the answer. EOFError cuts the line just there. Until it returns, client and server are kept waiting."""

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
        """The messages that the client sent in every round trip, in order, over all connections. A trip begins when a
        client sends after the server has answered everything; login and goodbye are not counted."""
        self.cuts = 0
        """How many COMMITs have been cut so far."""
        self.refused: re.Pattern[str] | None = None
        self.at_trip: AtTrip = lambda _where, _trip: None
        self.is_dead = False
        """True if new connections are refused; `kill` sets it, and you may set it back."""
        self.sessions: set[int] = set()
        """The server's ids of the open connections, as `pg_backend_pid()` or `connection_id()` returns them."""
        self.closed: set[int] = set()
        """The ids of the connections that were closed, until you remove them."""
        self._armed: list[Cut] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lines: list[_Line] = []

    def through(self, url: URL) -> URL:
        """Return a URL that leads to the same database through this proxy."""
        host, port = self._listener.getsockname()
        return url.set(host=host, port=port)

    def cut_commit(self, where: Cut, times: int = 1) -> None:
        """Cut the line at the next `times` COMMITs, of whichever connection.

        `before`: the server never sees it and rolls back as soon as it notices. `after`: the server has answered,
        and the answer is lost. Either way the client finds its connection closed.
        """
        with self._lock:
            self._armed += [where] * times

    @contextlib.contextmanager
    def refusing(self, pattern: str) -> Iterator[None]:
        """Within, statements that match `pattern` are answered by an error, and the server does not see them.

        On MariaDB by 1047, as a node of a cluster answers that has lost the others: it "has not yet prepared node
        for application use". On PostgreSQL, where only statements of the simple protocol are refused, by 58000.
        """
        self.refused = re.compile(pattern, re.IGNORECASE)
        try:
            yield
        finally:
            self.refused = None

    def refuses(self, sql: str | None) -> bool:
        """True if the client is to get an error for this statement."""
        return sql is not None and self.refused is not None and self.refused.search(sql) is not None

    def passes(self, where: Cut, trip: list[str]) -> None:
        """Called by the lines at every round trip; raises EOFError where the line is to be cut."""
        self.at_trip(where, trip)
        with self._lock:
            if self._armed[:1] != [where] or not any(map(_is_commit, trip)):
                return
            self.cuts += 1
            self._armed.pop(0)
        raise EOFError

    def hang_up(self) -> None:
        """Cut all lines that are open now."""
        for line in [*self._lines]:
            line.cut()

    def kill(self) -> None:
        """Cut all lines, and refuse new ones, so that the server gets nothing more of the client."""
        self.is_dead = True
        self.hang_up()

    def opened(self, session: int) -> None:
        """Called by a line that has learned the server's id of its connection."""
        with self._lock:
            self.sessions.add(session)

    def ended(self, line: "_Line") -> None:
        """Called by a line that was cut, perhaps more than once."""
        with self._lock:
            if line in self._lines:
                self._lines.remove(line)
            if line.session in self.sessions:
                self.sessions.discard(line.session)
                self.closed.add(line.session)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed: this is the end
            while True:
                client, _ = self._listener.accept()
                if self.is_dead:
                    client.close()
                    continue
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
        self.hang_up()


class _Line:
    """One client's connection and the server connection behind it, each read by a thread."""

    def __init__(self, proxy: CutProxy, client: socket.socket) -> None:
        self.proxy = proxy
        self.client = client
        self.session = 0  # the server's id of this connection, as soon as the server has sent it
        self.server = socket.create_connection(proxy.server)
        for each in (client, self.server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._prepare()
        for pump in (self._from_client, self._from_server):
            threading.Thread(target=self._run, args=(pump,), daemon=True).start()

    def _run(self, pump: Callable[[], None]) -> None:
        try:
            with contextlib.suppress(OSError, EOFError):  # either side has hung up
                pump()
        finally:
            self.cut()

    def cut(self) -> None:
        """Close both connections."""
        self.proxy.ended(self)  # before the client can know
        _hang_up(self.client)
        _hang_up(self.server)

    def learn(self, session: bytes, order: Literal["big", "little"]) -> None:
        """Note the server's id of this connection."""
        self.session = int.from_bytes(session, order)
        self.proxy.opened(self.session)

    def _prepare(self) -> None:
        """Set the attributes that a protocol needs; called once, before anything is passed on."""

    def _from_client(self) -> None:
        """Pass on what the client says."""
        raise NotImplementedError

    def _from_server(self) -> None:
        """Pass on what the server answers."""
        raise NotImplementedError


class _PostgreSQLLine(_Line):
    def _prepare(self) -> None:
        self.statements: dict[bytes, str] = {}  # name of a prepared statement -> SQL
        self.portals: dict[bytes, str] = {}
        self.logged_in = False
        self.status = b"I"  # of the transaction, as the server's last ReadyForQuery says
        self.turn = threading.Lock()  # guards the three below, which both threads change
        self.trip: list[str] | None = None  # the trip under way
        self.awaited = 0  # ReadyForQuery messages still to come
        self.flushed = False  # the client has asked for an answer short of ReadyForQuery

    def _from_client(self) -> None:
        self._greet()
        held = b""  # the messages of a trip, until the one that asks for an answer: they go together
        while True:
            kind, body = _read_message(self.client)
            sql = self._sql(kind, body)
            if kind == b"Q" and self.proxy.refuses(sql):
                fields = b"SERROR\0VERROR\0C58000\0Mrefused by the proxy\0\0"
                self.client.sendall(_packed(b"E", fields) + _packed(b"Z", self.status))
                continue
            held += _packed(kind, body)
            if self.logged_in and kind in _NAMES:
                trip = self._record(kind, sql if kind != b"B" else None)
                if kind in b"PBDEC":
                    continue
                if trip is not None:
                    self.proxy.passes("before", trip)
            self.server.sendall(held)
            held = b""

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

    def _record(self, kind: bytes, sql: str | None) -> list[str] | None:
        """The trip under way, when a message asks for its first answer."""
        with self.turn:
            if self.trip is None:
                self.trip = []
                self.proxy.trips.append(self.trip)
            self.trip.append(f"{_NAMES[kind]}: {sql}" if sql else _NAMES[kind])
            is_first = not (self.awaited or self.flushed) and kind in b"QSFH"
            self.awaited += kind in b"QSF"
            self.flushed = kind == b"H"
            return self.trip if is_first else None

    def _from_server(self) -> None:
        held = b""  # the answer to a trip, until it is whole
        while True:
            kind, body = _read_message(self.server)
            if kind == b"K":
                self.learn(body[:4], "big")
            held += _packed(kind, body)
            with self.turn:  # before the client gets the answer: it may speak again at once
                if kind == b"Z":
                    self.logged_in, self.status = True, body
                    self.awaited = max(0, self.awaited - 1)
                trip, answered = self.trip, self.awaited == 0 and (kind == b"Z" or self.flushed)
                if answered:
                    self.trip, self.flushed = None, False
            if answered and trip is not None:
                self.proxy.passes("after", trip)
            if answered or trip is None or kind in b"GHW":  # for COPY the client is to speak next
                self.client.sendall(held)
                held = b""


class _MariaDBLine(_Line):
    """Every command waits for its answer, so each is a round trip. Its packet has the number 0; login begins at 1."""

    def _prepare(self) -> None:
        self.trip: list[str] | None = None  # the trip under way

    def _from_client(self) -> None:
        while True:
            number, body = _read_packet(self.client)
            if number == 0 and body[:1] in _COMMANDS:
                sql = body[1:].decode(errors="replace") if body[:1] == _COM_QUERY else None
                if self.proxy.refuses(sql):
                    error = struct.pack("<BH", 0xFF, 1047) + b"#08S01WSREP has not yet prepared node"
                    self.client.sendall(_packet(1, error))
                    continue
                self.trip = [f"{_COMMANDS[body[:1]]}: {sql}" if sql else _COMMANDS[body[:1]]]
                self.proxy.trips.append(self.trip)
                self.proxy.passes("before", self.trip)
            self.server.sendall(_packet(number, body))

    def _from_server(self) -> None:
        number, greeting = _read_packet(self.server)
        version = greeting.index(b"\0", 1) + 1  # its end; the id of the connection follows
        self.learn(greeting[version : version + 4], "little")
        self.client.sendall(_packet(*self._without_tls(number, greeting)))
        while True:
            number, body = _read_packet(self.server)
            trip, self.trip = self.trip, None
            if trip is not None:  # the first packet of the answer
                self.proxy.passes("after", trip)
            self.client.sendall(_packet(number, body))

    def _without_tls(self, number: int, greeting: bytes) -> tuple[int, bytes]:
        """The server's greeting, as if it could not encrypt."""
        capabilities = greeting.index(b"\0", 1) + 14  # after version, connection id, and the salt with its filler
        low = greeting[capabilities] | greeting[capabilities + 1] << 8
        return number, greeting[:capabilities] + struct.pack("<H", low & ~_CLIENT_SSL) + greeting[capabilities + 2 :]


def _is_commit(message: str) -> bool:
    kind, _, sql = message.partition(": ")
    return kind in ("Query", "Execute") and _COMMIT.search(sql) is not None


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
