"""Galera without this library: transactions that read a row and write what they read plus one, through all nodes."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pymysql

from galera import DATABASE, GaleraCluster, GaleraNode

ROWS, WORKERS = 3, 2  # rows in all, and workers at each node


@dataclass
class Plain:
    """One run: transactions that were committed, those that were refused, and updates that are missing."""

    snapshots: str
    committed: int = 0
    refused: int = 0
    lost: int = 0


def runs(cluster: GaleraCluster, seed: int, seconds: float) -> Iterator[Plain]:
    """Run with MariaDB's refusal of stale writes off, as it is by default before 11.6.2, and on."""
    for snapshots in ("OFF", "ON"):
        yield _run(cluster, Plain(snapshots), seed, seconds)


def _run(cluster: GaleraCluster, plain: Plain, seed: int, seconds: float) -> Plain:
    first = cluster.nodes[0]
    first.execute(f"CREATE OR REPLACE TABLE {DATABASE}.plain (id INT PRIMARY KEY, number INT NOT NULL)")
    first.execute(f"INSERT INTO {DATABASE}.plain VALUES {', '.join(f'({row}, 0)' for row in range(ROWS))}")
    lock, end = threading.Lock(), time.monotonic() + seconds

    def work(node: GaleraNode, dice: random.Random) -> None:
        with contextlib.closing(node.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(f"SET SESSION innodb_snapshot_isolation = {plain.snapshots}, autocommit = 0")
            while time.monotonic() < end:
                row = dice.randrange(ROWS)
                try:
                    cursor.execute(f"SELECT number FROM {DATABASE}.plain WHERE id = {row}")
                    ((number,),) = cursor.fetchall() or ((0,),)  # no row yet: its UPDATE changes nothing
                    changed = cursor.execute(f"UPDATE {DATABASE}.plain SET number = {number + 1} WHERE id = {row}")
                    connection.commit()
                except pymysql.err.OperationalError:  # 1020, 1213
                    connection.rollback()
                    changed = None
                with lock:
                    plain.committed += changed or 0
                    plain.refused += changed is None

    workers = [
        threading.Thread(target=work, args=(node, random.Random(f"{seed} {number} {node.name}")), daemon=True)
        for node in cluster.nodes
        for number in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    ((found,),) = first.execute(f"SELECT SUM(number) FROM {DATABASE}.plain")
    plain.lost = plain.committed - int(found)
    return plain
