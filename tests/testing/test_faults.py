"""The faults of a schedule happen: a process is killed, a session ends, and the handler runs again where it must."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from databases import Database
from kit_handlers import PAYMENTS, Paid, add, check_of
from projector_dedup import on, projector
from projector_dedup.testing import checking
from projector_dedup.testing.checking import UnusableError, engine_on

HERE, CHILD = "this process", "another"


def ran(path: Path, url: str | Path, fault: str) -> list[str]:
    """Deliver one message with a fault, and return in which processes the handler ran to its end."""

    @projector(idempotent=True, name="notes-its-process")
    class Notes:
        @on(Paid)
        def apply(self, paid: Paid, session: Session) -> None:
            add(paid, session)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{os.getpid()}\n")

    check = check_of(Notes, PAYMENTS[:1], engine=engine_on(url, asynchronous=False))
    assert check.run_one([("deliver", (0,), fault)]) is None
    return [HERE if int(line) == os.getpid() else CHILD for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("fault", "processes"),
    [
        ("killed after the claim", [HERE]),
        ("killed after the flush", [CHILD, HERE]),
        ("killed before COMMIT", [CHILD, HERE]),
        ("killed after COMMIT", [CHILD]),
        ("killed before the acknowledgement", [CHILD]),
    ],
)
def test_a_process_is_killed(fault: str, processes: list[str], tmp_path: Path) -> None:
    """What the killed process has not committed, the next worker applies."""
    assert ran(tmp_path / "ran", tmp_path / "kit.sqlite3", fault) == processes


@pytest.mark.parametrize("engine", ["postgresql", "mariadb"])
@pytest.mark.parametrize("fault", ["connection lost at statement 1 of the handler", "connection lost before COMMIT"])
def test_a_connection_is_lost(fault: str, engine: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The library retries on another one; of the first run, only the file remains."""
    url = request.getfixturevalue(engine).url().render_as_string(hide_password=False)
    runs = ran(tmp_path / "ran", url, fault)
    assert runs == ([HERE] if "statement" in fault else [HERE, HERE])


def test_a_fork_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the test holds a lock when the process is forked: nobody in the fork can release it."""
    monkeypatch.setattr(checking, "LIFETIME", 0.3)
    lock, parent = threading.Lock(), os.getpid()

    @projector(idempotent=True, name="locks")
    class Locks:
        @on(Paid)
        def apply(self, paid: Paid, session: Session) -> None:
            if os.getpid() != parent:
                lock.acquire()
            add(paid, session)

    def check(**arguments: Any) -> None:
        engine = engine_on(tmp_path / "kit.sqlite3", asynchronous=False)
        assert check_of(Locks, PAYMENTS[:1], engine=engine, **arguments).run(1, 0) is None

    with lock:
        with pytest.raises(UnusableError, match="give kills=False"):
            check()
        check(kills=False)


def test_a_pool_of_one_connection_can_lose_it(postgresql: Database) -> None:
    """Another connection ends its session, which is not of the pool."""
    engine = create_engine(postgresql.url(), pool_size=1, max_overflow=0, pool_timeout=1)
    check = check_of(projector(idempotent=True, name="one")(on(Paid)(add)), PAYMENTS[:1], engine=engine)
    assert check.run_one([("deliver", (0,), "connection lost before COMMIT")]) is None
