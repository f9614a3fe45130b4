"""A program that uses an engine, forks, and delivers in its children while its own two transactions are open.

`forking.py URL POOL USED START` ends with 0 if the children have delivered, and both transactions have committed.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable

from sqlalchemy import Connection, create_engine, insert, pool, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from projector_dedup import Dispatcher, Message, make_tables, on, projector
from projector_dedup.markers import claim

CHILDREN, MESSAGES = 3, 8
OPEN: list[Connection] = []
"""What is in use at the fork. A child deletes it only when Python exits."""


class Base(DeclarativeBase):
    """The tables of this program."""


class Added(Base):
    """A row for each message that was applied, and for each transaction of the parent."""

    __tablename__ = "added"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]


make_tables(Base.metadata)


@projector(idempotent=True, name="adding")
class Adding:
    """Adds a row for each message."""

    @on("add")
    def add(self, event: dict[str, int], session: Session) -> None:
        """Add the row."""
        session.add(Added(number=event["number"]))


def main(url: str, pool_class: str, used: str, start: str) -> None:
    """Use the engine, fork, begin, let the children deliver, and commit."""
    engine = create_engine(url, poolclass=getattr(pool, pool_class), pool_pre_ping=used == "by others, with a ping")
    factory = sessionmaker(engine)
    dispatcher = Dispatcher(factory, Adding())

    def deliver(number: int) -> None:
        dispatcher.deliver(Message(f"m-{number}", {"number": number}, type="add"))

    def claim_by_hand(number: int) -> None:
        with factory.begin() as session:
            if claim(session, f"m-{number}", "by-hand"):
                session.add(Added(number=number))

    def work(child: int) -> None:
        os.close(opened)
        os.read(released, 1)  # until the parent has begun: all children at once
        apply = claim_by_hand if start == "claims by hand" else deliver
        for number in [*range(child * MESSAGES, (child + 1) * MESSAGES)] * 2:
            apply(number)

    Base.metadata.create_all(engine)
    with engine.connect() as one, engine.connect() as other:  # two are idle in the pool when it forks
        one.execute(text("SELECT 1"))
        other.execute(text("SELECT 1"))
    if used == "by the library":
        deliver(0)

    OPEN.append(begin(engine.connect(), -1))
    released, opened = os.pipe()
    wait = in_processes(work) if start == "multiprocessing" else in_forks(work)
    after = begin(engine.connect(), -2)
    os.close(opened)
    wait()
    after.commit()
    OPEN.pop().commit()


def begin(connection: Connection, number: int) -> Connection:
    """Begin a transaction, and insert a row."""
    connection.execute(insert(Added).values(number=number))
    return connection


def in_processes(work: Callable[[int], None]) -> Callable[[], None]:
    """Start processes of `multiprocessing`, which end by `os._exit`. Return what waits for them."""
    processes = [multiprocessing.get_context("fork").Process(target=work, args=(child,)) for child in range(CHILDREN)]
    for process in processes:
        process.start()

    def wait() -> None:
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * CHILDREN

    return wait


def in_forks(work: Callable[[int], None]) -> Callable[[], None]:
    """Fork as a server does: the children end by `sys.exit`. Return what waits for them."""
    children = []
    for child in range(CHILDREN):
        if (pid := os.fork()) == 0:
            work(child)
            sys.exit(0)
        children.append(pid)

    def wait() -> None:
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * CHILDREN

    return wait


if __name__ == "__main__":
    main(*sys.argv[1:])
