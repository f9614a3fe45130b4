"""From a database URL, as a user has it at hand, to an engine that is known to answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from .errors import Failed, reason, without_secrets

_EXAMPLE = (
    "postgresql+psycopg://user@host:5432/database, mariadb+pymysql://user@host:3306/database or sqlite:///file.db"
)
_CONNECT_TIMEOUT = 10  # seconds; a host that drops packets would otherwise hold the command for minutes

# The command is synchronous. Whoever configured an async driver, or none, gets the sync one we were tested with.
_DRIVERS = {
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+asyncpg": "postgresql+psycopg",
    "postgresql+psycopg_async": "postgresql+psycopg",
    "sqlite": "sqlite+pysqlite",
    "sqlite+aiosqlite": "sqlite+pysqlite",
    "mysql": "mysql+pymysql",
    "mysql+aiomysql": "mysql+pymysql",
    "mysql+asyncmy": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
    "mariadb+aiomysql": "mariadb+pymysql",
    "mariadb+asyncmy": "mariadb+pymysql",
}
_INSTALL = {
    "postgresql+psycopg": "pip install 'projector-dedup[postgresql]'",
    "postgresql+psycopg2": "pip install 'projector-dedup[psycopg2]'",
    "mysql+pymysql": "pip install 'projector-dedup[pymysql]'",
    "mariadb+pymysql": "pip install 'projector-dedup[pymysql]'",
    "mysql+mysqldb": "pip install 'projector-dedup[mysqlclient]'",
    "mariadb+mysqldb": "pip install 'projector-dedup[mysqlclient]'",
}


def parse(text: str) -> URL:
    """The URL with a driver that this command can use; `Failed` if it is not a URL."""
    try:
        url = make_url(text.strip())
    except (ArgumentError, ValueError):  # their texts quote what was given, password and all
        raise Failed(f"the database URL cannot be read; write it like {_EXAMPLE}") from None
    if "@" in (url.host or ""):
        raise Failed("the database URL has more than one @; write the one in the password as %40")
    if url.get_backend_name() in ("mysql", "mariadb") and not url.database:
        raise Failed(f"the database URL names no database; write it like {_EXAMPLE}")
    url = url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))
    if url.drivername == "postgresql+psycopg" and "ssl" in url.query:  # asyncpg's word for it
        url = url.difference_update_query(["ssl"]).update_query_dict({"sslmode": url.query["ssl"]})
    return url


def shown(url: URL) -> str:
    """The URL as it may be printed."""
    return without_secrets(url.render_as_string(hide_password=True))


def open_engine(url: URL, *, create: bool = False) -> Engine:
    """An engine on a database that answered just now; `Failed`, with the remedy, for any other.

    SQLite creates whatever file it is told to open. Unless ``create``, a file that is not there is a mistyped path.
    """
    sqlite = url.get_backend_name() == "sqlite"
    if sqlite:
        _refuse_no_file(url, create)
    try:
        engine = create_engine(url, connect_args=_connect_args(url))
    except NoSuchModuleError:
        raise Failed(f"{url.drivername} is not a database this command knows; write the URL like {_EXAMPLE}") from None
    except ImportError as error:
        remedy = _INSTALL.get(url.drivername, "pip install it, or name another in the URL")
        raise Failed(f"the driver of {url.drivername} is not installed: {remedy}") from error
    except (ArgumentError, TypeError, ValueError) as error:
        raise Failed(f"the database URL {shown(url)} is not accepted: {reason(error)}") from error
    try:
        with engine.connect() as connection:
            if sqlite:
                connection.exec_driver_sql("PRAGMA schema_version")  # it does not look at the file before
    except (DBAPIError, OSError) as error:
        engine.dispose()
        raise Failed(
            f"no connection to {shown(url)}: {reason(error)}; does the server run, and are host, port, user, "
            "password and database right?"
            if not sqlite
            else f"cannot open {shown(url)}: {reason(error)}; is it an SQLite file in a folder that may be written to?"
        ) from error
    return engine


def _refuse_no_file(url: URL, create: bool) -> None:
    name = url.database or ":memory:"
    if ":memory:" in name or "mode=memory" in name:
        raise Failed("an SQLite database in memory is empty and nobody else's; give a file, as in sqlite:///file.db")
    if not create and not name.startswith("file:") and not Path(name).is_file():
        raise Failed(f"there is no file {name}; three slashes begin a relative path, four an absolute one")


def _connect_args(url: URL) -> dict[str, Any]:
    driver = url.get_driver_name()
    arguments: dict[str, Any] = {"prepare_threshold": None} if driver == "psycopg" else {}  # fits a PgBouncer too
    if driver in ("psycopg", "psycopg2", "pymysql", "mysqldb") and "connect_timeout" not in url.query:
        arguments["connect_timeout"] = _CONNECT_TIMEOUT
    if driver == "pysqlite":
        arguments["timeout"] = _CONNECT_TIMEOUT  # for whoever writes; the file's journal mode is its owner's to choose
    return arguments
