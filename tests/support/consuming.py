"""Consumers of payments that a module names: `idempotency consume consuming:pika`, or ``python consuming.py pika``.

The environment names the queue and the database. The payment to the account ``held`` waits in its handler until the
test opens the named pipe ``PIPE``, and closes it.
"""

import os
import sys
from typing import Any

from sqlalchemy import create_engine, make_url

import payments
from flights_consumer import AWAITED, OURS, run

URL = make_url(os.environ["DATABASE_URL"])
ONE_BY_ONE = {"pika": {"prefetch": 1}, "aio-pika": {"prefetch": 1}, "sqs": {"batch": 1}, "pubsub": {"batch": 1}}


def _hold() -> None:
    with open(os.environ["PIPE"], "rb") as pipe:
        pipe.read()


payments.RULES["held"] = _hold


def __getattr__(name: str) -> Any:
    """Return the consumer of a client, in whose name an underscore stands for a hyphen."""
    client = name.replace("_", "-")
    if client not in OURS:
        raise AttributeError(name)
    if client in AWAITED:
        dispatcher: Any = payments.async_dispatcher(URL)[0]
    else:
        dispatcher = payments.dispatcher(create_engine(URL))
    return OURS[client](dispatcher, **ONE_BY_ONE.get(client, {}))


if __name__ == "__main__":
    run(__getattr__(sys.argv[1]))
