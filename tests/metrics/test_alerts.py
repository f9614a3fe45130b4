"""The alert rules load as they are, and each of fifteen faults rings within a minute in a real Prometheus."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from sqlalchemy import Engine, MetaData, create_engine, insert, update
from sqlalchemy.orm import Session, sessionmaker

from adapters import Redis, adapter
from databases import Database
from ending_worker import GROUP
from own_server import OwnServer
from payments import Base, Payments, payment
from projector_dedup import Dispatcher, make_tables, on, projector
from projector_dedup.brokers.incoming import Incoming
from projector_dedup.brokers.redis import dead_stream
from projector_dedup.brokers.settling import Settling
from projector_dedup.effects import Attempt, Effects, arm, default_effect_tables, effect, stop
from projector_dedup.maintenance.cleanup import prune
from projector_dedup.message import by_path
from projector_dedup.metrics.prometheus import PrometheusObserver
from projector_dedup.metrics.prometheus_tables import TablesCollector
from projector_dedup.options import RetryPolicy
from projector_dedup.tables import default_tables
from projector_dedup.testing.provider import free_port
from reached import reached
from redis_rig import RedisStream

ALERTS = Path(__file__).parents[2] / "docs" / "alerts"
RULES, BOARD = ALERTS / "rules.yml", ALERTS / "grafana.json"
RUNBOOK = ALERTS.parent / "runbook.md"
NOW = datetime.now(UTC)
WITHIN = 60.0
"""Seconds in which an alert rings after its fault."""

Alert = dict[str, str]


class Provider(Exception):  # noqa: N818
    """The answer of a provider was lost."""


@effect(name="charge", lease=1, unknown=stop)
def charge(_request: str, _attempt: Attempt) -> str:
    """Charge a card; the answer is lost."""
    raise Provider


@projector(idempotent=True, name="committing")
class Committing:
    """Ends a transaction that is not its own."""

    @on("payment")
    def paid(self, _event: Any, session: Session) -> None:
        """Commit."""
        session.commit()


class EndingWorker:
    """A process of `ending_worker.py`, whose consumer ends by itself when it gets a message."""

    def __init__(self, redis: Redis) -> None:
        self.port = free_port()
        self._queue = RedisStream(redis.queue.address)
        url = redis.database.url().render_as_string(hide_password=False)
        ours = {"STREAM": self._queue.stream, "REDIS_URL": self._queue.address, "DATABASE_URL": url}
        self._environment = {**os.environ, **ours, "PORT": str(self.port)}
        self._closed = threading.Event()
        self.start()

    def start(self) -> None:
        """Start the process."""
        program = Path(__file__).parents[1] / "support" / "ending_worker.py"
        self._process = subprocess.Popen([sys.executable, program], env=self._environment, stderr=subprocess.DEVNULL)

    def ends(self) -> None:
        """Send a message, and wait until the process has ended."""
        self._queue.pay(1)
        assert self._process.wait() == 1 or self._closed.is_set()

    def loops(self) -> None:
        """Start the process again each time, as a supervisor does."""
        self.ends()
        while not self._closed.is_set():
            self.start()
            self.ends()

    def close(self) -> None:
        """Kill the process, and delete its stream."""
        self._closed.set()
        self._process.kill()
        self._process.wait()
        self._queue.client.delete(dead_stream(self._queue.stream, GROUP))
        self._queue.close()


class Shop:
    """A worker with everything that can go wrong, and what it exports."""

    def __init__(self, redis: Redis) -> None:
        self.redis, self.engine = redis, redis.engine
        self.registry = CollectorRegistry()
        self.observer = PrometheusObserver(self.registry)
        self.spare = make_tables(MetaData(), "spare")
        for metadata in (self.spare.marker.metadata, default_effect_tables.marker.metadata):
            metadata.create_all(self.engine)
        self.registry.register(TablesCollector(self.engine, [default_tables, self.spare, default_effect_tables]))
        self.ending = EndingWorker(redis)
        self.late_line()

    def dispatcher(self, handler: object | None = None, engine: Engine | None = None, **options: Any) -> Dispatcher:
        """A dispatcher of payments that is observed."""
        return Dispatcher(
            sessionmaker(engine or self.engine),
            handler or Payments(),
            type=by_path("type"),
            observer=self.observer,
            retry=RetryPolicy(attempts=1),
            **options,
        )

    def consume(self, *bodies: bytes, ends: bool = False) -> None:
        """Let a consumer of Redis settle messages; it ``ends`` if it cannot keep a dead letter."""
        queue = self.redis.queue
        before = int(queue.client.xlen(queue.stream))
        for body in bodies:
            queue.client.xadd(queue.stream, {"body": body})
        consumer = self.redis.make(self.dispatcher())
        if ends:
            assert self.redis.failure(consumer=consumer) is not None
        else:
            self.redis.consume_until(queue.settled(before + len(bodies)), consumer=consumer)

    def late_line(self) -> None:
        """Clean up for the first time, which declares a horizon of a week: what occurred before it is late."""
        prune(self.engine)

    def works(self) -> None:
        """Apply a message, as on any day."""
        self.consume(payment(100, "good"))

    # Faults -------------------------------------------------------------------------------------------------------

    def poison(self) -> None:
        """A handler fails on a message."""
        self.consume(json.dumps({"type": "payment", "message_id": "poison"}).encode())

    def unreadable(self) -> None:
        """A producer sends what is not JSON."""
        self.consume(b"{")

    def no_dead_letters(self) -> None:
        """The broker keeps no dead letters."""
        self.redis.lose_letters()
        self.consume(b"[", ends=True)

    def commits(self) -> None:
        """A handler ends its transaction."""
        self.settle(self.dispatcher(Committing()), "commits")

    def no_table(self) -> None:
        """A deployment ran before its migration."""
        self.settle(self.dispatcher(tables=make_tables(MetaData(), "nowhere")), "no table")

    def no_server(self) -> None:
        """The database is away."""
        self.settle(self.dispatcher(engine=create_engine("postgresql+psycopg://nobody@127.0.0.1:1/none")), "no server")

    def late(self) -> None:
        """A message comes after its marker may have been pruned."""
        self.settle(self.dispatcher(), "late", occurred_at=NOW - timedelta(days=11))

    def collides(self) -> None:
        """Two producers give their events the same id."""
        for amount in (1, 2):
            self.settle(self.dispatcher(), "collides", body=payment(amount, "a"))

    def behind(self) -> None:
        """The consumer was down for hours, and works through what has gathered."""
        dispatcher = self.dispatcher()
        for number in range(8):
            self.settle(dispatcher, f"behind {number}", occurred_at=NOW - timedelta(hours=5))
            time.sleep(0.5)

    def redelivered(self) -> None:
        """A broker delivers one message again and again."""
        dispatcher = self.dispatcher()
        for number in range(60):
            self.settle(dispatcher, "again", attempt=number + 1)
            time.sleep(0.1)

    def never_pruned(self) -> None:
        """Nobody runs cleanup."""
        row = {"message_id": "ancient", "handler": "h", "processed_at": NOW - timedelta(days=300)}
        with self.engine.begin() as connection:
            connection.execute(insert(default_tables.marker), row)

    def no_spare(self) -> None:
        """Somebody drops a table."""
        self.spare.marker.drop(self.engine)

    def lost_answer(self) -> None:
        """A provider's answer is lost, and the policy is to stop."""
        factory = sessionmaker(self.engine)
        with factory.begin() as session:
            arm(session, charge, "card", key="k1")
        effects = Effects(factory, [charge], observer=self.observer)
        while not effects.settle().stopped:  # by the first one the effect is sent; the lease must end before the other
            time.sleep(0.2)

    def nobody_settles(self) -> None:
        """A refund was armed, and no process sends it."""
        refund = effect(name="refund", lease=1, unknown=stop)(charge.function)
        with sessionmaker(self.engine).begin() as session:
            arm(session, refund, "card", key="k2")
            row, ago = default_effect_tables.marker, 20 * 60_000
            times = {"armed_at": row.c.armed_at - ago, "next_at": row.c.next_at - ago}
            session.execute(update(row).where(row.c.handler == "refund").values(times))

    def consumer_ends(self) -> None:
        """Another worker of the shop ends by itself, and nobody starts it again."""
        self.ending.ends()

    def settle(
        self,
        dispatcher: Dispatcher,
        message_id: str,
        body: bytes = payment(7, "a"),
        **more: Any,
    ) -> None:
        """Deliver one payment as a consumer of another client does."""
        Settling(dispatcher).deliver(Incoming(body, message_id, **more))


FAULTS: dict[Callable[[Shop], None], Alert] = {
    Shop.poison: {"alertname": "MessageFailed", "handler": "payments.paid", "error": "KeyError"},
    Shop.unreadable: {"alertname": "MessageRejected", "broker": "redis", "reason": "invalid_message"},
    Shop.no_dead_letters: {"alertname": "DeadLetterLost", "broker": "redis"},
    Shop.commits: {"alertname": "TransactionViolated", "handler": "committing.paid"},
    Shop.no_table: {"alertname": "DeliveryRefused", "broker": "other"},
    Shop.no_server: {"alertname": "DatabaseFailing", "broker": "other"},
    Shop.late: {"alertname": "MessageLate", "handler": "payments.paid"},
    Shop.collides: {"alertname": "OtherBody", "handler": "payments.paid"},
    Shop.behind: {"alertname": "ReadModelBehind", "handler": "payments.paid"},
    Shop.redelivered: {"alertname": "RedeliveriesMany", "handler": "payments.paid"},
    Shop.never_pruned: {"alertname": "CleanupBehind", "table": "processed_message"},
    Shop.no_spare: {"alertname": "TablesUnreadable", "table": "spare"},
    Shop.consumer_ends: {"alertname": "ConsumerDown", "job": "shop", "process": "ending"},
    Shop.lost_answer: {"alertname": "EffectNeedsPerson", "table": "external_effect"},
    Shop.nobody_settles: {"alertname": "EffectOverdue", "table": "external_effect"},
}


class Prometheus:
    """A server of the test's own, which scrapes a registry and evaluates the rules every second."""

    def __init__(self, folder: Path, registry: CollectorRegistry, ending: int) -> None:
        self._exporter, self._thread = start_http_server(0, "127.0.0.1", registry)
        targets = [
            {"targets": [f"127.0.0.1:{self._exporter.server_port}"]},
            {"targets": [f"127.0.0.1:{ending}"], "labels": {"process": "ending"}},
        ]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "shop", "static_configs": targets}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        options = ("--config.file={folder}/prometheus.yml", "--storage.tsdb.path={folder}/data")
        self._server = OwnServer("prometheus", "prometheus", folder, *options, "--web.listen-address=127.0.0.1:{port}")
        self._server.start()

    def ask(self, path: str) -> Any:
        """The data of an answer of the HTTP API; None while the server starts."""
        url = f"http://127.0.0.1:{self._server.port}/api/v1/{path}"
        with contextlib.suppress(OSError), urllib.request.urlopen(url) as answer:
            return json.load(answer)["data"]

    def firing(self) -> list[Alert]:
        """The labels of the alerts that ring."""
        found = self.ask("alerts") or {"alerts": []}
        return [each["labels"] for each in found["alerts"] if each["state"] == "firing"]

    def evaluated(self) -> bool:
        """True once every rule was evaluated over what was scraped, without an error."""
        up = self.ask("query?query=projector_dedup_messages_total%20and%20on()%20(count(up%20==%201)%20==%202)")
        groups = (self.ask("rules") or {"groups": []})["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return bool(up and up["result"]) and bool(rules) and all(rule["health"] == "ok" for rule in rules)

    def close(self) -> None:
        """End both servers."""
        self._server.kill()
        self._exporter.shutdown()
        self._exporter.server_close()
        self._thread.join()


@pytest.fixture
def shop(postgresql: Database) -> Iterator[Shop]:
    """A worker on PostgreSQL and Redis."""
    with adapter("redis", postgresql) as made:
        assert isinstance(made, Redis)
        Base.metadata.create_all(made.engine)
        shop = Shop(made)
        yield shop
        shop.ending.close()


@pytest.fixture
def prometheus(shop: Shop, tmp_path: Path) -> Iterator[Prometheus]:
    """A real Prometheus that scrapes the worker."""
    server = Prometheus(tmp_path, shop.registry, shop.ending.port)
    yield server
    server.close()


def rings(expected: Alert, firing: list[Alert]) -> bool:
    """True if one of the alerts has the expected labels."""
    wanted = {**expected, "alertname": f"ProjectorDedup{expected['alertname']}"}
    return any(wanted.items() <= each.items() for each in firing)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_fault_rings_within_a_minute_and_a_healthy_worker_does_not(shop: Shop, prometheus: Prometheus) -> None:
    """The rules are those of the docs, unedited, and each of them has its fault."""
    assert {f"ProjectorDedup{each['alertname']}" for each in FAULTS.values()} == {*alerts()}
    shop.works()
    wait_until(prometheus.evaluated, 30)
    reached.saw("prometheus", prometheus.ask("status/buildinfo")["version"])
    time.sleep(17)  # longer than any `for:` of the rules
    assert prometheus.firing() == []
    silent = dict(FAULTS)
    injected: dict[Callable[[Shop], None], float] = {}
    for fault in FAULTS:
        injected[fault] = time.monotonic()
        fault(shop)

    def all_ring() -> bool:
        firing = prometheus.firing()
        for fault, expected in list(silent.items()):
            if rings(expected, firing):
                assert time.monotonic() - injected[fault] < WITHIN, expected
                del silent[fault]
        return not silent

    wait_until(all_ring, WITHIN, lambda: f"these do not ring: {silent}")


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_consumer_that_is_started_again_and_again_rings(shop: Shop, prometheus: Prometheus) -> None:
    """It is up for two seconds of each run, so no look at ``up`` alone finds it down for long."""
    shop.works()
    wait_until(prometheus.evaluated, 30)
    supervisor = threading.Thread(target=shop.ending.loops)
    supervisor.start()
    try:
        wait_until(lambda: rings(FAULTS[Shop.consumer_ends], prometheus.firing()), 150)
        down = prometheus.ask("query?query=max_over_time(up%7Bprocess=%22ending%22%7D%5B30s%5D)")["result"]
        assert [each["value"][1] for each in down] == ["1"]
    finally:
        shop.ending.close()
        supervisor.join()


def wait_until(condition: Callable[[], bool], seconds: float, why: Callable[[], str] = lambda: "") -> None:
    """Ask again and again."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.2)


# What is written in the files ----------------------------------------------------------------------------------------


def alerts() -> list[str]:
    """The names of the alerts, in the order of the file."""
    return re.findall(r"- alert: (\w+)", RULES.read_text(encoding="utf-8"))


def expressions() -> list[str]:
    """Every query of the rules and of the board."""
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(asked) > 15
    asked += [each["definition"] for each in board["templating"]["list"] if "definition" in each]
    return [*asked, *re.split(r"- alert: ", RULES.read_text(encoding="utf-8"))[1:]]


def exported() -> dict[str, set[str]]:
    """The series that are exported, and their labels."""
    registry = CollectorRegistry()
    PrometheusObserver(registry)
    found: dict[str, set[str]] = {}
    for collector in list[Any](registry._collector_to_names):  # which has no public list
        labels = set(collector._labelnames)
        for family in collector.describe():
            endings = ("_bucket", "_count", "_sum") if family.type == "histogram" else ("_total",)
            found |= {f"{family.name}{ending}": labels | {"le"} for ending in endings}
    gauges = TablesCollector(create_engine("sqlite://")).describe()
    return found | {family.name: set(family._labelnames) for family in gauges}


def test_the_rules_are_valid() -> None:
    """By Prometheus' own tool."""
    promtool = shutil.which("promtool")
    if promtool is None:
        reached.give_up("prometheus", "promtool", "promtool is not installed")
    done = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SUCCESS: {len(FAULTS)} rules found" in done.stdout


def test_rules_and_board_ask_for_what_is_exported() -> None:
    """Each metric that is asked for exists, with each label by which it is chosen or grouped."""
    known = exported()
    for expression in expressions():
        names = set(re.findall(r"\bprojector_dedup_\w+", expression))
        assert names, expression
        assert names <= known.keys(), expression
        grouped = {each.strip() for labels in re.findall(r"by \(([^)]*)\)", expression) for each in labels.split(",")}
        chosen = {
            label for labels in re.findall(r"\{([^{}]*)\}", expression) for label in re.findall(r"(\w+)[!=]", labels)
        }
        for name in names:
            assert grouped | chosen <= known[name], (expression, name)


def test_every_metric_is_on_the_board() -> None:
    """So that nobody looks for one in vain."""
    asked = BOARD.read_text(encoding="utf-8")
    families = {re.sub(r"_(bucket|count|sum|total)$", "", name) for name in exported()}
    assert [name for name in sorted(families) if name not in asked] == []


def test_every_alert_leads_to_its_heading_in_the_runbook() -> None:
    """By the anchor that both GitHub and the site make of a heading."""
    headings = {
        re.sub(r"[^\w-]", "", each.lower().replace(" ", "-"))
        for each in re.findall(r"^#+ (.+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)
    }
    links = re.findall(r'runbook_url: "docs/runbook\.md#(.+)"', RULES.read_text(encoding="utf-8"))
    assert links == [name.lower() for name in alerts()]
    assert [link for link in links if link not in headings] == []
