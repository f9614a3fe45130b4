"""What docs/operations.md and the runbook tell an operator to type or to write is run as it stands there."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, create_engine, insert, select, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, sessionmaker

from databases import Database
from marked import fill, left
from projector_dedup import Dispatcher, Outcome, make_tables, on, projector
from projector_dedup.dialects import configure_sqlite

ROOT = Path(__file__).parents[2]
metadata = MetaData()
tables = make_tables(metadata)
totals = Table("totals", metadata, Column("amount", Integer))


@projector(idempotent=True, name="totals.add")
@on(dict)
def add(event: dict[str, int], session: Session) -> None:
    """Add the amount of the event."""
    session.execute(update(totals).values(amount=totals.c.amount + event["amount"]))


def _block(section: str, language: str) -> str:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    found = re.search(rf"^### {section}\n(?:(?!^### ).*\n)*?^```{language}\n((?:.*\n)*?)^```", text, re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_line_of_the_crontab_works_as_cron_runs_it(sqlite: Database, tmp_path: Path) -> None:
    """With cron's PATH and nothing else in the environment, the command alone deletes what is old."""
    engine = create_engine(sqlite.url())
    fill(engine, [400] * 5 + [0] * 2)
    fields = re.fullmatch(r"(?:[\d*]+ +){5}app +(.*)\n", _block("cron", "text"))
    assert fields is not None
    assert "%" not in fields[1]
    settings = tmp_path / "env"
    url = sqlite.url().render_as_string(hide_password=False)
    settings.write_text(f"export PROJECTOR_DEDUP_DATABASE_URL='{url}'\n")
    line = (
        fields[1]
        .replace("/etc/myapp/env", str(settings))
        .replace("/opt/myapp/venv/bin", str(Path(sys.executable).parent))
    )
    cron = ["env", "-i", "PATH=/usr/bin:/bin", "sh", "-c", line]
    done = subprocess.run(cron, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["deleted"] == 5
    assert len(left(engine)) == 2
    engine.dispose()


class Rounds(Event):
    """An event that is set after so many waits, which take no time; before each a step is taken."""

    def __init__(self, *steps: Any) -> None:
        super().__init__()
        self.steps = list(steps)

    def wait(self, timeout: float | None = None) -> bool:
        """Take the next step; after the last one the event is set."""
        assert timeout is not None
        assert 1800 <= timeout <= 5400
        if not self.steps:
            return True
        self.steps.pop(0)()
        return False


def _keep_pruned() -> Any:
    names: dict[str, Any] = {"__name__": "worker"}
    exec(_block("A thread of the worker", "python"), names)
    return names["keep_pruned"]


def test_a_worker_prunes_by_a_timer_of_its_own(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    """A round that fails is logged, and the next one deletes what is old; the young markers stay."""
    engine = create_engine(database.url())
    rounds = Rounds(lambda: None, lambda: fill(engine, [400] * 5 + [0] * 2))
    with caplog.at_level(logging.ERROR, "worker"):
        _keep_pruned()(engine, rounds)
    (record,) = caplog.records
    assert "is missing" in str(record.exc_info and record.exc_info[1])
    assert len(left(engine)) == 2
    engine.dispose()


def test_the_timer_of_a_worker_ends_with_it(sqlite: Database) -> None:
    """In a thread, an event that is set ends it although an hour has not passed."""
    engine, stop = create_engine(sqlite.url()), Event()
    pruning = Thread(target=_keep_pruned(), args=(engine, stop), daemon=True)
    pruning.start()
    stop.set()
    pruning.join(60)
    assert not pruning.is_alive()
    engine.dispose()


@pytest.mark.parametrize("write_ahead", [True, False], ids=["write-ahead log", "rollback journal"])
def test_a_file_that_is_deleted_while_it_is_open(write_ahead: bool, sqlite: Database) -> None:
    """With a write-ahead log "applied" is said of what nobody will find; with a rollback journal SQLite refuses."""
    path = Path(sqlite.url().database or "")
    engine = create_engine(sqlite.url())
    if write_ahead:
        configure_sqlite(engine)
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(totals), {"amount": 0})
    dispatcher = Dispatcher(sessionmaker(engine), add)
    assert dispatcher.deliver({"amount": 1}, message_id="1").outcome is Outcome.APPLIED
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    if write_ahead:
        assert dispatcher.deliver({"amount": 2}, message_id="2").outcome is Outcome.APPLIED
    else:
        with pytest.raises(OperationalError, match="readonly"):
            dispatcher.deliver({"amount": 2}, message_id="2")
    engine.dispose()
    restored = create_engine(sqlite.url())
    with restored.connect() as connection, pytest.raises(OperationalError, match="no such table"):
        connection.execute(select(totals))
    restored.dispose()
