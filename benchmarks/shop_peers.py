"""`make effects-peers`: a shop with each of several other libraries, in processes that are killed; judged by the logs.

An order is three functions, each protected by the library: *charge* (the bank remembers keys), *count* (an UPDATE that
adds), *receipt* (the mail service remembers a key for 30 s, and its list lags by 2 s). Both lie as in
`make shop-proof`. Five processes are killed at random. Most start again at once, one of eight after 35 s. A caller
without an answer asks again within 45 s, until six calls have failed. The clock is right, and nobody decides what is
listed. A customer is counted wrong if the row has another sum than the charged orders; a listed one may be missing.

Each library is used as its pages recommend. The key is sent to bank and mail service, and no call takes more than 5 s:

- idemkit: a function for each effect, on Redis, with a lease of 10 s, which is renewed. It has no list.
- Powertools: the same; the context says that 10 s are left. It has no list.
- effect-ledger: on SQLite; its own key is sent. An order stops where the ledger has no result. When the processes have
  been stopped, a recovery policy completes what the provider's list has, and permits one more attempt of a charge (the
  bank remembers the key). It abstains on other receipts, and on counts: they leave no trace. It runs until it changes
  nothing. The list is ``unresolved()``.
- DBOS: on PostgreSQL; the order is a workflow whose id is the order's number. Charge and receipt are steps with five
  attempts, the count is a transaction of a datasource, in the same database. Each process keeps its executor id, so
  ``launch()`` recovers its workflows. The list is each workflow that did not succeed. Its Conductor, a service that
  moves the workflows of a dead process to a living one, is not used.
"""

import argparse
import contextlib
import json
import logging
import os
import random
import secrets
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sqlalchemy import NullPool, create_engine, make_url, text

from fork_server import LIES, serve, starting
from projector_dedup.testing.provider import Provider

REDIS = os.environ.get("PROJECTOR_DEDUP_TEST_REDIS_URL", "redis://127.0.0.1:6379/0")
POSTGRESQL = os.environ.get("PROJECTOR_DEDUP_TEST_POSTGRESQL_URL", "postgresql://postgres@127.0.0.1:5432/postgres")
WEBS = 5
TIMEOUT, LEASE = 5, 10
PAUSE, ASKS = 45, 6  # a caller asks again within so many seconds, until so many calls have failed
DOWN = 35  # seconds in which one of eight killed processes is not started again
LONGEST = 180  # seconds of kills; they end sooner if every order was asked for
FORGET, LAG = 30, 2
COLUMNS = (
    *("orders", "kills", "calls", "charged twice", "customers counted wrong", "mailed twice", "listed for a person"),
    "charged but not mailed and in no list",
)
ADD = text("UPDATE sales SET orders = orders + 1, amount = amount + :amount WHERE customer = :customer")


@dataclass(frozen=True)
class Order:
    """An order, and what is sent to the bank and to the mail service."""

    number: int

    @property
    def content(self) -> dict[str, Any]:
        """The order as JSON; a customer has six orders."""
        return {"order": self.number, "customer": f"customer-{self.number // 6}", "amount": 1 + self.number * 37 % 100}


class Listed(Exception):  # noqa: N818  # an answer
    """The library lists the order, and to ask again would change nothing."""


@dataclass(frozen=True)
class Deeds:
    """The three effects, without any protection."""

    bank: str
    mailer: str
    database: str
    folder: Path
    orders: int  # how many are placed

    def charge(self, content: dict[str, Any], key: str) -> str:
        """Charge the card; return "paid" or "declined"."""
        return "paid" if ask(self.bank, content, key) else "declined"

    def count(self, content: dict[str, Any]) -> None:
        """Add the order to the customer's row."""
        with create_engine(self.database, poolclass=NullPool).begin() as connection:
            connection.execute(ADD, content)

    def receipt(self, content: dict[str, Any], key: str) -> str | None:
        """Mail the receipt; return the number of the mail."""
        return ask(self.mailer, content | {"tag": key}, key)


def ask(service: str, content: dict[str, Any], key: str) -> str | None:
    """Ask for a deed; return its number, or None if the provider rejects it."""
    headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
    request = urllib.request.Request(f"{service}/deeds", json.dumps(content).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return str(json.load(answer)["id"])
    except urllib.error.HTTPError as error:
        if error.code == 402:
            return None
        raise RuntimeError(f"The provider answered {error.code}.") from None


@dataclass(frozen=True)
class Peer:
    """A shop with a library: how it takes an order, and what it lists."""

    place: Callable[[Order], str]
    listed: Callable[[], set[int]] = set
    recover: Callable[[], int] = lambda: 0  # called when every other process was stopped; returns how much it changed


# The libraries --------------------------------------------------------------------------------------------------------


def idemkit(deeds: Deeds, _name: str) -> Peer:
    """`idempotent_sync` on Redis."""
    from idemkit import MethodConfig, RedisBackend, idempotent_sync

    backend = RedisBackend.from_url(REDIS, namespace=deeds.folder.name)
    once = idempotent_sync(backend=backend, config=MethodConfig(key_fields=["order"], lease_ttl_seconds=LEASE))

    @once
    def charge(*, order: int, customer: str, amount: int) -> str:
        return deeds.charge({"order": order, "customer": customer, "amount": amount}, f"charge:{order}")

    @once
    def count(*, order: int, customer: str, amount: int) -> bool:
        deeds.count({"order": order, "customer": customer, "amount": amount})
        return True

    @once
    def receipt(*, order: int, customer: str, amount: int) -> str | None:
        return deeds.receipt({"order": order, "customer": customer, "amount": amount}, f"receipt:{order}")

    def place(order: Order) -> str:
        answer: str = charge(**order.content)
        if answer == "paid":
            count(**order.content)
            receipt(**order.content)
        return answer

    return Peer(place)


def powertools(deeds: Deeds, _name: str) -> Peer:
    """`idempotent_function` on the library's Redis layer."""
    import redis
    from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
    from aws_lambda_powertools.utilities.idempotency.persistence.redis import CachePersistenceLayer

    class Context:
        def get_remaining_time_in_millis(self) -> int:
            return LEASE * 1000

    config = IdempotencyConfig()

    def once(function: Callable[..., Any]) -> Callable[..., Any]:
        return idempotent_function(
            function,
            data_keyword_argument="content",
            persistence_store=CachePersistenceLayer(client=redis.Redis.from_url(REDIS, decode_responses=True)),
            config=config,
            key_prefix=f"{deeds.folder.name}:{function.__name__}",
        )

    @once
    def charge(*, content: dict[str, Any]) -> str:
        return deeds.charge(content, f"charge:{content['order']}")

    @once
    def count(*, content: dict[str, Any]) -> bool:
        deeds.count(content)
        return True

    @once
    def receipt(*, content: dict[str, Any]) -> str | None:
        return deeds.receipt(content, f"receipt:{content['order']}")

    def place(order: Order) -> str:
        config.register_lambda_context(Context())
        answer: str = charge(content=order.content)
        if answer == "paid":
            count(content=order.content)
            receipt(content=order.content)
        return answer

    return Peer(place)


def effect_ledger(deeds: Deeds, _name: str) -> Peer:
    """`EffectExecutor` on SQLite, with a recovery policy."""
    from effect_ledger import EffectExecutor, Operation, RecoveryDecision

    services = {"charge:v1": deeds.bank, "receipt:v1": deeds.mailer}

    def decide(operation: Operation) -> RecoveryDecision | None:
        if operation.effect not in services:
            return None
        with urllib.request.urlopen(f"{services[operation.effect]}/deeds?key={operation.provider_key}") as answer:
            found = json.load(answer)["deeds"]
        decision = f"{operation.operation_id} {operation.version}"
        if found:
            result = "paid" if operation.effect == "charge:v1" else found[0]["id"]
            return RecoveryDecision("complete", decision, "the provider has it", result)
        if operation.effect == "charge:v1":
            return RecoveryDecision("retry", decision, "the bank remembers the key")
        return None

    executor = EffectExecutor(deeds.folder / "ledger.sqlite3", scope="shop", recovery=decide)

    def once(effect: str, content: dict[str, Any], deed: Callable[[str], Any]) -> Any:
        done = executor.execute(
            f"{effect}:{content['order']}", f"{effect}:v1", content, lambda operation: deed(operation.provider_key)
        )
        if done.state != "completed":
            raise Listed(done.state)
        return done.result

    def place(order: Order) -> str:
        content = order.content
        answer: str = once("charge", content, lambda key: deeds.charge(content, key))
        if answer == "paid":
            once("count", content, lambda _: deeds.count(content))
            once("receipt", content, lambda key: deeds.receipt(content, key))
        return answer

    def unresolved() -> list[Operation]:
        return executor.unresolved(limit=1_000_000)

    def recover() -> int:
        return sum(executor.recover(each.operation_id, workers_stopped=True) != each for each in unresolved())

    return Peer(place, lambda: {each.request["order"] for each in unresolved()}, recover)


def dbos(deeds: Deeds, name: str) -> Peer:
    """A workflow of two steps and a transaction on PostgreSQL."""
    from dbos import DBOS, DBOSConfig, SetWorkflowID, SQLAlchemyDatasource

    DBOS(config=DBOSConfig(name="shop", system_database_url=deeds.database, executor_id=name, log_level="ERROR"))
    sales = SQLAlchemyDatasource.create(deeds.database)

    @DBOS.step(retries_allowed=True, max_attempts=5)
    def charge(content: dict[str, Any]) -> str:
        return deeds.charge(content, f"{DBOS.workflow_id}:charge")

    @sales.transaction
    def count(content: dict[str, Any]) -> None:
        sales.sql_session().execute(ADD, content)

    @DBOS.step(retries_allowed=True, max_attempts=5)
    def receipt(content: dict[str, Any]) -> str | None:
        return deeds.receipt(content, f"{DBOS.workflow_id}:receipt")

    @DBOS.workflow()
    def placed(content: dict[str, Any]) -> str:
        answer: str = charge(content)
        if answer == "paid":
            count(content)
            receipt(content)
        return answer

    def place(order: Order) -> str:
        try:
            with SetWorkflowID(str(order.number)):
                answer: str = placed(order.content)
        except Exception as error:
            status = DBOS.get_workflow_status(str(order.number))
            if status and status.status in ("ERROR", "MAX_RECOVERY_ATTEMPTS_EXCEEDED"):
                raise Listed(status.status) from error
            raise
        return answer

    def listed() -> set[int]:
        return {int(each.workflow_id) for each in DBOS.list_workflows() if each.status != "SUCCESS"}

    DBOS.launch()
    return Peer(place, listed)


PEERS: dict[str, tuple[str, Callable[[Deeds, str], Peer]]] = {  # by the name on PyPI: the module, and the shop
    "idemkit": ("idemkit", idemkit),
    "aws-lambda-powertools": ("aws_lambda_powertools.utilities.idempotency.persistence.redis", powertools),
    "effect-ledger": ("effect_ledger", effect_ledger),
    "dbos": ("dbos", dbos),
}


# The processes --------------------------------------------------------------------------------------------------------


def take_orders(place: Callable[[Order], str], web: int, orders: int, log: Path) -> None:
    """Place this process's orders, and ask again for those without an answer, when they are due."""
    latest, failed = web - WEBS, Counter[int]()
    due: dict[int, float] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in log.read_text().splitlines(keepends=True):
            match json.loads(line) if line.endswith("]\n") else None:
                case ["asked", int(number), float(again)]:
                    due[number], latest = again, max(number, latest)
                case ["answered", int(number)]:
                    del due[number]
                case ["failed", int(number), int(calls)]:
                    failed[number] += calls
                case ["again", float(now)]:  # after a recovery
                    due, failed = dict.fromkeys(due, now), Counter()
    with log.open("a") as lines:

        def write(*line: object) -> None:
            lines.write(json.dumps(line) + "\n")
            lines.flush()

        lines.write("\n")  # a kill may have cut the last line
        while waiting := [each for each in due if failed[each] < ASKS] or [latest + WEBS] * (latest + WEBS < orders):
            now = time.time()
            number = next((each for each in waiting if due.get(each, now) <= now), latest + WEBS)
            if number < orders:
                latest, due[number] = max(number, latest), now + random.uniform(1, PAUSE)
                write("asked", number, due[number])
                try:
                    place(Order(number))
                except Exception as error:  # noqa: BLE001  # whatever it is: the caller has no answer
                    calls = ASKS if isinstance(error, Listed) else 1
                    failed[number] += calls
                    write("failed", number, calls)
                    sys.stderr.write(f"{number}: {error!r}\n")
                else:
                    del due[number]
                    write("answered", number)
            else:
                log.with_suffix(".asked").touch()
            time.sleep(0.1)
    log.with_suffix(".asked").touch()
    log.with_suffix(".done").touch()
    signal.pause()


def work(name: str, what: str, folder: Path) -> None:
    """Be one of the processes: `web 0`, say, until it is killed; or `recover`, which writes what it finds."""
    deeds = Deeds(**json.loads((folder / "settings.json").read_text()), folder=folder)
    peer = PEERS[name][1](deeds, what)
    match what.split():
        case ["web", web]:
            take_orders(peer.place, int(web), deeds.orders, folder / f"web-{web}.jsonl")
        case _:
            found = {"changed": peer.recover(), "listed": sorted(peer.listed())}
            (folder / "found").write_text(json.dumps(found))
            (folder / "found").rename(folder / "found.json")


def fork(name: str, folder: Path) -> None:
    """Import the library, and fork a process for each line of the input."""
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    import_module(PEERS[name][0])
    serve(lambda what: work(name, what, folder))


# Who kills them, and who judges ---------------------------------------------------------------------------------------


@dataclass
class Run:
    """The shop with one library."""

    name: str
    folder: Path
    orders: int
    start: Callable[[str], int]
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.dice = random.Random(1)
        self.logs = [self.folder / f"web-{web}.jsonl" for web in range(WEBS)]
        self.living: dict[int, int] = {}

    def are_all(self, suffix: str) -> bool:
        """True if each of the processes has said so."""
        return all(log.with_suffix(suffix).exists() for log in self.logs)

    def kill(self, web: int) -> None:
        """Kill the process."""
        try:
            os.kill(self.living.pop(web), signal.SIGKILL)
        except ProcessLookupError:
            raise RuntimeError(f"web {web} ended: {(self.folder / 'said').read_text()[-2_000:]}") from None

    def recover(self) -> tuple[int, set[int]]:
        """Let the library recover while nothing else runs; return how much it changed, and the orders it lists."""
        time.sleep(LAG + 2)
        self.start("recover")
        ends = time.monotonic() + 300
        while not (self.folder / "found.json").exists():
            if time.monotonic() > ends:
                raise RuntimeError((self.folder / "said").read_text()[-2_000:])
            time.sleep(0.1)
        found = json.loads((self.folder / "found.json").read_text())
        (self.folder / "found.json").unlink()
        return found["changed"], set(found["listed"])

    def run(self) -> set[int]:
        """Kill processes until every order was asked for; then let it come to its end. Return the orders listed."""
        self.recover()  # creates the tables
        down = dict.fromkeys(range(WEBS), 0.0)
        ends = time.monotonic() + LONGEST
        while not (is_over := time.monotonic() > ends or self.are_all(".asked")) or down:
            for web in [each for each, until in down.items() if until <= time.monotonic()]:
                self.living[web] = self.start(f"web {web}")
                del down[web]
            time.sleep(self.dice.uniform(0, 1.2))
            web, is_long = self.dice.randrange(WEBS), self.dice.random() < 1 / 8
            if web in self.living and not is_over:
                self.kill(web)
                down[web] = time.monotonic() + DOWN * is_long
                self.counts["kills"] += 1
        while True:
            ends = time.monotonic() + 2 * PAUSE * ASKS
            while not self.are_all(".done"):
                time.sleep(0.5)
                if time.monotonic() > ends:
                    raise RuntimeError(f"orders wait: {(self.folder / 'said').read_text()[-2_000:]}")
            for web in range(WEBS):
                self.kill(web)
            changed, listed = self.recover()
            if not changed:
                return listed
            for web, log in enumerate(self.logs):
                log.with_suffix(".done").unlink()
                with log.open("a") as lines:
                    lines.write(json.dumps(["again", time.time()]) + "\n")
                self.living[web] = self.start(f"web {web}")

    def judge(self, listed: set[int], bank: Provider, mailer: Provider, sales: dict[str, tuple[int, int]]) -> None:
        """Count what is wrong, by the logs of the providers and the table."""
        charged = Counter(deed.body["order"] for deed in bank.deeds())
        mailed = Counter(deed.body["order"] for deed in mailer.deeds())
        right: defaultdict[str, set[tuple[int, int]]] = defaultdict(lambda: {(0, 0)})
        for number in range(self.orders):
            content, is_charged, is_listed = Order(number).content, charged[number] > 0, number in listed
            self.counts["charged twice"] += charged[number] > 1
            self.counts["mailed twice"] += mailed[number] > is_charged
            self.counts["charged but not mailed and in no list"] += is_charged and not (mailed[number] or is_listed)
            before = right[content["customer"]]
            after = {(orders + is_charged, amount + is_charged * content["amount"]) for orders, amount in before}
            right[content["customer"]] = after | before if is_listed else after  # a listed order may be counted, or not
        self.counts["customers counted wrong"] = sum(sales[each] not in right[each] for each in right)
        self.counts["orders"], self.counts["listed for a person"] = self.orders, len(listed)
        self.counts["calls"] = len(bank.calls()) + len(mailer.calls())


@contextlib.contextmanager
def database(orders: int) -> Iterator[str]:
    """A database with the sales of all customers."""
    server, name = make_url(POSTGRESQL).set(drivername="postgresql+psycopg"), f"shop_peers_{secrets.token_hex(4)}"
    admin = create_engine(server, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    try:
        url = server.set(database=name)
        with create_engine(url, poolclass=NullPool).begin() as connection:
            connection.execute(text("CREATE TABLE sales (customer text PRIMARY KEY, orders int, amount int)"))
            for customer in sorted({Order(number).content["customer"] for number in range(orders)}):
                connection.execute(text("INSERT INTO sales VALUES (:customer, 0, 0)"), {"customer": customer})
        yield url.render_as_string(hide_password=False)
    finally:
        with admin.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))


def run(name: str, orders: int) -> Counter[str]:
    """Run the shop with one library, and count."""
    with (
        tempfile.TemporaryDirectory(prefix=f"{name}-") as path,
        database(orders) as url,
        Provider(Path(path) / "bank.jsonl") as bank,
        Provider(Path(path) / "mail.jsonl", forget_after=FORGET, index_lag=LAG) as mailer,
    ):
        folder = Path(path)
        bank.chances(1, reject=0.05, **LIES)
        mailer.chances(1, **LIES)
        settings = {"bank": bank.url, "mailer": mailer.url, "database": url, "orders": orders}
        (folder / "settings.json").write_text(json.dumps(settings))
        with starting(__file__, "fork", name, str(folder), said=folder / "said") as start:
            shop = Run(name, folder, orders, start)
            listed = shop.run()
        with create_engine(url, poolclass=NullPool).connect() as connection:
            sales = {row.customer: (row.orders, row.amount) for row in connection.execute(text("SELECT * FROM sales"))}
        shop.judge(listed, bank, mailer, sales)
    return shop.counts


def main() -> None:
    """Run the shops side by side, and print a row for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--orders", type=int, default=300)
    parser.add_argument("libraries", nargs="*", help=", ".join(PEERS))
    given = parser.parse_args()
    names = given.libraries or list(PEERS)
    for row in (("library", *COLUMNS), ("---", *["---:"] * len(COLUMNS))):
        sys.stdout.write(f"| {' | '.join(row)} |\n")
    with ThreadPoolExecutor(len(names)) as pool:
        for name, counts in zip(names, pool.map(run, names, [given.orders] * len(names)), strict=True):
            cells = [f"{name} {version(name)}", *(f"{counts[column]:,}" for column in COLUMNS)]
            sys.stdout.write(f"| {' | '.join(cells)} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["fork"]:
        fork(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
