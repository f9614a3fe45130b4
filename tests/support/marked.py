"""Markers of given ages, for tests of what looks after the tables; and what is left of them."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import URL, Engine, MetaData, create_engine, insert, select

from databases import Database
from projector_dedup import make_tables

metadata = MetaData()
tables = make_tables(metadata)


@pytest.fixture(name="sync_url")
def one_of_each_engine(database: Database) -> URL:
    """What looks after the tables does not depend on the driver: import this, and each engine comes once."""
    return database.url()


on_one_database = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
"""What the command prints does not depend on the database, which the functions behind it are tried on."""


def fill(engine: Engine, ages: Iterable[float] | Mapping[str, Iterable[float]]) -> datetime:
    """Make the tables and write markers "0", "1", ... of so many hours, of one handler or of each; return when."""
    metadata.create_all(engine)
    now = datetime.now(UTC)
    rows = [
        {
            "message_id": str(number),
            "handler": handler,
            "processed_at": now - timedelta(hours=age, microseconds=number),
        }
        for handler, some in (ages if isinstance(ages, Mapping) else {"h": ages}).items()
        for number, age in enumerate(some)
    ]
    with engine.begin() as connection:
        if rows:
            connection.execute(insert(tables.marker), rows)
    return now


def left(engine: Engine) -> list[str]:
    """The ids of the markers that are there, as another connection sees them."""
    other = create_engine(engine.url)
    with other.connect() as connection:
        found = sorted(connection.scalars(select(tables.marker.c.message_id)))
    other.dispose()
    return found


def url_of(engine: Engine) -> str:
    """The URL, password and all."""
    return engine.url.render_as_string(hide_password=False)
