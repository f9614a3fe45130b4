"""`make shop-proof`: the shop of `examples/shop` for ten minutes of kills, lies and wrong clocks; what came of it.

Two processes take orders, two settle effects and two consume the queue; every second one of them is killed. The bank
and the mail service lose replies, answer late, fail after the deed, and decline. The database's clock jumps by an hour,
ahead and back. Two people on call decide what is listed, by the provider's log.

Then nobody is killed any more, time passes, and it goes on until nothing is listed and the queue is empty. The counts
are made from the orders that were asked for, the providers' logs and the tables, not from what the library says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import URL, create_engine, text, update
from sqlalchemy.exc import DBAPIError

import shop_worker
from brokers import broker
from databases import USUAL_DRIVERS, Driver
from effect_rig import TABLE, TIMES
from effects_proof import print_row, servers
from fork_server import LIES, starting
from projector_dedup.effects.steps import State
from projector_dedup.errors import RefusedError
from projector_dedup.maintenance.effects import StoredEffect, find_effects, resolve
from projector_dedup.testing.provider import Provider
from rabbitmq_rig import RabbitMQ
from shop_worker import Told, asked_for

SHOP = Path(__file__).parents[2] / "examples" / "shop"
HOUR = 3_600
WORKERS = ("web 0", "web 1", "settle", "settle", "consume", "consume")
COLUMNS = (
    *("orders", "kills", "jumps of the clock", "calls", "decisions", "paid", "declined"),
    *("orders twice or lost", "charged twice", "state wrong", "customers counted wrong"),
    *("mailed twice", "not mailed"),
)
WRONG = COLUMNS[7:]


@dataclass
class Shop:
    """The processes of one shop on one database, its providers, and those who trouble it."""

    url: URL
    folder: Path
    bank: Provider
    mailer: Provider
    queue: RabbitMQ
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    right: threading.Event = field(default_factory=threading.Event)  # nobody sets the clock any more
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.engine = create_engine(self.url)
        self.dice = random.Random(self.seed)
        database = self.url.render_as_string(hide_password=False)
        self.environment = os.environ | {
            "SHOP_DATABASE_URL": database,
            "SHOP_QUEUE_URL": self.queue.url,
            "SHOP_QUEUE": self.queue.queue,
            "SHOP_BANK_URL": self.bank.url,
            "SHOP_MAIL_URL": self.mailer.url,
        }
        self.said = self.folder / "workers.log"
        self.logs = [self.folder / f"web-{parity}.jsonl" for parity in (0, 1)]

    def create_tables(self) -> None:
        """Create the tables of the shop."""
        create = "import shop; shop.Base.metadata.create_all(shop.engine)"
        subprocess.run([sys.executable, "-c", create], cwd=SHOP, env=self.environment, check=True)

    # Those who trouble it

    def kill(self, start: Callable[[str], int], minutes: float) -> None:
        """Kill one process after the other, and start it again."""
        living = [start(each) for each in WORKERS]
        ends = time.monotonic() + minutes * 60
        while time.monotonic() < ends:
            time.sleep(self.dice.uniform(0, 1))
            chosen = self.dice.randrange(len(WORKERS))
            try:
                os.kill(living[chosen], signal.SIGKILL)
            except ProcessLookupError:
                raise RuntimeError(f"{WORKERS[chosen]} ended by itself: {self.said.read_text()[-2_000:]}") from None
            living[chosen] = start(WORKERS[chosen])
            self.counts["kills"] += 1

    def pass_time(self, seconds: int) -> None:
        """Make every effect that much older, as if the database's clock had jumped ahead; back, if it is negative."""
        older = update(TABLE).values({name: TABLE.c[name] - seconds * 1000 for name in TIMES})
        while True:
            with contextlib.suppress(DBAPIError), self.engine.begin() as connection:  # a deadlock, or a locked row
                connection.execute(older)
                return

    def jump(self) -> None:
        """Let the clock jump by an hour, ahead and back in turn."""
        ahead = True
        while not self.right.wait(self.dice.uniform(5, 25)) or not ahead:
            self.pass_time(HOUR if ahead else -HOUR)
            ahead = not ahead
            self.counts["jumps of the clock"] += 1

    def be_on_call(self, name: str) -> None:
        """Look at the list, and decide about what needs a person, until nobody is needed any more."""
        while not self.ended.wait(0.5):
            for each in find_effects(self.engine, unknown=True):
                if each.state is State.STOPPED:
                    self.decide(each, name)

    def decide(self, listed: StoredEffect, name: str) -> None:
        """Decide by what the provider has done; to announce it once more does no harm."""
        provider = {"shop.charge": self.bank, "shop.receipt": self.mailer}.get(listed.effect)
        deeds = provider.deeds(listed.provider_key) if provider else []
        said: dict[str, Any] = {"outcome": "not done"}
        if deeds:
            said = {"outcome": "done", "value": json.dumps(f"deed_{deeds[0].number}")}
        with contextlib.suppress(RefusedError):  # the other one was faster
            resolve(self.engine, listed.key, attempt=listed.attempt, why="says the provider", who=name, **said)
            self.counts["decisions"] += 1

    # The end, and the judge

    def run(self, minutes: float) -> Counter[str]:
        """Run the shop, let everything come to its end, and count."""
        self.create_tables()
        words = [str(Path(shop_worker.__file__)), str(self.folder)]
        with ThreadPoolExecutor(3) as pool, starting(*words, said=self.said, cwd=SHOP, env=self.environment) as start:
            jumps = pool.submit(self.jump)
            people = [pool.submit(self.be_on_call, name) for name in ("ada", "bob")]
            try:
                self.kill(start, minutes)
                self.right.set()
                jumps.result()
                self.finish()
            finally:
                self.right.set()
                self.ended.set()
            for each in people:
                each.result()
        self.judge()
        return self.counts

    def finish(self) -> None:
        """Let time pass until no order is taken, nothing is listed and the queue is empty, twice in a row."""
        for log in self.logs:
            log.with_suffix(".stop").touch()
        quiet = passed = 0
        while quiet < 2:
            time.sleep(4)
            states = {each.state for each in find_effects(self.engine)}
            is_done = all(log.with_suffix(".done").exists() for log in self.logs)
            quiet = quiet + 1 if is_done and not states and not self.queue.left() else 0
            if State.STOPPED not in states:  # who else would find ever more to decide
                self.pass_time(31 * 2 ** min(passed, 12))
                passed += 1
            if passed > 100:
                raise RuntimeError(f"it does not end: {states}, and {self.queue.left()} messages wait")

    def judge(self) -> None:
        """Count what is as it should be, and what is not."""
        told, counts = Told(*self.logs), self.counts
        with self.engine.connect() as connection:
            orders = {row.number: row for row in connection.execute(text("SELECT * FROM shop_order"))}
            sales = {row.customer: (row.orders, row.amount) for row in connection.execute(text("SELECT * FROM sales"))}
        charged = Counter(deed.body["order"] for deed in self.bank.deeds())
        mailed = Counter(deed.body["order"] for deed in self.mailer.deeds())
        wanted: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for number in told.asked:
            customer, amount = asked_for(number)
            answers = told.answers[number]
            order = orders.pop(next(iter(answers), ""), None)
            if order is None or len(answers) != 1 or (order.customer, order.amount) != (customer, amount):
                counts["orders twice or lost"] += 1
                continue
            deeds = charged[order.number]
            counts[order.state] += 1
            counts["charged twice"] += deeds > 1
            counts["state wrong"] += order.state != ("paid" if deeds else "declined")
            counts["mailed twice"] += mailed[order.number] > bool(deeds)
            counts["not mailed"] += mailed[order.number] < bool(deeds)
            wanted[customer] += Counter({"orders": bool(deeds), "amount": amount * bool(deeds)})
        counts["orders"] = len(told.asked)
        counts["calls"] = len(self.bank.calls()) + len(self.mailer.calls())
        counts["orders twice or lost"] += len(orders)
        counts["customers counted wrong"] = sum(
            sales.get(each, (0, 0)) != (wanted[each]["orders"], wanted[each]["amount"]) for each in wanted
        )


@contextlib.contextmanager
def opened(driver: Driver, create: Any, folder: Path, seed: int) -> Iterator[Shop]:
    """A shop on an empty database, with a bank that remembers its keys, and a mail service that soon forgets them."""
    with (
        create() as database,
        Provider(folder / "bank.jsonl") as bank,
        Provider(folder / "mail.jsonl", forget_after=30, index_lag=2) as mailer,
    ):
        bank.chances(seed, reject=0.05, **LIES)
        mailer.chances(seed, **LIES)
        with contextlib.closing(RabbitMQ(broker("rabbitmq") + "?heartbeat=0")) as queue:
            yield Shop(database.url(driver.name_in_url), folder, bank, mailer, queue, seed)


def main() -> int:
    """Run the shop on each engine, print a row for each, and return 1 if one of them is wrong."""
    parser = argparse.ArgumentParser("make shop-proof", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10, help="of kills, on each engine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", default="postgresql")
    given = parser.parse_args()
    engines, wrong = given.engines.split(","), 0
    print_row("database", *COLUMNS)
    print_row("---", *["---:"] * len(COLUMNS))
    with servers(engines) as create:
        for driver in USUAL_DRIVERS:
            if driver.engine in engines and not driver.is_async:
                with (
                    tempfile.TemporaryDirectory() as folder,
                    opened(driver, create[driver.engine], Path(folder), given.seed) as shop,
                ):
                    counts = shop.run(given.minutes)
                print_row(driver.engine, *(f"{counts[name]:,}" for name in COLUMNS))
                wrong += any(counts[name] for name in WRONG)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
