"""MySQL, where it differs from MariaDB. These tests run where a MySQL stands in for it, as `make servers` lets it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.orm import Session

from contract import LOOK_ALIKES
from databases import USUAL_DRIVERS, Database, Driver, each_driver, mariadb_connection
from kit import Added, Gate, Harness, Held, Subject, Total, add
from on_mariadb import run, subject
from projector_dedup import Outcome
from projector_dedup.errors import InProgress, MissingTableError, UnsafeSessionError
from projector_dedup.maintenance.check import check
from projector_dedup.maintenance.cleanup import cleanup
from projector_dedup.markers import claim
from ready import ready

USUAL = next(each for each in USUAL_DRIVERS if each.engine == "mariadb")
WAIT = "select @@innodb_lock_wait_timeout"
each_way = each_driver("mariadb")
usual_ways = each_driver("mariadb", usual=True)


@pytest.fixture(autouse=True)
def mysql(mariadb: Database) -> Database:
    """The database, which is one of MySQL."""
    if not mariadb.is_mysql:
        pytest.skip("the server is MariaDB")
    return mariadb


@pytest.fixture(name="harness")
def harness_fixture(mysql: Database, driver: Driver) -> Iterator[Harness]:
    """The contract's tables, through the driver of the test."""
    with ready(Subject(mysql.url(driver.drivername))) as harness:
        yield harness


@pytest.fixture
def user(mysql: Database) -> Iterator[str]:
    """The name of a user, who is dropped in the end; the test creates him for both names of this machine."""
    name = f"of_{mysql.url().database}"
    yield name
    with mariadb_connection(mysql.url()) as admin, admin.cursor() as cursor:
        cursor.execute(f"DROP USER IF EXISTS {name}@'127.0.0.1', {name}@localhost")


# claim_timeout -------------------------------------------------------------------------------------------------------


@each_way
def test_claim_timeout_limits_the_wait_in_whole_seconds(harness: Harness) -> None:
    """It is the session's limit for locks, rounded up."""
    held = Held(harness)
    handler = harness.handler(held)
    winner = harness.start(harness.deliver, harness.dispatcher(handler))
    held.gate.arrival()
    hasty = harness.dispatcher(handler, claim_timeout=0.25)
    began = time.monotonic()
    with pytest.raises(InProgress, match=r"0\.25 s") as refused:
        harness.deliver(hasty)
    assert time.monotonic() - began >= 1
    cause: Any = refused.value.__cause__
    assert cause.orig.args[0] == 1205
    held.gate.open()
    assert winner.result().outcome is Outcome.APPLIED
    assert harness.deliver(hasty).outcome is Outcome.DUPLICATE


@usual_ways
def test_claim_timeout_is_the_limit_of_the_transaction_and_of_nobody_else(harness: Harness) -> None:
    """The handler's locks have it, too. Others who use the engine have their own, on the same connection."""
    before = harness.transact(lambda session: session.scalar(text(WAIT)))
    found: list[Any] = []

    def body(happened: Added, session: Session) -> None:
        found.append(session.scalar(text(WAIT)))
        add(happened, session)

    handler = harness.handler(body)
    for number, limit in enumerate((7.5, None, 3.0)):
        harness.deliver(harness.dispatcher(handler, claim_timeout=limit), message_id=f"m{number}")
        assert harness.transact(lambda session: session.scalar(text(WAIT))) == before
    assert found == [8, before, 3]


@pytest.mark.parametrize("driver", [USUAL], ids=str)
def test_claim_timeout_overrules_a_listener(mysql: Database, driver: Driver) -> None:
    """One that sets the limit whenever a connection is taken, attached before the first delivery."""
    found: list[Any] = []

    def sets(dbapi_connection: Any, *_: object) -> None:
        with dbapi_connection.cursor() as cursor:
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 12")

    def body(happened: Added, session: Session) -> None:
        found.append(session.scalar(text(WAIT)))
        add(happened, session)

    with ready(Subject(mysql.url(driver.drivername))) as harness:
        event.listen(harness.engine, "checkout", sets)
        dispatcher = harness.dispatcher(harness.handler(body), claim_timeout=2)
        for number in range(4):
            harness.deliver(dispatcher, message_id=f"m{number}")
    assert found == [2] * 4


# Rows that others hold -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", [USUAL], ids=str)
def test_cleanup_waits_for_nobody(harness: Harness) -> None:
    """In a small table, too, it finds its batch first, and skips a marker that somebody holds."""
    harness.transact(lambda session: [claim(session, f"m{number}", "h") for number in range(5)])
    old = "UPDATE processed_message SET processed_at = '2020-01-01', occurred_at = NULL WHERE message_id <> 'm4'"
    harness.transact(lambda session: session.execute(text(old)))
    gate = Gate(harness)

    def hold(session: Session) -> None:
        session.execute(text("SELECT 1 FROM processed_message WHERE message_id = 'm1' FOR UPDATE"))
        gate.stop()

    holder = harness.start(harness.transact, hold)
    gate.arrival()
    impatient = {"init_command": "SET SESSION innodb_lock_wait_timeout = 1, sql_safe_updates = 1"}
    engine = create_engine(harness.subject.url, connect_args=impatient)
    errors: list[Any] = []
    event.listen(engine, "handle_error", lambda context: errors.append(context.original_exception))
    try:
        assert cleanup(engine, retention_hours=24) == 3
    finally:
        gate.open()
        holder.result()
        engine.dispose()
    assert errors == []  # a lock wait timeout, say
    assert harness.markers() == [("m1", "h"), ("m4", "h")]


# Tables --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collation", ["utf8mb4_0900_ai_ci", "utf8mb4_0900_as_cs", "utf8mb4_0900_bin"])
@usual_ways
def test_ids_compare_byte_for_byte(mysql: Database, driver: Driver, collation: str) -> None:
    """Whatever the database's collation says of a and A, of accents and of trailing spaces."""
    with ready(subject(mysql, driver, collation=collation)) as harness:
        for new in (True, False):
            found = harness.transact(lambda session: [claim(session, each, "h") for each in LOOK_ALIKES])
            assert found == [new] * len(LOOK_ALIKES)


@pytest.mark.parametrize("setting", ["sql_generate_invisible_primary_key", "sql_require_primary_key"])
@usual_ways
def test_our_tables_have_primary_keys_of_their_own(mysql: Database, driver: Driver, setting: str) -> None:
    """A server that adds an invisible key, or refuses a table without one, takes them as they are."""
    with ready(subject(mysql, driver, **{setting: "ON"})) as harness:
        assert harness.deliver(harness.dispatcher()).outcome is Outcome.APPLIED
        assert harness.deliver(harness.dispatcher()).outcome is Outcome.DUPLICATE
        engine = create_engine(harness.subject.url.set(drivername="mysql+pymysql"))
        assert [each.problem for each in check(engine) if each.fatal] == []
        engine.dispose()


@pytest.mark.parametrize("driver", [USUAL], ids=str)
def test_a_table_may_be_anywhere(harness: Harness) -> None:
    """In a tablespace, in partitions, and with comments that look like SQL."""
    name = f"of_{harness.subject.url.database}"
    run(
        harness,
        "DROP TABLE contract_account",  # InnoDB has no foreign keys to partitioned tables
        f"CREATE TABLESPACE {name} ADD DATAFILE '{name}.ibd'",
        rf"ALTER TABLE processed_message TABLESPACE {name}, COMMENT '\n) ENGINE=MEMORY'",
        r"ALTER TABLE contract_total MODIFY amount INT COMMENT '\n) ENGINE=CSV' PARTITION BY KEY () PARTITIONS 2",
    )
    try:
        assert harness.deliver(harness.dispatcher()).outcome is Outcome.APPLIED
        assert harness.deliver(harness.dispatcher()).outcome is Outcome.DUPLICATE
    finally:
        run(harness, "DROP TABLE processed_message", f"DROP TABLESPACE {name}")


INSTEAD = "DROP PRIMARY KEY, ADD UNIQUE"


@pytest.mark.parametrize("driver", [USUAL], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        "DROP PRIMARY KEY",
        f"{INSTEAD} (message_id(100), handler(100))",
        f"{INSTEAD} (message_id, handler, processed_at) COMMENT '(`message_id`,`handler`)'",
        f"{INSTEAD} `PRIMARY KEY (``message_id``,``handler``)` (message_id, handler, processed_at)",
    ],
)
def test_a_marker_table_without_its_index_is_refused(harness: Harness, change: str) -> None:
    """A plain INSERT would insert the same marker twice."""
    run(harness, f"ALTER TABLE processed_message {change}")
    with pytest.raises(MissingTableError, match="idempotency check"):
        harness.deliver(harness.dispatcher())
    assert harness.totals() == {}


@pytest.mark.parametrize("driver", [USUAL], ids=str)
@pytest.mark.parametrize("columns", ["handler, message_id", "message_id, handler DESC", "MESSAGE_ID, handler"])
def test_another_unique_index_is_one(harness: Harness, columns: str) -> None:
    """In another order or direction."""
    run(harness, f"ALTER TABLE processed_message {INSTEAD} ({columns})")
    assert harness.deliver(harness.dispatcher()).outcome is Outcome.APPLIED
    assert harness.deliver(harness.dispatcher()).outcome is Outcome.DUPLICATE


@usual_ways
@pytest.mark.parametrize("settings", [{"sql_mode": "ANSI"}, {"sql_quote_show_create": 0}], ids=str)
def test_a_session_that_shows_tables_otherwise(mysql: Database, driver: Driver, settings: dict[str, Any]) -> None:
    """Without the storage engine, in this mode, or without quotes."""
    with ready(subject(mysql, driver, **settings)) as harness:
        assert harness.deliver(harness.dispatcher()).outcome is Outcome.APPLIED
        assert harness.deliver(harness.dispatcher()).outcome is Outcome.DUPLICATE


@pytest.mark.parametrize("driver", [USUAL], ids=str)
def test_who_may_not_see_a_table_is_told_all_the_same(harness: Harness, user: str) -> None:
    """A user with privileges for columns only is refused a marker table without its index."""
    database, few = harness.subject.url.database, f"{user}@'127.0.0.1', {user}@localhost"
    columns = "message_id, handler, processed_at, occurred_at, digest"
    run(
        harness,
        f"CREATE USER {few}",
        f"GRANT SELECT ({columns}), INSERT ({columns}) ON {database}.processed_message TO {few}",
        f"GRANT SELECT ON {database}.processed_message_state TO {few}",
        f"GRANT ALL ON {database}.contract_total TO {few}",
    )
    theirs = Subject(harness.subject.url.set(username=user))
    with Harness(theirs) as hers:
        assert hers.deliver(hers.dispatcher()).outcome is Outcome.APPLIED
        assert hers.deliver(hers.dispatcher()).outcome is Outcome.DUPLICATE
        run(harness, "ALTER TABLE processed_message DROP PRIMARY KEY")
    with Harness(theirs) as hers, pytest.raises(MissingTableError):
        hers.deliver(hers.dispatcher())
    assert harness.totals() == {"a": 1}


@pytest.mark.parametrize("driver", [USUAL], ids=str)
@pytest.mark.parametrize("table", ["processed_message", "contract_total"])
def test_a_table_without_transactions_is_refused(harness: Harness, table: str) -> None:
    """The markers, and a read model."""
    run(harness, "DROP TABLE contract_account", f"ALTER TABLE {table} ENGINE=MyISAM")  # it refers to the other
    with pytest.raises(UnsafeSessionError, match="MyISAM, which has no transactions"):
        harness.deliver(harness.dispatcher())
    assert (harness.totals(), harness.markers()) == ({}, [])


@pytest.mark.parametrize("driver", [USUAL], ids=str)
def test_check_says_what_a_user_of_mysql_can_do(harness: Harness) -> None:
    """Projectors run at SERIALIZABLE there, and no MariaDB is advised."""
    engine = create_engine(harness.subject.url)
    remedies = [each.remedy for each in check(engine) if "SERIALIZABLE" in each.problem]
    engine.dispose()
    assert len(remedies) == 1
    assert "read_models" in remedies[0]
    assert "MariaDB" not in remedies[0]


# Logging in ----------------------------------------------------------------------------------------------------------


@each_way
def test_caching_sha2_password(mysql: Database, driver: Driver, user: str) -> None:
    """The default since MySQL 8, with a password, on a connection that is not encrypted by any setting of ours."""
    with ready(Subject(mysql.url())) as admin:
        for host in ("127.0.0.1", "localhost"):
            created = f"CREATE USER {user}@'{host}' IDENTIFIED WITH caching_sha2_password BY 'a secret'"
            run(admin, created, f"GRANT ALL ON {mysql.url().database}.* TO {user}@'{host}'")
    url = mysql.url(driver.drivername).set(username=user, password="a secret")
    with Harness(Subject(url)) as harness:
        assert harness.deliver(harness.dispatcher()).outcome is Outcome.APPLIED
        assert harness.deliver(harness.dispatcher()).outcome is Outcome.DUPLICATE
        assert harness.transact(lambda session: session.get_one(Total, "a").amount) == 1
