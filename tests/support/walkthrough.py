"""Runs the steps of a page as a reader does: copies its files into an empty folder, and types its commands."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from kit import PATIENCE

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w./-]+\.\w+)\n")
NOT_TYPED = ("python -m venv ", ". .venv/bin/activate", "pip install ", "docker compose up ", "sudo ")
"""Commands that prepare the machine. The test's own environment takes their place."""
POLLS = ("python accounts.py", "idempotency dead payments:consumer list", "curl ")
"""Commands that a reader repeats until what runs in the background is done."""


@dataclass
class Step:
    """A file to copy, or a command to type and what it prints."""

    file: str = ""
    text: str = ""
    command: str = ""
    printed: list[str] = field(default_factory=list)


def steps_of(page: str) -> Iterator[Step]:
    """Yield the steps of a page: blocks that begin with the name of a file, and the lines of ``console`` blocks."""
    for language, text in _BLOCK.findall(page):
        if named := _FILE.match(text):
            yield Step(file=named[1], text=text)
        elif language == "console":
            commands: list[Step] = []
            for line in text.splitlines():
                if line.startswith("$ "):
                    commands.append(Step(command=line.removeprefix("$ ")))
                else:
                    commands[-1].printed.append(line)
            yield from commands


@contextmanager
def shell(folder: Path) -> Iterator["Shell"]:
    """Yield a shell in ``folder``, with the programs of this environment; what it started ends with it."""
    running = Shell(folder)
    try:
        yield running
    finally:
        running.close()


class Shell:
    """One bash, so that variables and background processes last from one command to the next."""

    def __init__(self, folder: Path) -> None:
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.folder = folder
        self._errors = (folder / "stderr.txt").open("w+", encoding="utf-8")
        self._bash = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            env={**os.environ, "PATH": programs, "PYTHONPATH": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def run(self, command: str) -> tuple[str, int]:
        """Return what a command printed, and its exit code."""
        given, printed = _pipes(self._bash)
        given.write(f"{command}\ncode=$?; echo; echo --done-- $code\n")
        given.flush()
        lines: list[str] = []
        for line in printed:
            if line.startswith("--done-- "):
                return "".join(lines).removesuffix("\n"), int(line.split()[1])
            lines.append(line)
        raise AssertionError(f"the shell ended in: {command}")

    def errors(self) -> str:
        """Return what was printed on stderr so far."""
        self._errors.seek(0)
        return self._errors.read()

    def close(self) -> None:
        """End the shell, and whatever still runs in its background."""
        given, printed = _pipes(self._bash)
        given.write("kill $(jobs -p) 2>/dev/null; wait\n")
        given.close()
        try:
            self._bash.wait(PATIENCE)
        finally:
            self._bash.kill()
            self._bash.wait()
            printed.close()
            self._errors.close()


def _pipes(bash: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert bash.stdin is not None
    assert bash.stdout is not None
    return bash.stdin, bash.stdout


def matches(printed: str, promised: list[str]) -> bool:
    """True if a page promises this output: "..." stands for any text, and durations and white space do not count."""
    pattern = re.escape(" ".join(" ".join(promised).split())).replace(r"\.\.\.", ".*")
    pattern = re.sub(r"in\\ [\d]+\\\.\d+s", r"in\\ .*s(\\ \\([\\d:]+\\))?", pattern)  # pytest also writes (0:01:02)
    return re.fullmatch(pattern, " ".join(printed.split()), re.DOTALL) is not None


def walk(page: str, folder: Path, replaced: Mapping[str, str]) -> list[str]:
    """Do each step of a page in an empty folder; return the commands that were run.

    ``replaced`` has the texts of the page's files that are this machine's affair, such as the URLs of servers.
    Raises ``AssertionError`` for a command that fails, or that prints something else than the page says.
    """
    typed = []
    with shell(folder) as bash:
        for step in steps_of(page):
            if step.file:
                text = step.text
                for old, new in replaced.items():
                    text = text.replace(old, new)
                path = folder / step.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            elif not step.command.startswith(NOT_TYPED):
                _type(bash, step)
                typed.append(step.command)
    return typed


def _type(bash: Shell, step: Step) -> None:
    deadline = time.monotonic() + (2 * PATIENCE if step.command.startswith(POLLS) else 0)
    while True:
        printed, code = bash.run(step.command)
        fails = any(" failed in " in line for line in step.printed)
        if (code != 0) is fails and (not step.printed or matches(printed, step.printed)):
            return
        assert time.monotonic() < deadline, f"$ {step.command}\n{printed}\nexit code {code}\n{bash.errors()}"
        time.sleep(0.2)
