"""Handlers that choose another schema, database or role, and the questions that are asked of their transaction then.

A handler that keeps its transaction is applied; one that ended it is reported, whatever else it chose.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from databases import USUAL_DRIVERS, Database, Driver
from kit import Added, Harness, Subject, add
from misbehaviour import execute_raw
from projector_dedup import Outcome
from projector_dedup.errors import TransactionViolatedError
from ready import make_contract_tables, role_on

APPLIED = Outcome.APPLIED
on_drivers_of = {
    engine: pytest.mark.parametrize("driver", [each for each in USUAL_DRIVERS if each.engine == engine], ids=str)
    for engine in ("postgresql", "mariadb", "sqlite")
}
Execute = Callable[[Session, str], object]


def as_text(session: Session, sql: str) -> None:
    """By SQLAlchemy."""
    session.execute(text(sql))


def as_raw(session: Session, sql: str) -> None:
    """By the driver's own connection."""
    execute_raw(session, sql)


class Place:
    """A database with the tables, and what a handler may choose in it."""

    def __init__(self, database: Database, elsewhere: str) -> None:
        self.database = database
        self.elsewhere = elsewhere  # a schema or database that has the tables too
        self.role = ""  # that may not read markers
        self.owner = create_engine(database.url())

    def harness(self, driver: Driver) -> Harness:
        """Reach the database by a driver."""
        return Harness(Subject(self.database.url(driver.name_in_url)))

    def count(self, table: str) -> int:
        """The rows of a table, from another connection."""
        with self.owner.connect() as connection:
            return int(connection.scalar(text(f"SELECT count(*) FROM {table}")) or 0)


@pytest.fixture
def schemas(postgresql: Database) -> Iterator[Place]:
    """PostgreSQL: a second schema, an empty one, and a role."""
    place = Place(postgresql, "elsewhere")
    with place.owner.begin() as connection:
        for each in ("elsewhere", "nothing"):
            connection.execute(text(f"CREATE SCHEMA {each}"))
    make_contract_tables(place.owner, "elsewhere")
    with role_on(place.owner, "SELECT, INSERT, UPDATE ON contract_total") as place.role:
        yield place
    place.owner.dispose()


@pytest.fixture
def second_database(mariadb: Database) -> Iterator[Place]:
    """MariaDB: a second database, and one that is empty."""
    place = Place(mariadb, f"{mariadb.url().database}_b")
    with place.owner.begin() as connection:
        connection.execute(text(f"CREATE DATABASE {place.elsewhere}"))
    make_contract_tables(place.owner, place.elsewhere)
    yield place
    with place.owner.begin() as connection:
        connection.execute(text(f"DROP DATABASE {place.elsewhere}"))
    place.owner.dispose()


@pytest.fixture
def temporary(sqlite: Database) -> Iterator[Place]:
    """SQLite: the main file."""
    place = Place(sqlite, "main")
    make_contract_tables(place.owner)
    yield place
    place.owner.dispose()


def deliver_once(
    place: Place, driver: Driver, body: Callable[[Any, Session], None], *, strict: bool, **settings: Any
) -> Outcome:
    """One message, on an engine of its own: what is set for the session ends with it."""
    with place.harness(driver) as harness:
        dispatcher = harness.dispatcher(harness.handler(body, **settings), strict=strict)
        return harness.deliver(dispatcher).outcome


CHOICES = ["SET LOCAL search_path TO elsewhere", "SET search_path TO elsewhere", "SET LOCAL ROLE {role}"]


@on_drivers_of["postgresql"]
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("execute", "strict"), [(as_text, True), (as_raw, False)])
def test_a_handler_that_chooses_a_schema_or_role_is_applied(
    schemas: Place, driver: Driver, choice: str, execute: Execute, strict: bool
) -> None:
    """The question before COMMIT is about the transaction, and names no table."""

    def body(happened: Added, session: Session) -> None:
        execute(session, choice.format(role=schemas.role))
        add(happened, session)

    assert deliver_once(schemas, driver, body, strict=strict) is APPLIED
    assert schemas.count("public.processed_message") == 1
    assert schemas.count("contract_total" if "ROLE" in choice else "elsewhere.contract_total") == 1


@on_drivers_of["postgresql"]
@pytest.mark.parametrize("ends", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("idempotent", [True, False])
def test_another_transaction_is_seen_under_another_role(
    schemas: Place, driver: Driver, ends: str, idempotent: bool
) -> None:
    """By its id, also where there is no marker. Nobody asks which of the two ended it."""

    def body(happened: Added, session: Session) -> None:
        add(happened, session)
        session.flush()
        for each in (ends, "BEGIN", f"SET LOCAL ROLE {schemas.role}"):
            execute_raw(session, each)

    with pytest.raises(TransactionViolatedError) as raised:
        deliver_once(schemas, driver, body, strict=True, idempotent=idempotent)
    assert raised.value.durable
    assert schemas.count("processed_message") == (1 if ends == "COMMIT" and idempotent else 0)


CHOSEN_FOR_GOOD = [
    "SET search_path TO elsewhere",
    "SET search_path TO nothing",
    "SET ROLE {role}",
]


@on_drivers_of["postgresql"]
@pytest.mark.parametrize("choice", CHOSEN_FOR_GOOD)
@pytest.mark.parametrize("ends", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("execute", [as_text, as_raw])
def test_a_handler_that_ended_its_transaction_is_reported_wherever_it_went(
    schemas: Place, driver: Driver, choice: str, ends: str, execute: Execute
) -> None:
    """The driver knows that nothing is open; no table is asked."""

    def body(happened: Added, session: Session) -> None:
        add(happened, session)
        session.flush()
        execute(session, choice.format(role=schemas.role))
        execute_raw(session, ends)

    with pytest.raises(TransactionViolatedError, match="idempotency show") as raised:
        deliver_once(schemas, driver, body, strict=False)
    assert raised.value.durable
    assert schemas.count("public.processed_message") == (ends == "COMMIT")


@on_drivers_of["mariadb"]
@pytest.mark.parametrize("execute", [as_text, as_raw])
def test_on_mariadb_a_handler_that_uses_another_database_is_applied(
    second_database: Place, driver: Driver, execute: Execute
) -> None:
    """A savepoint is asked for, which is of no database."""

    def body(happened: Added, session: Session) -> None:
        execute(session, f"USE {second_database.elsewhere}")
        add(happened, session)

    assert deliver_once(second_database, driver, body, strict=True) is APPLIED
    assert second_database.count("processed_message") == 1
    assert second_database.count(f"{second_database.elsewhere}.contract_total") == 1


@on_drivers_of["mariadb"]
@pytest.mark.parametrize("ends", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("chosen", ["elsewhere", "mysql"])
@pytest.mark.parametrize("execute", [as_text, as_raw])
def test_on_mariadb_a_handler_that_ended_its_transaction_is_reported_though_it_uses_another_database(
    second_database: Place, driver: Driver, ends: str, chosen: str, execute: Execute
) -> None:
    """No table is asked, so it does not matter where the handler went."""

    def body(happened: Added, session: Session) -> None:
        add(happened, session)
        session.flush()
        execute(session, f"USE {second_database.elsewhere if chosen == 'elsewhere' else chosen}")
        execute_raw(session, ends)

    with pytest.raises(TransactionViolatedError, match="idempotency show") as raised:
        deliver_once(second_database, driver, body, strict=False)
    assert raised.value.durable
    assert second_database.count("processed_message") == (ends == "COMMIT")


@on_drivers_of["sqlite"]
def test_on_sqlite_a_temporary_table_that_hides_the_markers_does_no_harm_to_strict(
    temporary: Place, driver: Driver
) -> None:
    """A savepoint is asked for."""

    def body(happened: Added, session: Session) -> None:
        session.execute(text("CREATE TEMPORARY TABLE processed_message (message_id TEXT, handler TEXT)"))
        add(happened, session)

    assert deliver_once(temporary, driver, body, strict=True) is APPLIED
    assert temporary.count("processed_message") == 1
