"""Tenants that a listener of the user's chooses, by what it sets on the connection of a unit of work.

Two tenants have the same tables and message ids in common. A connection that nobody sets anything on is tenant a's, so
whatever undoes a setting adds tenant b's amounts to tenant a's, or takes its messages for duplicates.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session

from databases import Database, Driver, each_driver, spread
from kit import Added, Harness, Subject, add
from projector_dedup import Dispatcher, Message, Outcome
from projector_dedup.errors import BatchFailed, UnsafeSessionError
from projector_dedup.tables import default_metadata
from ready import make_contract_tables, ready, role_on

APPLIED, DUPLICATE = Outcome.APPLIED, Outcome.DUPLICATE
SCHEMAS = {"a": "public", "b": "tenant_b"}
AMOUNTS = {"a": 1, "b": 10}


SETTINGS = {
    "SET": "SET search_path TO {}",
    "SET LOCAL": "SET LOCAL search_path TO {}",
    "set_config": "SELECT set_config('search_path', '{}', false)",
    "set_config, local": "SELECT set_config('search_path', '{}', true)",
}


Choose = Callable[[Any], None]
"""Sets the tenant by a function that executes SQL text."""


def by_checkout(_harness: Harness, choose: Choose) -> None:
    """On the driver's connection, whenever it is taken from the pool."""

    def on_checkout(driver: Any, _record: object, _proxy: object) -> None:
        with closing(driver.cursor()) as cursor:
            choose(cursor.execute)

    event.listen(_harness.engine, "checkout", on_checkout)


def by_engine_connect(harness: Harness, choose: Choose) -> None:
    """On SQLAlchemy's connection, in a transaction that it begins."""

    def on_engine_connect(connection: Any) -> None:
        choose(connection.exec_driver_sql)

    event.listen(harness.engine, "engine_connect", on_engine_connect)


def by_cursor_of_engine_connect(harness: Harness, choose: Choose) -> None:
    """On the driver's connection; SQLAlchemy knows of no transaction then."""

    def on_engine_connect(connection: Any) -> None:
        with closing(connection.connection.cursor()) as cursor:
            choose(cursor.execute)

    event.listen(harness.engine, "engine_connect", on_engine_connect)


def by_begin(harness: Harness, choose: Choose) -> None:
    """When SQLAlchemy begins a transaction."""
    event.listen(harness.engine, "begin", lambda connection: choose(connection.exec_driver_sql))


def by_after_begin(harness: Harness, choose: Choose) -> None:
    """When the session has begun a transaction."""
    sessions = harness.factory.kw.setdefault("sync_session_class", type("Tenants", (Session,), {}))
    if not harness.asynchronous:
        del harness.factory.kw["sync_session_class"]
        sessions = harness.factory
    event.listen(sessions, "after_begin", lambda _session, _transaction, connection: choose(connection.exec_driver_sql))


BEFORE_THE_LEVEL = (by_checkout, by_engine_connect, by_cursor_of_engine_connect)
LISTENERS = (*BEFORE_THE_LEVEL, by_begin, by_after_begin)


class Tenants:
    """Two schemas, a harness whose listener chooses one of them, and what was delivered to each."""

    def __init__(self, owner: Engine, harness: Harness, body: Callable[..., Any] = add) -> None:
        self.now = "a"
        self.harness = harness
        self.dispatcher = harness.dispatcher(harness.handler(body))
        self.sent: dict[str, set[str]] = {"a": set(), "b": set()}
        self._owner = owner

    def setting(self, how: str) -> Choose:
        """What a listener does."""
        return lambda execute: execute(SETTINGS[how].format(SCHEMAS[self.now])) and None

    def deliver(self, message_id: str) -> Outcome:
        """One message to the tenant of now."""
        self.sent[self.now].add(message_id)
        outcome: Outcome = self.harness.deliver(
            self.dispatcher, Added(amount=AMOUNTS[self.now]), message_id=message_id
        ).outcome
        return outcome

    def deliver_batch(self, *message_ids: str) -> set[Outcome]:
        """Several at once."""
        self.sent[self.now].update(message_ids)
        batch = [Message(message_id, Added(amount=AMOUNTS[self.now])) for message_id in message_ids]
        return {each.outcome for each in self.harness.run(self.dispatcher.deliver_batch, batch)}

    def expected(self) -> dict[str, tuple[int, int]]:
        """Markers and total of each tenant, by what was sent."""
        return {each: (len(ids), len(ids) * AMOUNTS[each]) for each, ids in self.sent.items()}

    def found(self) -> dict[str, tuple[int, int]]:
        """The same, as another connection finds it."""
        with self._owner.connect() as connection:
            return {
                tenant: tuple(
                    connection.execute(
                        text(
                            f"SELECT (SELECT count(*) FROM {schema}.processed_message), "
                            f"(SELECT coalesce(sum(amount), 0) FROM {schema}.contract_total)"
                        )
                    ).one()
                )
                for tenant, schema in SCHEMAS.items()
            }


@contextmanager
def tenants_on(database: Database, driver: Driver, body: Callable[..., Any] = add, **options: Any) -> Iterator[Tenants]:
    """The tables in both schemas."""
    owner = create_engine(database.url("postgresql+psycopg"))
    with owner.begin() as connection:
        connection.execute(text("CREATE SCHEMA tenant_b"))
    make_contract_tables(owner, "tenant_b")
    with Harness(Subject(database.url(driver.name_in_url), **options)) as harness:
        yield Tenants(owner, harness, body)
    owner.dispose()


def deliver_everything(tenants: Tenants) -> None:
    """Messages of both tenants in turn, one by one and in batches; each of them twice."""
    batch = ("b1", "b2", "b3")
    for expected in (APPLIED, DUPLICATE):
        for message_id in ("m1", "m2"):
            for tenants.now in "abb" if expected is DUPLICATE else "ab":
                assert tenants.deliver(message_id) is expected
        for tenants.now in "ba":
            assert tenants.deliver_batch(*batch) == {expected}


@pytest.mark.parametrize("setting", ["SET LOCAL", "set_config, local"])
@spread("listen", LISTENERS, "postgresql")
def test_what_a_listener_has_set_holds_at_a_level_of_the_engine(
    postgresql: Database, driver: Driver, listen: Callable[..., None], setting: str
) -> None:
    """Nobody asks for another level then."""
    with tenants_on(postgresql, driver, engine_isolation="REPEATABLE READ") as tenants:
        listen(tenants.harness, tenants.setting(setting))
        deliver_everything(tenants)
        assert tenants.found() == tenants.expected()


@pytest.mark.parametrize("setting", ["SET", "SET LOCAL"])
@spread("listen", LISTENERS, "postgresql")
def test_what_a_listener_has_set_holds_at_the_level_that_is_asked_for(
    postgresql: Database, driver: Driver, listen: Callable[..., None], setting: str
) -> None:
    """The level is chosen in the transaction that the listener has begun."""
    levels: set[str] = set()

    def body(happened: Added, session: Session) -> None:
        levels.add(session.execute(text("SHOW transaction_isolation")).scalar_one())
        add(happened, session)

    with tenants_on(postgresql, driver, body) as tenants:
        listen(tenants.harness, tenants.setting(setting))
        deliver_everything(tenants)
        assert tenants.found() == tenants.expected()
    assert levels == {"repeatable read"}


@pytest.mark.parametrize("setting", ["set_config", "set_config, local"])
@spread("listen", [by_begin, by_after_begin], "postgresql")
def test_what_a_query_has_set_holds_where_the_level_is_asked_for_before(
    postgresql: Database, driver: Driver, listen: Callable[..., None], setting: str
) -> None:
    """Listeners to `begin` and `after_begin` come later than the level."""
    with tenants_on(postgresql, driver) as tenants:
        listen(tenants.harness, tenants.setting(setting))
        deliver_everything(tenants)
        assert tenants.found() == tenants.expected()


@pytest.mark.parametrize("setting", ["set_config", "set_config, local"])
@spread("listen", BEFORE_THE_LEVEL, "postgresql")
def test_a_listener_that_runs_a_query_is_refused(
    postgresql: Database, driver: Driver, listen: Callable[..., None], setting: str
) -> None:
    """The transaction has a snapshot then, and no level can be chosen: nothing is applied to any tenant."""
    with tenants_on(postgresql, driver) as tenants:
        listen(tenants.harness, tenants.setting(setting))
        for tenants.now in "ab":
            with pytest.raises(UnsafeSessionError, match=r"a listener of the engine ran a query .* SET LOCAL"):
                tenants.deliver("m1")
            with pytest.raises(BatchFailed) as failed:
                tenants.deliver_batch("m2", "m3")
            assert [type(each) for each in failed.value.exceptions] == [UnsafeSessionError]
        assert tenants.found() == {"a": (0, 0), "b": (0, 0)}
        assert tenants.harness.engine.pool.checkedout() == 0  # type: ignore[union-attr]  # a QueuePool


@spread("listen", BEFORE_THE_LEVEL, "postgresql")
def test_a_listener_that_sets_now_and_then_is_heard_whenever_it_does(
    postgresql: Database, driver: Driver, listen: Callable[..., None]
) -> None:
    """Whether a transaction is open is seen for each message, not for the engine."""
    with tenants_on(postgresql, driver) as tenants:
        choose = tenants.setting("SET LOCAL")
        listen(tenants.harness, lambda execute: choose(execute) if tenants.now == "b" else None)
        deliver_everything(tenants)
        assert tenants.found() == tenants.expected()


@each_driver("postgresql")
@pytest.mark.parametrize("isolation", [None, "SERIALIZABLE"])
def test_rows_of_a_tenant_by_a_variable_are_that_tenants(
    postgresql: Database, driver: Driver, isolation: str | None
) -> None:
    """Row level security by `current_setting()`, set for the transaction when a connection is taken from the pool."""
    owner, password = create_engine(postgresql.url("postgresql+psycopg")), secrets.token_hex(8)
    default_metadata.create_all(owner)
    with owner.begin() as connection:
        for each in (
            "CREATE TABLE contract_total (key TEXT, amount INTEGER, tenant TEXT DEFAULT current_setting('app.tenant'), "
            "PRIMARY KEY (tenant, key))",
            "ALTER TABLE contract_total ENABLE ROW LEVEL SECURITY",
            "CREATE POLICY own ON contract_total USING (tenant = current_setting('app.tenant'))",
        ):
            connection.execute(text(each))
    everything = "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public"
    with role_on(owner, everything, password=password) as name:
        with owner.begin() as connection:
            connection.execute(text(f"ALTER ROLE {name} SET app.tenant = 'a'"))
        url = postgresql.url(driver.name_in_url).set(username=name, password=password)
        with Harness(Subject(url, dispatcher_isolation=isolation)) as harness:
            tenants = Tenants(owner, harness)
            by_checkout(harness, lambda execute: execute(f"SET LOCAL app.tenant = '{tenants.now}'") and None)
            for expected in (APPLIED, DUPLICATE):
                for number in range(4):
                    for tenants.now in "ab":
                        assert tenants.deliver(f"{tenants.now}{number}") is expected
                for tenants.now in "ab":
                    assert tenants.deliver_batch(f"{tenants.now}5", f"{tenants.now}6") == {expected}
        with owner.connect() as connection:
            rows = connection.execute(text("SELECT tenant, amount FROM contract_total"))
            found = dict(map(tuple, rows))
        assert found == {tenant: total for tenant, (_, total) in tenants.expected().items()}
    owner.dispose()


@pytest.fixture
def second_database(mariadb: Database) -> Iterator[str]:
    """Tenant b's, beside that of tenant a."""
    name = f"{mariadb.url().database}_b"
    owner = create_engine(mariadb.url("mariadb+pymysql"))
    with owner.begin() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    make_contract_tables(owner, name)
    yield name
    with owner.begin() as connection:
        connection.execute(text(f"DROP DATABASE {name}"))
    owner.dispose()


@each_driver("mariadb")
@pytest.mark.parametrize("isolation", [None, "SERIALIZABLE"])
@pytest.mark.parametrize("listen", [by_checkout, by_cursor_of_engine_connect])
def test_on_mariadb_asking_for_a_level_undoes_nothing(
    mariadb: Database, second_database: str, driver: Driver, isolation: str | None, listen: Callable[..., None]
) -> None:
    """SQLAlchemy sends COMMIT there, which keeps the database that was chosen, and variables."""
    databases = {"a": mariadb.url().database, "b": second_database}
    seen: set[tuple[str, str]] = set()

    def body(happened: Added, session: Session) -> None:
        seen.add((tenants.now, session.execute(text("SELECT @tenant")).scalar_one()))
        add(happened, session)

    def choose(execute: Callable[[str], Any]) -> None:
        execute(f"USE {databases[tenants.now]}")
        execute(f"SET @tenant = '{tenants.now}'")
        execute("SELECT count(*) FROM contract_total")  # which begins a transaction

    owner = create_engine(mariadb.url("mariadb+pymysql"))
    with Harness(Subject(mariadb.url(driver.drivername), dispatcher_isolation=isolation)) as harness:
        tenants = Tenants(owner, harness, body)
        listen(harness, choose)
        deliver_everything(tenants)
    with owner.connect() as connection:
        found = {
            tenant: connection.scalar(text(f"SELECT amount FROM {database}.contract_total"))
            for tenant, database in databases.items()
        }
    owner.dispose()
    assert found == {tenant: total for tenant, (_, total) in tenants.expected().items()}
    assert seen == {("a", "a"), ("b", "b")}


def test_on_sqlite_a_transaction_that_a_listener_has_begun_is_the_units(sqlite: Database) -> None:
    """There is no level to choose: what it set for its transaction holds in the handler, and the claim commits."""
    seen: list[int] = []

    def body(happened: Added, session: Session) -> None:
        seen.append(session.execute(text("PRAGMA defer_foreign_keys")).scalar_one())
        add(happened, session)

    def begin(execute: Callable[[str], Any]) -> None:
        execute("BEGIN")
        execute("PRAGMA defer_foreign_keys = ON")

    with ready(sqlite.url("sqlite+pysqlite")) as harness:
        by_checkout(harness, begin)
        dispatcher: Dispatcher = harness.dispatcher(harness.handler(body))
        outcomes = [dispatcher.deliver(Added(), message_id=each).outcome for each in ("m1", "m2", "m1")]
        assert outcomes == [APPLIED, APPLIED, DUPLICATE]
        assert harness.totals() == {"a": 2}
    assert seen == [1, 1]
