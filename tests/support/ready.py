"""A harness, or an engine, in a database that has the tables of the contract; schemas and roles beside them."""

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

from sqlalchemy import URL, Engine, create_engine

from kit import Base, Harness, Subject
from projector_dedup.tables import default_metadata


@contextlib.contextmanager
def ready(database: URL | Subject, **settings: Any) -> Iterator[Harness]:
    """A harness with its tables. ``database`` may be a URL, and ``settings`` are the others of a ``Subject`` then."""
    with Harness(Subject(database, **settings) if isinstance(database, URL) else database) as harness:
        harness.create_tables()
        yield harness


def make_contract_tables(engine: Engine, *schemas: str) -> None:
    """Create the markers and the read model in the usual schema, and in each of ``schemas``."""
    with engine.begin() as connection:
        for schema in (None, *schemas):
            mapped = connection.execution_options(schema_translate_map={None: schema})
            default_metadata.create_all(mapped)
            Base.metadata.create_all(mapped)


@contextlib.contextmanager
def engine_on(url: URL, **arguments: Any) -> Iterator[Engine]:
    """An engine as ``create_engine`` makes it, in a database with the tables."""
    engine = create_engine(url, **arguments)
    make_contract_tables(engine)
    yield engine
    engine.dispose()


@contextlib.contextmanager
def role_on(owner: Engine, *grants: str, password: str | None = None) -> Iterator[str]:
    """A new role of PostgreSQL that has these rights, "SELECT ON total" say; yields its name. It may use ``public``."""
    name = f"pdtest_{secrets.token_hex(4)}"
    with owner.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {name} LOGIN" + (f" PASSWORD '{password}'" if password else ""))
        for grant in ("USAGE ON SCHEMA public", *grants):
            connection.exec_driver_sql(f"GRANT {grant} TO {name}")
    try:
        yield name
    finally:
        with owner.begin() as connection:
            connection.exec_driver_sql(f"DROP OWNED BY {name}")
            connection.exec_driver_sql(f"DROP ROLE {name}")
