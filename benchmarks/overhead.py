"""What a message costs, with every guard on (the figures of docs/adr/0007-guards.md).

    python benchmarks/overhead.py postgresql+psycopg://user@host/database

The same ORM handler (read a row, add to it) on 100 rows, one worker; contenders interleaved in rounds. Ratios are
to the same code without deduplication in the same round: medians and quartiles over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

from sqlalchemy import create_engine, delete, event, insert
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from projector_dedup import Dispatcher, claim, make_tables, on, projector


class Base(DeclarativeBase):
    """The benchmark's own tables."""


class Total(Base):
    """One row of the read model."""

    __tablename__ = "benchmark_total"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    amount: Mapped[int]


TABLES = make_tables(Base.metadata, name="benchmark_marker")


def add(number: int, session: Session) -> None:
    """The handler of every contender."""
    total = session.get(Total, number % 100)
    assert total is not None
    total.amount += 1


@projector(idempotent=True, name="benchmark")
@on(int)
def guarded(number: int, session: Session) -> None:
    """Ours."""
    add(number, session)


@projector(name="benchmark-plain")
@on(int)
def unmarked(number: int, session: Session) -> None:
    """Ours, without idempotent=True."""
    add(number, session)


def main() -> None:
    """Print a row for each contender."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--messages", type=int, default=400)
    options = parser.parse_args()
    engine = create_engine(options.url)
    listened = create_engine(options.url)
    for name in ("before_cursor_execute", "commit"):
        event.listen(listened, name, lambda *_: None)
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(Total), [{"id": row, "amount": 0} for row in range(100)])
    sessions = sessionmaker(engine)

    def plain(number: int, _: str) -> None:
        with sessions.begin() as session:
            add(number, session)

    def bare_claim(number: int, message_id: str) -> None:
        with sessions.begin() as session:
            if claim(session, message_id, "benchmark", tables=TABLES):
                add(number, session)

    def by(dispatcher: Dispatcher) -> Callable[[int, str], None]:
        return lambda number, message_id: dispatcher.deliver(number, message_id=message_id) and None

    contenders: dict[str, Callable[[int, str], None]] = {
        "no dedup": plain,
        "claim() without guards": bare_claim,
        "not idempotent": by(Dispatcher(sessions, unmarked, tables=TABLES)),
        "default, all guards": by(Dispatcher(sessions, guarded, tables=TABLES)),
        "strict": by(Dispatcher(sessions, guarded, tables=TABLES, strict=True)),
        "claim_timeout": by(Dispatcher(sessions, guarded, tables=TABLES, claim_timeout=1.0)),
        "+ ConnectionEvents": by(Dispatcher(sessionmaker(listened), guarded, tables=TABLES)),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    rates["redelivery"] = []
    unique = itertools.count()
    for _ in range(options.rounds):
        with engine.begin() as connection:
            connection.execute(delete(TABLES.marker))
        base = 0.0
        for name, deliver in contenders.items():
            ids = [f"message-{next(unique):040}" for _ in range(options.messages)]
            rate = _rate(deliver, ids)
            base = base or rate
            rates[name].append(rate / base)
            if name.startswith("default"):
                rates["redelivery"].append(_rate(deliver, ids) / base)
    for name, ratios in rates.items():
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name:24} {middle:5.2f}   ({low:.2f} .. {high:.2f})")
    Base.metadata.drop_all(engine)


def _rate(deliver: Callable[[int, str], None], ids: list[str]) -> float:
    started = time.perf_counter()
    for number, message_id in enumerate(ids):
        deliver(number, message_id)
    return len(ids) / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
