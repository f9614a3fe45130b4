"""The benchmark suite in its smallest form: what it says of a contender's read model is true."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from suite import contenders, targets
from suite.contenders.meeting import SHAPES, Delivered, Shape, Unprotected
from suite.contenders.orm import Given, NoDedup
from suite.harness import Contender, Entry, Item, Quartiles, enter, race
from suite.report import markdown
from suite.results import Plot, Run, Section, rounds_of, standings
from suite.sections.races import ON_ENGINES
from suite.servers import Server


class Forgetful(NoDedup):
    """Acknowledges one message in ten without applying it."""

    def messages(self, items: Sequence[Item]) -> Sequence[Given]:
        """All but every tenth."""
        return super().messages([item for item in items if item.number % 10])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """SQLite files; all of them are gone in the end."""
    server = Server(f"sqlite:///{tmp_path}/unused.sqlite3")
    yield server
    server.close()
    assert not list(tmp_path.iterdir())


def run(server: Server, *those: Contender, redelivered: float = 0.0) -> list[Entry]:
    """Two short rounds."""
    entries = [enter(server, contender, redelivered=redelivered) for contender in those]
    race(entries, 2, 0.01)
    return entries


def test_every_contender_is_right_when_every_message_is_new(server: Server) -> None:
    """With one worker and no redelivery nobody loses anything, and the table says so."""
    everybody = contenders.on_engine("sqlite")
    names = [name for name in ON_ENGINES if everybody[name].batch <= 100]  # larger ones take seconds
    entries = run(server, *(everybody[name] for name in names))
    assert [str(entry.totals()) for entry in entries] == [f"{entry.stream.new:,} right" for entry in entries]
    assert all(len(entry.turns) == 2 for entry in entries)
    table = standings(entries, entries[0])
    assert [row[0] for row in table.rows] == names
    assert table.rows[0][1] == "1.00 (1.00..1.00)"


def test_a_contender_that_loses_messages_is_shown_as_losing(server: Server) -> None:
    """A lost message is missing from the total, whatever the contender says."""
    (entry,) = run(server, Forgetful("forgetful"))
    totals = entry.totals()
    assert not totals.right
    assert totals.found == totals.expected - totals.expected // 10
    assert standings([entry], entry).rows[0][-1] == f"-{totals.expected // 10} of {totals.expected}"


def test_redeliveries_double_what_has_no_dedup_and_nothing_else(server: Server) -> None:
    """Half of the messages come again: who cannot tell counts them twice, the library does not."""
    everybody = contenders.on_engine("sqlite")
    without, deliver = run(server, everybody[contenders.BASE], everybody[contenders.DEFAULT], redelivered=0.5)
    assert without.totals().found > without.totals().expected
    assert str(without.totals()).startswith("+")
    assert deliver.totals().right


@pytest.mark.parametrize(
    "shape", [shape for shape in SHAPES if "isolation" not in shape.declared], ids=lambda shape: shape.name
)
def test_a_handler_whose_messages_cannot_meet_is_right_and_runs_once(server: Server, shape: Shape) -> None:
    """With one thread nothing is lost, with the library and without, and the section counts what it should."""
    both = [Delivered(shape, 1), Unprotected(shape, 1)]
    entries = run(server, *both)
    expected = [entry.stream.new for entry in entries]
    assert [entry.place.ask(shape.counted) for entry in entries] == expected
    assert [len(contender.runs) for contender in both] == expected


def test_targets_are_measured_from_the_run_and_a_miss_is_called_one() -> None:
    """Medians of ratios within a round decide; what was not measured is not met."""
    measured = {contenders.BASE: [100.0, 200.0, 100.0], contenders.DEFAULT: [70.0, 160.0, 70.0]}
    told = Run({}, quick=False, sections=[Section("rates", "Rates", "", rounds=measured)])
    rows = {row[0]: row[1:] for row in targets.table(told).rows}
    assert rows["ORM handler, new ÷ no dedup"] == ["≥ 0.78", "≥ 0.92", "0.70 (0.70..0.75)", "MISSED"]
    assert rows["deliver ÷ Protean"][-2:] == ["-", "-"]


def test_every_target_names_contenders_that_there_are() -> None:
    """A target of somebody who was renamed would never be measured."""
    known = {*contenders.everybody(), contenders.PROTEAN}
    assert {name for each in targets.TARGETS if each.section == "rates" for name in (each.of, each.by)} <= known


def test_a_report_tells_what_failed(server: Server) -> None:
    """A section that failed is named, and a quick run is called one."""
    entries = run(server, contenders.on_engine("sqlite")[contenders.BASE])
    bars = [("a", Quartiles(1.0, 2.0, 3.0))]
    section = Section("rates", "Rates", "Text.", [standings(entries, entries[0])], [Plot("a", "A", "rate", bars)])
    section.rounds = rounds_of(entries)
    told = Run({"date": "today"}, quick=True, sections=[section], failed={"wire": "it broke"})
    assert "its figures mean nothing" in markdown(told, Path("results"))
    assert "it broke" in markdown(told, Path("results"))
