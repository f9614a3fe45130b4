"""The pytest plugin: its fixtures in runs of pytest of their own."""

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import create_engine, text

from databases import Database
from projector_dedup.testing.answered_once import AnsweredOnce
from projector_dedup.testing.checking import SHRINKING
from projector_dedup.testing.exactly_once import ExactlyOnce
from projector_dedup.testing.fault_points import CALL_KILLS, ERRORS, KILLS, LOSSES, MEETING
from projector_dedup.testing.pasting import regression_test
from projector_dedup.testing.schedules import Turn
from projector_dedup.testing.settled import Settled

ROOT = Path(__file__).parents[2]
UNNAMED = ("self", "projector", "messages", "operation", "effect", "requests", "options")

TEST = """
from dataclasses import dataclass

from sqlalchemy import String, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
import pytest

from projector_dedup import on, projector


class Base(DeclarativeBase):
    pass


class Totals(Base):
    __tablename__ = "totals"
    account_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    amount: Mapped[int]


@dataclass
class PaymentReceived:
    account_id: str
    amount: int


@projector(idempotent=IDEMPOTENT, name="account-totals")
class AccountTotals:
    @on(PaymentReceived)
    def add_payment(self, event: PaymentReceived, session: Session) -> None:
        totals = session.get(Totals, event.account_id)
        if totals is None:
            totals = Totals(account_id=event.account_id, amount=0)
            session.add(totals)
        totals.amount += event.amount


PAYMENTS = [(f"payment-{number}", PaymentReceived("alice", 10)) for number in range(4)]


def amount_of(session):
    return session.get_one(Totals, "alice").amount


def expected(messages):
    return sum(event.amount for _, event in messages)


def test_totals(exactly_once):
    exactly_once(AccountTotals(), PAYMENTS, expected=expected, read=amount_of, metadata=Base.metadata, schedules=5)
"""
RIGHT, WRONG = TEST.replace("IDEMPOTENT", "True"), TEST.replace("IDEMPOTENT", "False")
OWN_ENGINE = """

@pytest.fixture
def projector_dedup_engine(tmp_path):
    engine = create_engine(f"sqlite:///{tmp_path / 'own.sqlite3'}")
    Base.metadata.create_all(engine)
    yield engine
    assert engine.pool.checkedout() == 0
    with Session(engine) as session:
        assert session.scalars(select(Totals)).all() == []
    engine.dispose()
"""


def run(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on a file, in a process of its own."""
    (folder / "test_totals.py").write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "test_totals.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_pytest_finds_the_plugin() -> None:
    """The entry point names the module, which is installed beside the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"]["pytest11"] == {"projector_dedup": "pytest_projector_dedup"}
    assert project["tool"]["setuptools"]["py-modules"] == ["pytest_projector_dedup"]


def test_the_plugin_costs_nothing_where_it_is_not_used() -> None:
    """Importing it imports neither the library nor SQLAlchemy."""
    program = "import sys, pytest_projector_dedup; print({'projector_dedup', 'sqlalchemy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_right_projector_passes(tmp_path: Path) -> None:
    """On an SQLite file of the test's own."""
    done = run(tmp_path, RIGHT)
    assert done.returncode == 0, done.stdout


def test_a_failure_prints_a_schedule_and_a_regression_test(tmp_path: Path) -> None:
    """The pasted test fails like the first, and passes when the projector is mended."""
    done = run(tmp_path, WRONG, "--projector-dedup-seed=7")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "Seed 7, schedule 2." in lines
    start = next(at for at, line in enumerate(lines) if "smallest schedule" in line)
    assert lines[start + 1] == lines[start + 2].replace("2.", "1.")
    assert "deliver: payment-" in lines[start + 1]
    pasted = lines[lines.index("def test_totals_again(exactly_once):") :]
    pasted = pasted[: next(at for at, line in enumerate(pasted) if line.startswith(("=", "---")))]
    test = "\n" + "\n".join(pasted) + "\n"
    assert "('deliver', (" in test
    again = run(tmp_path, WRONG + test, "-k", "again")
    assert (again.returncode, "schedule 1." in again.stdout) == (1, True), again.stdout
    assert run(tmp_path, RIGHT + test).returncode == 0


def test_a_url_gives_another_database_which_is_left_empty(tmp_path: Path, mariadb: Database) -> None:
    """The tables are created, and dropped in the end, also after a failure."""
    url = mariadb.url().render_as_string(hide_password=False)
    for source, code in ((RIGHT, 0), (WRONG, 1)):
        done = run(tmp_path, source, f"--projector-dedup-url={url}")
        assert done.returncode == code, done.stdout
        engine = create_engine(url)
        assert sqlalchemy.inspect(engine).get_table_names() == []
        engine.dispose()


def test_an_engine_of_the_user_is_used(tmp_path: Path) -> None:
    """By the fixture `projector_dedup_engine`; its tables stay, without rows, for the next check."""
    head, call = RIGHT.replace(" metadata=Base.metadata,", "").split("def test_totals(exactly_once):\n")
    source = f"{head}def test_totals(exactly_once):\n{call}{call}{OWN_ENGINE}"
    done = run(tmp_path, source)
    assert done.returncode == 0, done.stdout


def test_a_table_with_rows_is_refused(tmp_path: Path, sqlite: Database) -> None:
    """The rows stay."""
    engine = create_engine(sqlite.url())
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE totals (account_id VARCHAR(64) PRIMARY KEY, amount INTEGER NOT NULL)"))
        connection.execute(text("INSERT INTO totals VALUES ('alice', 5)"))
    done = run(tmp_path, RIGHT, f"--projector-dedup-url={sqlite.url()}")
    assert "UnusableError: exactly_once deletes all rows of the table totals, which is not empty" in done.stdout
    with engine.connect() as connection:
        assert connection.execute(text("SELECT amount FROM totals")).scalar_one() == 5
    engine.dispose()


WRONG_ARGUMENTS = [
    ("PAYMENTS, expected=", "[], expected="),
    ("AccountTotals(), ", "[AccountTotals(), open(__file__)], "),
    ("schedules=5", "schedule=[('deliver', (0,), 'after commit')]"),
    ("schedules=5", "schedule=[('deliver', (9,), None)]"),
    (" metadata=Base.metadata,", ""),
]


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    """Each text says what to give instead."""
    head, test = RIGHT.split("def test_totals")
    tests = [f"def test_{at}{test.replace(*each)}" for at, each in enumerate(WRONG_ARGUMENTS)]
    done = run(tmp_path, "\n\n".join([head, *tests]))
    assert f"{len(tests)} failed" in done.stdout
    said = re.findall(r"^E +\S*UnusableError: (exactly_once.*)$", done.stdout, re.MULTILINE)
    assert ["; give " in each for each in said] == [True] * len(tests)


FEW = re.compile(r"(^ +)(?=expected=)", re.MULTILINE)
PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")


def test_the_page_shows_what_happens(tmp_path: Path) -> None:
    """Its tests of a projector and of a command pass; without `idempotent=True` it prints the text of the page."""
    first, commands, _ = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (printed,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    done = run(tmp_path, FEW.sub(r"\1schedules=2, ", f"{first}\n\n{commands}"))
    assert "2 passed" in done.stdout, done.stdout
    done = run(tmp_path, first.replace("idempotent=True, ", ""))
    assert printed in done.stdout


def test_the_page_checks_the_effect_of_the_page_of_effects(tmp_path: Path) -> None:
    """Whose function gets the URL of the provider from a setting; without its key, a schedule is told."""
    text = (ROOT / "docs" / "effects.md").read_text(encoding="utf-8")
    page = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert page is not None
    module = page[1][: page[1].index("engine = create_engine")].replace("provider.url", "settings.payment_url")
    start = module.index("provider = Provider(")
    module = module.replace(
        module[start : module.index("def post")], "settings = SimpleNamespace(payment_url='')\n\n\n"
    )
    test = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[2]
    shop = tmp_path / "shop.py"
    shop.write_text(f"from types import SimpleNamespace\n{module}", encoding="utf-8")
    done = run(tmp_path, FEW.sub(r"\1schedules=2, ", test))
    assert done.returncode == 0, done.stdout
    shop.write_text(shop.read_text().replace('{"Idempotency-Key": attempt.key}', "{}"), encoding="utf-8")
    done = run(tmp_path, test)
    assert "The provider got a call without attempt.key" in done.stdout
    assert "def test_charges_again(settled, tmp_path):" in done.stdout


def test_the_page_names_every_fault_and_every_argument() -> None:
    """And the library's numbers are those of the page."""
    short = {point.removeprefix("at statement ").removesuffix(" of the handler") for point in ERRORS[3:5]}
    named = set(re.findall(r"`([^`\n]+)`", PAGE))
    assert {*ERRORS[:3], *ERRORS[5:], *short, *KILLS, *LOSSES, *CALL_KILLS} - named == set()
    arguments = {name for kind in (ExactlyOnce, AnsweredOnce, Settled) for name in _arguments(kind)}
    assert [name for name in arguments if f"`{name}=`" not in PAGE and f"{name}=" not in PAGE] == []
    assert f"stops after {SHRINKING:.0f} seconds" in PAGE
    assert f"waits up to {MEETING} seconds" in PAGE


def _arguments(kind: Any) -> set[str]:
    return {*inspect.signature(kind.__call__).parameters} - {*UNNAMED}


def _in_one_line(exactly_once: Any) -> None:
    exactly_once("a", "b", expected=1)


def _in_several_lines(exactly_once: Any) -> None:
    exactly_once(
        "a",
        expected=1,
    )


def _twice(exactly_once: Any) -> None:
    exactly_once("a")
    exactly_once("b")


def test_the_argument_is_put_into_the_call_as_it_is_written() -> None:
    """Into a call of one line and of several; two calls get the argument alone, for the user to put it."""
    argument = ["        schedule=[", "            ('deliver', (0,), None),", "        ],", "    )"]
    one, several, two = (
        list(regression_test(each, "exactly_once", [Turn("deliver", (0,))]))
        for each in (_in_one_line, _in_several_lines, _twice)
    )
    assert one[2] == "def _in_one_line_again(exactly_once: Any) -> None:"
    assert one[3:] == ['    exactly_once("a", "b", expected=1,', *argument]
    assert several[3:] == ["    exactly_once(", '        "a",', "        expected=1,", *argument]
    assert two == ["To run this schedule alone, add the argument", "schedule=[", "    ('deliver', (0,), None),", "]"]
