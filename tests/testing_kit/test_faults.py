"""The faults of a schedule happen: a process is killed, a session ends, and the handler runs again where it must."""

import os
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from kit_handlers import PAYMENTS, Base, Paid, add, read_sums, sums
from projector_dedup import on, projector
from projector_dedup.testing.checking import engine_on
from projector_dedup.testing.exactly_once import ProjectorCheck

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

    check = ProjectorCheck(
        Notes,
        PAYMENTS[:1],
        expected=sums,
        read=read_sums,
        engine=engine_on(url, asynchronous=False),
        metadata=Base.metadata,
    )
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
