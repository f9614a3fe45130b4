"""Processes that a proof kills, forked from one that has imported what they need; and how bank and mail service lie.

Only the standard library, since environments of other libraries import it, too.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

LIES = {
    "lose_reply_before": 0.03,
    "lose_reply_after": 0.04,
    "answer_late": 0.02,
    "do_late": 0.02,
    "error_before": 0.03,
    "error_after": 0.01,
}


@contextlib.contextmanager
def starting(
    *arguments: str, said: Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator[Callable[[str], int]]:
    """Start a Python that calls ``serve``, whose errors go to ``said``.

    Within the block, the function tells it what a new process shall be, and returns the number of that process. All of
    them end with the block.
    """
    with (
        said.open("wb") as output,
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
        ) as parent,
    ):
        assert parent.stdin is not None
        assert parent.stdout is not None
        to, of = parent.stdin, parent.stdout

        def start(what: str) -> int:
            to.write(f"{what}\n".encode())
            to.flush()
            return int(of.readline())

        yield start


def serve(work: Callable[[str], None]) -> None:
    """Fork a process for each line of the input, which does this work; when the input ends, kill all."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            work(line.strip())
            os._exit(0)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
    os.killpg(0, signal.SIGKILL)
