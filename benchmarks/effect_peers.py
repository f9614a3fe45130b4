"""`make effects-peers`: other libraries at the provider that lies, in processes that are killed; judged by its log.

Each effect is a POST to a provider that ignores keys. A process is killed before and after each call of the library's
store and of the provider, for each behaviour of the provider. Afterwards a caller repeats each call three times, each
time after the lease has ended: what a client, a broker or an agent does. What the library lists for a person counts.
"""

import contextlib
import json
import logging
import os
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
import urllib.request
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from projector_dedup.testing.provider import Behaviour, Provider

LEASE = 1.0
DELAY = 0.3
REDIS = os.environ.get("PROJECTOR_DEDUP_TEST_REDIS_URL", "redis://127.0.0.1:6379/0")
COLUMNS = (
    *("effects", "kills", "calls", "done", "done twice or more", "listed for a person", "not done, in no list"),
    "done, and the caller has no answer",
)

Call = Callable[[str], Any]


class Steps:
    """Counts calls of the store and the provider, and kills this process at one of the points around them."""

    def __init__(self, die_at: int = 0) -> None:
        self.die_at, self.count = die_at, 0

    def point(self) -> None:
        """Pass a point, or die there."""
        self.count += 1
        if self.count == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a point before it and one after it."""

        def stepping(*args: Any, **kwargs: Any) -> Any:
            self.point()
            result = call(*args, **kwargs)
            self.point()
            return result

        return stepping

    def around_async(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the coroutine function with a point before it and one after it."""

        async def stepping(*args: Any, **kwargs: Any) -> Any:
            self.point()
            result = await call(*args, **kwargs)
            self.point()
            return result

        return stepping


def post(steps: Steps, url: str, key: str) -> str:
    """Do the deed."""
    headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/deeds", json.dumps({"order": key}).encode(), headers)  # http

    def send() -> str:
        with urllib.request.urlopen(asked, timeout=0.2) as answer:  # http
            return str(json.load(answer)["id"])

    return str(steps.around(send)())


def idemkit(steps: Steps, url: str, _folder: Path) -> Call:
    """`idempotent_sync` on Redis: a lease that ended is taken over by the next call."""
    import redis.asyncio
    from idemkit import MethodConfig, RedisBackend, idempotent_sync

    redis.asyncio.Redis.execute_command = steps.around_async(redis.asyncio.Redis.execute_command)

    @idempotent_sync(backend=RedisBackend.from_url(REDIS, namespace=url), config=MethodConfig(lease_ttl_seconds=LEASE))
    def charge(order: str) -> str:
        return post(steps, url, order)

    return charge


def powertools(steps: Steps, url: str, _folder: Path) -> Call:
    """`idempotent_function` on its own Redis layer; the context of the invocation says that a second is left."""
    import redis
    from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
    from aws_lambda_powertools.utilities.idempotency.persistence.redis import CachePersistenceLayer

    redis.Redis.execute_command = steps.around(redis.Redis.execute_command)

    class Context:
        def get_remaining_time_in_millis(self) -> int:
            return int(LEASE * 1000)

    config = IdempotencyConfig(lambda_context=Context())
    store = CachePersistenceLayer(client=redis.Redis.from_url(REDIS, decode_responses=True))

    @idempotent_function(data_keyword_argument="order", persistence_store=store, config=config, key_prefix=url)
    def charge(order: str) -> str:
        return post(steps, url, order)

    return lambda key: charge(order=key)


def effect_ledger(steps: Steps, url: str, folder: Path) -> Call:
    """`EffectExecutor` on SQLite. A completed operation has an answer; anything else is for a person."""
    from effect_ledger import EffectExecutor

    class Connection(sqlite3.Connection):
        execute = steps.around(sqlite3.Connection.execute)
        commit = steps.around(sqlite3.Connection.commit)

    connect = sqlite3.connect
    sqlite3.connect = lambda *args, **kwargs: connect(*args, factory=Connection, **kwargs)  # type: ignore[assignment]
    executor = EffectExecutor(folder / "ledger.sqlite3", scope="proof")

    def charge(key: str) -> Any:
        done = executor.execute(key, "charge:v1", {"order": key}, lambda _: post(steps, url, key))
        if done.state != "completed":
            raise LookupError(done.state)
        return done.result

    charge.listed = lambda: {each.operation_id for each in executor.unresolved(limit=1_000_000)}  # type: ignore[attr-defined]
    return charge


PEERS = {"idemkit": idemkit, "aws-lambda-powertools": powertools, "effect-ledger": effect_ledger}


def forked(work: Callable[[], Any]) -> Any:
    """Do the work in a process of its own; return its result, or None if the process was killed."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.write(writes, json.dumps(work()).encode())
            code = 0
        except Exception:  # noqa: BLE001  # whatever it is, it is shown
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writes)
    with os.fdopen(reads) as told:
        text = told.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"the process ended with {code}")
    return json.loads(text) if text else None


def run(build: Callable[[Steps, str, Path], Call]) -> Counter[str]:
    """Run one library through all cases, and count."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Provider(folder / "log.jsonl", forget_after=0.0, delay=DELAY) as provider:
            keys: list[str] = []

            def victim(behaviour: Behaviour, die_at: int) -> int:
                key = f"{len(keys)} {behaviour} at {die_at}"
                keys.append(key)
                provider.on_key(key, [behaviour])

                def work() -> int:
                    steps = Steps(die_at)
                    charge = build(steps, provider.url, folder)
                    with contextlib.suppress(Exception):
                        charge(key)
                    return steps.count

                count: int | None = forked(work)
                counts["kills"] += count is None
                return count or 0

            for behaviour in Behaviour:
                for step in range(1, victim(behaviour, 0) + 1):
                    victim(behaviour, step)

            def again() -> tuple[list[str], list[str]]:
                charge, answered = build(Steps(), provider.url, folder), []
                for key in keys:
                    with contextlib.suppress(Exception):
                        charge(key)
                        answered.append(key)
                return answered, sorted(getattr(charge, "listed", set)())

            for _ in range(3):
                time.sleep(LEASE + DELAY)
                answered, listed = (set(each) for each in forked(again))
            time.sleep(DELAY)
            deeds, counts["calls"] = Counter(call.key for call in provider.deeds()), len(provider.calls())
    for key in keys:
        counts += Counter(
            {
                "effects": 1,
                "done": int(deeds[key] > 0),
                "done twice or more": int(deeds[key] > 1),
                "listed for a person": int(key in listed),
                "not done, in no list": int(not deeds[key] and key not in listed),
                "done, and the caller has no answer": int(deeds[key] > 0 and key not in answered | listed),
            }
        )
    return counts


def main() -> None:
    """Print a row for each library."""
    logging.disable(logging.ERROR)
    for row in (("library", *COLUMNS), ("---", *["---:"] * len(COLUMNS))):
        sys.stdout.write(f"| {' | '.join(row)} |\n")
    for name, build in PEERS.items():
        counts = run(build)
        cells = [f"{name} {version(name)}", *(f"{counts[column]:,}" for column in COLUMNS)]
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
