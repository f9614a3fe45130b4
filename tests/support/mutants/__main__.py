"""`make mutants`: break the library in many small ways, and see the tests notice each.

    make mutants                             # all of them
    make mutants ARGS="--pick 12"            # a dozen, chosen by the day's date
    make mutants ARGS="long-ids-are-cut"     # these, or a whole group
    make mutants ARGS="--list"
    make mutants ARGS="claims --tests tests/proofs/exploring/test_every_order.py"   # by these tests, not those that each one names

A mutant counts as killed only if its tests are green without it and one of them fails with it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace

from . import catalogue
from .mutant import Mutant
from .running import ROOT, Copy, Result, Runner, Verdict

OUTPUT = ROOT / "build" / "mutants"
_COLOURS = {Verdict.KILLED: 32, Verdict.SURVIVED: 31, Verdict.NOT_APPLICABLE: 33, Verdict.NOT_RUN: 33}
_COLOURED = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
_WIDTH = min(100, shutil.get_terminal_size((80, 24)).columns)


def main() -> int:
    """Run what the arguments ask for; the exit code is 0 only if every mutant was killed."""
    arguments = _arguments()
    if arguments.list:
        for group, listed in catalogue.GROUPS.items():
            _say(f"{group}:")
            for mutant in listed:
                _say(mutant.breaks, before=f"  {mutant.name}: ", indent=4)
        return 0
    mutants = _chosen(arguments)
    if arguments.tests:
        mutants = [replace(mutant, tests=tuple(arguments.tests), hangs=False) for mutant in mutants]
    began, results = time.monotonic(), []
    with Copy.of(ROOT) as unchanged:
        unchanged.verify()
        runner = Runner(unchanged)
        tests = len({test for mutant in mutants for test in mutant.tests})
        _say(f"{tests} tests of {len(mutants)} mutants, first without any ...")
        if not runner.see_green(mutants, arguments.jobs):
            _say("Some of them fail without a mutant: those of each mutant are looked at by themselves.")
        shutil.rmtree(OUTPUT, ignore_errors=True)
        OUTPUT.mkdir(parents=True)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            try:
                for future in as_completed([pool.submit(runner.judge, mutant) for mutant in mutants]):
                    results.append(future.result())
                    _report(results[-1], len(results), len(mutants))
            except BaseException:  # Ctrl-C: those that have not begun are left
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return _summary(results, time.monotonic() - began)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="mutants, or whole groups; all of them by default")
    parser.add_argument("--pick", type=int, metavar="N", help="choose so many by the date, from all groups")
    parser.add_argument("--date", help="choose as on this day, such as 2026-11-22")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at one time (2)")
    parser.add_argument("--tests", nargs="+", metavar="TEST", help="the tests that must notice each mutant, by choice")
    parser.add_argument("--list", action="store_true", help="name all mutants and run none")
    arguments = parser.parse_args()
    known = {*catalogue.GROUPS, *(mutant.name for mutant in catalogue.MUTANTS)}
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"no mutant and no group is called {', '.join(unknown)}; --list names them")
    return arguments


def _chosen(arguments: argparse.Namespace) -> list[Mutant]:
    groups = {
        group: [each for each in mutants if not arguments.names or {group, each.name} & set(arguments.names)]
        for group, mutants in catalogue.GROUPS.items()
    }
    if not arguments.pick:
        return [mutant for mutants in groups.values() for mutant in mutants]
    date = arguments.date or datetime.datetime.now(datetime.UTC).date().isoformat()
    _say(f"Chosen by the date: --pick {arguments.pick} --date {date}")
    return catalogue.picked(groups, arguments.pick, date)


def _report(result: Result, number: int, of: int) -> None:
    (OUTPUT / f"{result.mutant.name}.txt").write_text(f"{result.why}\n\n{result.output}", encoding="utf-8")
    verdict = result.verdict.value
    before = f"{number:3}/{of} {verdict:9}{result.seconds:5.1f} s  "
    _say(f"{result.mutant.name}: {result.mutant.breaks}", before=before, colour=_COLOURS[result.verdict], indent=10)
    if result.verdict is not Verdict.KILLED:
        for line in result.why.splitlines():
            _say(line, before=" " * 10 + "> ", indent=12)


def _summary(results: Iterable[Result], seconds: float) -> int:
    counts = Counter(result.verdict for result in results)
    said = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    _say(f"{said}; {seconds / 60:.1f} minutes. The words of pytest are in {OUTPUT.relative_to(ROOT)}/")
    return 0 if counts.total() == counts[Verdict.KILLED] else 1


def _say(text: str, *, before: str = "", colour: int | None = None, indent: int = 0) -> None:
    wrapped = textwrap.fill(
        text, _WIDTH, initial_indent=before, subsequent_indent=" " * indent, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip
    print(f"\033[{colour}m{wrapped}\033[0m" if colour and _COLOURED else wrapped, flush=True)


if __name__ == "__main__":
    sys.exit(main())
