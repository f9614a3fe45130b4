"""An unreliable payment provider, for tests of effects: an HTTP server in its own process, and a log of its calls.

::

    with Provider(tmp_path / "provider.jsonl", forget_after=60) as provider:
        provider.next(Behaviour.LOSE_REPLY_AFTER)
        run_the_code_under_test(provider.url)
        assert len(provider.deeds("order-7")) == 1

``POST /deeds`` with a JSON object does a deed and answers 201 ``{"id": "deed_17"}``. A second call with the same header
``Idempotency-Key`` gets the saved answer, or 422 if its body differs. Each call without the header does a deed.
``GET /deeds?key=K`` lists the deeds whose header, or whose text under ``"tag"`` in the body, is K.

The provider first writes each call to its log, with fsync, and each deed before it answers. Tests read this log. If a
provider is killed and started again with the same log, it knows its deeds and keys. It has forgotten its behaviours,
chances and holds.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

Reply = tuple[int, dict[str, Any]]
FAILED: Reply = (500, {"error": "The provider failed."})


class Behaviour(StrEnum):
    """The ways to treat one ``POST /deeds``. The provider never does a second deed for a known key."""

    NORMAL = "normal"  #: do the deed and answer 201
    LOSE_REPLY_BEFORE = "lose_reply_before"  #: close the connection; nothing is done
    LOSE_REPLY_AFTER = "lose_reply_after"  #: do the deed, then close the connection
    ANSWER_LATE = "answer_late"  #: do the deed at once, and answer after ``delay`` seconds
    DO_LATE = "do_late"  #: do the deed after ``delay`` seconds, even if the client has gone; then answer
    REJECT = "reject"  #: answer 402 ``{"code": "card_declined"}``; nothing is done or saved
    ERROR_BEFORE = "error_before"  #: answer 500; nothing is done or saved
    ERROR_AFTER = "error_after"  #: do the deed, answer 500, and save that 500 as the answer for the key


@dataclass(frozen=True)
class Call:
    """A ``POST /deeds`` that reached the provider. Its deed, if it did one, has the id ``deed_<number>``."""

    number: int  #: from 1, in the order of arrival
    at: datetime  #: UTC
    key: str | None  #: the header Idempotency-Key
    body: Any  #: the JSON value, or the text if it is no JSON
    behaviour: Behaviour
    done: datetime | None = None  #: when this call did its deed, UTC; None if it did none, or got a saved answer
    answered: int | None = None  #: the status of the answer; None if the provider gave none (yet)

    @property
    def tag(self) -> str | None:
        """The text under ``"tag"`` in the body, if any."""
        return _tag(self.body)


# Below the range from which systems take the ports of outgoing connections: a client that keeps knocking while a server
# restarts could otherwise be given the server's own port, connect to itself, and keep the server out.
_PORTS = range(15_000, 32_000)


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 on which nobody listens. Raises RuntimeError if 100 attempts find none."""
    for port in random.sample(_PORTS, 100):
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("Found no free TCP port on 127.0.0.1 after 100 attempts.")


class Provider:
    """A provider in a process of its own, on a free port of 127.0.0.1, while the ``with`` block runs.

    - ``log``: the file to which the provider appends. Only one provider at a time may use it.
    - ``forget_after``: how many seconds after a deed the provider knows its key. The default is for ever.
    - ``index_lag``: after how many seconds ``GET /deeds`` finds a deed.
    - ``delay``: the seconds of ``ANSWER_LATE`` and ``DO_LATE``.

    Raises ValueError for negative seconds. ``start()`` raises ValueError for a log that no provider wrote, and OSError
    if the log cannot be written.

    The provider treats a call by the first of these: the next behaviour for its key (``on_key``), the next behaviour
    for any call (``next``), a behaviour drawn from the ``chances``, ``NORMAL``. ``key`` is the header or, in a call
    without the header, the tag.
    """

    def __init__(
        self, log: Path, *, forget_after: float = math.inf, index_lag: float = 0.0, delay: float = 1.0
    ) -> None:
        self.log = log.absolute()
        self._settings = {"forget_after": forget_after, "index_lag": index_lag, "delay": delay}
        _check(**self._settings)
        self._port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """The base URL, e.g. ``http://127.0.0.1:20001``. It stays the same after ``kill()`` and ``start()``."""
        if not self._port:
            raise RuntimeError("The provider was not started: use it as `with Provider(log) as provider`.")
        return f"http://127.0.0.1:{self._port}"

    @property
    def delay(self) -> float:
        """The seconds of ``ANSWER_LATE`` and ``DO_LATE``."""
        return self._settings["delay"]

    @property
    def index_lag(self) -> float:
        """The seconds after which ``GET /deeds`` finds a deed."""
        return self._settings["index_lag"]

    def start(self) -> None:
        """Start the process, and return when it answers. Raises RuntimeError if it already runs, or does not start."""
        if self._process:
            raise RuntimeError("The provider already runs.")
        self.log.open("ab").close()
        _read(self.log)
        self._port = self._port or free_port()
        command = [sys.executable, "-P", __file__, f"--log={self.log}", f"--port={self._port}"]
        command += [f"--parent={os.getpid()}"]
        command += [f"--{name.replace('_', '-')}={value}" for name, value in self._settings.items()]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  # our own
        assert self._process.stdout  # noqa: S101  # PIPE was passed
        with self._process.stdout as output:
            started = output.readline()
        if not started:
            self.kill()
            raise RuntimeError("The provider did not start; its error output says why.")
        self._order(down=False)

    def kill(self) -> None:
        """End the process as ``kill -9`` does. ``start()`` starts it again on the same port and log."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def next(self, behaviour: Behaviour, times: int = 1) -> None:
        """Treat the next ``times`` calls with this behaviour, whatever their keys, after those queued before."""
        self._order(next=[behaviour] * times, key=None)

    def on_key(self, key: str, behaviours: Iterable[Behaviour]) -> None:
        """Treat the next calls with ``key`` with these behaviours in turn, after those queued before."""
        self._order(next=list(behaviours), key=key)

    def chances(self, seed: int, **chances: float) -> None:
        """Draw the behaviour of each call at random, as in ``chances(seed=7, lose_reply_after=0.1)``.

        The chances replace earlier ones. The draw depends on ``seed``, on the key, and on how many calls with this key
        came before, so the order of different keys does not matter. Raises ValueError for an unknown name, for a
        negative chance, and if the sum of the chances is more than 1.
        """
        self._order(chances=chances, seed=seed)

    def held(self, key: str, calls: int | None = None, *, done: bool = False) -> AbstractContextManager[None]:
        """Hold calls with ``key`` until the block ends: they are in the log, and get no answer before.

        ``calls`` is how many calls are held; the default is all. With ``done=True``, the provider does their deeds
        before it holds them. Raises ValueError if the key is already held.
        """
        return self._during({"hold": key, "calls": calls, "done": done}, {"release": key})

    def down(self) -> AbstractContextManager[None]:
        """Close every connection without an answer until the block ends. These calls are not in the log."""
        return self._during({"down": True}, {"down": False})

    @contextlib.contextmanager
    def _during(self, begin: dict[str, Any], end: dict[str, Any]) -> Iterator[None]:
        self._order(**begin)
        try:
            yield
        finally:
            if self._process:  # a killed provider has already forgotten ``begin``
                self._order(**end)

    def _order(self, **order: Any) -> None:
        with contextlib.closing(HTTPConnection(urlsplit(self.url).netloc, timeout=30)) as connection:
            connection.request("PUT", "/behaviour", json.dumps(order))
            answer = connection.getresponse()
            content = json.loads(answer.read())
        if answer.status != 200:
            raise ValueError(content["error"])

    def calls(self, key: str | None = None) -> list[Call]:
        """Return every ``POST /deeds`` of the log in the order of arrival, or those whose header or tag is ``key``."""
        return [call for call in _read(self.log) if key in (None, call.key, call.tag)]

    def deeds(self, key: str | None = None) -> list[Call]:
        """Return the calls of ``calls(key)`` that did a deed."""
        return [call for call in self.calls(key) if call.done]

    def arrived(self, key: str, calls: int = 1, timeout: float = 30.0) -> list[Call]:
        """Wait until ``calls`` calls with ``key`` have reached the provider, and return all of them.

        Raises TimeoutError after ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        while len(found := self.calls(key)) < calls:
            if time.monotonic() > end:
                raise TimeoutError(f"{len(found)} of {calls} calls with the key {key!r} arrived within {timeout:g} s.")
            time.sleep(0.01)
        return found


def _check(**settings: float) -> None:
    for name, seconds in settings.items():
        if not seconds >= 0 or (math.isinf(seconds) and name != "forget_after"):
            raise ValueError(f"{name}={seconds}: give seconds, 0 or more.")


def _tag(body: Any) -> str | None:
    tag = body.get("tag") if isinstance(body, dict) else None
    return tag if isinstance(tag, str) else None


def _read(log: Path) -> list[Call]:
    calls: list[Call] = []
    lines = log.read_bytes().split(b"\n") if log.exists() else []
    for line in lines[:-1]:  # the last line is empty or incomplete
        try:
            match json.loads(line):
                case {"call": number, "at": at, "key": key, "body": body, "behaviour": name}:
                    calls.append(Call(number, datetime.fromisoformat(at), key, body, Behaviour(name)))
                case {"done": number, "at": at}:
                    calls[number - 1] = replace(calls[number - 1], done=datetime.fromisoformat(at))
                case {"answered": number, "status": status}:
                    calls[number - 1] = replace(calls[number - 1], answered=status)
                case {"query": _}:
                    pass
                case _:
                    raise ValueError("unknown line")
        except (ValueError, TypeError, IndexError) as error:
            raise ValueError(f"{log}: no provider wrote {line[:80]!r}. Give the log a path of its own.") from error
    return calls


# The server -----------------------------------------------------------------------------------------------------------


@dataclass
class _Hold:
    calls: float  # how many more calls to hold
    done: bool
    released: threading.Event = field(default_factory=threading.Event)


class _State:
    def __init__(self, log: Path, forget_after: float, index_lag: float, delay: float) -> None:
        _check(forget_after=forget_after, index_lag=index_lag, delay=delay)
        self.forget_after, self.index_lag, self.delay = forget_after, index_lag, delay
        self.down = False
        self._lock = threading.RLock()
        self._log = log.open("ab", buffering=0)
        os.truncate(log, log.read_bytes().rfind(b"\n") + 1)  # a kill may leave half a line at the end
        calls = _read(log)
        self._calls = Counter(call.key or call.tag for call in calls)
        self._deeds: defaultdict[str | None, list[Call]] = defaultdict(list)  # by header and by tag
        for call in calls:
            if call.done:
                self._remember(call)
        self._queued: defaultdict[str | None, deque[Behaviour]] = defaultdict(deque)
        self._holds: dict[str | None, _Hold] = {}
        self._chances: dict[Behaviour, float] = {}
        self._seed: Any = None

    def order(self, order: Any) -> None:
        """Change the settings as the test orders. Raises ValueError or TypeError for a wrong order."""
        with self._lock:
            match order:
                case {"next": [*names], "key": str() | None as key}:
                    self._queued[key].extend([Behaviour(name) for name in names])
                case {"chances": dict() as chances, "seed": seed}:
                    if any(chance < 0 for chance in chances.values()) or sum(chances.values()) > 1 + 1e-9:
                        raise ValueError(f"{chances}: a chance is 0 or more, and the sum of all is at most 1.")
                    self._chances = {Behaviour(name): chance for name, chance in chances.items()}
                    self._seed = seed
                case {"hold": str(key)} if key in self._holds:
                    raise ValueError(f"The key {key!r} is already held.")
                case {"hold": str(key), "calls": int() | None as calls, "done": bool(done)}:
                    self._holds[key] = _Hold(math.inf if calls is None else calls, done)
                case {"release": str(key)}:
                    if hold := self._holds.pop(key, None):
                        hold.released.set()
                case {"down": bool(down)}:
                    self.down = down
                case _:
                    raise ValueError(f"{order}: give one of next, chances, hold, release, down.")

    def post(self, key: str | None, body: Any) -> Reply | None:
        """Write the call to the log, treat it by its behaviour, and return the reply. None closes the connection."""
        with self._lock:
            name = key or _tag(body)
            self._calls[name] += 1
            behaviour = self._behaviour(name, self._calls[name])
            call = Call(self._calls.total(), datetime.now(UTC), key, body, behaviour)
            self._write(call=call.number, at=call.at.isoformat(), key=key, body=body, behaviour=behaviour)
            hold = self._holds.get(name)
            if hold:
                hold.calls -= 1
                hold = hold if hold.calls >= 0 else None
        if hold and not hold.done:
            hold.released.wait()
        if behaviour is Behaviour.DO_LATE:
            time.sleep(self.delay)
        reply = None if behaviour is Behaviour.LOSE_REPLY_BEFORE else self._act(call)
        if hold and hold.done:
            hold.released.wait()
        if behaviour is Behaviour.ANSWER_LATE:
            time.sleep(self.delay)
        if reply is None or behaviour is Behaviour.LOSE_REPLY_AFTER:
            return None
        self._write(sync=False, answered=call.number, status=reply[0])  # before the client can read the log
        return reply

    def get(self, key: str) -> Reply:
        """Return the deeds with this header or tag that are older than ``index_lag``."""
        with self._lock:
            now = datetime.now(UTC)
            found = [f"deed_{call.number}" for call in self._deeds[key] if _age(call, now) >= self.index_lag]
            self._write(query=key, at=now.isoformat(), found=found)
        return 200, {"deeds": [{"id": each} for each in found]}

    def _behaviour(self, name: str | None, number: int) -> Behaviour:
        for queued in (self._queued[name], self._queued[None]):
            if queued:
                return queued.popleft()
        drawn = hashlib.sha256(json.dumps([self._seed, name, number]).encode()).digest()
        left = int.from_bytes(drawn[:8]) / 2**64
        for behaviour in Behaviour:  # in the order of the class: the order of the arguments does not matter
            left -= self._chances.get(behaviour, 0)
            if left < 0:
                return behaviour
        return Behaviour.NORMAL

    def _act(self, call: Call) -> Reply:
        with self._lock:
            if call.behaviour is Behaviour.ERROR_BEFORE:
                return FAILED
            if not isinstance(call.body, dict):
                return 400, {"error": "Send a JSON object and its Content-Length."}
            now = datetime.now(UTC)
            for deed in self._deeds[call.key]:
                if deed.key == call.key and _age(deed, now) < self.forget_after:
                    same = deed.body == call.body
                    return _reply(deed) if same else (422, {"error": "The key was used with another body."})
            if call.behaviour is Behaviour.REJECT:
                return 402, {"code": "card_declined"}
            self._write(done=call.number, at=now.isoformat())
            self._remember(replace(call, done=now))
            return _reply(call)

    def _remember(self, deed: Call) -> None:
        for name in {deed.key, deed.tag} - {None}:
            self._deeds[name].append(deed)

    def _write(self, *, sync: bool = True, **line: Any) -> None:
        with self._lock:
            self._log.write(json.dumps(line).encode() + b"\n")
            if sync:
                os.fsync(self._log.fileno())


def _age(deed: Call, now: datetime) -> float:
    return (now - (deed.done or now)).total_seconds()


def _reply(deed: Call) -> Reply:
    return FAILED if deed.behaviour is Behaviour.ERROR_AFTER else (201, {"id": f"deed_{deed.number}"})


class _Server(ThreadingHTTPServer):
    request_queue_size = 128

    def __init__(self, port: int, state: _State, parent: int | None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.state = state
        self.parent = parent

    def service_actions(self) -> None:  # called twice a second
        if self.parent not in (None, os.getppid()):
            os._exit(0)  # the test was killed, and nothing else would end this process

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients may hang up
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    wbufsize = -1  # headers and body leave together

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        if len(raw) < length or (reply := self._reply(raw)) is None:  # the client or the provider closes the connection
            return
        content = json.dumps(reply[1]).encode()
        self.send_response(reply[0])
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = _answer  # noqa: N815  # the names that http.server calls

    def _reply(self, raw: bytes) -> Reply | None:
        state, url = self.server.state, urlsplit(self.path)
        try:
            body = json.loads(raw)
        except ValueError:
            body = raw.decode(errors="replace")
        match self.command, url.path:
            case "PUT", "/behaviour":
                try:
                    state.order(body)
                except (ValueError, TypeError) as error:
                    return 400, {"error": str(error)}
                return 200, {}
            case _ if state.down:
                return None
            case "POST", "/deeds":
                return state.post(self.headers.get("Idempotency-Key") or None, body)
            case "GET", "/deeds" if keys := parse_qs(url.query).get("key"):
                return state.get(keys[0])
            case _:
                return 404, {"error": "Try POST /deeds, GET /deeds?key=... or PUT /behaviour."}

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    """Run the provider until it is killed. The first line of its output is its URL."""
    description = "An unreliable payment provider for tests: POST /deeds, GET /deeds?key=..., PUT /behaviour."
    parser = argparse.ArgumentParser("python -m projector_dedup.testing.provider", description=description)
    parser.add_argument("--log", type=Path, required=True, help="file to append calls and deeds to, as JSON lines")
    parser.add_argument("--port", type=int, default=0, help="port of 127.0.0.1 (default: a free one)")
    parser.add_argument("--forget-after", type=float, default=math.inf, help="seconds in which a key is known")
    parser.add_argument("--index-lag", type=float, default=0.0, help="seconds after which GET /deeds finds a deed")
    parser.add_argument("--delay", type=float, default=1.0, help="seconds of answer_late and do_late")
    parser.add_argument("--parent", type=int, help="end when the process with this id is no longer the parent")
    given = parser.parse_args()
    try:
        state = _State(given.log, given.forget_after, given.index_lag, given.delay)
        server = _Server(given.port, state, given.parent)
    except (ValueError, OSError, OverflowError) as error:  # OverflowError: a port that no computer has
        parser.error(str(error))
    sys.stdout.write(f"http://127.0.0.1:{server.server_port}\n")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
