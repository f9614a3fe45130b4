"""The command on a terminal: lines break between words; the last line says what is next."""

import re
from datetime import UTC, datetime

import pytest
from sqlalchemy import create_engine, update

from command import idempotency, on_a_terminal
from databases import Database
from marked import fill, metadata, one_of_each_engine, tables, url_of  # noqa: F401  # a fixture
from projector_dedup.maintenance.cleanup import cleanup, declare_horizon

pytestmark = pytest.mark.slow


def _next(*command: str) -> str:
    """The last line of a command, which begins with "Next: "."""
    last = idempotency(*command).stdout.splitlines()[-1]
    assert last.startswith("Next: ")
    return last


def test_what_is_next(sqlite: Database) -> None:
    """`check` leads from empty tables to a cleanup that runs by itself, and then says so."""
    url = sqlite.url().render_as_string()
    engine = create_engine(url)
    open(sqlite.url().database or "", "a").close()
    assert "solve each problem above" in _next("check", "--database-url", url)
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = wal")
    assert "`idempotency horizon HOURS`" in _next("check", "--database-url", url)
    declare_horizon(engine, 100)
    assert "put `idempotency cleanup` into cron" in _next("check", "--database-url", url)
    cleanup(engine)
    assert "nothing. Run this after each deploy" in _next("check", "--database-url", url)
    fill(engine, [130])
    with engine.begin() as connection:
        connection.execute(update(tables.marker).values(occurred_at=datetime.now(UTC)))  # else that is advised
    assert "run `idempotency cleanup` to delete expired markers" in _next("check", "--database-url", url)
    fill(engine, {"another": [1000]})
    assert "follow the advice above" in _next("check", "--database-url", url)
    engine.dispose()


def test_long_lines_break_between_words(sqlite: Database) -> None:
    """On a terminal of 80 columns no line is longer, and no word is cut; in a pipe each stays in one line."""
    url = sqlite.url().render_as_string()
    open(sqlite.url().database or "", "a").close()
    for command in (["check"], ["show", "x"]):
        piped = idempotency(*command, "--database-url", url)
        code, seen = on_a_terminal(*command, "--database-url", url, NO_COLOR="1")
        assert code == piped.returncode == 1
        assert sorted(seen.split()) == sorted((piped.stdout + piped.stderr).split())
        words = {word for word in seen.split() if len(word) > 60}  # the path of the file
        assert [line for line in seen.splitlines() if len(line) > 80 and not words & set(line.split())] == []
        assert len(piped.stderr.splitlines()) == 1
        assert len(seen.splitlines()) > 2


def test_a_table_fits_a_terminal_of_80_columns(sqlite: Database) -> None:
    """No line is longer, whatever the handlers are called, and nothing of the names is cut off."""
    engine = create_engine(sqlite.url())
    name = "".join(f"part{number}." for number in range(20))
    fill(engine, {name: [1], "a.add": [1]})
    engine.dispose()
    code, seen = on_a_terminal("show", "0", "--database-url", sqlite.url().render_as_string(), NO_COLOR="1")
    assert code == 0
    seen = re.sub(r"\x1b\[\d*m", "", seen)
    drawn = seen[seen.index(" handler") :].splitlines()
    assert max(map(len, drawn)) <= 80
    width = drawn[0].index("processed")
    assert "".join(line[:width].strip() for line in drawn[2:]).replace("a.add", "") == name
