"""An operation is renamed and its command and result get a field, while processes of old and new code serve clients.

Each key is asked for in both processes at once; some of them die in the handler, or behind the COMMIT.
"""

import json
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from command import importing
from command_rig import SYNC_ONES, Desk, desks
from projector_dedup.commands import default_command_tables
from projector_dedup.maintenance.rows import rename

OLD = """
@dataclass(frozen=True)
class PlaceOrder:
    amount: int
    customer: str = "alice"
    note: str = ""


@dataclass(frozen=True)
class Placed:
    left: int


@command(name="shop.place")
def place(order: PlaceOrder, call: Call) -> Placed:
    return Placed(placed(order, call).left)
"""
NEW = """
@dataclass(frozen=True)
class PlaceOrder:
    amount: int
    urgent: bool = False
    customer: str = "alice"
    note: str = ""


@dataclass(frozen=True)
class Placed:
    left: int
    points: int = 0


@command(name="orders.place"{formerly})
def place(order: PlaceOrder, call: Call) -> Placed:
    return Placed(placed(order, call).left, order.amount)
"""
CODE = {"old": OLD, "new": NEW.format(formerly=', formerly=["shop.place"]'), "newest": NEW.format(formerly="")}

WORKER = """
import json, os, signal, sys
from dataclasses import dataclass

from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from command_rig import place as rig_place
from projector_dedup.commands import Call, Commands, command

asked = {}


def placed(order, call):
    done = rig_place(order, call)
    if asked.get("death") == "in the handler":
        os.kill(os.getpid(), signal.SIGKILL)
    return done

"""
SERVE = """

commands = Commands(sessionmaker(create_engine(sys.argv[1])))
for line in sys.stdin:
    asked.update(death=None)
    asked.update(json.loads(line))
    done = commands.handle(place, PlaceOrder(**asked["order"]), key=asked["key"], scope="tenant")
    answer = {"left": done.result.left, "replayed": done.replayed}
    if asked["death"] == "behind the commit":
        os.kill(os.getpid(), signal.SIGKILL)
    print(json.dumps(answer), flush=True)
"""


desk = desks([driver for driver in SYNC_ONES if driver.engine == "postgresql"])  # on the others: test_operation_names


@dataclass
class Server:
    """A process of one version of the code, which is started anew when it has died."""

    desk: Desk
    folder: Path
    version: str
    deaths: int = 0

    def __enter__(self) -> Self:
        code = self.folder / f"{self.version}.py"
        code.write_text(WORKER + CODE[self.version] + SERVE)
        url = self.desk.harness.subject.url.render_as_string(hide_password=False)
        self._process = subprocess.Popen(
            [sys.executable, str(code), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=importing(),
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask(self, key: str, death: str | None = None, **order: Any) -> dict[str, Any]:
        """Ask for one order; where the process dies, ask the next one again."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"key": key, "order": order, "death": death}) + "\n")
        self._process.stdin.flush()
        if answer := self._process.stdout.readline():
            found: dict[str, Any] = json.loads(answer)
            return found
        self._process.communicate()
        assert self._process.returncode == -signal.SIGKILL
        self.deaths += 1
        self.__enter__()
        return self.ask(key, **order)


def test_old_and_new_code_give_one_answer_to_each_key(desk: Desk, tmp_path: Path) -> None:
    """One order for each key, and one answer; the newest code, which knows one name, gives the same after `rename`."""
    amounts = {f"k{number}": number % 7 + 1 for number in range(20)}

    def serve(version: str, seed: int, death: str) -> tuple[dict[str, int], int]:
        keys = random.Random(seed).sample(sorted(amounts), len(amounts))
        with Server(desk, tmp_path, version) as server:
            found = {
                key: server.ask(key, death if key == keys[3] else None, amount=amounts[key])["left"] for key in keys
            }
        return found, server.deaths

    with ThreadPoolExecutor(2) as both:
        (by_old, died), (by_new, _) = both.map(serve, ("old", "new"), (1, 2), ("behind the commit", "in the handler"))
    assert by_old == by_new
    assert died == 1  # the other one had perhaps no handler to die in
    assert (desk.orders(), desk.spent()) == (sorted(amounts), sum(amounts.values()))

    rename(desk.harness.engine, "shop.place", "orders.place", tables=default_command_tables)
    with Server(desk, tmp_path, "newest") as server:
        answers = {key: server.ask(key, amount=amount) for key, amount in amounts.items()}
    assert {key: answer["left"] for key, answer in answers.items()} == by_new
    assert all(answer["replayed"] for answer in answers.values())
    assert len(desk.orders()) == len(amounts)
