"""A process that drives effects and is killed at one of its steps: `python effect_victim.py DATABASE PROVIDER`.

Each line of its input is a case: the policy, the key (null: settle what is due), and the number of the step at which
to die. It forks for each case, and prints the exit code, and the steps that the case has passed. A step is a call of
the driver, or a call of the provider; each has a point before it and one after it.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Self

from sqlalchemy import URL, create_engine, make_url
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from command import importing
from effect_rig import Charge, book, function_of, refuse
from projector_dedup.effects import (
    AsyncEffects,
    Attempt,
    Effects,
    EffectUnknown,
    NotDone,
    Rejected,
    ask,
    effect,
    resend,
    stop,
)

_CALLS = ("do_execute", "do_executemany", "do_commit", "do_rollback")
SHORT = timedelta(seconds=60)
WINDOW = timedelta(hours=6)  # of both policies: much longer than a run with many effects takes on a slow machine


class Victim:
    """Counts its steps, and dies at one of them. ``die_at=0`` lives. ``patience``: seconds for a reply."""

    def __init__(self, provider: str, die_at: int = 0, patience: float = 5) -> None:
        self.provider, self.die_at, self.patience, self.steps = provider, die_at, patience, 0

    def step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make the call between two points."""
        self._point()
        result = call(*args, **kwargs)
        self._point()
        return result

    def _point(self) -> None:
        self.steps += 1
        if self.steps == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, dialect: Any) -> None:
        """Let each call of the driver be a step."""
        for name in _CALLS:
            setattr(dialect, name, self._stepping(getattr(dialect, name)))

    def _stepping(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.step(call, *args, **kwargs)

    def charge(self, request: Charge, attempt: Attempt) -> str:
        """Do the deed at the provider."""
        asked = urllib.request.Request(  # http
            f"{self.provider}/deeds",
            json.dumps({"order": request.order}).encode(),
            {"Idempotency-Key": attempt.key, "Content-Type": "application/json"},
        )
        try:
            return str(self.step(_json, asked, attempt.time_left(self.patience))["id"])
        except urllib.error.HTTPError as error:
            if error.code == 402:
                raise Rejected("card_declined") from error
            raise

    def was_charged(self, _request: Charge, attempt: Attempt) -> str:
        """Ask the provider."""
        found = self.step(_json, f"{self.provider}/deeds?key={attempt.key}", attempt.time_left(self.patience))["deeds"]
        if not found:
            raise NotDone
        return str(found[0]["id"])

    def effect(self, policy: str, *, asynchronous: bool) -> Any:
        """Return the effect with one of the three policies."""

        plain = partial(function_of, asynchronous=asynchronous)
        asking = ask(plain(self.was_charged), after=SHORT, within=WINDOW)
        unknown: Any = {"resend": resend(within=WINDOW), "ask": asking, "stop": stop}[policy]
        made = effect(name=f"victim.{policy}", lease=30, unknown=unknown)(plain(self.charge))
        made.recorded(plain(book))
        made.refused(plain(refuse))
        return made


def _json(asked: Any, timeout: float) -> Any:
    with urllib.request.urlopen(asked, timeout=timeout) as answer:  # http
        return json.load(answer)


def drive(
    database: str, provider: str, policy: str, key: str | None = None, die_at: int = 0, patience: float = 5
) -> int:
    """Run an armed effect, or settle what is due; return the number of steps, or die at one of them."""
    victim, url = Victim(provider, die_at, patience), make_url(database)
    if url.get_dialect().is_async:
        engine = create_async_engine(url)
        victim.watch(engine.sync_engine.dialect)

        async def driven() -> None:
            made = victim.effect(policy, asynchronous=True)
            effects = AsyncEffects(async_sessionmaker(engine), [made])
            with contextlib.suppress(EffectUnknown, Rejected):
                await (effects.settle(limit=10_000) if key is None else effects.run(made, key=key))
            await engine.dispose()

        asyncio.run(driven())
    else:
        plain = create_engine(url)
        victim.watch(plain.dialect)
        made = victim.effect(policy, asynchronous=False)
        effects = Effects(sessionmaker(plain), [made])
        with contextlib.suppress(EffectUnknown, Rejected):
            _ = effects.settle(limit=10_000) if key is None else effects.run(made, key=key)
        plain.dispose()
    return victim.steps


class Victims:
    """Processes that are killed, one for each case."""

    def __init__(self, database: URL, provider: str, patience: float = 5) -> None:
        url = database.render_as_string(hide_password=False)
        command = [sys.executable, __file__, url, provider, str(patience)]
        self._process = subprocess.Popen(
            command, env=importing(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, policy: str, key: str | None, die_at: int = 0) -> int:
        """Run the armed effect, or settle; return the number of steps, or 0 if the process was killed."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps([policy, key, die_at]) + "\n")
        self._process.stdin.flush()
        code, steps = json.loads(self._process.stdout.readline())
        assert code == (-signal.SIGKILL if die_at and not steps else 0), (policy, key, die_at, code)
        return int(steps or 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def main(database: str, provider: str, patience: str) -> None:
    """Fork for each line of the input."""
    logging.disable(logging.WARNING)
    for line in sys.stdin:
        policy, key, die_at = json.loads(line)
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            code = 1
            try:
                os.write(writes, str(drive(database, provider, policy, key, die_at, float(patience))).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(writes)
        _, status = os.waitpid(child, 0)
        with os.fdopen(reads) as told:
            sys.stdout.write(json.dumps([os.waitstatus_to_exitcode(status), told.read()]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
