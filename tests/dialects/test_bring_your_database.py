"""An unknown database or driver is refused by name; a dialect of somebody else is used as the page shows it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, insert, select
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.orm import Session, sessionmaker

from databases import Database
from kit import Added, add
from projector_dedup import Dispatcher, on, projector
from projector_dedup.dialects import Failure, MariaDB, PostgreSQL, SQLite, dialect_of, failure_of
from projector_dedup.dialects.dialect import _DIALECTS
from projector_dedup.errors import UnsupportedDatabaseError
from projector_dedup.maintenance.check import check
from projector_dedup.maintenance.databases import Database as Maintained
from projector_dedup.maintenance.databases import Expired
from projector_dedup.markers import claim
from projector_dedup.tables import default_metadata, default_tables

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "bring-your-database.md"
DIALECT, SUITE = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
totals = projector(idempotent=True, name="totals")(on(Added)(add))


@pytest.fixture
def by_pg8000(postgresql: Database) -> Iterator[Engine]:
    """An engine with a driver that the library does not know."""
    pytest.importorskip("pg8000")
    engine = create_engine(postgresql.url().set(drivername="postgresql+pg8000"))
    yield engine
    engine.dispose()


def test_an_unknown_driver_is_refused_by_name(by_pg8000: Engine) -> None:
    """By whatever would claim, before anything is sent, and with the list of what is supported."""
    names = r"postgresql\+pg8000 is not supported.*mariadb\+pymysql.*postgresql\+psycopg.*dialects\.register"
    with pytest.raises(UnsupportedDatabaseError, match=names):
        Dispatcher(sessionmaker(by_pg8000), totals).deliver(Added(), message_id="m1")
    with Session(by_pg8000) as session, pytest.raises(UnsupportedDatabaseError, match=names):
        claim(session, "m1", "h")
    with pytest.raises(UnsupportedDatabaseError, match=names):
        check(by_pg8000)


def test_the_dialect_is_registered_as_it_is_printed(by_pg8000: Engine) -> None:
    """Whoever connects with that driver gets the dialect, and nobody else does."""
    names: dict[str, Any] = {}
    exec(DIALECT, names)
    try:
        assert type(dialect_of(by_pg8000)) is names["Pg8000"]
        assert type(dialect_of(create_engine("postgresql+psycopg://"))) is not names["Pg8000"]
    finally:
        del _DIALECTS["postgresql", "pg8000"]


@pytest.mark.nightly
def test_the_suite_passes_as_it_is_printed(postgresql: Database, tmp_path: Path) -> None:
    """Copied into two files, the whole contract passes; the page leaves nothing out."""
    pytest.importorskip("pg8000")
    (tmp_path / "our_dialect.py").write_text(DIALECT, encoding="utf-8")
    (tmp_path / "test_our_database.py").write_text(SUITE, encoding="utf-8")
    url = postgresql.url().set(drivername="postgresql+pg8000").render_as_string(hide_password=False)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "test_our_database.py"],
        cwd=tmp_path,
        env={**os.environ, "OUR_DATABASE_URL": url, "PYTHONPATH": str(ROOT / "tests" / "contract")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert "failed" not in run.stdout


@pytest.mark.parametrize("database", [SQLite, PostgreSQL, MariaDB])
def test_a_subclass_that_does_not_say_what_its_driver_tells_cannot_be_made(database: type[Any]) -> None:
    """It would guess how a transaction stands, or whether a COMMIT has an effect."""
    mine = type("Mine", (database,), {"drivers": frozenset({"mine"})})
    with pytest.raises(TypeError, match="abstract"):
        mine()


def test_cleanup_deletes_batches_on_a_database_of_somebodys_own(database: Database) -> None:
    """The statement of a database that is none of ours runs on each of ours: the oldest go first, the young stay."""
    engine, marker = create_engine(database.url()), default_tables.marker
    default_metadata.create_all(engine)
    now = datetime.now(UTC)
    rows = [
        {"message_id": f"m{hours}", "handler": "h", "processed_at": now - timedelta(hours=hours)} for hours in range(5)
    ]
    statement = Maintained().cleanup_statement(Expired(marker, now - timedelta(hours=1, minutes=30), None, 2))
    with engine.begin() as connection:
        connection.execute(insert(marker), rows)
        for left in (["m0", "m1", "m2"], ["m0", "m1"], ["m0", "m1"]):
            connection.execute(statement)
            assert sorted(connection.scalars(select(marker.c.message_id))) == left
    engine.dispose()


class _SaidError(Exception):
    """The error of a driver that is not known, as PEP 249 and common sense name its SQLSTATE."""

    def __init__(self, sqlstate: str | None) -> None:
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("kind", "sqlstate", "failure"),
    [
        (DBAPIError, "40001", Failure.TRANSIENT),
        (DBAPIError, "08006", Failure.TRANSIENT),
        (OperationalError, None, Failure.LATER),
        (IntegrityError, "23505", Failure.PERMANENT),
    ],
)
def test_an_error_of_a_second_database_that_is_not_known(
    kind: type[DBAPIError], sqlstate: str | None, failure: Failure
) -> None:
    """What a handler meets there is told by SQLSTATE, or by PEP 249's class; the driver's own error by nothing."""
    assert failure_of(kind("insert", {}, _SaidError(sqlstate))) is failure
    assert failure_of(_SaidError(sqlstate)) is None
