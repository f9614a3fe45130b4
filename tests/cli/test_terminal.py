"""The command on a terminal: lines break between words, statistics are drawn anew; the last line says what is next."""

import os
import pty
import re
import signal
import subprocess
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import URL, Engine, MetaData, create_engine, insert

from command import COMMAND, idempotency, on_a_terminal, surroundings
from databases import Database
from projector_dedup import make_tables
from projector_dedup.maintenance.cleanup import cleanup
from projector_dedup.maintenance.horizon import declare_horizon

pytestmark = pytest.mark.slow

metadata = MetaData()
tables = make_tables(metadata)


@pytest.fixture(name="sync_url")
def one_url_of_each_engine(database: Database) -> URL:
    """What these tests are about does not depend on the driver."""
    return database.url()


def _mark(engine: Engine, message_id: str, hours: float = 0) -> None:
    at = datetime.now(UTC) - timedelta(hours=hours)
    with engine.begin() as connection:
        connection.execute(insert(tables.marker), {"message_id": message_id, "handler": "h", "processed_at": at})


def _next(*command: str) -> str:
    """The last line of a command, which begins with "Next: "."""
    last = idempotency(*command).stdout.splitlines()[-1]
    assert last.startswith("Next: ")
    return last


def test_what_is_next(sqlite: Database) -> None:
    """`check` and `stats` lead from empty tables to a cleanup that runs by itself, and then say so."""
    url = sqlite.url().render_as_string()
    engine = create_engine(url)
    open(sqlite.url().database or "", "a").close()
    assert "solve what is called a problem above" in _next("check", "--database-url", url)
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = wal")
    for command in ("check", "stats"):
        assert "`idempotency horizon HOURS`" in _next(command, "--database-url", url)
    declare_horizon(engine, 100)
    for command in ("check", "stats"):
        assert "put `idempotency cleanup` into cron" in _next(command, "--database-url", url)
    cleanup(engine)
    assert "nothing. Run this after each deploy" in _next("check", "--database-url", url)
    assert "nothing. `idempotency check`" in _next("stats", "--database-url", url)
    _mark(engine, "1", hours=169)
    for command in ("check", "stats"):
        assert "`idempotency cleanup` deletes what has expired" in _next(command, "--database-url", url)
    _mark(engine, "2", hours=1000)
    assert "follow the advice above" in _next("check", "--database-url", url)
    engine.dispose()


def test_statistics_of_tables_that_a_migration_of_ones_own_made(engine: Engine) -> None:
    """That no schema version is recorded is nothing wrong, and the line says so."""
    metadata.create_all(engine)
    done = idempotency("stats", "--database-url", engine.url.render_as_string(hide_password=False))
    assert re.search(r"schema version +not recorded \(fine: idempotency did not make the tables\)", done.stdout)


def test_long_lines_break_between_words(sqlite: Database) -> None:
    """On a terminal of 80 columns no line is longer, and no word is cut; in a pipe each stays in one line."""
    url = sqlite.url().render_as_string()
    open(sqlite.url().database or "", "a").close()
    for command in (["check"], ["stats"], ["show", "x"]):
        piped = idempotency(*command, "--database-url", url)
        code, seen = on_a_terminal(*command, "--database-url", url, NO_COLOR="1")
        assert code == piped.returncode == 1
        assert sorted(seen.split()) == sorted((piped.stdout + piped.stderr).split())
        words = {word for word in seen.split() if len(word) > 60}  # the path of the file
        assert [line for line in seen.splitlines() if len(line) > 80 and not words & set(line.split())] == []
        assert len(piped.stderr.splitlines()) == 1
        assert len(seen.splitlines()) > 2


def _watching(url: str, *, stdout: int, **environment: str) -> subprocess.Popen[bytes]:
    surrounded = surroundings(PYTHONUNBUFFERED="1", **environment)
    command = [*COMMAND, "stats", "--watch", "0.1", "--database-url", url]
    return subprocess.Popen(command, env=surrounded, stdout=stdout, stderr=subprocess.PIPE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_watch_in_a_pipe_says_a_line_for_each_look(number: signal.Signals, engine: Engine) -> None:
    """A marker that is written meanwhile is counted by a later look; a signal ends it, exit code 0."""
    metadata.create_all(engine)
    url = engine.url.render_as_string(hide_password=False)
    with _watching(url, stdout=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        assert b": 0 markers, newest -, 0 expired\n" in watching.stdout.readline()
        _mark(engine, "1", hours=200)
        for line in watching.stdout:
            if b": 1 marker, newest " in line:
                break
        assert line.endswith(b"ago), 1 expired\n")
        watching.send_signal(number)
        watching.stdout.read()
        assert (watching.wait(), watching.stderr.read()) == (0, b"")


def test_a_watch_on_a_terminal_draws_anew(sqlite: Database) -> None:
    """The screen is cleared before each look, and shows all that `stats` shows."""
    engine = create_engine(sqlite.url())
    metadata.create_all(engine)
    ours, its = pty.openpty()
    with _watching(sqlite.url().render_as_string(), stdout=its, TERM="xterm-256color", COLUMNS="80") as watching:
        os.close(its)
        seen = b""
        while seen.count(b"Ctrl-C ends.") < 2:
            seen += os.read(ours, 4096)
        watching.send_signal(signal.SIGINT)
        assert watching.wait() == 0
    os.close(ours)
    engine.dispose()
    before, first, second = seen.split(b"\x1b[2J")[:3]
    assert before == b""
    for look in (first, second):
        assert b"cleanup would delete" in look
        assert b"Next: " in look


def test_a_watch_has_no_end_and_json_has_one() -> None:
    """Both at once are a wrong command line."""
    done = idempotency("stats", "--watch", "--json", "--database-url", "sqlite:///x.db")
    assert done.returncode == 2
    assert "exclude each other" in done.stderr
