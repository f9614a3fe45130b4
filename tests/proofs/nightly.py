"""`make nightly`: what guards against the outside (versions, Pythons, mutants), and the proofs that take long.

    make nightly                             # every section; some hours
    make nightly ARGS="--section mutants"    # this one, whole
    make nightly ARGS=--today                # a part of one, chosen by the date: each `.ci/run` does so
    make nightly ARGS=--list

What becomes of a whole section is written into docs/tested-on.md at once, with its date.
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tested-on.md"
ROW = r"^- {}: ([-\w]+).*$"
OLD = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Section:
    """A target of the Makefile, and the parts of it that a gate can run in a minute: none if it cannot be cut."""

    target: str
    parts: int = 0
    a_part: str = ""
    """What ARGS says for a part; without it, the tests take the part from the environment (tests/conftest.py)."""
    whole: str = ""
    """What ARGS says for all of it, where the target alone takes hours."""

    def command(self, part: int | None = None) -> tuple[list[str], dict[str, str]]:
        """Return how to run all of it, or a part, and what the environment says then."""
        words = ["make", "--no-print-directory", self.target]
        if part is None:
            return [*words, *([f"ARGS={self.whole}"] if self.whole else [])], {}
        if self.a_part:
            return [*words, f"ARGS={self.a_part}"], {}
        return words, {"PROJECTOR_DEDUP_TEST_PART": f"{part}/{self.parts}"}


SECTIONS = (
    Section("lowest", 2),
    Section("newest", 2),
    Section("try-release", 1),
    Section("outside", 8),
    Section("mutants", 1, "--pick 6"),
    Section("servers", 1, "--today"),
    Section("explore"),
    Section("effects-proof", whole="--effects 2000"),
    Section("effects-sweep", whole="--rows 20000"),
)
PARTS = tuple((section, part + 1) for section in SECTIONS for part in range(section.parts))


def main() -> int:
    """Run what the arguments ask for; the exit code is 0 only if all of it passed."""
    parser = argparse.ArgumentParser(prog="make nightly", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--today", action="store_true", help="one part, chosen by the date")
    parser.add_argument("--part", type=int, metavar="N", help=f"this part, 1 to {len(PARTS)}")
    parser.add_argument("--section", choices=[each.target for each in SECTIONS], help="all of this section")
    parser.add_argument("--list", action="store_true", help="name the sections and parts, and run none")
    options = parser.parse_args()
    today = datetime.datetime.now(datetime.UTC).date()
    if options.part is not None and not 1 <= options.part <= len(PARTS):
        parser.error(f"--part takes 1 to {len(PARTS)}")
    if options.list:
        for number, (section, part) in enumerate(PARTS, 1):
            print(f"part {number:2}: {section.target}, {part} of {section.parts}")
        print("only as a whole:", *(section.target for section in SECTIONS if not section.parts))
        return 0
    if options.today or options.part:
        print(_told_of_old_ones(today))
        number = options.part or today.toordinal() % len(PARTS) + 1
        section, part = PARTS[number - 1]
        return 0 if _passes(f"part {number} of {len(PARTS)}", *section.command(part)) else 1
    chosen = [each for each in SECTIONS if options.section in (None, each.target)]
    failed = [each for each in chosen if not _is_recorded(each, today)]  # all are run, whatever fails
    return 1 if failed else 0


def _is_recorded(section: Section, today: datetime.date) -> bool:
    """Run all of a section, and write its row into the page. Return True if it passed."""
    began = time.monotonic()
    passed = _passes(section.target, *section.command())
    minutes = (time.monotonic() - began) / 60
    row = f"- {section.target}: {today}, {minutes:.0f} minutes, {'passed' if passed else 'FAILED'}"
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(ROW.format(section.target), row, page, flags=re.MULTILINE), encoding="utf-8")
    return passed


def _passes(name: str, command: list[str], environment: dict[str, str]) -> bool:
    print(
        f"nightly, {name}: {' '.join([*(f'{key}={value}' for key, value in environment.items()), *command])}",
        flush=True,
    )
    began = time.monotonic()
    # Not the ARGS of `make nightly`, which make would hand on to the make that is called here.
    ours = {name: value for name, value in os.environ.items() if name not in ("ARGS", "MAKEFLAGS", "MFLAGS")}
    passed = subprocess.run(command, cwd=ROOT, env={**ours, **environment}, check=False).returncode == 0
    print(f"nightly, {name}: {'passed' if passed else 'FAILED'} in {time.monotonic() - began:.0f} s", flush=True)
    return passed


def _told_of_old_ones(today: datetime.date) -> str:
    """Return a line that names each section whose last whole run is more than 30 days ago, or was never."""
    page, old = PAGE.read_text(encoding="utf-8"), []
    for section in SECTIONS:
        row = re.search(ROW.format(section.target), page, re.MULTILINE)
        assert row is not None, f"{PAGE} has no row for {section.target}"
        if row[1] == "never" or today - datetime.date.fromisoformat(row[1]) > OLD:
            old.append(f"{section.target} ({row[1]})")
    if not old:
        return f"Every section of `make nightly` ran whole within {OLD.days} days."
    return f'More than {OLD.days} days ago: {", ".join(old)}. Run `make nightly ARGS="--section ..."`.'


if __name__ == "__main__":
    sys.exit(main())
