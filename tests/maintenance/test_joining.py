"""The three ways of docs/joining.md: code without the library and code with it run beside each other, and count once.

The statements and the Python are those of the page. Expected totals come from the input.
"""

import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from sqlalchemy import String, create_engine, insert, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.pool import NullPool

from databases import Database
from projector_dedup import Dispatcher, Message, make_tables, on, projector
from projector_dedup.brokers.incoming import Convert, Incoming, json_event
from projector_dedup.brokers.settling import Settling
from projector_dedup.dialects import configure_sqlite
from projector_dedup.maintenance.cleanup import prune
from rig import Outside

PAGE = (Path(__file__).parents[2] / "docs" / "joining.md").read_text(encoding="utf-8")
NOTHING, INBOX, POSITIONS = "No deduplication so far", "An inbox table", "Positions"
HIGHEST = 9223372036854775807


def blocks(section: str, language: str) -> list[str]:
    """The code blocks of a section of the page."""
    body = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", body, re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Payment:
    """A message as it is published."""

    id: str
    account: str
    amount: int
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def event(self) -> dict[str, Any]:
        """The body."""
        return {"account_id": self.account, "amount": self.amount, **dict(self.more)}


def payments(numbers: Iterable[int], more: Callable[[int], dict[str, Any]] = lambda _number: {}) -> list[Payment]:
    """Payments to two accounts; the amount is a number of two digits that no sum of others hides."""
    return [Payment(f"zahlung-é-{n}", "ab"[n % 2], 1000 + n, tuple(more(n).items())) for n in numbers]


def total(sent: Iterable[Payment]) -> dict[str, int]:
    """What the accounts must have."""
    sums = Counter({"a": 0, "b": 0})
    for each in sent:
        sums[each.account] += each.amount
    return dict(sums)


class Running:
    """A projector that runs by itself: its database, the code of the page in it, and a look from outside."""

    def __init__(self, database: Database) -> None:
        class Base(DeclarativeBase):
            pass

        class Totals(Base):
            __tablename__ = "totals"
            account_id: Mapped[str] = mapped_column(String(64), primary_key=True)
            amount: Mapped[int]

        make_tables(Base.metadata)
        self.database, self.outside = database, Outside(database)
        self.engine = create_engine(database.url(), pool_size=10)
        self.of_old_code = create_engine(database.url(), pool_size=10)
        self.by_hand = create_engine(database.url(), poolclass=NullPool)
        if database.engine == "sqlite":
            for each in (self.engine, self.of_old_code, self.by_hand):
                configure_sqlite(each, busy_timeout=30)
        Base.metadata.create_all(self.engine)
        with self.engine.begin() as connection:
            connection.execute(insert(Totals), [{"account_id": each, "amount": 0} for each in "ab"])
        self.factory = sessionmaker(self.engine)

        def add(event: dict[str, Any], session: Session) -> None:
            session.get_one(Totals, event["account_id"]).amount += event["amount"]

        self.names: dict[str, Any] = {
            "engine": self.engine,
            "add": add,
            "on": on,
            "projector": projector,
            "Session": Session,
            "sessionmaker": sessionmaker,
            "Dispatcher": Dispatcher,
        }

    def python(self, section: str) -> None:
        """Run the Python of a section, as it is written for this database."""
        self.names["AccountTotals"] = self.account_totals()
        for block in blocks(section, "python"):
            source = block.replace("dialects.sqlite", f"dialects.{self.database.engine.replace('mariadb', 'mysql')}")
            if self.database.engine == "mariadb":
                source = re.sub(r"new\.on_conflict_do_nothing\(\)  # MariaDB: (.*)", r"\1", source)
            exec(compile(source, "joining.md", "exec"), self.names)

    def sql(self, block: str) -> list[Any]:
        """Run a block of SQL as somebody types it, and return the rows of its last statement."""
        rows: list[Any] = []
        with self.by_hand.begin() as connection:
            for statement in self.statements(block):
                result = connection.exec_driver_sql(statement)
                rows = list(result) if result.returns_rows else []
        return rows

    def statements(self, block: str) -> list[str]:
        """The statements of a block, changed as the page says for MariaDB and MySQL."""
        if self.database.engine == "mariadb":
            block = re.sub(r"CAST\((\w+) AS text\)", r"CONVERT(\1 USING utf8mb4)", block)
            block = re.sub(r"INSERT INTO (.*) ON CONFLICT DO NOTHING", r"INSERT IGNORE INTO \1", block, flags=re.DOTALL)
            (begin,) = re.findall(r"Begin with `(SET SESSION .*?)`", PAGE)
            block = f"{begin};\n{block}"
        return [each for each in re.sub(r"--.*", "", block).split(";") if each.strip()]

    def account_totals(self) -> Any:
        """A projector as it is when the old code has ended."""
        add = self.names["add"]

        @projector(idempotent=True, name="account-totals")
        class AccountTotals:
            @on("payment.received")
            def add_payment(self, event: dict[str, Any], session: Session) -> None:
                add(event, session)

        return AccountTotals

    def new(self, dispatcher: Dispatcher | None = None, convert: Convert = json_event) -> Callable[[Payment], bool]:
        """The new code, as a consumer runs it: True if the message is acknowledged."""
        settling = Settling(dispatcher or Dispatcher(self.factory, self.names["AccountTotals"]()), convert)

        def deliver(each: Payment) -> bool:
            settled = settling.deliver(Incoming(json.dumps(each.event).encode(), each.id, "payment.received"))
            assert not settled.reject, settled.reason
            return settled.acknowledge

        return deliver

    def divided(self) -> Callable[[Payment], bool]:
        """The new code with the converter and the dispatcher of the page."""
        return self.new(self.names["dispatcher"], self.names["convert"])

    def add_by_old_code(self, connection: Any, each: Payment) -> None:
        """Change the read model as the old code does, with a lock on the row."""
        change = text("UPDATE totals SET amount = amount + :amount WHERE account_id = :account")
        connection.execute(change, {"amount": each.amount, "account": each.account})

    def totals(self) -> dict[str, int]:
        """What the accounts have, as another connection sees it."""
        rows = self.outside.execute("select account_id, amount from totals")
        return {account: int(amount) for account, amount in rows}

    def markers(self, handler: str = "account-totals.add_payment") -> int:
        """The number of markers of a handler."""
        ((count,),) = self.outside.execute(f"select count(*) from processed_message where handler = '{handler}'")
        return int(count)

    def until_blocked(self) -> None:
        """Return when somebody waits for a lock. SQLite does not say so."""
        query = {
            "postgresql": "select 1 from pg_stat_activity where datname = current_database() "
            "and wait_event_type = 'Lock'",
            "mariadb": "select 1 from information_schema.innodb_trx join information_schema.processlist on "
            "id = trx_mysql_thread_id where trx_state = 'LOCK WAIT' and db = database()",
        }.get(self.database.engine)
        deadline = time.monotonic() + 30
        while query and not self.outside.execute(query):
            assert time.monotonic() < deadline
            time.sleep(0.15)  # MariaDB makes no new copy of innodb_trx while it is asked for every 100 ms

    def close(self) -> None:
        """Hang up."""
        self.engine.dispose()
        self.of_old_code.dispose()
        self.by_hand.dispose()
        self.outside.close()


@pytest.fixture
def running(database: Database) -> Iterator[Running]:
    """A projector on each database, with an empty read model."""
    made = Running(database)
    yield made
    made.close()


def consume(sent: list[Payment], *codes: Callable[[Payment], bool]) -> None:
    """Let these codes take messages from one queue, each in a thread of its own; what fails comes again."""
    queue: SimpleQueue[Payment] = SimpleQueue()
    for each in sent:
        queue.put(each)
    begin = threading.Barrier(len(codes))

    def work(deliver: Callable[[Payment], bool]) -> None:
        begin.wait()
        while True:
            try:
                each = queue.get_nowait()
            except Empty:
                return
            if not deliver(each):
                queue.put(each)

    with ThreadPoolExecutor(len(codes)) as threads:
        list(threads.map(work, codes))


def shuffled(sent: list[Payment], times: int = 1) -> list[Payment]:
    """The messages, so many times each, in some order."""
    order = sent * times
    random.Random(len(sent)).shuffle(order)
    return order


# Nothing so far ------------------------------------------------------------------------------------------------------


def test_a_moment_divides_the_messages_between_old_and_new_code(running: Running) -> None:
    """Clocks differ by half an hour, and the messages come in any order: each message counts once.

    The old code has no deduplication and gets each message once; the new code gets it three times.
    """
    running.python(NOTHING)
    switch = running.names["SWITCH"]
    (only_older,) = re.findall(r"`(datetime\.fromisoformat\(event\[\"at\"\]\) >\s+SWITCH)`", PAGE)
    back = switch + timedelta(minutes=20)

    def old(each: Payment) -> bool:
        at = datetime.fromisoformat(each.event["at"])
        if eval(" ".join(only_older.split()), {**running.names, "event": each.event}) and at <= back:
            return True
        with running.of_old_code.begin() as connection:
            running.add_by_old_code(connection, each)
        return True

    def convert_until_back(incoming: Incoming) -> Message:
        message: Message = running.names["convert"](incoming)
        later = datetime.fromisoformat(message.body["at"]) > back
        return Message(message.id, message.body, "old") if later else message

    sent = payments(range(60), lambda n: {"at": (switch + timedelta(minutes=n - 30)).isoformat()})
    new = running.new(running.names["dispatcher"], convert_until_back)
    with ThreadPoolExecutor(2) as queues:
        works = [
            queues.submit(consume, shuffled(sent), old),
            queues.submit(consume, shuffled(sent, 3), new, new),
        ]
        for work in works:
            work.result()
    assert running.totals() == total(sent)
    assert running.markers() == 20  # after SWITCH, up to the second moment
    assert running.markers("left.leave") == 40


def test_what_the_new_code_ignores_is_listed(running: Running) -> None:
    """A message from before the switch that comes first when the old code has ended is lost, and the query names it."""
    running.python(NOTHING)
    (query,) = blocks(NOTHING, "sql")
    switch = running.names["SWITCH"]
    early, late = payments(range(2), lambda n: {"at": (switch - timedelta(minutes=n)).isoformat()})
    new = running.divided()
    assert new(early)
    ((ended,),) = running.sql("SELECT max(processed_at) FROM processed_message")
    ended = datetime.fromisoformat(str(ended))
    moment = ended if ended.tzinfo is None else ended.astimezone(UTC)
    running.sql(f"UPDATE processed_message SET processed_at = '{moment - timedelta(seconds=1)}'")
    assert new(late)
    query = re.sub(r"'2026-[^']*'", f"'{moment - timedelta(seconds=1)}'", query)
    found = [each.decode() if isinstance(each, bytes) else each for (each,) in running.sql(query)]
    assert found == [late.id]
    assert running.totals() == total([])


def test_a_message_without_its_time_is_rejected(running: Running) -> None:
    """Nobody could say on which side it is."""
    running.python(NOTHING)
    with pytest.raises(AssertionError, match="KeyError"):
        running.divided()(payments([1])[0])
    assert running.totals() == total([])


# An inbox table ------------------------------------------------------------------------------------------------------


@pytest.fixture
def inbox(running: Running) -> Running:
    """The same, whose old code keeps the ids of its messages."""
    running.sql("CREATE TABLE processed_events (event_id VARCHAR(64) PRIMARY KEY)")
    running.python(INBOX)
    return running


def inbox_code(running: Running) -> Callable[[Payment], bool]:
    """The old code: it inserts the id first, and takes an id that is there for a duplicate."""

    def deliver(each: Payment) -> bool:
        try:
            with running.of_old_code.begin() as connection:
                connection.execute(text("INSERT INTO processed_events VALUES (:id)"), {"id": each.id})
                running.add_by_old_code(connection, each)
        except IntegrityError:
            return True
        except DBAPIError:  # a deadlock: the broker delivers it again
            return False
        return True

    return deliver


def test_old_and_new_code_share_a_queue_and_an_inbox(inbox: Running) -> None:
    """Each message is delivered four times, to two workers of each code that race for it; it counts once.

    The markers are made before, meanwhile and after. Then the inbox is left out, and in the end the old code is back.
    """
    copy, missing, copy_back = blocks(INBOX, "sql")
    old, new = inbox_code(inbox), inbox.new()
    first, second, third = payments(range(20)), payments(range(20, 40)), payments(range(40, 80))
    consume(shuffled(first, 2), old)
    inbox.sql(copy)
    assert inbox.markers() == 20
    consume(shuffled(second, 2), new)
    assert inbox.totals() == total(first + second)

    rounds = threading.Barrier(4)

    def race(deliver: Callable[[Payment], bool]) -> None:
        for each in third:
            rounds.wait()
            while not deliver(each):
                pass

    with ThreadPoolExecutor(5) as threads:
        works = [threads.submit(race, each) for each in (old, old, new, new)]
        while not all(each.done() for each in works):
            copied(inbox, copy)
        for work in works:
            work.result()
    consume(shuffled(first + second + third, 2), old, old, new, new)
    every = first + second + third
    assert inbox.totals() == total(every)

    alone = payments(range(80, 85))  # by the old code, as the last of its messages
    consume(alone, old)
    assert inbox.sql(missing) == [(5,)]
    for _ in range(2):
        inbox.sql(copy)
        assert inbox.sql(missing) == [(0,)]
    assert inbox.markers() == len(every + alone)

    newer = inbox.new(Dispatcher(inbox.factory, inbox.account_totals()()))
    later = payments(range(85, 95))
    consume(shuffled(every + alone + later, 2), newer, new)  # while the third step is deployed
    assert inbox.totals() == total(every + alone + later)

    inbox.sql(copy_back)
    last = payments(range(95, 100))
    consume(shuffled(every + alone + later + last, 2), old)
    assert inbox.totals() == total(every + alone + later + last)


def copied(running: Running, copy: str) -> None:
    """Run the statement beside both codes. MariaDB may end it by a deadlock; then it is run again."""
    try:
        running.sql(copy)
    except OperationalError as error:
        if running.database.engine != "mariadb" or error.orig is None or error.orig.args[0] not in (1213, 1020):
            raise


@pytest.mark.parametrize("ends", ["commit", "rollback"])
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_new_code_waits_for_old_code_that_has_the_same_message(inbox: Running, ends: str) -> None:
    """It applies the message if the old code rolls back, and only then."""
    (each,) = payments([7])
    new = inbox.new()
    with inbox.of_old_code.connect() as connection, ThreadPoolExecutor(1) as threads:
        connection.execute(text("INSERT INTO processed_events VALUES (:id)"), {"id": each.id})
        inbox.add_by_old_code(connection, each)
        delivery = threads.submit(new, each)
        inbox.until_blocked()
        getattr(connection, ends)()
        while not delivery.result():
            delivery = threads.submit(new, each)
    assert inbox.totals() == total([each])
    assert inbox.markers() == 1


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_old_code_that_writes_back_what_it_read_overwrites_new_code(inbox: Running) -> None:
    """The page asks for a lock, or for a change in one statement: here the message of the new code is lost."""
    theirs, ours = payments([2, 4])
    with inbox.of_old_code.begin() as connection:
        read = connection.scalar(text("SELECT amount FROM totals WHERE account_id = 'a'"))
        assert inbox.new()(ours)
        change = text("UPDATE totals SET amount = :amount WHERE account_id = 'a'")
        connection.execute(change, {"amount": (read or 0) + theirs.amount})
    assert inbox.totals() == total([theirs])


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_second_handler_finds_the_id_of_the_first(inbox: Running) -> None:
    """Each has a transaction of its own, so one handler only may take a message until the inbox is left out."""
    first = inbox.names["AccountTotals"]
    inbox.names["on"] = lambda *names, **options: on(*names, name="second", **options)
    inbox.python(INBOX)
    second = inbox.names["AccountTotals"]
    sent = payments([2])
    assert inbox.new(Dispatcher(inbox.factory, first(), second()))(sent[0])
    assert inbox.markers() == inbox.markers("account-totals.second") == 1
    assert inbox.totals() == total(sent)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_source_makes_other_ids_than_those_of_the_inbox(inbox: Running) -> None:
    """With `source=`, a message that the old code has applied is applied again after the third step."""
    sent = payments([2])
    consume(sent, inbox_code(inbox))
    inbox.sql(blocks(INBOX, "sql")[0])
    newer = Dispatcher(inbox.factory, inbox.account_totals()())
    assert inbox.new(newer)(sent[0])
    assert inbox.totals() == total(sent)
    assert inbox.new(newer, lambda incoming: replace(json_event(incoming), source="payments"))(sent[0])
    assert inbox.totals() == total(sent * 2)


def test_cleanup_keeps_the_markers_that_were_copied(inbox: Running) -> None:
    """Their age begins with the copy."""
    consume(payments(range(10)), inbox_code(inbox))
    inbox.sql(blocks(INBOX, "sql")[0])
    prune(inbox.engine, retention_hours=1)
    assert inbox.markers() == 10


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_the_copy_does_not_lock_the_inbox(inbox: Running) -> None:
    """On MariaDB at READ COMMITTED: the old code inserts while the copy has not committed."""
    copy = blocks(INBOX, "sql")[0]
    old = inbox_code(inbox)
    consume(payments(range(0, 20, 2)), old)
    with inbox.by_hand.connect() as connection:
        for statement in inbox.statements(copy):
            connection.exec_driver_sql(statement)
        with inbox.by_hand.begin() as other:
            other.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = 1")
            for each in payments(range(1, 21, 2)):
                other.execute(text("INSERT INTO processed_events VALUES (:id)"), {"id": each.id})
        connection.commit()
    assert inbox.markers() == 10


# Positions -----------------------------------------------------------------------------------------------------------


def position_code(running: Running, meanwhile: Callable[[int], None]) -> Callable[[Payment], bool]:
    """The old code: it moves the position forward, if the message is behind it, and applies the message."""
    forward = text("UPDATE positions SET position = :n WHERE partition_id = :p AND position < :n")

    def deliver(each: Payment) -> bool:
        number = each.event["position"]
        with running.of_old_code.begin() as connection:
            if connection.execute(forward, {"n": number, "p": each.event["partition"]}).rowcount:
                running.add_by_old_code(connection, each)
                meanwhile(number)
        return True

    return deliver


def test_one_update_switches_from_old_to_new_code(running: Running) -> None:
    """It waits for the message that the old code has begun; of two partitions, each message counts once.

    The old code goes on to the end of its partitions, and the new code gets all messages twice, in any order.
    """
    running.sql("CREATE TABLE positions (partition_id INTEGER PRIMARY KEY, position BIGINT NOT NULL)")
    running.sql("INSERT INTO positions VALUES (0, -1), (1, -1)")
    (switch,) = blocks(POSITIONS, "sql")
    add_column, update = switch.split(";")[:2]
    running.sql(add_column)
    sent = payments(range(40), lambda n: {"partition": n % 2, "position": n // 2})
    with ThreadPoolExecutor(1) as threads:
        switching: list[Any] = []

        def begin_switch(number: int) -> None:
            if number == 12 and not switching:
                switching.append(threads.submit(running.sql, update))
                running.until_blocked()

        old = position_code(running, begin_switch)
        consume([*sent[:20], *sent[10:26]], old)  # with redeliveries
        switching[0].result()
        consume(sent, old)
    running.python(NOTHING)
    running.python(POSITIONS)
    switched_at = running.names["switched_at"]
    assert (switched_at[0], switched_at[1] in (11, 12)) == (12, True)
    new = running.divided()
    with ThreadPoolExecutor(2) as queues:
        works = [queues.submit(consume, sent, old), queues.submit(consume, shuffled(sent, 2), new, new)]
        for work in works:
            work.result()
    assert running.totals() == total(sent)
    assert running.outside.execute(f"select * from positions where position <> {HIGHEST}") == []
    assert (running.markers(), running.markers("left.leave")) == (
        sum(each.event["position"] > switched_at[each.event["partition"]] for each in sent),
        sum(switched_at.values()) + 2,
    )

    running.sql("UPDATE positions SET position = 19")  # the way back: the last position of the group, in both
    last = payments(range(40, 50), lambda n: {"partition": n % 2, "position": n // 2})
    consume([*sent, *last, *last], old)
    assert running.totals() == total(sent + last)


def test_a_partition_without_a_row_is_rejected(running: Running) -> None:
    """The old code could still begin to apply its messages."""
    running.sql("CREATE TABLE positions (partition_id INTEGER PRIMARY KEY, position BIGINT NOT NULL)")
    for statement in ("INSERT INTO positions VALUES (0, 5)", *blocks(POSITIONS, "sql")):
        running.sql(statement)
    running.python(NOTHING)
    running.python(POSITIONS)
    with pytest.raises(AssertionError, match="KeyError"):
        running.divided()(payments([1], lambda n: {"partition": 1, "position": n})[0])
    assert running.totals() == total([])
