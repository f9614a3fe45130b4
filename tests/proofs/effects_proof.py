"""`make effects-proof`: thousands of effects at a provider that lies, in processes that are killed; what came of them.

Each database, sync and async, with each policy, is a cell. A cell arms its effects, and runs each in a process that is
killed at one of its steps: each step for each behaviour of the provider, in turn, until the number is reached. Then
processes settle, some of which are killed as well, until nothing moves. A person decides about what is listed, by what
the provider has done. The counts are made from the provider's log and the payments, not from what the library says.

The provider ignores keys where the policy is ``ask`` or ``stop``, and its list lags. For the last eighth of a cell six
hours pass before anybody settles: the time of both policies is over, and the provider has forgotten everything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, cycle, pairwise
from pathlib import Path
from typing import Any

from sqlalchemy import URL, func, select

from databases import (
    USUAL_DRIVERS,
    Database,
    Driver,
    mariadb_database,
    mariadb_server,
    postgresql_database,
    postgresql_server,
    sqlite_database,
)
from effect_rig import TABLE, Charge, Till
from effect_victim import WINDOW, Victim, Victims
from kit import Harness, Subject
from projector_dedup.maintenance.effects import find_effects, resolve
from projector_dedup.testing.provider import Behaviour, Call, Provider

POLICIES = ("resend", "ask", "stop")
DELAY = 0.3  # seconds of a late reply, and of a late deed
PATIENCE = 0.2  # seconds that an attempt waits for a reply
LAG = 1.0  # seconds after which the provider's list has a deed
SETTLERS = 10  # processes that are killed in each of the first four sweeps
REFUSED = "refused: card_declined"
COLUMNS = (
    *("effects", "kills", "calls", "not permitted", "done twice", "in no list", "done", "rejected", "needs a person"),
    *("without cause", "recorded in the end", "wrong payments"),
)
WRONG = ("not permitted", "done twice", "in no list", "without cause", "wrong payments")

_ONE_AT_A_TIME = threading.Lock()


class Part:
    """The effects of one cell. With a second provider, which knows nothing, six hours pass before anybody settles."""

    def __init__(self, till: Till, providers: list[Provider], policy: str, seed: str) -> None:
        self.till, self.providers, self.policy, self.aged = till, providers, policy, len(providers) > 1
        self.dice = random.Random(seed)
        self.keys: dict[str, str] = {}  # of the provider, by our own
        self.not_done: Counter[str] = Counter()  # decisions of the person
        self.counts: Counter[str] = Counter()

    def run(self, url: URL, number: int) -> Counter[str]:
        """Run so many effects, settle, and count."""
        made = Victim("").effect(self.policy, asynchronous=False)
        with Victims(url, self.providers[0].url, PATIENCE) as victims:
            steps = {each: self._victim(victims, made, each, 0) for each in Behaviour}
            cases = [(each, step) for each, last in steps.items() for step in range(1, last + 1)]
            self.dice.shuffle(cases)
            for behaviour, step in cycle(cases):
                if len(self.keys) >= number:
                    break
                self._victim(victims, made, behaviour, step)
        if self.aged:
            time.sleep(DELAY)  # for the last deed that comes late
            self.till.pass_time(WINDOW.total_seconds() + 1)
        with Victims(url, self.providers[-1].url, PATIENCE) as victims:
            self._settle(victims, killed=True)
            self._judge_before()
            while listed := find_effects(self.till.harness.engine, unknown=True):
                time.sleep(DELAY)  # whoever looks sooner does not see a late deed
                deeds = self._deeds()
                for each in listed:
                    self._decide(each, deeds[each.provider_key])
                self._settle(victims, killed=False)
        self._judge()
        return self.counts

    def _victim(self, victims: Victims, made: Any, behaviour: Behaviour, die_at: int) -> int:
        key = f"{len(self.keys)} {behaviour} at {die_at}"
        self.till.arm(made, Charge(key), key=key)
        self.keys[key] = str(self.till.row(key).provider_key)
        told = [behaviour, self.dice.choice(list(Behaviour))]
        for provider in self.providers:
            provider.on_key(self.keys[key], told)
            told = told[1:]
        steps = victims.run(self.policy, key, die_at)
        self.counts["kills"] += not steps
        return steps

    def _settle(self, victims: Victims, *, killed: bool) -> None:
        """Settle until nothing moves. What asks too early is asked first, before the provider can know."""
        moving = select(func.count()).where(TABLE.c.outcome.is_(None), TABLE.c.next_at.is_not(None))
        for sweep in count():
            assert sweep < 60, "it moves for ever"
            self.till.pass_time(31 * 2 ** (sweep // 2) if sweep % 2 else 31)
            for _ in range(SETTLERS if killed and sweep < 4 else 0):
                self.counts["kills"] += not victims.run(self.policy, None, self.dice.randint(1, 40))
            victims.run(self.policy, None)
            if not self.till.harness.transact(lambda session: session.scalar(moving)):
                return
            if not sweep % 2:
                time.sleep(DELAY + LAG + 0.2)  # the provider's own clock: its list has everything by then

    def _decide(self, listed: Any, deeds: list[Call]) -> None:
        """Decide as a person does who looks at the provider."""
        said: dict[str, Any] = {"outcome": "not done"}
        if deeds:
            said = {"outcome": "done", "value": json.dumps(f"deed_{deeds[0].number}")}
        self.not_done[listed.key] += not deeds
        engine = self.till.harness.engine
        resolve(engine, listed.key, attempt=listed.attempt, why="so says the provider", who="ada", **said)

    def _calls(self) -> defaultdict[str | None, list[Call]]:
        found = defaultdict(list)
        for provider in self.providers:
            for call in provider.calls():
                found[call.key].append(call)
        return found

    def _deeds(self) -> defaultdict[str | None, list[Call]]:
        return defaultdict(list, {key: [call for call in calls if call.done] for key, calls in self._calls().items()})

    def _payments(self) -> dict[str, list[str]]:
        payments = defaultdict(list)
        for order, what in self.till.payments():
            payments[order].append(what)
        return payments

    def _judge_before(self) -> None:
        """Count what has ended without a person, and what is listed for one."""
        engine, payments, deeds = self.till.harness.engine, self._payments(), self._deeds()
        listed = {each.key for each in find_effects(engine, unknown=True) if each.state == "needs a person"}
        for key, provider_key in self.keys.items():
            done = deeds[provider_key]
            ended = self._outcome(payments[key], done)
            self.counts[ended or "open"] += 1
            self.counts["needs a person"] += key in listed
            self.counts["in no list"] += not ended and key not in listed
            self.counts["wrong payments"] += bool(payments[key]) and (not ended or key in listed)
            replays_failure = self.policy == "resend" and any(each.behaviour == Behaviour.ERROR_AFTER for each in done)
            has_cause = self.policy == "stop" or self.aged or replays_failure
            self.counts["without cause"] += key in listed and not has_cause

    def _outcome(self, payments: list[str], deeds: list[Call]) -> str:
        """Return how the effect has ended by its payments, if these are as the provider did; else nothing."""
        if payments == [f"deed_{each.number}" for each in deeds[:1]] != []:
            return "done"
        return "rejected" if payments == [REFUSED] and not deeds else ""

    def _judge(self) -> None:
        """Count the calls that were not permitted, and the effects that are not recorded as the provider did them."""
        made, deeds, payments, told = self._calls(), self._deeds(), self._payments(), defaultdict(list)
        for provider in self.providers:
            for line in provider.log.read_bytes().splitlines():
                match json.loads(line):
                    case {"call": _, "key": key}:
                        told[key].append((provider, "call"))
                    case {"query": key, "found": []}:
                        told[key].append((provider, "nothing"))
        assert set(told) <= set(self.keys.values())
        for key, provider_key in self.keys.items():
            calls = sum(what == "call" for _, what in told[provider_key])
            forbidden = self._again(told[provider_key]) - self.not_done[key]
            ended = self._outcome(payments[key], deeds[provider_key])
            if forbidden > 0 or not ended:
                told_of = [(call.number, str(call.behaviour), call.done) for call in made[provider_key]]
                sys.stderr.write(f"{self.policy}, {key}: calls {told_of}, payments {payments[key]}\n")
            self.counts += Counter(
                {
                    "effects": 1,
                    "calls": calls,
                    "not permitted": max(0, forbidden),
                    "done twice": max(0, len(deeds[provider_key]) - 1),
                    "recorded in the end": int(ended != ""),
                    "wrong payments": int(ended == ""),
                }
            )

    def _again(self, told: list[tuple[Provider, str]]) -> int:
        """Count the calls after the first one that the policy alone does not permit."""
        again = 0
        for (before, what), (now, call) in pairwise(told):
            if call == "call" and not (self.policy == "resend" and before is now):
                again += self.policy != "ask" or what != "nothing"
        return again


def run_cell(create: Callable[[], Any], driver: Driver, policy: str, number: int, seed: int) -> Counter[str]:
    """Run the effects of one cell; an eighth of them is aged."""
    total: Counter[str] = Counter()
    for aged in (False, True):
        known = {} if policy == "resend" else {"forget_after": 0.0}
        with contextlib.ExitStack() as stack:
            database: Database = stack.enter_context(create())
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            logs = [folder / "first.jsonl", folder / "second.jsonl"][: 1 + aged]
            with _ONE_AT_A_TIME:  # else two of them choose the same free port
                providers = [stack.enter_context(Provider(log, index_lag=LAG, delay=DELAY, **known)) for log in logs]
            till = Till(stack.enter_context(Harness(Subject(database.url()))))
            till.create_tables()
            part = Part(till, providers, policy, f"{seed} {driver} {policy} {aged}")
            total += part.run(database.url(driver.name_in_url), number // 8 if aged else number - number // 8)
    return total


@contextlib.contextmanager
def _sqlite() -> Iterator[Database]:
    with tempfile.TemporaryDirectory() as folder:
        yield sqlite_database(Path(folder))


@contextlib.contextmanager
def servers(wanted: list[str]) -> Iterator[dict[str, Callable[[], Any]]]:
    """Return what creates an empty database, for each engine that is wanted."""
    with contextlib.ExitStack() as stack:
        create: dict[str, Callable[[], Any]] = {"sqlite": _sqlite}
        if "postgresql" in wanted:
            postgresql = stack.enter_context(
                postgresql_server(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            )
            create["postgresql"] = lambda: postgresql_database(postgresql)
        if "mariadb" in wanted:
            mariadb = stack.enter_context(mariadb_server())
            create["mariadb"] = lambda: mariadb_database(mariadb)
        yield create


def main() -> int:
    """Run the cells, print a row for each, and return 1 if one of them is wrong."""
    parser = argparse.ArgumentParser("make effects-proof", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--effects", type=int, default=10_000, help="how many, of all cells together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4, help="cells at a time")
    parser.add_argument("--engines", default="postgresql,mariadb,sqlite")
    given = parser.parse_args()
    engines = given.engines.split(",")
    cells = [(driver, policy) for driver in USUAL_DRIVERS if driver.engine in engines for policy in POLICIES]
    number = -(-given.effects // len(cells))
    began, wrong, total = time.monotonic(), 0, Counter[str]()
    _print(f"Seed {given.seed}.\n")
    print_row("database, policy", *COLUMNS)
    print_row("---", *["---:"] * len(COLUMNS))
    with servers(engines) as create, ThreadPoolExecutor(given.workers) as pool:
        for cell, counts in zip(
            cells,
            pool.map(lambda cell: run_cell(create[cell[0].engine], cell[0], cell[1], number, given.seed), cells),
            strict=True,
        ):
            wrong += any(counts[name] for name in WRONG) or counts["recorded in the end"] != counts["effects"]
            total += counts
            print_row(f"{cell[0]}, {cell[1]}", *(f"{counts[name]:,}" for name in COLUMNS))
    print_row("all", *(f"{total[name]:,}" for name in COLUMNS))
    _print(f"\n{wrong} of {len(cells)} rows are wrong. {time.monotonic() - began:,.0f} s.")
    return int(wrong > 0)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_row(*cells: str) -> None:
    """Print a row of a table in Markdown."""
    _print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
