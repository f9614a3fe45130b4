"""What the command prints: no text of a message, a handler or a server acts on a terminal or forges a line."""

import json
import subprocess
from pathlib import Path

import pytest
from sqlalchemy import create_engine, insert
from sqlalchemy.orm import sessionmaker

from command import COMMAND, idempotency, surroundings
from databases import Database
from marked import metadata, tables
from projector_dedup.commands import Call, Commands, command, default_command_tables

EVIL = "a\u202eb\x9b2J\x1b[31m\u2028c\U000e0001d"
"""Turns the line round, clears the screen, colours it, ends it, and hides a letter."""


def acts(text: str) -> list[str]:
    """The characters on which a terminal would act."""
    return [each for each in text if not each.isprintable() and each != "\n"]


@pytest.fixture
def url(sqlite: Database) -> str:
    """A database with a marker of an evil message and an evil handler, and an evil result of a command."""
    url = sqlite.url().render_as_string()
    engine = create_engine(url)
    metadata.create_all(engine)
    default_command_tables.marker.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(tables.marker).values(message_id=EVIL, handler=EVIL))

    @command(name="evil")
    def evil(_: str, _call: Call) -> dict[str, str]:
        return {EVIL: EVIL}

    Commands(sessionmaker(engine)).handle(evil, "x", key=EVIL)
    engine.dispose()
    return url


def test_json_has_nothing_on_which_a_terminal_acts(url: str) -> None:
    """It says the same as before to a program that reads it."""
    answers = []
    for arguments in (["show", EVIL], ["show", EVIL, "--commands", "--result"]):
        done = idempotency(*arguments, "--json", "--database-url", url)
        assert acts(done.stdout) == []
        answers.append(json.loads(done.stdout))
    marker, record = answers
    assert marker["message_id"] == marker["markers"][0]["handler"] == record["key"] == EVIL
    assert record["records"][0]["result"] == {EVIL: EVIL}


def test_text_has_nothing_on_which_a_terminal_acts(url: str, tmp_path: Path) -> None:
    """Neither names in the tables nor the text of an error of the application."""
    (tmp_path / "evil.py").write_text(f"raise ValueError({EVIL!r} + '\\nError: forged')")
    for arguments in (
        ["show", EVIL],
        ["show", EVIL + "x"],
        ["show", EVIL, "--commands", "--result"],
        ["check"],
        ["check", "--app", "evil:app"],
        ["check", "--app", "evil:app", "--debug"],
        ["check", "--table", EVIL],
        ["rename", EVIL, "y"],
        ["rename", EVIL, EVIL + "x", "--dry-run"],
        ["cleanup", "--handler", EVIL + "x"],
        ["cleanup", "--database-url", f"{EVIL}://x", "--debug"],
    ):
        given = [] if "--database-url" in arguments else ["--database-url", url]
        done = idempotency(*arguments, *given, cwd=str(tmp_path))
        assert acts(done.stdout + done.stderr) == [], arguments
        assert [line for line in done.stderr.splitlines() if line.startswith("Error: forged")] == []


def test_a_stored_json_result_is_printed_as_json(url: str) -> None:
    """A program may read what `--result` prints, whatever is in it."""
    done = idempotency("show", EVIL, "--commands", "--result", "--database-url", url)
    assert json.loads(done.stdout.partition("Stored by evil:\n")[2]) == {EVIL: EVIL}


@pytest.mark.parametrize(
    ("arguments", "closed", "code"),
    [
        (("check",), ">&-", 0),
        (("show", "missing"), "2>&-", 1),
        (("forget", "x"), "<&-", 2),
        (("check", "--json"), "<&- >&- 2>&-", 0),
    ],
    ids=["stdout", "stderr", "stdin", "all"],
)
def test_a_closed_stream_is_like_dev_null(url: str, arguments: tuple[str, ...], closed: str, code: int) -> None:
    """The command does its work, and its exit code is that of the work; an open stream says the same as ever."""
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *COMMAND, *arguments, "--database-url", url]
    done = subprocess.run(shell, capture_output=True, text=True, env=surroundings(), check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert ("there is no terminal to ask" in done.stderr) is (closed == "<&-")
    assert "unexpected" not in done.stderr
