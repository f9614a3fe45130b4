"""Drivers whose connections a tracing library has replaced: each delivers as it does without, or is refused at once."""

import logging
from collections.abc import Callable, Iterator
from inspect import unwrap
from typing import Any

import pytest
import wrapt
from opentelemetry.instrumentation.asyncpg import AsyncPGInstrumentor
from opentelemetry.instrumentation.mysqlclient import MySQLClientInstrumentor
from opentelemetry.instrumentation.psycopg import PsycopgInstrumentor
from opentelemetry.instrumentation.psycopg2 import Psycopg2Instrumentor
from opentelemetry.instrumentation.pymysql import PyMySQLInstrumentor
from opentelemetry.instrumentation.sqlalchemy import SQLAlchemyInstrumentor
from opentelemetry.instrumentation.sqlite3 import SQLite3Instrumentor
from sqlalchemy import bindparam, event

from databases import DRIVERS, Driver, each_driver
from projector_dedup import Outcome
from projector_dedup.errors import UnsupportedDatabaseError
from projector_dedup.verdict import Action, verdict_of
from rig import NOTHING, ONCE, TOTAL, Rig, RigOn, add

INSTRUMENTORS: dict[str, Any] = {
    "psycopg": PsycopgInstrumentor,
    "psycopg2": Psycopg2Instrumentor,
    "asyncpg": AsyncPGInstrumentor,
    "pymysql": PyMySQLInstrumentor,
    "MySQLdb": MySQLClientInstrumentor,
    "sqlite3": SQLite3Instrumentor,
}
"""By the module of the driver. OpenTelemetry traces the other drivers through SQLAlchemy."""

PYMYSQL = next(driver for driver in DRIVERS if driver.module == "pymysql")


@pytest.fixture
def traced(driver: Driver) -> Iterator[None]:
    """OpenTelemetry traces the driver of the test."""
    instrumentor = INSTRUMENTORS[driver.module]()
    instrumentor.instrument(skip_dep_check=True)
    yield
    instrumentor.uninstrument()


def wrapping(rig: Rig, proxy: Callable[[Any], Any]) -> Rig:
    """Let SQLAlchemy get a proxy of each connection."""

    @event.listens_for(rig.sync_engine, "do_connect")
    def _connect(dialect: Any, _record: Any, arguments: Any, parameters: Any) -> Any:
        return proxy(dialect.loaded_dbapi.connect(*arguments, **parameters))

    return rig


def assert_applied_once(rig: Rig) -> None:
    """The first delivery applies, and the second one is a duplicate."""
    assert [rig.deliver(add).outcome for _ in range(2)] == [Outcome.APPLIED, Outcome.DUPLICATE]
    rig.assert_settled(ONCE)


@pytest.mark.parametrize("driver", [each for each in DRIVERS if each.module in INSTRUMENTORS], ids=str)
@pytest.mark.usefixtures("traced")
def test_a_traced_driver_delivers(rig_on: RigOn, driver: Driver) -> None:
    """OpenTelemetry's proxies and cursors change nothing."""
    assert_applied_once(rig_on(driver))


@each_driver()
def test_a_traced_engine_delivers(rig: Rig) -> None:
    """OpenTelemetry's listeners, which add a comment to each statement, change nothing."""
    instrumentor = SQLAlchemyInstrumentor()
    instrumentor.instrument(skip_dep_check=True, engine=rig.sync_engine, enable_commenter=True)
    try:
        assert_applied_once(rig)
    finally:
        instrumentor.uninstrument()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    "driver", [each for each in DRIVERS if not each.is_async and each.module != "psycopg2"], ids=str
)
def test_a_driver_behind_bare_proxies_delivers(rig_on: RigOn, driver: Driver, layers: int) -> None:
    """One tracing library may wrap the connection of another one."""

    def proxy(connection: Any) -> Any:
        for _ in range(layers):
            connection = wrapt.ObjectProxy(connection)
        return connection

    assert_applied_once(wrapping(rig_on(driver), proxy))


def test_an_interrupted_pymysql_behind_a_proxy_is_closed(rig_on: RigOn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next statement would read the answer of the interrupted one."""
    rig = wrapping(rig_on(PYMYSQL), wrapt.ObjectProxy)
    rig.deliver(add)
    with rig.sync_engine.connect() as connection:
        driver = unwrap(connection.connection.dbapi_connection)  # type: ignore[arg-type]  # any object will do

        def interrupted(*_: object, **_options: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(driver, "_read_query_result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            connection.connection.cursor().execute("SELECT 1")
        assert not driver.open


class Hiding:
    """A proxy that passes everything on, and does not name the connection behind it."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class Lacking:
    """A proxy that lacks what the library asks a driver."""

    def __init__(self, connection: Any) -> None:
        for name in ("cursor", "commit", "rollback", "close"):
            setattr(self, name, getattr(connection, name))


@pytest.mark.parametrize("proxy", [Hiding, Lacking])
def test_pymysql_behind_another_proxy_is_refused(rig_on: RigOn, proxy: Any) -> None:
    """An interrupted statement would leave its answer to the next one, so the error names the proxy."""
    rig = wrapping(rig_on(PYMYSQL), proxy)
    with pytest.raises(UnsupportedDatabaseError, match=proxy.__name__) as refused:
        rig.deliver(add)
    assert verdict_of(refused.value).action is Action.RETRY_LATER
    assert rig.durable() == NOTHING


@each_driver(is_async=False)
def test_a_connection_that_lacks_an_attribute_is_refused(rig_on: RigOn, driver: Driver) -> None:
    """The first delivery says that the connections are not the driver's, and is to be retried."""
    rig = wrapping(rig_on(driver), Lacking)
    with pytest.raises(Exception) as refused:  # noqa: PT011  # its class is what the test asks
        rig.deliver(add)
    assert isinstance(refused.value, UnsupportedDatabaseError)
    assert verdict_of(refused.value).action is Action.RETRY_LATER
    assert rig.durable() == NOTHING


@each_driver("postgresql", module="psycopg")
def test_a_conflict_in_a_pipeline_logs_no_warning(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """psycopg's `executemany` uses a pipeline; the library retries its conflict, and nobody needs to know."""
    rig.outside.execute("insert into total values ('a', 0)")
    runs: list[int] = []

    def handler(session: Any) -> None:
        runs.append(1)
        if len(runs) == 1:
            rig.outside.execute("update total set amount = 1")  # newer than the snapshot of the claim
        changed = TOTAL.update().where(TOTAL.c.account == bindparam("one")).values(amount=TOTAL.c.amount + 10)
        many = [{"one": "a"}, *({"one": "nobody"} for _ in range(20_000))]  # psycopg gets answers while it sends
        session.execute(changed, many)

    with caplog.at_level(logging.INFO):
        assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert len(runs) == 2
    assert rig.outside.execute("select amount from total") == [(11,)]
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []


@each_driver("postgresql", module="psycopg")
def test_other_warnings_of_psycopg_are_logged(rig_on: RigOn, driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    """Only the echo of an error that psycopg has raised is left out."""
    rig_on(driver).deliver(add)
    logging.getLogger("psycopg").warning("error ignored terminating %r: %s", "a pipeline", ValueError("lost"))
    assert "lost" in caplog.text
