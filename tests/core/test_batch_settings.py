"""A batch whose handlers set something for their transaction: each message finds what it would find alone."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, literal, select, text
from sqlalchemy.orm import Session

from databases import DRIVERS, Database, Driver
from kit import Added, Base, Harness, Subject, add
from misbehaviour import swallow
from projector_dedup import Message, Outcome
from projector_dedup.dialects import MariaDB, PostgreSQL, SQLite
from projector_dedup.errors import BatchFailed
from ready import engine_on, ready

APPLIED, DUPLICATE, FAILED = Outcome.APPLIED, Outcome.DUPLICATE, Outcome.FAILED
SCHEMAS = {"a": "public", "b": "tenant_b"}
POSTGRESQL = [driver for driver in DRIVERS if driver.engine == "postgresql"]
PSYCOPG2 = next(driver for driver in POSTGRESQL if driver.module == "psycopg2")

MESSAGES = [Message(f"m{number}", Added((tenant,), 10**number)) for number, tenant in enumerate("aabaabab")]
EXPECTED = {tenant: sum(each.body.amount for each in MESSAGES if each.body.keys == (tenant,)) for tenant in "ab"}


@pytest.fixture
def schemas(postgresql: Database) -> Iterator[Engine]:
    """The tables, and the read model in a second schema."""
    with engine_on(postgresql.url()) as engine:
        with engine.begin() as connection:
            connection.execute(text("CREATE SCHEMA tenant_b"))
            Base.metadata.create_all(connection.execution_options(schema_translate_map={None: "tenant_b"}))
        yield engine


def totals(engine: Engine) -> dict[str, dict[str, int]]:
    """Of each tenant's schema, from another connection."""
    with engine.connect() as connection:
        return {
            tenant: {row.key: row.amount for row in connection.execute(text(f"SELECT * FROM {schema}.contract_total"))}
            for tenant, schema in SCHEMAS.items()
        }


def by_text(session: Session) -> None:
    """As most would."""
    session.execute(text("SET LOCAL search_path TO tenant_b"))


SET_CONFIG = "SELECT pg_catalog.set_config('search_path', 'tenant_b', true)"
FUNCTION = func.set_config("search_path", "tenant_b", literal(True))
BLOCK = "DO $$ BEGIN PERFORM 1; SET LOCAL search_path TO tenant_b; END $$"
OTHER_WAYS: dict[str, Callable[[Session], object]] = {
    "by_driver_text": lambda session: session.connection().exec_driver_sql("SET /* a */ LOCAL search_path TO tenant_b"),
    "by_query": lambda session: session.execute(text(SET_CONFIG)),
    "by_core": lambda session: session.execute(select(FUNCTION)),
    "by_scalar": lambda session: session.scalar(select(FUNCTION)),
    "by_scalar_of_text": lambda session: session.scalar(text(SET_CONFIG)),
    "by_scalar_of_function": lambda session: session.connection().scalar(FUNCTION),
    "by_block": lambda session: session.execute(text(BLOCK)),
    "by_map": lambda session: session.connection().execution_options(schema_translate_map={None: "tenant_b"}),
    "swallowed": lambda session: swallow(by_text, session),
}


@pytest.mark.parametrize(
    ("driver", "choose", "idempotent"),
    [
        *(pytest.param(driver, by_text, True, id=f"{driver}-by_text-True") for driver in POSTGRESQL),
        *(pytest.param(PSYCOPG2, way, True, id=f"{PSYCOPG2}-{name}-True") for name, way in OTHER_WAYS.items()),
        pytest.param(POSTGRESQL[0], by_text, False, id=f"{POSTGRESQL[0]}-by_text-False"),
    ],
)
def test_a_schema_that_a_handler_chooses_is_its_own_messages(
    postgresql: Database, schemas: Engine, driver: Driver, choose: Callable[[Session], object], idempotent: bool
) -> None:
    """The next message of the batch goes to the schema that it would go to alone."""

    def body(happened: Added, session: Session) -> None:
        if happened.keys == ("b",):
            choose(session)
        add(happened, session)

    with Harness(Subject(postgresql.url(driver.name_in_url))) as harness:
        dispatcher = harness.dispatcher(harness.handler(body, idempotent=idempotent))
        deliveries = harness.run(dispatcher.deliver_batch, MESSAGES)
        assert {each.outcome for each in deliveries} == {APPLIED}
        if idempotent:
            again = harness.run(dispatcher.deliver_batch, MESSAGES)
            assert {each.outcome for each in again} == {DUPLICATE}
    assert totals(schemas) == {tenant: {tenant: amount} for tenant, amount in EXPECTED.items()}


def test_a_handler_that_is_given_the_list_may_set_what_it_likes(postgresql: Database, schemas: Engine) -> None:
    """It knows that all of them share its transaction, and is called once."""
    called: list[int] = []

    def body(happened: list[Added], session: Session) -> None:
        called.append(len(happened))
        by_text(session)
        for each in happened:
            add(each, session)

    with Harness(Subject(postgresql.url("postgresql+psycopg"))) as harness:
        dispatcher = harness.dispatcher(harness.handler(body, batch=True))
        assert {each.outcome for each in harness.run(dispatcher.deliver_batch, MESSAGES)} == {APPLIED}
    assert called == [len(MESSAGES)]
    assert totals(schemas) == {"a": {}, "b": EXPECTED}


@pytest.mark.usefixtures("schemas")
def test_a_message_that_is_alone_in_its_batch_is_not_run_again(postgresql: Database) -> None:
    """Of those that are no duplicates."""
    called: list[Added] = []

    def body(happened: Added, session: Session) -> None:
        called.append(happened)
        by_text(session)

    with Harness(Subject(postgresql.url("postgresql+psycopg"))) as harness:
        dispatcher = harness.dispatcher(harness.handler(body))
        harness.deliver(dispatcher, Added(), message_id="m1")
        deliveries = dispatcher.deliver_batch([Message(each, Added()) for each in ("m1", "m2", "m2")])
        assert [each.outcome for each in deliveries] == [DUPLICATE, APPLIED, DUPLICATE]
    assert len(called) == 2


DEFERRING = {"postgresql": "SET CONSTRAINTS ALL DEFERRED", "sqlite": "PRAGMA defer_foreign_keys = ON"}


@pytest.mark.parametrize("engine_name", DEFERRING)
def test_constraints_that_a_handler_defers_are_deferred_for_its_message_only(
    engine_name: str, request: pytest.FixtureRequest
) -> None:
    """The next one, which writes in an order that is not allowed, fails as it does alone."""
    database: Database = request.getfixturevalue(engine_name)
    statements = {
        "defers": [DEFERRING[engine_name], "INSERT INTO child VALUES (1)", "INSERT INTO parent VALUES (1)"],
        "does not": ["INSERT INTO child VALUES (2)", "INSERT INTO parent VALUES (2)"],
    }

    def body(happened: Added, session: Session) -> None:
        for statement in statements[happened.keys[0]]:
            session.execute(text(statement))

    with ready(database.url()) as harness:
        if engine_name == "sqlite":
            enforce(harness.engine)
        with harness.engine.begin() as connection:
            connection.execute(text("CREATE TABLE parent (id INTEGER PRIMARY KEY)"))
            connection.execute(text("CREATE TABLE child (id INTEGER REFERENCES parent DEFERRABLE)"))
        with pytest.raises(BatchFailed) as failed:
            harness.dispatcher(harness.handler(body)).deliver_batch(
                [Message("m1", Added(("defers",))), Message("m2", Added(("does not",)))]
            )
        assert [each.outcome for each in failed.value.deliveries] == [APPLIED, FAILED]
        with harness.engine.connect() as connection:
            assert connection.execute(text("SELECT id FROM child")).scalars().all() == [1]


def enforce(engine: Engine) -> None:
    """SQLite's foreign keys, for connections to come."""

    def on_connect(driver: Any, _record: object) -> None:
        driver.execute("PRAGMA foreign_keys = ON")

    event.listen(engine, "connect", on_connect)
    engine.dispose()


SETTING = [
    "SET LOCAL search_path TO tenant_b", "set local role reader", 'SET LOCAL "a.b" = 1', "select 1; SET LOCAL x = 1",
    "SET TRANSACTION READ ONLY", "SET CONSTRAINTS ALL DEFERRED", "SELECT set_config('app.tenant', 'b', true)",
    'select pg_catalog."set_config" (x, y, true) from t', "/* */ set -- then\n local x to 1",
    "do $$ begin perform set_config('x', 'y', true); end $$", "do $$ begin set local x = 1; end $$",
    "with x as (select set_config('a', 'b', true)) select * from x",
]  # fmt: skip
NOT_SETTING = [
    "UPDATE t SET local = 1", "update t set transaction = 2, constraints = 3", "SET search_path TO tenant_b",
    "select local from t", "select preset_config from t", "SET ROLE reader",
]  # fmt: skip


@pytest.mark.parametrize("sql", SETTING)
def test_text_that_sets_something_for_the_transaction_is_seen(sql: str) -> None:
    """On PostgreSQL, wherever in the text it is."""
    assert PostgreSQL.grammar.sets_for_transaction(sql)


@pytest.mark.parametrize("sql", NOT_SETTING)
def test_text_that_sets_nothing_for_the_transaction_is_not(sql: str) -> None:
    """Columns may have such names; what is set for the session outlives the message alone, too."""
    assert not PostgreSQL.grammar.sets_for_transaction(sql)


def test_on_mariadb_nothing_is_set_for_a_transaction_within_it() -> None:
    """SET LOCAL is another word for SET SESSION there."""
    assert not MariaDB.grammar.sets_for_transaction("SET LOCAL sql_mode = ''")


def test_on_sqlite_foreign_keys_are_deferred_for_a_transaction() -> None:
    """In whichever file."""
    assert SQLite.grammar.sets_for_transaction("PRAGMA main.defer_foreign_keys=1")
    assert not SQLite.grammar.sets_for_transaction("PRAGMA foreign_keys = ON")
