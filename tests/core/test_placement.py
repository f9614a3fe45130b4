"""Marker and read model land in one place, whatever leads a session there: binds, schemas, tables, databases."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import (
    Delete,
    Engine,
    Insert,
    MetaData,
    String,
    Update,
    create_engine,
    event,
    insert,
    select,
    text,
)
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from databases import USUAL_DRIVERS, Database, Driver, each_driver
from kit import Added, Harness, Subject
from marked import one_of_each_engine  # noqa: F401  # a fixture
from projector_dedup import Dispatcher, Outcome, make_tables, on, projector
from projector_dedup.dialects import configure_sqlite
from projector_dedup.errors import MissingTableError, TransactionViolatedError, UnsafeSessionError
from projector_dedup.maintenance.check import check
from projector_dedup.maintenance.cleanup import cleanup
from projector_dedup.maintenance.schema import require_tables
from projector_dedup.markers import claim
from projector_dedup.tables import DedupTables, default_metadata, default_tables
from rig import ONCE, Base, Durable, Total, state, tables_on

Body = Callable[[Any, Session], Any]


class PerTenant(DeclarativeBase):
    """A read model whose schema is a name that only a translate map gives a meaning."""

    metadata = MetaData(schema="per_tenant")


class TenantTotal(PerTenant):
    """What accumulates, once for each tenant."""

    __tablename__ = "total"
    account: Mapped[str] = mapped_column(String(20), primary_key=True)
    amount: Mapped[int]


TENANT_TABLES = make_tables(PerTenant.metadata, schema="per_tenant")


def add(model: type[Any] = Total) -> Body:
    """A handler: read, create if missing, add."""

    def body(_event: object, session: Session) -> None:
        total = session.get(model, "a")
        if total is None:
            session.add(total := model(account="a", amount=0))
        total.amount += 1

    return body


def fail(_event: object, _session: Session) -> None:
    """A handler that must not be entered."""
    raise AssertionError("the handler was entered")


class Place:
    """One driver, a database with two schemas beside its own, and a view of what is durable in each."""

    def __init__(self, harness: Harness, engine: Any, schemas: tuple[str, str]) -> None:
        self.harness = harness
        self.engine = engine  # an Engine or an AsyncEngine
        self.schemas = schemas

    def mapped(self, **schemas: str | None) -> Any:
        """The engine, with a translate map; ``none`` is None."""
        return self.engine.execution_options(
            schema_translate_map={None if name == "none" else name: schema for name, schema in schemas.items()}
        )

    def create(self, bind: Any, *metadata: MetaData) -> None:
        """``create_all``, through ``bind``: the markers and the read model, or those of other metadata."""
        for each in metadata or (default_metadata, Base.metadata):
            self.harness.transact(partial(_create, each), self.harness.factory_for(bind))

    def execute(self, *statements: str) -> None:
        """SQL text, in a transaction of its own."""
        self.harness.transact(lambda session: [session.execute(text(statement)) for statement in statements])

    def deliver(
        self,
        body: Body,
        factory: Any,
        message_id: str = "m1",
        *,
        tables: DedupTables = default_tables,
        strict: bool = False,
        **settings: Any,
    ) -> Outcome:
        """Deliver one message by a dispatcher of its own."""
        handler = self.harness.handler(body, **settings)
        dispatcher = self.harness.dispatcher(handler, factory=factory, tables=tables, strict=strict)
        return self.harness.deliver(dispatcher, Added(), message_id).outcome

    def factory(self, bind: Any, session_class: type[Session] | None = None, **arguments: Any) -> Any:
        """A session factory of the right kind, perhaps for a Session class of one's own."""
        kind = "sync_session_class" if self.harness.asynchronous else "class_"
        if session_class is not None:
            arguments[kind] = session_class
        return (async_sessionmaker if self.harness.asynchronous else sessionmaker)(bind, **arguments)

    def durable(self, schema: str | None = None) -> tuple[list[str], int]:
        """Message ids and total, as another connection sees them."""
        prefix = "" if schema is None else f"{schema}."

        def look(session: Session) -> tuple[list[str], int]:
            query = text(f"select message_id from {prefix}processed_message order by 1")
            ids = session.scalars(query.columns(default_tables.marker.c.message_id))
            amount = session.scalar(text(f"select coalesce(sum(amount), 0) from {prefix}total"))
            return list(ids), int(amount)

        found: tuple[list[str], int] = self.harness.transact(look)
        return found


def _create(metadata: MetaData, session: Session) -> None:
    metadata.create_all(session.connection())


NOTHING: tuple[list[str], int] = ([], 0)


def add_schemas(engine: Engine, folder: Path) -> tuple[str, str]:
    """Two schemas in an engine's database; SQLite has files that every connection attaches."""
    if engine.dialect.name == "sqlite":
        names = ("tenant_a", "tenant_b")

        @event.listens_for(engine, "connect")
        def _attach(dbapi_connection: Any, _record: object) -> None:
            cursor = dbapi_connection.cursor()
            for name in names:
                cursor.execute(f"ATTACH '{folder / name}.sqlite3' AS {name}")
            cursor.close()

        return names
    database = str(engine.url.database)
    return f"{database}_a", f"{database}_b"  # where a schema is a database, its name must be nobody else's


@pytest.fixture(params=USUAL_DRIVERS, ids=str)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A synchronous and an asynchronous driver of each database."""
    driver: Driver = request.param
    if not driver.installed:
        pytest.skip(f"{driver.module} is not installed")
    url = request.getfixturevalue(driver.engine).url(driver.drivername)
    if driver.is_async and driver.module == "psycopg":
        url = url.set(drivername="postgresql+psycopg_async")
    engines: list[Any] = []
    with Harness(Subject(url, prepare=engines.append)) as harness:
        schemas = add_schemas(harness.engine, tmp_path)
        place = Place(harness, engines[0], schemas)
        if driver.engine != "sqlite":
            place.execute(*(f"create schema {name}" for name in schemas))
        yield place
        if driver.engine not in ("sqlite", "postgresql"):  # PostgreSQL's are swept away with the database's own
            place.execute(*(f"drop schema {name}" for name in schemas))


@pytest.fixture
def tenants(place: Place) -> list[Any]:
    """The engine twice, with a map that moves all tables without a schema to the one, and to the other."""
    engines = [place.mapped(none=schema) for schema in place.schemas]
    for engine in engines:
        place.create(engine)
    return engines


# Translate maps, in every place where one can be given -------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"strict": True}, {"read_models": [Total]}], ids=str)
def test_tenants_take_turns_in_one_process(place: Place, tenants: list[Any], settings: dict[str, Any]) -> None:
    """Marker and read model are the tenant's own, though the compiled statements are shared by both."""
    turns = [place.deliver(add(), place.factory(tenant), **settings) for _ in range(3) for tenant in tenants]
    assert turns == [Outcome.APPLIED] * 2 + [Outcome.DUPLICATE] * 4
    assert [place.durable(schema) for schema in place.schemas] == [(["m1"], 1)] * 2


def test_one_dispatcher_serves_the_tenant_of_the_moment(place: Place, tenants: list[Any]) -> None:
    """A Session class may choose among engines, or its ``after_begin`` may set the map: the claim follows."""
    engines = [getattr(tenant, "sync_engine", tenant) for tenant in tenants]
    current: ContextVar[int] = ContextVar("current")

    class Choosing(Session):
        def get_bind(self, *_args: Any, **_kwargs: Any) -> Any:
            return engines[current.get()]

    class Beginning(Session):
        pass

    @event.listens_for(Beginning, "after_begin")
    def _begin(_session: Session, _transaction: object, connection: Any) -> None:
        connection.execution_options(schema_translate_map={None: place.schemas[current.get()]})

    for message_id, factory in [
        ("m1", place.factory(None, Choosing)),
        ("m2", place.factory(place.engine, Beginning)),
    ]:
        outcomes = []
        for turn in (0, 1, 0, 1):
            current.set(turn)
            outcomes.append(place.deliver(add(), factory, message_id))
        assert outcomes == [Outcome.APPLIED] * 2 + [Outcome.DUPLICATE] * 2
    assert [place.durable(schema) for schema in place.schemas] == [(["m1", "m2"], 2)] * 2


def test_a_map_that_moves_the_read_model_alone_is_refused(place: Place) -> None:
    """Tenants would share one table of ids, where the second tenant's message 1 is a duplicate of the first's."""
    tenant = place.mapped(per_tenant=place.schemas[0])
    place.create(place.engine)
    place.create(tenant, PerTenant.metadata)
    factory = place.factory(tenant)
    with pytest.raises(UnsafeSessionError, match=r"would share its markers.*\{None: None, \.\.\.\}"):
        place.deliver(fail, factory)
    with pytest.raises(UnsafeSessionError, match="would share its markers"):
        place.harness.transact(lambda session: claim(session, "m1", "totals"), factory)
    assert place.durable() == NOTHING
    assert place.deliver(add(TenantTotal), factory, tables=TENANT_TABLES) is Outcome.APPLIED
    assert place.durable(place.schemas[0]) == (["m1"], 1)


def test_shared_markers_are_shared_by_those_who_say_so(place: Place) -> None:
    """A map that names the marker's schema is taken at its word: an id that two tenants have in common is one."""
    tenants = [place.mapped(none=None, per_tenant=schema) for schema in place.schemas]
    place.create(place.engine)
    for tenant in tenants:
        place.create(tenant, PerTenant.metadata)
    factories = [place.factory(tenant) for tenant in tenants]
    assert [place.deliver(add(TenantTotal), factory) for factory in factories] == [
        Outcome.APPLIED,
        Outcome.DUPLICATE,
    ]
    assert place.deliver(add(TenantTotal), factories[1], "m2") is Outcome.APPLIED
    assert place.durable()[0] == ["m1", "m2"]
    assert [place.durable(schema) for schema in place.schemas] == [([], 1)] * 2


def _per_statement(session: Session, schema: str) -> None:
    options = {"schema_translate_map": {None: schema}}
    session.execute(insert(Total).values(account="a", amount=1), execution_options=options)


def _in_place(session: Session, schema: str) -> None:
    session.connection().execution_options(schema_translate_map={None: schema})
    add()(None, session)


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("move", [_per_statement, _in_place])
def test_what_a_handler_sends_elsewhere_still_commits_with_its_marker(
    place: Place, tenants: list[Any], move: Callable[[Session, str], None], strict: bool
) -> None:
    """The marker stays where it was claimed, and is looked for there, whatever schema the handler writes to."""
    home, away = place.schemas

    def moves(_event: object, session: Session) -> None:
        move(session, away)

    def fails(_event: object, session: Session) -> None:
        move(session, away)
        session.flush()
        raise KeyError("the handler's own")

    factory = place.factory(tenants[0])
    with pytest.raises(KeyError):
        place.deliver(fails, factory, strict=strict)
    assert [place.durable(schema) for schema in (home, away)] == [NOTHING, NOTHING]
    outcomes = [place.deliver(moves, factory, strict=strict) for _ in range(2)]
    assert outcomes == [Outcome.APPLIED, Outcome.DUPLICATE]
    assert [place.durable(schema) for schema in (home, away)] == [(["m1"], 0), ([], 1)]


def test_a_map_that_comes_too_late_is_refused(place: Place, tenants: list[Any]) -> None:
    """SQLAlchemy would drop it with a warning, and write into the schema of the claim."""
    home, away = place.schemas

    def late(_event: object, session: Session) -> None:
        session.connection(execution_options={"schema_translate_map": {None: away}})
        add()(None, session)

    with pytest.raises(UnsafeSessionError, match="comes too late"):
        place.deliver(late, place.factory(tenants[0]))
    assert [place.durable(schema) for schema in (home, away)] == [NOTHING, NOTHING]


def test_a_missing_table_is_named_as_the_engine_addresses_it(place: Place) -> None:
    """With the tenant's schema, and a remedy that creates it there."""
    tenant = place.mapped(none=place.schemas[0])
    expected = rf"{place.schemas[0]}\.processed_message is missing.*create_all\(engine\).*, on the engine that has this"
    with pytest.raises(MissingTableError, match=expected):
        place.deliver(fail, place.factory(tenant))


# Tables and schemas in one database, databases in one process ------------------------------------------------------


@pytest.fixture
def home(engine: Engine, tmp_path: Path) -> Iterator[tuple[Engine, tuple[str, str]]]:
    """An engine on each database, and the two schemas in it."""
    schemas = add_schemas(engine, tmp_path)
    with engine.begin() as connection:
        for name in schemas if engine.dialect.name != "sqlite" else ():
            connection.execute(text(f"create schema {name}"))
    yield engine, schemas
    if engine.dialect.name not in ("sqlite", "postgresql"):
        with engine.begin() as connection:
            for name in schemas:
                connection.execute(text(f"drop schema {name}"))


def test_check_and_cleanup_look_where_the_engine_does(home: tuple[Engine, tuple[str, str]]) -> None:
    """The tenant whose tables are there is well, the other's are missing; only the first one's markers are pruned."""
    engine, schemas = home
    first, second = (engine.execution_options(schema_translate_map={None: schema}) for schema in schemas)
    tables_on(first)
    assert not [finding for finding in check(first) if finding.fatal]
    require_tables(first, default_tables)
    missing = [finding for finding in check(second) if finding.fatal]
    assert missing[0].problem == f"the table {schemas[1]}.processed_message is missing"
    assert "schema_translate_map" in missing[0].remedy
    with pytest.raises(MissingTableError, match=schemas[1]):
        cleanup(second)
    tables_on(second)
    marker = {"message_id": "m1", "handler": "h"}
    old = text("update processed_message set processed_at = '2020-01-01 00:00:00'")
    for tenant, schema in zip((first, second), schemas, strict=True):
        with tenant.begin() as connection:
            connection.execute(insert(default_tables.marker), marker)
            connection.execute(text(str(old).replace("processed_message", f"{schema}.processed_message")))
    assert cleanup(first) == 1
    counts = []
    for tenant in (first, second):
        with tenant.connect() as connection:
            counts.append(len(connection.execute(select(default_tables.marker)).all()))
    assert counts == [0, 1]


def test_a_table_that_lacks_something_is_named_as_the_engine_addresses_it(home: tuple[Engine, tuple[str, str]]) -> None:
    """Columns and indexes are those of the tenant's table, not of one that has the same name elsewhere."""
    engine, schemas = home
    tenant = engine.execution_options(schema_translate_map={None: schemas[0]})
    tables_on(engine)
    with engine.begin() as connection:
        columns = "message_id varchar(20), handler varchar(20), occurred_at timestamp"
        connection.execute(text(f"create table {schemas[0]}.processed_message ({columns})"))
    problems = " ".join(finding.problem for finding in check(tenant) if finding.fatal)
    assert f"{schemas[0]}.processed_message has no column processed_at" in problems
    assert f"{schemas[0]}.processed_message has no unique index over (message_id, handler)" in problems


def test_tables_of_several_names_and_schemas_know_nothing_of_each_other(home: tuple[Engine, tuple[str, str]]) -> None:
    """One id, one handler, four marker tables in one database: applied once for each."""
    engine, schemas = home
    metadata = MetaData()
    kinds = [make_tables(metadata, name, schema) for name in ("inbox", "seen") for schema in schemas]
    metadata.create_all(engine)
    tables_on(engine)
    handler = projector(idempotent=True, name="totals")(on(dict)(add()))
    for tables in kinds:
        require_tables(engine, tables)
        dispatcher = Dispatcher(sessionmaker(engine), handler, tables=tables)
        outcomes = [dispatcher.deliver({}, message_id="m1").outcome for _ in range(2)]
        assert outcomes == [Outcome.APPLIED, Outcome.DUPLICATE]
    with Session(engine) as session:
        assert session.get_one(Total, "a").amount == 4


@contextlib.contextmanager
def another_database(engine: Engine, folder: Path) -> Iterator[Engine]:
    """A second database for the same driver."""
    if engine.dialect.name == "sqlite":
        other = create_engine(engine.url.set(database=str(folder / "another.sqlite3")))
        yield other
        other.dispose()
        return
    name = f"{engine.url.database}_other"
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as admin:
        admin.execute(text(f"create database {name}"))
        other = create_engine(engine.url.set(database=name))
        try:
            yield other
        finally:
            other.dispose()
            admin.execute(text(f"drop database {name}"))


@pytest.fixture
def databases(engine: Engine, tmp_path: Path) -> Iterator[list[Engine]]:
    """Two databases of each kind, both with all tables."""
    with another_database(engine, tmp_path) as other:
        for each in (engine, other):
            tables_on(each)
        yield [engine, other]


def test_two_databases_in_one_process_know_nothing_of_each_other(databases: list[Engine]) -> None:
    """One id, one handler: applied once in each."""
    handler = projector(idempotent=True, name="totals")(on(dict)(add()))
    dispatchers = [Dispatcher(sessionmaker(engine), handler) for engine in databases]
    outcomes = [dispatcher.deliver({}, message_id="m1").outcome for _ in range(2) for dispatcher in dispatchers]
    assert outcomes == [Outcome.APPLIED] * 2 + [Outcome.DUPLICATE] * 2
    assert [state(engine) for engine in databases] == [ONCE] * 2


# Sessions with several binds ---------------------------------------------------------------------------------------


def _statements(engine: Engine) -> list[str]:
    seen: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda _c, _cursor, statement, *_: seen.append(statement))
    return seen


def by_binds(first: Engine, second: Engine) -> sessionmaker[Session]:
    """Tables have engines: the read model is elsewhere."""
    return sessionmaker(binds={default_tables.marker: first, TenantTotal: first, Total: second})


def by_model(first: Engine, second: Engine) -> sessionmaker[Session]:
    """A Session class that routes by mapped class."""

    class Routing(Session):
        def get_bind(self, mapper: Any = None, **_: Any) -> Any:
            return second if mapper is not None and mapper.class_ is Total else first

    return sessionmaker(class_=Routing)


def by_statement(first: Engine, second: Engine) -> sessionmaker[Session]:
    """A Session class that splits reads from writes, as SQLAlchemy's documentation has it."""

    class Splitting(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> Any:  # noqa: ARG002  # SQLAlchemy's
            return first if self._flushing or isinstance(clause, (Insert, Update, Delete)) else second

    return sessionmaker(class_=Splitting)


ROUTES = [by_binds, by_model, by_statement]


@pytest.mark.parametrize("route", ROUTES)
def test_a_read_model_on_another_engine_never_commits_without_its_marker(
    databases: list[Engine], route: Callable[[Engine, Engine], sessionmaker[Session]]
) -> None:
    """The handler's first use of the second engine is prevented: nothing of either is durable."""
    handler = projector(idempotent=True, name="totals")(on(dict)(add()))
    with pytest.raises(TransactionViolatedError, match="second database connection"):
        Dispatcher(route(*databases), handler).deliver({}, message_id="m1")
    assert [state(engine) for engine in databases] == [Durable(0, 0)] * 2


@pytest.mark.parametrize("route", ROUTES)
def test_a_declared_read_model_on_another_engine_is_refused_before_the_claim(
    databases: list[Engine], route: Callable[[Engine, Engine], sessionmaker[Session]]
) -> None:
    """What ``read_models`` names is asked for its engine first: no statement reaches either database."""
    seen = [_statements(engine) for engine in databases]
    handler = projector(idempotent=True, name="totals", read_models=[TenantTotal, Total])(on(dict)(fail))
    with pytest.raises(UnsafeSessionError, match="on another engine"):
        Dispatcher(route(*databases), handler).deliver({}, message_id="m1")
    assert seen == [[], []]


@pytest.mark.parametrize("route", ROUTES)
def test_binds_that_come_to_one_engine_are_fine(
    engine: Engine, route: Callable[[Engine, Engine], sessionmaker[Session]]
) -> None:
    """However a session finds its engine, what counts is that marker and read model have the same."""
    tables_on(engine)
    for message_id, settings in [("m1", {}), ("m2", {"read_models": [Total]})]:
        handler = projector(idempotent=True, name="totals", **settings)(on(dict)(add()))  # type: ignore[call-overload]  # one of two
        dispatcher = Dispatcher(route(engine, engine), handler)
        outcomes = [dispatcher.deliver({}, message_id=message_id).outcome for _ in range(2)]
        assert outcomes == [Outcome.APPLIED, Outcome.DUPLICATE]
    assert state(engine) == Durable(2, 2)


def test_a_handler_that_only_writes_may_have_a_session_that_splits(databases: list[Engine]) -> None:
    """The claim is a write, and goes where writes go."""

    @projector(idempotent=True, name="totals")
    @on(dict)
    def writes(_event: object, session: Session) -> None:
        session.add(Total(account="a", amount=1))

    dispatcher = Dispatcher(by_statement(*databases), writes)
    assert dispatcher.deliver({}, message_id="m1").outcome is Outcome.APPLIED
    assert [state(engine) for engine in databases] == [ONCE, Durable(0, 0)]


def test_binds_of_an_async_session_are_held_to_the_same(place: Place) -> None:
    """Another engine on the same database is a second connection, and refused; the same engine is not."""
    place.create(place.engine)
    place.deliver(add(), place.factory(None, binds={default_tables.marker: place.engine, Total: place.engine}))
    clone = place.engine.execution_options()
    elsewhere = place.factory(None, binds={default_tables.marker: place.engine, Total: clone})
    with pytest.raises(TransactionViolatedError, match="second database connection"):
        place.deliver(add(), elsewhere, "m2")
    with pytest.raises(UnsafeSessionError, match="on another engine"):
        place.deliver(fail, elsewhere, "m3", read_models=[Total])
    assert place.durable() == (["m1"], 1)


# What is one database's own ----------------------------------------------------------------------------------------


@each_driver("postgresql")
def test_the_search_path_leads_both_to_its_first_schema(driver: Driver, postgresql: Database) -> None:
    """Two schemas in one PostgreSQL database, told apart by the connections' search_path alone."""
    url = postgresql.url(driver.drivername)
    if driver.is_async and driver.module == "psycopg":
        url = url.set(drivername="postgresql+psycopg_async")
    schemas = ("one", "two")
    for schema in schemas:
        path = f"{schema},public"
        by_driver: dict[str, Any] = {"server_settings": {"search_path": path}}
        if driver.module != "asyncpg":
            by_driver = {"options": f"-c search_path={path}"}
        engines: list[Any] = []
        subject = Subject(url, prepare=engines.append, engine_arguments={"connect_args": by_driver})
        with Harness(subject) as harness:
            place = Place(harness, engines[0], schemas)
            place.execute(f"create schema {schema}")
            place.create(place.engine)
            outcomes = [place.deliver(add(), harness.factory, strict=True) for _ in range(2)]
            assert outcomes == [Outcome.APPLIED, Outcome.DUPLICATE]
            assert place.durable(schema) == (["m1"], 1)
            if not driver.is_async:
                assert not [finding for finding in check(harness.engine) if finding.fatal]


def test_check_warns_of_attached_files_that_do_not_commit_as_one(sqlite: Database, tmp_path: Path) -> None:
    """Under write-ahead logging SQLite commits file by file; a crash in between keeps the one and loses the other."""
    engine = create_engine(sqlite.url())
    configure_sqlite(engine)
    tables_on(engine)
    assert check(engine) == []
    engine.dispose()
    add_schemas(engine, tmp_path)
    (advice,) = check(engine)
    assert not advice.fatal
    assert "may commit one file" in advice.problem
    assert "make_tables(metadata, schema=" in advice.remedy
    engine.dispose()
