"""A user's editor and type checker see the public API as it is."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
APIS = [str(ROOT / "tests" / "support" / name) for name in ("typed_api.py", "typed_commands.py")]
"""What is right: `make types` has mypy read it."""

WRONG = """
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker

from projector_dedup.commands import AsyncCommands, Commands
from typed_commands import Place, place, place_later


async def wrong() -> None:
    Commands(sessionmaker()).handle(place, "no command", key="k")
    Commands(sessionmaker()).handle(place_later, Place(1), key="k")
    await AsyncCommands(async_sessionmaker()).handle(place, Place(1), key="k")
"""


MISTAKES = """
from collections.abc import Sequence

from projector_dedup import AsyncDispatcher, Dispatcher, Message, on, projector
from projector_dedup.options import RetryPolicy
from projector_dedup.commands import Call, command
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker


class Paid: ...


class Refunded: ...


@projector(idempotent=True, name="mistakes")
class Mistakes:
    @on(Paid)  # wrong event class
    def wrong_event(self, event: Refunded, session: Session) -> None: ...

    @on(Paid)  # no session parameter
    def no_session(self, event: Paid) -> None: ...

    @on(Paid)  # parameters swapped
    def swapped(self, session: Session, event: Paid) -> None: ...

    @on("paid")  # parameters swapped, the event has a name
    def swapped_name(self, session: Session, event: Message) -> None: ...

    @on(Paid, batch=True)  # single event with batch=True
    def single(self, event: Paid, session: Session) -> None: ...

    @on("paid", batch=True)  # single event with batch=True, by name
    def single_name(self, event: Paid, session: Session) -> None: ...

    @on(Paid, batch=True)  # a batch of other events
    def other_batch(self, events: list[Refunded], session: Session) -> None: ...

    @on(Paid, Refunded)  # one of two events
    def one_of_two(self, event: Paid, session: Session) -> None: ...

    @on(Paid, envelope=True)  # the body instead of the message
    def no_envelope(self, event: Paid, session: Session) -> None: ...

    @on(Paid, envelope=True, batch=True)  # the bodies instead of the messages
    def no_envelopes(self, events: Sequence[Paid], session: Session) -> None: ...

    @on(Paid)  # something else than a session
    def no_session_at_all(self, event: Paid, session: int) -> None: ...

    @on(Paid)  # a result, which nobody gets
    def returns(self, event: Paid, session: Session) -> int: ...

    @on(Paid)
    def right(self, event: Paid, session: Session) -> None: ...


@projector(idempotent=True, identity="other")  # an unknown option of @projector
class Other: ...


@on(Paid)  # a function without a session
def function(event: Paid) -> None: ...


@on(Paid)  # a function with its parameters swapped
def swapped(session: Session, event: Paid) -> None: ...


@on(17)  # no event
def seventeen(event: int, session: Session) -> None: ...


@on(Paid, batches=True)  # an unknown option of @on
def unknown(event: Paid, session: Session) -> None: ...


@command  # no parentheses
def bare(asked: Paid, call: Call) -> int: ...


@command("credit")  # a name without name=
def named(asked: Paid, call: Call) -> int: ...


def dispatchers(engine: Engine, sync: sessionmaker[Session], later: async_sessionmaker[AsyncSession]) -> None:
    Dispatcher(engine, Mistakes())  # an Engine as factory
    AsyncDispatcher(sync, Mistakes())  # a sync factory for async
    Dispatcher(later, Mistakes())  # an async factory for sync
    Dispatcher(sync(), Mistakes())  # a session as factory
    Dispatcher(sync, Mistakes(), message_id=17)  # message_id=17
    Dispatcher(sync, Mistakes(), retries=3)  # an unknown option
    Dispatcher(sync, Mistakes()).deliver(Paid(), message_id=17)  # a number as id
    Dispatcher(sync, Mistakes(), retry=RetryPolicy(attempts=3))
    AsyncDispatcher(later, Mistakes())
"""


def _mistakes_at(lines: list[int]) -> dict[int, str]:
    """The comments of the lines with errors; an error in the line below a decorator is the decorator's."""
    texts = MISTAKES.split("\n")
    found = {number if "  # " in texts[number - 1] else number - 1 for number in lines}
    return {number: texts[number - 1].partition("  # ")[2] for number in found}


ALL_MISTAKES = {
    number: line.partition("  # ")[2] for number, line in enumerate(MISTAKES.split("\n"), 1) if "  # " in line
}
WRONG_COMMANDS = [number for number, line in enumerate(WRONG.split("\n"), 1) if ".handle(" in line]


def _run(*arguments: str) -> str:
    environment = {**os.environ, "MYPYPATH": str(ROOT / "tests" / "support")}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment).stdout


def test_mypy_sees_every_mistake(tmp_path: Path) -> None:
    """And nothing else: each in its own line, without naming a private class; commands of another type or kind too."""
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    (tmp_path / "wrong.py").write_text(WRONG)
    said = _run("mypy", "--strict", "--no-error-summary", str(tmp_path / "mistakes.py"), str(tmp_path / "wrong.py"))
    lines = {
        name: [int(line) for line in re.findall(rf"{name}\.py:(\d+): error", said)] for name in ("mistakes", "wrong")
    }
    assert _mistakes_at(lines["mistakes"]) == ALL_MISTAKES, said
    assert sorted(set(lines["wrong"])) == WRONG_COMMANDS, said
    assert not re.search(r"\b_[A-Z][a-z]", said), said


def test_pyright_sees_every_mistake_and_no_other(tmp_path: Path) -> None:
    """The checker that most editors use agrees with every assert_type; the library's own types are complete for it."""
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    said = _run(*("basedpyright", "--outputjson", "--pythonpath", sys.executable), str(tmp_path / "mistakes.py"), *APIS)
    errors = [entry for entry in json.loads(said)["generalDiagnostics"] if entry["severity"] == "error"]
    assert {Path(entry["file"]).name for entry in errors} == {"mistakes.py"}, errors
    assert _mistakes_at([entry["range"]["start"]["line"] + 1 for entry in errors]) == ALL_MISTAKES, errors
    assert not re.search(r"\b_[A-Z][a-z]", " ".join(entry["message"] for entry in errors)), errors
