"""A worker that exports its metrics and ends by itself, after two seconds, at the first message of its stream."""

import os
import time
from typing import Any

import redis
from prometheus_client import start_http_server
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from projector_dedup import Dispatcher, on, projector
from projector_dedup.brokers.redis import Consumer, dead_stream
from projector_dedup.message import by_path
from projector_dedup.metrics.prometheus import PrometheusObserver

GROUP = "ending"


@projector(idempotent=True, name="payments")
class Failing:
    """Fails, and the dead letter cannot be kept, so the consumer ends."""

    @on("payment")
    def paid(self, _event: Any, _session: Session) -> None:
        """Take the time in which Prometheus asks once or twice."""
        time.sleep(2)
        raise KeyError("poison")


if __name__ == "__main__":
    client, stream = redis.Redis.from_url(os.environ["REDIS_URL"]), os.environ["STREAM"]
    client.set(dead_stream(stream, GROUP), "no stream")
    start_http_server(int(os.environ["PORT"]), "127.0.0.1")
    dispatcher = Dispatcher(
        sessionmaker(create_engine(os.environ["DATABASE_URL"])),
        Failing(),
        type=by_path("type"),
        observer=PrometheusObserver(),
    )
    Consumer(client, stream, GROUP, dispatcher).run()
