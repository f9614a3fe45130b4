"""`make effects-sweep`: two processes settle at once, are killed and started again, with many rows.

The provider is a file: the function of the effect appends the request to it. Policy ``stop``, so that no kill permits a
second call. What the processes did is told by the file and the payments.
"""

import argparse
import json
import logging
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, event, select, text
from sqlalchemy.orm import sessionmaker

from command import importing
from effect_rig import TABLE, Charge, Till, book
from kit import Harness, Subject
from projector_dedup.effects import Attempt, Effects, arm, effect, stop
from projector_dedup.maintenance.effects import find_effects, resolve

AT_ONCE = 100  # rows that settle finds at once


def label(log: Path) -> Any:
    """Return the effect; ``log`` is the provider's."""

    def append(request: Charge, _attempt: Attempt) -> str:
        line = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(line, f"{request.order}\n".encode())
        finally:
            os.close(line)
        return request.order

    made = effect(name="sweep.label", lease=30, unknown=stop)(append)
    made.recorded(book)
    return made


def settle(url: str, log: Path, limit: int) -> None:
    """Settle, and print what was counted, and the memory in MiB before and at the most."""
    logging.disable(logging.WARNING)
    effects = Effects(sessionmaker(create_engine(url)), [label(log)])
    effects.settle(limit=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    settled = effects.settle(limit=limit)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(json.dumps([str(settled), round(before / 1024, 1), round(most / 1024, 1)]))


@dataclass
class Swept:
    """What came of a run."""

    twice: int  #: calls at the provider after the first one for a request
    done: int  #: recorded before a person was asked
    listed: int  #: a process was killed between taking the row and recording it
    unlisted: int
    wrong: int  #: requests whose payments, in the end, are not one
    kills: int
    displaced: int  #: the most rows that a row was sent later or earlier than by its age
    memory: list[list[float]]  #: MiB before and at the most, of the processes that were not killed
    seconds: float


def sweep(till: Till, folder: Path, rows: int, kills: int, seed: int) -> Swept:
    """Arm so many effects, and let two processes settle them, of which one is killed now and then."""
    log, dice = folder / "provider.log", random.Random(seed)
    log.touch()
    made, engine = label(log), till.harness.engine
    orders = [f"{number:06}" for number in range(rows)]
    for first in range(0, rows, 1000):

        def armed(session: Any, chosen: list[str] = orders[first : first + 1000]) -> None:
            for order in chosen:
                arm(session, made, Charge(order), key=order)

        till.harness.transact(armed)
    age = select(TABLE.c.message_id).order_by(TABLE.c.next_at, TABLE.c.message_id)
    oldest = till.harness.transact(lambda session: [each[2:] for each in session.scalars(age)])
    url = till.harness.subject.url.render_as_string(hide_password=False)
    command = [sys.executable, __file__, "--settle", url, str(log), "--rows", str(rows)]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, env=importing(), stdout=subprocess.PIPE, text=True)

    began, two = time.monotonic(), [start(), start()]
    for number in sorted(dice.sample(range(1, rows * 9 // 10), kills)):
        while log.stat().st_size < 7 * number:  # an order and a newline
            time.sleep(0.001)
        victim = two.pop(dice.randrange(2))
        victim.kill()
        victim.communicate()
        two.append(start())
    told = [json.loads(each.communicate()[0]) for each in two]
    seconds = time.monotonic() - began
    till.pass_time(31)
    effects = till.effects(made)
    till.harness.run(effects.settle, limit=rows)
    sent, done = log.read_text().split(), {order for order, _ in till.payments()}
    listed = find_effects(engine, unknown=True)
    unlisted = set(orders) - done - {each.key for each in listed}
    for each in listed:  # a person looks at the provider
        said: dict[str, Any] = {"outcome": "not done"}
        if each.key in sent:
            said = {"outcome": "done", "value": json.dumps(each.key)}
        resolve(engine, each.key, attempt=each.attempt, why="so says the provider", who="ada", **said)
    for _ in range(2):  # what was not done is sent by the second sweep
        till.harness.run(effects.settle, limit=rows)
    paid, ranks = Counter(till.payments()), {order: rank for rank, order in enumerate(oldest)}
    sent_in_the_end = Counter(log.read_text().split())
    return Swept(
        twice=sum(sent_in_the_end.values()) - len(sent_in_the_end),
        done=len(done),
        listed=len(listed),
        unlisted=len(unlisted),
        wrong=sum(paid[order, order] != 1 for order in orders) + len(paid) - rows,
        kills=kills,
        displaced=max(abs(ranks[order] - place) for place, order in enumerate(sent)),
        memory=[[before, most] for _, before, most in told],
        seconds=seconds,
    )


def _plans(till: Till, folder: Path) -> dict[str, str]:
    """Return the plan of each statement on the table of effects that a sweep of one row sends."""
    made, engine = label(folder / "provider.log"), till.harness.engine
    till.arm(made, Charge("plan"), key="plan")
    analyze = text(f"ANALYZE {'TABLE ' * (engine.dialect.name == 'mariadb')}{TABLE.name}")
    till.harness.transact(lambda session: session.execute(analyze))
    sent: dict[str, tuple[str, Any]] = {}

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if TABLE.name in statement and statement.split()[0] in ("SELECT", "UPDATE"):
            kind = "finish" if "outcome=" in statement.partition("WHERE")[0] else statement.split()[0].lower()
            sent.setdefault({"select": "find", "update": "take"}.get(kind, kind), (statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    till.settle(made)
    event.remove(engine, "before_cursor_execute", note)
    explain = "EXPLAIN QUERY PLAN " if engine.dialect.name == "sqlite" else "EXPLAIN "
    found = {}
    for name, (statement, parameters) in sent.items():
        with engine.connect() as connection:
            rows = connection.exec_driver_sql(explain + statement, parameters).all()
        found[name] = "; ".join(" ".join(str(part).strip() for part in row) for row in rows)
    return found


def main() -> None:
    """Run on each engine, and print a row and the plans for each."""
    from effects_proof import servers

    parser = argparse.ArgumentParser("effect_sweep", description=__doc__)
    parser.add_argument("--settle", nargs=2)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", default="postgresql,mariadb,sqlite")
    given = parser.parse_args()
    if given.settle:
        settle(given.settle[0], Path(given.settle[1]), given.rows)
        return
    with servers(given.engines.split(",")) as create:
        for engine in given.engines.split(","):
            with (
                create[engine]() as database,
                tempfile.TemporaryDirectory() as folder,
                Harness(Subject(database.url())) as harness,
            ):
                till = Till(harness)
                till.create_tables()
                sys.stdout.write(f"{engine}: {sweep(till, Path(folder), given.rows, given.kills, given.seed)}\n")
                for name, plan in _plans(till, Path(folder)).items():
                    sys.stdout.write(f"{engine}, {name}: {plan}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
