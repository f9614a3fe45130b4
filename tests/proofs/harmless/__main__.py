"""Draw programs, and print those that are right alone and not with the library; in the end a table of all."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from databases import ENGINES, USUAL
from effects_proof import servers

from .programs import draw, each
from .running import CONTROLS, WAYS, Stage, driver_called, judge, quiet


def main() -> int:
    """Run the programs, and return 1 if one is silent."""
    parser = argparse.ArgumentParser("python -m harmless", description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="postgresql")
    parser.add_argument("--driver", help="postgresql+psycopg2, say; by default the usual one of the engine")
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the first program; the next have the next ones")
    parser.add_argument("--each", action="store_true", help="each lock and each work, in place of programs by lot")
    parser.add_argument("--repeat", type=int, default=1, help="run each program so many times")
    parser.add_argument("--ways", default="single,batch", help=f"of {','.join(WAYS)}")
    parser.add_argument("--isolation", help="declared for the handler, and the level of the control")
    parser.add_argument(
        "--controls", type=int, default=CONTROLS, help="schedules in which a program must be right alone"
    )
    parser.add_argument("--flagged", action="store_true", help="also programs for which nothing is promised")
    parser.add_argument("--no-events", action="store_true", help="without programs that change their event")
    given = parser.parse_args()
    driver = driver_called(given.driver or USUAL[given.engine])
    ways = given.ways.split(",")
    began = time.monotonic()
    left_out: Counter[str] = Counter()
    kinds: Counter[tuple[str, str]] = Counter()
    of_events: Counter[tuple[str, str]] = Counter()
    counted = 0
    with (
        quiet(),
        servers([driver.engine]) as create,
        create[driver.engine]() as database,
        Stage(database, driver, isolation=given.isolation, alone=given.isolation) as stage,
    ):
        seeds = range(given.seed, given.seed + given.programs)
        drawn = each(driver.engine) if given.each else [draw(driver.engine, seed) for seed in seeds]
        programs = [program for program in drawn for _ in range(given.repeat)]
        for program in programs:
            judged = judge(
                stage, program, ways, controls=given.controls, flagged=given.flagged, events=not given.no_events
            )
            if judged.left_out is not None:
                left_out[judged.left_out] += 1
                continue
            counted += 1
            for way, verdict in judged.verdicts.items():
                kinds[way, verdict.kind] += 1
                of_events[way, verdict.kind] += program.changes_event
                if verdict.kind == "right" and verdict.errors:
                    kinds[way, "right after errors"] += 1
                if verdict.kind != "right":
                    flag = f" [{program.remains}]" if program.remains else ""
                    flag += " [changes its event]" if program.changes_event else ""
                    print(f"{verdict.kind} {way}{flag} {program}\n    {verdict.detail}", flush=True)
    print(f"\n{driver}: {len(programs)} programs, {counted} counted, in {time.monotonic() - began:.0f} s")
    for reason, number in left_out.most_common():
        print(f"    left out: {reason}: {number} ({number / len(programs):.0%})")
    for way in ways:
        print(
            f"    {way}: silent {kinds[way, 'silent']} ({of_events[way, 'silent']} of them change their event), "
            f"loud {kinds[way, 'loud']} ({of_events[way, 'loud']}), right {kinds[way, 'right']} "
            f"({kinds[way, 'right after errors']} of them after errors that a redelivery repaired)"
        )
    return 1 if any(kind == "silent" and number for (_, kind), number in kinds.items()) else 0


if __name__ == "__main__":
    sys.exit(main())
