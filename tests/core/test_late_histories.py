"""In no random history of deliveries, cleanups, changed horizons and a rename is a message applied twice."""

import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from sqlalchemy import Engine, delete, update

from databases import Database
from kit import Added, Harness, Total
from late_rig import MARKER, STATE, Claims, Clock, meanwhile, outcome
from marked import one_of_each_engine  # noqa: F401  # a fixture
from projector_dedup import Message
from projector_dedup.errors import ProjectorDedupError, RefusedError, RetentionTooShortError
from projector_dedup.maintenance.cleanup import declare_horizon, prune
from projector_dedup.maintenance.rows import rename
from projector_dedup.message import from_uuid7
from ready import ready

HISTORIES = {"sqlite": 120, "postgresql": 40, "mariadb": 40}
HORIZONS = (2, 5, 12, 48)
SPANS = (3, 8, 14, 20, 40, 65, 180, 600, 3000)  # minutes


class History:
    """Workers, cleanups, changed horizons and a rename, in an order that a seed chooses."""

    def __init__(self, seed: int, harness: Harness, cleaner: Engine, clock: Clock, claims: Claims) -> None:
        self.random, self._harness, self._cleaner = Random(seed), harness, cleaner
        self._clock, self._claims = clock, claims
        self.log: list[str] = []
        self._times: dict[str, datetime] = {}
        self._messages: list[Message] = []
        self._nested = False
        self._old = [self._dispatcher("totals"), self._dispatcher("totals")]
        self._both = [self._dispatcher("renamed", "totals"), self._dispatcher("renamed", "totals")]
        self._new = [self._dispatcher("renamed")]
        self._workers = [*self._old, *self._both]  # of which each knows a late moment of its own

    def _dispatcher(self, name: str, *formerly: str) -> Any:
        handler = self._harness.handler(name=name, formerly=formerly)
        return self._harness.dispatcher(handler, occurred_at=lambda each: self._times.get(each.id) or from_uuid7(each))

    def _message(self) -> Message:
        """A new message, or one that came before; its time is in the message, in its id, or known to the extractor."""
        if self._messages and self.random.random() < 0.75:
            return self.random.choice(self._messages)
        hours = self.random.choice([-4, 0, 1, 6, *HORIZONS]) - self.random.random() / 4  # -4: a clock that is ahead
        at, carrier = datetime.now(UTC) + self._clock.ahead - timedelta(hours=hours), self.random.randrange(3)
        name = f"m{len(self._messages)}"
        if carrier == 0:
            message = Message(name, Added((name,)), occurred_at=at)
        elif carrier == 1:
            self._times[name] = at
            message = Message(name, Added((name,)))
        else:
            bits = (int(at.timestamp() * 1000) << 80) | (7 << 76) | (2 << 62) | len(self._messages)
            message = Message(str(uuid.UUID(int=bits)), Added((name,)))
        self._messages.append(message)
        return message

    def _deliver(self) -> None:
        message, number = self._message(), self.random.randrange(len(self._workers))
        nests = not self._nested and self._harness.engine.dialect.name != "sqlite" and self.random.random() < 0.3
        if nests:  # its claim is answered, and it does not know yet what is late
            self._claims.then = lambda: self._happens(self._pass, self._prune, self._declare)
        try:
            result: Any = self._workers[number].deliver(message)
        except ProjectorDedupError as error:
            result = error
        self._claims.then = None
        if outcome(result) == "applied":  # the database's own clock is not ahead
            at = datetime.now(UTC) + self._clock.ahead
            with self._cleaner.begin() as connection:
                connection.execute(update(MARKER).where(MARKER.c.message_id == message.id).values(processed_at=at))
        self.log.append(f"worker {number} {message.id}: {outcome(result)}")

    def _pass(self) -> None:
        minutes = self.random.choice(SPANS)
        self._clock.passes(timedelta(minutes=minutes))
        self.log.append(f"{minutes} minutes")

    def _prune(self) -> None:
        hours = self.random.choice([None, None, *HORIZONS])
        self.log.append(f"cleanup {hours} begins")
        try:
            done: Any = prune(self._cleaner, retention_hours=hours, batch_size=2).deleted
        except RetentionTooShortError:
            done = "refused"
        self.log.append(f"cleanup {hours}: {done}")

    def _declare(self) -> None:
        hours = self.random.choice([None, *HORIZONS])
        declare_horizon(self._cleaner, hours)
        self.log.append(f"horizon {hours}")

    def _rename(self) -> None:
        """When no worker has old code; afterwards new code does without `formerly`."""
        if self._nested or self._workers[0] not in self._old:
            return
        with suppress(RefusedError):
            rename(self._cleaner, "totals", "renamed", remove_old=self.random.random() < 0.5)
        self._workers = [*self._both, *self._new]
        self.log.append("rename")

    def announced(self) -> None:
        """Between what a cleanup announces and what it deletes."""
        if not self._nested:
            self._happens(self._pass, self._declare, self._deliver, self._deliver)

    def _happens(self, *acts: Callable[[], None]) -> None:
        self._nested = True
        for _ in range(self.random.randrange(3)):
            self.random.choice(acts)()
        self._nested = False

    def run(self) -> None:
        """Let forty things happen."""
        acts = (
            [self._deliver] * 8
            + [self._pass] * 4
            + [self._prune] * 3
            + [self._declare]
            + [self._rename] * (self.random.random() < 0.5)
        )
        for _ in range(40):
            self.random.choice(acts)()


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("database", HISTORIES, indirect=True)
def test_in_no_history_is_a_message_applied_twice(
    database: Database, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh and old readings, renames, cleanups, horizons raised, lowered and taken back, and time that passes."""
    clock, claims, seen = Clock(monkeypatch), Claims(monkeypatch), set()
    running: list[History] = []

    def announced() -> None:
        running[-1].announced()

    meanwhile(monkeypatch, announced)
    with ready(database.url()) as harness:
        for seed in range(HISTORIES[database.engine]):
            with engine.begin() as connection:
                for table in (MARKER, STATE, Total):
                    connection.execute(delete(table))
            clock.ahead = timedelta()
            running.append(History(seed, harness, engine, clock, claims))
            running[-1].run()
            twice = {key: amount for key, amount in harness.totals().items() if amount != 1}
            assert not twice, "\n".join([f"seed {seed}: {twice}", *running[-1].log])
            seen |= {each.rpartition(": ")[2] for each in running[-1].log if each.startswith("worker")}
    expected = {"applied", "duplicate", "BeyondRetention"}
    assert seen == (expected if database.engine == "sqlite" else {*expected, "InProgress"})
