"""The command: which sections run, on which servers, and where the results go."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
import traceback
from pathlib import Path

from . import machine, report
from .harness import Bench, progress
from .results import Run
from .sections import SECTIONS
from .servers import Server, postgresql

HOME = Path(__file__).parents[1]  # benchmarks/


def main() -> int:
    """0 if every section ran."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server that came along is stopped, databases dropped
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(postgresql(options.postgresql))
        mariadb = stack.enter_context(contextlib.closing(Server(options.mariadb))) if options.mariadb else None
        bench = Bench(server, mariadb, options.quick)
        run = Run(machine.describe([server, *filter(None, [mariadb])]), options.quick)
        for key in options.sections or SECTIONS:
            progress(f"== {key} ({time.monotonic() - began:.0f} s)")
            _measure(key, bench, run)
    run.machine["took"] = f"{(time.monotonic() - began) / 60:.0f} minutes"
    print("\n".join(report.target_lines(run)))
    if options.results or not (options.sections or options.quick):
        _write(run, options.results or HOME)
    return 1 if run.failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description="This library beside what else one would use.")
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all, unless some are named")
    parser.add_argument("--quick", action="store_true", help="all of it in two minutes, to try it out")
    parser.add_argument("--postgresql", metavar="URL", help="a server whose databases may be made and dropped")
    parser.add_argument("--mariadb", metavar="URL", help="the same; without it MariaDB is left out")
    parser.add_argument(
        "--results", metavar="FOLDER", type=Path, help="write RESULTS.md, results.json and plots there; a full run does"
    )
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"there is no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return options


def _measure(key: str, bench: Bench, run: Run) -> None:
    try:
        section = SECTIONS[key](bench)
    except Exception as error:  # noqa: BLE001  # told in the report; the other sections need not be lost
        traceback.print_exc()
        run.failed[key] = f"{type(error).__name__}: {error}".splitlines()[0]
        return
    run.sections.append(section)
    print("\n".join(report.section_lines(section, Path("results"))), flush=True)


def _write(run: Run, folder: Path) -> None:
    from .plots import draw

    pictures = folder / "results"
    draw(run, pictures)
    (pictures / "results.json").write_text(run.to_json(), encoding="utf-8")
    (folder / "RESULTS.md").write_text(report.markdown(run, Path("results")), encoding="utf-8")
    print(f"\nWritten: {folder / 'RESULTS.md'}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
