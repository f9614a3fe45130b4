"""`python -m` in a process of its own, forked from one that has imported SQLAlchemy and Alembic already.

To start Python and import those is most of what a command takes, half a second of a processor, hundreds of times a run.
What a test sees is its own in a fork as well: streams, environment, folder, exit code, and the library, which is
imported anew. That it starts from nothing is the business of the tests that use `subprocess`: the wheel, the demo,
the signals, the README.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# None of ours, and no driver: which of these is imported, and when, is for the tests to find out.
PRELOADED = (
    *("sqlalchemy.orm", "sqlalchemy.ext.asyncio", "alembic.command", "alembic.config", "click", "rich.console"),
    *(f"sqlalchemy.dialects.{name}" for name in ("mysql", "postgresql", "sqlite")),
)


class Starter:
    """Our end: it starts the process that is forked when the first command is asked for, and ends it with ours."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._there: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def wait_for(
        self, module: str, *arguments: str, safe_path: bool, env: Mapping[str, str], cwd: str, streams: list[int]
    ) -> int:
        """Run `python -m module` on three file descriptors; its exit code, negative for a signal."""
        with self._one_at_a_time:
            _, line = self._there = self._there or _start()
            request = [module, arguments, safe_path, dict(env), cwd]
            try:
                socket.send_fds(line, [b"!"], streams)
                line.sendall(json.dumps(request).encode() + b"\n")
                return int(line.makefile().readline())
            except BaseException:
                self.end()  # else the next one would get this one's answer
                raise

    def end(self) -> None:
        """End the server process, and a command that is under way."""
        if self._there is not None:
            process, line = self._there
            self._there = None
            line.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with process:  # closes its streams
                pass


def _start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return process, ours


STARTER = Starter()
atexit.register(STARTER.end)


def run_module(
    module: str,
    *arguments: str | Path,
    safe_path: bool = False,
    env: Mapping[str, str] = os.environ,
    cwd: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module` in a forked process; with `safe_path`, as `python -P -m` does.

    It returns what `subprocess.run(..., capture_output=True, text=True)` would return.
    """
    words = [str(argument) for argument in arguments]
    with open(os.devnull) as nothing, ThreadPoolExecutor(2) as readers:
        pipes = [os.pipe(), os.pipe()]
        said = [readers.submit(_read, ours) for ours, _ in pipes]
        try:
            streams = [nothing.fileno(), *(theirs for _, theirs in pipes)]
            folder = os.path.abspath(cwd or ".")  # ours, whichever it is by now
            code = STARTER.wait_for(module, *words, safe_path=safe_path, env=env, cwd=folder, streams=streams)
        finally:
            for _, theirs in pipes:
                os.close(theirs)
        return subprocess.CompletedProcess([module, *words], code, *(each.result() for each in said))


def _read(descriptor: int) -> str:
    with open(descriptor) as stream:
        return stream.read()


# The other end ------------------------------------------------------------------------------------------------------


def _forks(line: socket.socket) -> Iterator[tuple[str, list[str], bool]]:
    """Fork for each request; yields in the child only, which is what was asked for by then."""
    while True:
        mark, streams, *_ = socket.recv_fds(line, 1, 3)
        if not mark:
            return
        module, arguments, safe_path, environment, folder = json.loads(line.makefile().readline())
        if (child := os.fork()) == 0:
            line.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
            for text in (sys.stdout, sys.stderr):
                text.reconfigure(line_buffering=text.isatty() or text is sys.stderr)  # type: ignore[union-attr]
            yield module, arguments, safe_path
            return
        for stream in streams:
            os.close(stream)
        line.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _main() -> None:
    line = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            __import__(name)
    gc.freeze()
    for module, arguments, safe_path in _forks(line):
        sys.argv = [module, *arguments]
        added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [*([] if safe_path else [os.getcwd()]), *filter(None, added)]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
