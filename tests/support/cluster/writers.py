"""Galera: one cluster of three nodes, several writers through all of them, a hot row, and a node that is killed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sqlalchemy import NullPool, Row, Select, create_engine, delete, select, text
from sqlalchemy.dialects.mysql import insert
from sqlalchemy.orm import Session

from galera import GaleraCluster, GaleraNode
from projector_dedup import Outcome
from projector_dedup.tables import default_tables
from projector_dedup.testing.convergence import Messages, generate
from projector_dedup.testing.kit import Added, Harness, Subject, Total

from .load import Broker, Deliver, Handler, Ran, working

DRIVERS = ("pymysql", "asyncmy", "pymysql")  # of the workers at each node
WORKERS = 2  # at each node


def add_by_upsert(happened: Added, session: Session) -> None:
    """Add to each total in one statement, which reads nothing before."""
    for key in sorted(happened.keys):
        row = insert(Total).values(key=key, amount=happened.amount)
        session.execute(row.on_duplicate_key_update(amount=Total.amount + happened.amount))


def runs(cluster: GaleraCluster, seed: int, messages: int) -> Iterator[Ran]:
    """Run all of them on one cluster, each with empty tables."""
    with contextlib.ExitStack() as stack:
        harnesses = [
            stack.enter_context(Harness(Subject(node.url.set(drivername=f"mariadb+{driver}"))))
            for node, driver in zip(cluster.nodes, DRIVERS, strict=True)
        ]
        harnesses[0].create_tables()
        yield _all_nodes(cluster, harnesses, seed, messages)
        yield _at_once(cluster, harnesses, seed, messages // 4)
        hot = {f"hot-{number}": Added(("a",), number) for number in range(1, messages // 4 + 1)}
        for through, nodes in (("all nodes", harnesses), ("one node", harnesses[:1] * len(harnesses))):
            yield _hot(cluster, nodes, hot, f"one hot row, through {through}", Handler(seed, 0))
            locked = Handler(seed, 0, read_models=[Total])
            yield _hot(cluster, nodes, hot, f"one hot row, `read_models`, through {through}", locked)
            upsert = Handler(seed, 0, add_by_upsert, reads=None)
            yield _hot(cluster, nodes, hot, f"one hot row, by upserts, through {through}", upsert)
        yield _killed(cluster, harnesses, seed, messages)


def _all_nodes(cluster: GaleraCluster, harnesses: list[Harness], seed: int, number: int) -> Ran:
    """Messages that meet on six rows; each comes to any node, some to two of them."""
    _empty(harnesses[0])
    began, broker, handler = time.monotonic(), Broker(generate(seed, number), seed), Handler(seed)
    with working(broker, _workers(handler, harnesses)):
        pass
    return _ran("several writers, through all nodes", "none", cluster, broker, handler, began)


def _at_once(cluster: GaleraCluster, harnesses: list[Harness], seed: int, number: int) -> Ran:
    """Each message comes to every node at the same moment."""
    _empty(harnesses[0])
    messages = generate(seed, number)
    began, broker, handler = time.monotonic(), Broker(messages, seed, redelivered=0), Handler(seed, failing=0)
    start = threading.Barrier(len(harnesses))
    delivers = [handler.through(harness) for harness in harnesses]

    def deliver(through: Deliver, message_id: str) -> Outcome:
        start.wait(60)
        return through(message_id, messages[message_id])

    with ThreadPoolExecutor(len(harnesses)) as threads:
        for message_id in messages:
            rivals = [threads.submit(deliver, through, message_id) for through in delivers]
            broker.outcomes.update(sorted(rival.result().name for rival in rivals))
            broker.acknowledged.add(message_id)
    ran = _ran("each message at all nodes at once", "none", cluster, broker, handler, began)
    assert broker.outcomes == {"APPLIED": number, "DUPLICATE": number * (len(harnesses) - 1)}, broker.outcomes
    return ran


def _hot(cluster: GaleraCluster, harnesses: list[Harness], messages: Messages, name: str, handler: Handler) -> Ran:
    """Every message adds to the same row."""
    _empty(harnesses[0])
    began, broker = time.monotonic(), Broker(messages, seed=1)
    with working(broker, _workers(handler, harnesses)):
        pass
    return _ran(name, "none", cluster, broker, handler, began)


def _killed(cluster: GaleraCluster, harnesses: list[Harness], seed: int, number: int) -> Ran:
    """A node is killed when a third is acknowledged, and comes back when two thirds are."""
    _empty(harnesses[0])
    broker, handler = Broker(generate(seed + 1, number), seed), Handler(seed)
    began, victim = time.monotonic(), cluster.nodes[2]
    with working(broker, _workers(handler, harnesses)):
        broker.wait_for(number // 3)
        victim.kill()
        acknowledged = broker.seen
        lost = acknowledged - _markers(cluster.nodes[0])
        broker.wait_for(2 * number // 3)
        cluster.rejoin(victim)
    ran = _ran(
        "several writers, through all nodes", "a node killed under load; it comes back", cluster, broker, handler, began
    )
    ran.acknowledged, ran.lost = len(acknowledged), len(lost)
    return ran


def _workers(handler: Handler, harnesses: list[Harness]) -> list[Deliver]:
    return [handler.through(harness) for harness in harnesses for _ in range(WORKERS)]


def _ran(name: str, fault: str, cluster: GaleraCluster, broker: Broker, handler: Handler, began: float) -> Ran:
    seconds = time.monotonic() - began
    found = {node.name: _totals(node) for node in cluster.nodes}
    return Ran(name, fault, len(broker.messages), broker, handler.runs, seconds, found)


def _totals(node: GaleraNode) -> dict[str, int]:
    return {str(key): int(amount) for key, amount in _settled(node, select(Total.key, Total.amount))}


def _markers(node: GaleraNode) -> set[str]:
    return {str(message_id) for (message_id,) in _settled(node, select(default_tables.marker.c.message_id))}


def _settled(node: GaleraNode, statement: Select[*tuple[Any, ...]]) -> Sequence[Row[*tuple[Any, ...]]]:
    """Return rows of a node as they are when it has applied everything that the cluster has committed."""
    engine = create_engine(node.url, poolclass=NullPool)
    with engine.connect() as connection:
        connection.execute(text("SET SESSION wsrep_sync_wait = 1"))
        connection.commit()
        return connection.execute(statement).all()


def _empty(harness: Harness) -> None:
    def empty(session: Session) -> None:
        session.execute(delete(Total))
        session.execute(delete(default_tables.marker))

    harness.transact(empty)
