"""The processes of the shop of `examples/shop`, which a proof kills: `python shop_worker.py FOLDER`, run in its folder.

Each line of the input is what a new process shall be: `web 0`, `web 1`, `settle` or `consume`; its number is printed.
They are forked from one that has imported the shop and connected to nothing. All end when the input ends.
"""

import json
import signal
import sys
import time
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

from fork_server import serve

CUSTOMERS = 7
PACE = 0.1  # seconds between the orders of one process, and between two sweeps


def asked_for(number: int) -> tuple[str, int]:
    """Return customer and amount of an order."""
    return f"customer-{number % CUSTOMERS}", 1 + number * 37 % 100


class Told:
    """What the processes that take orders have written down: what was asked, and each answer."""

    def __init__(self, *logs: Path) -> None:
        self.asked: list[int] = []
        self.answers: defaultdict[int, set[str]] = defaultdict(set)
        for line in (line for log in logs if log.exists() for line in log.read_text().splitlines(keepends=True)):
            match json.loads(line) if line.endswith("]\n") else None:
                case ["asked", int(number)]:
                    self.asked.append(number)
                case ["answered", int(number), str(answer)]:
                    self.answers[number].add(answer)


def take_orders(shop: Any, parity: int, log: Path) -> None:
    """Place one order after the other, until told to stop; what is not answered, and the last five, is asked again."""
    told = Told(log)
    again = [each for each in told.asked if each not in told.answers] + told.asked[-5:]
    number = max(told.asked, default=parity - 2)
    with log.open("a") as lines:

        def write(*line: object) -> None:
            lines.write(json.dumps(line) + "\n")
            lines.flush()

        lines.write("\n")  # a kill may have cut the last line
        while again or not log.with_suffix(".stop").exists():
            if again:
                wanted = again.pop()
            else:
                wanted = number = number + 2
                write("asked", wanted)
            command = shop.PlaceOrder(*asked_for(wanted))
            write("answered", wanted, shop.commands.handle(shop.place_order, command, key=f"web-{wanted}").result)
            time.sleep(PACE)
    log.with_suffix(".done").touch()
    signal.pause()


def work(shop: Any, what: str, folder: Path) -> None:
    """Be one of the processes, until it is killed."""
    match what.split():
        case ["web", parity]:
            take_orders(shop, int(parity), folder / f"web-{parity}.jsonl")
        case ["settle"]:
            while True:
                shop.effects.settle()
                time.sleep(PACE)
        case ["consume"]:
            shop.consumer.run()


def main(folder: Path) -> None:
    """Import the shop, and fork a process for each line."""
    sys.path.insert(0, "")
    shop: Any = import_module("shop")
    serve(lambda what: work(shop, what, folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
