"""`idempotency cleanup` in cron's hands: its bounds, its signals, and what it says to machines."""

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner
from projector_dedup.cli.main import main
from sqlalchemy import URL, MetaData, create_engine, func, insert, select

from databases import Database
from projector_dedup import make_tables

metadata = MetaData()
tables = make_tables(metadata)


def _fill(url: URL, expired: int) -> str:
    engine = create_engine(url)
    metadata.create_all(engine)
    old = datetime.now(UTC) - timedelta(hours=1000)
    with engine.begin() as connection:
        rows = [{"message_id": str(number), "handler": "h", "processed_at": old} for number in range(expired)]
        if rows:
            connection.execute(insert(tables.marker), rows)
    engine.dispose()
    return url.render_as_string(hide_password=False)


def _left(url: str) -> int:
    engine = create_engine(url)
    with engine.connect() as connection:
        found = connection.scalar(select(func.count()).select_from(tables.marker)) or 0
    engine.dispose()
    return found


def _cleanup(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["cleanup", *arguments])
    return done.exit_code, done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_signal_ends_the_run_after_the_batch(number: signal.Signals, database: Database) -> None:
    """Exit code 0, and a count that is true; it is sent to a real process that rests for a day between batches."""
    url = _fill(database.url(), 30)
    command = [sys.executable, "-u", "-c", _TELLS_OF_BATCHES, "cleanup", "--batch-size", "10", "--pause", "86400"]
    environment = {**os.environ, "PROJECTOR_DEDUP_DATABASE_URL": url}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "batch 10\n"
        process.send_signal(number)
        said, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert said == "Deleted 10 markers older than 168 hours; it was told to stop: more may be left.\n"
    assert _left(url) == 20


_TELLS_OF_BATCHES = """
import contextlib, sys
from projector_dedup.cli import cleanup
from projector_dedup.cli.main import main

@contextlib.contextmanager
def counting(verb):
    yield lambda deleted: print("batch", deleted, file=sys.stderr, flush=True)

cleanup.counting = counting
main()
"""


def test_a_dry_run_deletes_nothing(database: Database) -> None:
    """It says how many would go."""
    url = _fill(database.url(), 7)
    assert _cleanup("--database-url", url, "--dry-run") == (0, "Would delete 7 markers older than 168 hours.\n")
    assert _left(url) == 7


def test_a_handlers_markers_and_bounds(sqlite: Database) -> None:
    """What was left out is said."""
    url = _fill(sqlite.url(), 7)
    young = ("--handler", "h", "--retention-hours", "2000")
    assert _cleanup("--database-url", url, *young) == (0, "Deleted 0 markers of h older than 2000 hours.\n")
    code, said = _cleanup("--database-url", url, "--batch-size", "2", "--max-batches", "2", "--time-budget", "600")
    assert code == 0
    assert said.startswith("Deleted 4 markers older than 168 hours; 2 batches were all")


@pytest.mark.parametrize("dry_run", [False, True], ids=["", "--dry-run"])
def test_a_handler_that_nobody_knows_is_refused(dry_run: bool, database: Database) -> None:
    """A misspelt name deletes nothing and says so, with the command that has the names."""
    url = _fill(database.url(), 7)
    arguments = ["cleanup", "--database-url", url, "--handler", "H", *(["--dry-run"] if dry_run else [])]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1
    assert "no marker of H in " in done.stderr
    assert "look at the spelling; `idempotency stats` has the names" in done.stderr
    assert done.stdout == ""
    assert _left(url) == 7


def test_a_line_of_json(sqlite: Database) -> None:
    """Also for a run that failed, without its password; the exit code tells as well."""
    url = _fill(sqlite.url(), 7)
    code, said = _cleanup("--database-url", url, "--log-json")
    good = json.loads(said)
    assert (code, good.pop("seconds") >= 0) == (0, True)
    assert good == {"event": "cleanup", "deployment": url, "deleted": 7, "complete": True}
    bad = "postgresql+psycopg://app:s3cret@127.0.0.1:1/orders"
    code, said = _cleanup("--database-url", bad, "--log-json")
    failed = json.loads(said)
    assert code == 1
    assert (failed["event"], failed["deployment"]) == ("cleanup", bad.replace("s3cret", "***"))
    assert "no connection" in failed["error"]
    assert "s3cret" not in said


@pytest.mark.parametrize(
    "arguments",
    [
        *(("--retention-hours", hours) for hours in ("0", "-1", "nan", "inf", "999999999")),
        *(("--batch-size", size) for size in ("0", "-1")),
        *(("--max-batches", number) for number in ("0", "-1")),
        *(("--time-budget", seconds) for seconds in ("0", "-1", "nan", "inf")),
        *(("--pause", seconds) for seconds in ("-1", "nan", "inf")),
    ],
    ids=" ".join,
)
def test_a_bound_that_cannot_be_meant_is_a_usage_error(arguments: Any) -> None:
    """Exit code 2, before anything is connected to."""
    assert _cleanup("--database-url", "sqlite:///x.db", *arguments)[0] == 2
