"""The command `idempotency`, as a user runs it: in a pipe, or on a terminal."""

import contextlib
import os
import pty
import subprocess
import sys

from forked import run_module

COMMAND = [sys.executable, "-P", "-m", "projector_dedup"]  # -P: no current directory, as in a script


def surroundings(**environment: str) -> dict[str, str]:
    """Return the environment of this process, without variables that configure the command or its colours."""
    ours = ("PROJECTOR_DEDUP", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | environment


def importing(**environment: str) -> dict[str, str]:
    """Return the environment of this process, in which another one finds the modules that this one can import."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}


def idempotency(*arguments: str, cwd: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a pipe; no variable of this process configures it."""
    return run_module("projector_dedup", *arguments, safe_path=True, env=surroundings(**environment), cwd=cwd)


def on_a_terminal(*arguments: str, types: str = "", **environment: str) -> tuple[int, str]:
    """Run the command on a terminal of 80 columns where somebody ``types``; its exit code and what is seen."""
    ours, its = pty.openpty()
    surrounded = surroundings(TERM="xterm-256color", COLUMNS="80", LINES="40", **environment)
    with subprocess.Popen([*COMMAND, *arguments], env=surrounded, stdin=its, stdout=its, stderr=its) as process:
        os.close(its)
        os.write(ours, types.encode())
        seen = b""
        with contextlib.suppress(OSError):  # Linux's way to say that nobody has it open any more
            while some := os.read(ours, 4096):
                seen += some
    os.close(ours)
    return process.returncode, seen.decode().replace("\r\n", "\n")
