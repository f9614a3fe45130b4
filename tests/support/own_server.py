"""A broker of a test's own, with its port and its folder, that is killed and started again."""

import contextlib
import shutil
import socket
import subprocess
import time
from pathlib import Path

from projector_dedup.testing.provider import free_port
from reached import reached


class OwnServer:
    """A program that listens on a port; in its arguments `{port}` and `{folder}` are filled in."""

    def __init__(self, name: str, program: str, folder: Path, *arguments: str) -> None:
        found = shutil.which(program)
        if found is None:
            reached.give_up(name, program, f"{program} is not installed")
        self.port = free_port()
        self._command = [found, *(each.format(port=self.port, folder=folder) for each in arguments)]
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and return when it listens."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill it, which it can do nothing about; what it has told the disk stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def own_redis(folder: Path) -> OwnServer:
    """A Redis that keeps on disk what it has confirmed; not started yet."""
    persistent = ["--port", "{port}", "--dir", "{folder}", "--appendonly", "yes", "--appendfsync", "always"]
    return OwnServer("redis", "redis-server", folder, *persistent)
