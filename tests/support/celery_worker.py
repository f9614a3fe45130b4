"""A worker of Celery whose parent has used the database before it forks its children."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import celery
from sqlalchemy import create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from projector_dedup import Defer, Dispatcher, make_tables, on, projector
from projector_dedup.brokers.celery import delivering_task
from projector_dedup.message import by_path

QUEUE = os.environ["QUEUE"]
TASK = "flights.count"


class Base(DeclarativeBase):
    """The tables of this worker."""


class Seen(Base):
    """A call of the handler: the backend and the process that served it, and the delivery."""

    __tablename__ = "seen"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]
    backend: Mapped[int]
    process: Mapped[int]


make_tables(Base.metadata)


@projector(idempotent=True, name="seen")
class See:
    """Keep who has seen an event, or fail as it says."""

    @on("see")
    def see(self, event: dict[str, Any], session: Session) -> None:
        """Write a row."""
        if event.get("poison"):
            raise KeyError("poison")
        if event.get("early"):
            raise Defer("not yet")
        if trace := event.get("kills"):
            with open(trace, "a") as file:
                file.write("killed\n")
            os.kill(os.getpid(), 9)
        if (trace := event.get("hangs")) and _is_first(trace):
            threading.Event().wait()  # until a time limit ends it
        if (trace := event.get("exits")) and _is_first(trace):
            raise SystemExit
        backend = session.scalar(text("SELECT pg_backend_pid()"))
        time.sleep(event.get("takes", 0))  # so that another child gets the next one
        session.add(Seen(id=event["number"], number=event["number"], backend=backend or 0, process=os.getpid()))


def _is_first(trace: str) -> bool:
    """True for the first delivery, which leaves a trace."""
    try:
        Path(trace).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


engine = create_engine(os.environ["FLIGHTS_DATABASE_URL"])
app = celery.Celery("seen", broker=os.environ["AMQP_URL"])
app.conf.update(task_default_queue=QUEUE, task_acks_on_failure_or_timeout=True, task_acks_on_timeout=True)
count = delivering_task(
    app,
    TASK,
    Dispatcher(sessionmaker(engine), See(), type=by_path("type")),
    queue=QUEUE,
    max_attempts=3,
    max_delay=0.1,
)

if __name__ == "__main__":
    Base.metadata.create_all(engine)  # and its connection stays in the pool, which the children inherit
    with Session(engine) as session:
        session.add(
            Seen(id=0, number=0, backend=session.scalar(text("SELECT pg_backend_pid()")) or 0, process=os.getpid())
        )
        session.commit()
    options = ["--concurrency", "2", "--loglevel", "WARNING", "--without-mingle", "--without-gossip"]
    app.worker_main(["worker", "-n", f"{os.getpid()}@%h", *options])
