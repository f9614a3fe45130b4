"""`make nightly`: what guards against the outside (versions, Pythons, mutants), and the proofs that take long.

    make nightly                     # everything, and its result into docs/tested-on.md; some hours
    make nightly ARGS=--today        # one of the parts, chosen by the date: each `.ci/run` does so
    make nightly ARGS=--list

Without ``--today`` and ``--part``, the sections that cannot be cut run too.
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
LINE = re.compile(r"^Last whole run of `make nightly`: .*$", re.MULTILINE)
OLD = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Section:
    """A target of the Makefile, and the parts of it that a gate can run in a minute: none if it cannot be cut."""

    target: str
    parts: int = 0
    a_part: str = ""
    """What ARGS says for a part; without it, the tests take the part from the environment (tests/conftest.py)."""

    def command(self, part: int | None = None) -> tuple[list[str], dict[str, str]]:
        """Return how to run all of it, or a part, and what the environment says then."""
        words = ["make", "--no-print-directory", self.target]
        if part is None:
            return words, {}
        if self.a_part:
            return [*words, f"ARGS={self.a_part}"], {}
        return words, {"PROJECTOR_DEDUP_TEST_PART": f"{part}/{self.parts}"}


SECTIONS = (
    Section("lowest", 2),
    Section("newest", 2),
    Section("try-release", 1),
    Section("outside", 8),
    Section("mutants", 1, "--pick 6"),
    Section("explore"),
    Section("effects-proof"),
    Section("effects-sweep"),
)
PARTS = tuple((section, part + 1) for section in SECTIONS for part in range(section.parts))


def main() -> int:
    """Run what the arguments ask for; the exit code is 0 only if all of it passed."""
    parser = argparse.ArgumentParser(prog="make nightly", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--today", action="store_true", help="one part, chosen by the date")
    parser.add_argument("--part", type=int, metavar="N", help=f"this part, 1 to {len(PARTS)}")
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
        print(_told_of_the_last(today))
        number = options.part or today.toordinal() % len(PARTS) + 1
        section, part = PARTS[number - 1]
        return 0 if _passes(f"part {number} of {len(PARTS)}", *section.command(part)) else 1
    began = time.monotonic()
    failed = [section.target for section in SECTIONS if not _passes(section.target, *section.command())]
    said = f"{today}, {(time.monotonic() - began) / 60:.0f} minutes, {_verdict(failed)}"
    PAGE.write_text(LINE.sub(f"Last whole run of `make nightly`: {said}.", PAGE.read_text(encoding="utf-8")))
    return 1 if failed else 0


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


def _verdict(failed: list[str]) -> str:
    return f"FAILED: {', '.join(failed)}" if failed else f"all {len(SECTIONS)} sections passed"


def _told_of_the_last(today: datetime.date) -> str:
    """Return the line of the page on the last whole run, and how old it is if that is more than 30 days."""
    line = LINE.search(PAGE.read_text(encoding="utf-8"))
    assert line is not None, f"{PAGE} has no line on the last whole run"
    ran = re.search(r"\d{4}-\d\d-\d\d", line[0])
    if ran is None or today - datetime.date.fromisoformat(ran[0]) > OLD:
        return f"{line[0]} That is older than {OLD.days} days: run `make nightly`."
    return line[0]


if __name__ == "__main__":
    sys.exit(main())
