"""The column types of the library's tables on each database: text that compares byte for byte, bytes, times in UTC."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from typing import Any

from sqlalchemy import BigInteger, BindParameter, ColumnElement, DateTime, Dialect, LargeBinary, String, Text, func
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement


class _FromHex:
    """Sends bytes as hexadecimal digits, which mean the same whatever the SQL mode and the character set are.

    The way in which asyncmy and aiomysql write bytes ends the literal early under NO_BACKSLASH_ESCAPES, and under gbk.
    """

    def bind_expression(self, bindvalue: BindParameter[Any]) -> ColumnElement[Any]:
        return func.unhex(bindvalue, type_=self)

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any]:  # SQLAlchemy's signature
        return _hex

    def literal_processor(self, dialect: Dialect) -> Callable[[Any], str]:
        return lambda value: f"'{_hex(value)}'"


def _hex(value: Any) -> Any:
    data = value.encode() if isinstance(value, str) else value
    return data.hex() if isinstance(data, bytes) else data


class _TextAsBytes(_FromHex, mysql.VARBINARY):
    """Stores text as VARBINARY in UTF-8, for every character set of the connection.

    A text column is not enough: every collation that both MariaDB and MySQL have treats "a" and "a " as equal.
    """

    # Alembic writes the column into the user's migration by these names: as VARBINARY.
    __visit_name__ = "VARBINARY"
    __module__ = mysql.VARBINARY.__module__

    def __repr__(self) -> str:
        return f"VARBINARY(length={self.length})"

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        return lambda value: value.decode() if isinstance(value, bytes) else value


class _Blob(_FromHex, mysql.MEDIUMBLOB):
    """Stores bytes, up to 16 MiB."""

    __visit_name__ = "MEDIUMBLOB"
    __module__ = mysql.MEDIUMBLOB.__module__

    def __repr__(self) -> str:
        return "MEDIUMBLOB()"


class _MomentInUTC(mysql.DATETIME):
    """Stores a time of any time zone as DATETIME in UTC, because the drivers would drop the time zone."""

    __visit_name__ = "DATETIME"
    __module__ = mysql.DATETIME.__module__

    def __repr__(self) -> str:
        return f"DATETIME(fsp={self.fsp})"

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any]:
        return in_utc

    def literal_processor(self, dialect: Dialect) -> Callable[[Any], str]:
        return lambda value: f"'{in_utc(value)}'"


def in_utc(value: Any) -> Any:
    """Return a moment that has a time zone as one in UTC without it; return any other value as it is."""
    return value.astimezone(UTC).replace(tzinfo=None) if getattr(value, "tzinfo", None) is not None else value


def exact_text(length: int) -> String:
    """Return the type of a text of at most ``length`` bytes that compares byte for byte.

    Two different ids are never equal.
    """
    return (
        String(length)
        .with_variant(Text(collation="C"), "postgresql")
        .with_variant(_TextAsBytes(length), "mysql", "mariadb")
    )


def exact_bytes() -> LargeBinary:
    """Return the type of bytes that are stored unchanged."""
    return LargeBinary().with_variant(_Blob(), "mysql", "mariadb")


def moment() -> DateTime:
    """Return the type of a point in time, to the microsecond.

    MariaDB and MySQL store it in UTC. SQLite drops the time zone: give it moments in UTC.
    """
    return DateTime(timezone=True).with_variant(_MomentInUTC(fsp=6), "mysql", "mariadb")


class utc_now(FunctionElement[Any]):  # noqa: N801  # as func.now() is
    """Gives the current time of the database's clock, in the form that ``moment`` stores."""

    type = DateTime(timezone=True)
    inherit_cache = True


@compiles(utc_now)
def _current_timestamp(_element: utc_now, _compiler: SQLCompiler, **_: Any) -> str:
    return "CURRENT_TIMESTAMP"


@compiles(utc_now, "mysql", "mariadb")
def _utc_timestamp(_element: utc_now, _compiler: SQLCompiler, **_: Any) -> str:
    return "(utc_timestamp(6))"  # CURRENT_TIMESTAMP would be in the time zone of the session


class now_ms(FunctionElement[int]):  # noqa: N801  # as func.now() is
    """Gives the time of the database's clock in milliseconds since 1970, not that of the transaction's beginning."""

    type = BigInteger()
    inherit_cache = True


@compiles(now_ms, "postgresql")
def _ms_of_postgresql(_element: now_ms, _compiler: SQLCompiler, **_: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)"


@compiles(now_ms, "mysql", "mariadb")
def _ms_of_mariadb(_element: now_ms, _compiler: SQLCompiler, **_: Any) -> str:
    return "(timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6)) DIV 1000)"


@compiles(now_ms, "sqlite")
def _ms_of_sqlite(_element: now_ms, _compiler: SQLCompiler, **_: Any) -> str:
    return "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"


TABLE_OPTIONS: dict[str, Any] = {
    f"{name}_{option}": value
    for name in ("mysql", "mariadb")
    for option, value in {"engine": "InnoDB", "default_charset": "utf8mb4"}.items()
}
"""The storage engine and the character set of our tables are given.

The defaults of a server may be a storage engine without transactions and a character set without most letters.
"""
