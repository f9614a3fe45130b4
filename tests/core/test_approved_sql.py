"""The SQL that each database gets, as text that can be reviewed without a server: `tests/core/approved/*.sql`.

After an intended change: `APPROVE=1 python -m pytest tests/core/test_approved_sql.py`, then read the difference.
"""

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.schema import CreateIndex, CreateTable

from projector_dedup.bodies import other_body
from projector_dedup.commands.record import RESULT, Record, default_command_tables, recalling, recording
from projector_dedup.dialects import Dialect, dialect_of
from projector_dedup.dialects.claims import lookup_statement
from projector_dedup.dialects.mariadb import insert_given, met_by_claim
from projector_dedup.maintenance.databases import Expired, database_of
from projector_dedup.tables import default_tables

APPROVED = Path(__file__).parent / "approved"
ENGINES = {
    "postgresql-psycopg": create_engine("postgresql+psycopg://"),
    "postgresql-psycopg2": create_engine("postgresql+psycopg2://"),
    "postgresql-asyncpg": create_async_engine("postgresql+asyncpg://").sync_engine,
    "mariadb-pymysql": create_engine("mariadb+pymysql://"),
    "mariadb-asyncmy": create_async_engine("mariadb+asyncmy://").sync_engine,
    "sqlite-pysqlite": create_engine("sqlite://"),
}


def statements(engine: Engine) -> dict[str, Any]:
    """Everything that the library ever sends, by what it is for."""
    dialect: Dialect = dialect_of(engine)
    marker, state = default_tables.marker, default_tables.state
    expired = Expired(marker, datetime(2026, 3, 2, tzinfo=UTC), None, 100)
    return {
        "the marker table": CreateTable(marker),
        **{f"its index {index.name}": CreateIndex(index) for index in marker.indexes},
        "the state table": CreateTable(state),
        "claim": dialect.claim_statement(marker, bounded=False),
        "claim, with claim_timeout": dialect.claim_statement(marker, bounded=True),
        "claim, with a former name": dialect.claim_statement(marker, bounded=False, names=2),
        "claim, with both": dialect.claim_statement(marker, bounded=True, names=2),
        "claim, with a digest": dialect.claim_statement(marker, bounded=False, digest=True),
        "claim, with a digest and a former name": dialect.claim_statement(marker, bounded=False, names=2, digest=True),
        **(
            {
                "claim of several": insert_given(marker, bounded=False),
                "claim of several, with claim_timeout": insert_given(marker, bounded=True),
                "claim of several, with digests": insert_given(marker, bounded=False, digest=True),
            }
            if engine.name == "mariadb"
            else {}
        ),
        **({"which of them did the claim meet?": met_by_claim(marker, 2)} if engine.name == "mariadb" else {}),
        **({"was it this marker that the claim met?": met_by_claim(marker)} if engine.name == "mariadb" else {}),
        "is the marker there? (for the text of an error)": lookup_statement(marker),
        "has the duplicate another body?": other_body(marker, {"message_id": "m", "digest": b""}, ["h"]).statement,
        "prune one batch": database_of(engine).cleanup_statement(expired),
        "prune one batch of a handler": database_of(engine).cleanup_statement(replace(expired, handler="h")),
        "is anything left to prune?": expired.any(),
        **_commands(dialect),
    }


def _commands(dialect: Dialect) -> dict[str, Any]:
    record = default_command_tables.marker
    done, names = Record(RESULT, "json", b"{}", None), ["its name", "its former name"]
    return {
        "the record table": CreateTable(record),
        "record the outcome of a command": recording(dialect, default_command_tables, "0:k", names[:1], done).statement,
        "the same, with a former name": recording(dialect, default_command_tables, "0:k", names, done).statement,
        "recall the outcome of a command": recalling(default_command_tables, "0:k", names[:1]).statement,
        "the same, under its former name": recalling(default_command_tables, "0:k", names).statement,
    }


def text_of(engine: Engine) -> str:
    """The compiled statements, each under its purpose."""
    parts = []
    for purpose, statement in statements(engine).items():
        compiled = str(statement.compile(dialect=engine.dialect)).strip()
        lines = (line.rstrip().replace("\t", "    ") for line in compiled.splitlines())
        parts.append(f"-- {purpose}\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


@pytest.mark.parametrize("name", ENGINES)
def test_the_sql_is_the_approved_one(name: str) -> None:
    """A change of SQL is seen by whoever reviews the change."""
    path = APPROVED / f"{name}.sql"
    found = text_of(ENGINES[name])
    if os.environ.get("APPROVE"):
        path.write_text(found)
    assert found == path.read_text(), f"if this is intended: APPROVE=1 python -m pytest {__file__}"


def test_nothing_is_approved_that_nobody_sends() -> None:
    """No approved file is left over from a driver that is gone."""
    assert {path.stem for path in APPROVED.iterdir()} == set(ENGINES)
