"""Read the database URL that a user gives, and open an engine on a database that answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from projector_dedup.maintenance.waits import LOCK_TIMEOUT

from .errors import Failed, is_lock_timeout, is_shown, keep_secret, reason

_EXAMPLE = (
    "postgresql+psycopg://user@host:5432/database, mariadb+pymysql://user@host:3306/database or sqlite:///file.db"
)
_CONNECT_TIMEOUT = 10  # seconds; a host that drops packets would otherwise hold the command for minutes

# The command is synchronous: in place of an async driver, or of none, it takes the sync driver that is tested.
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
    """Return the URL, with a synchronous driver in place of an asynchronous one or of none.

    Raises `Failed`, without quoting the text, if it is no URL of a database.
    """
    try:
        url = make_url(text.strip())
    except (ArgumentError, ValueError):  # their texts quote the URL, password and all
        raise Failed(f"the database URL cannot be read; write it like {_EXAMPLE}") from None
    if "@" in (url.host or ""):
        raise Failed("the database URL has more than one @; write the one in the password as %40")
    if "@" in (url.database or "") and url.get_backend_name() != "sqlite":
        raise Failed("the database URL has a / before its @; write one in the user's name as %2F, and an @ as %40")
    for name, value in _parameters(url):
        if not is_shown(name, value):
            keep_secret(value)
    if url.get_backend_name() in ("mysql", "mariadb") and not url.database:
        raise Failed(f"the database URL names no database; write it like {_EXAMPLE}")
    url = url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))
    if url.drivername == "postgresql+psycopg" and "ssl" in url.query:  # asyncpg's name for sslmode
        url = url.difference_update_query(["ssl"]).update_query_dict({"sslmode": url.query["ssl"]})
    return url


def shown(url: URL) -> str:
    """Return the URL as text for printing, without the password, and without parameters that may be secret."""
    parameters = [
        f"{quote(name)}={quote(value, safe=',=/-') if is_shown(name, value) else '***'}"
        for name, value in _parameters(url)
    ]
    bare = url.set(query={}).render_as_string(hide_password=True)
    return bare + (f"?{'&'.join(parameters)}" if parameters else "")


def shown_or_number(text: str, number: int) -> str:
    """Return the URL as ``shown``; of one that cannot be read, which of them it is: any part may be a secret."""
    try:
        return shown(parse(text))
    except Failed:
        return f"database URL {number}"


def _parameters(url: URL) -> Iterator[tuple[str, str]]:
    for name, values in url.query.items():
        for value in (values,) if isinstance(values, str) else values:
            yield name, value


def open_engine(url: URL, *, create: bool = False, lock_timeout: float = LOCK_TIMEOUT) -> Engine:
    """Connect once, and return an engine on the database. Raises `Failed`, with the remedy, if that does not work.

    A file of SQLite that does not exist is created if ``create``; otherwise it is taken for a mistyped path. One that
    somebody else holds for more than ``lock_timeout`` seconds is left to whoever uses the engine.
    """
    sqlite = url.get_backend_name() == "sqlite"
    if sqlite:
        _refuse_no_file(url, create)
    try:
        engine = create_engine(url, connect_args=_connect_args(url, lock_timeout))
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
                connection.exec_driver_sql("PRAGMA schema_version")  # SQLite does not open the file before
    except (DBAPIError, OSError) as error:
        if is_lock_timeout(engine, error):
            return engine
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
        raise Failed(
            "an SQLite database in memory would be new and empty for this command; give a file, as in sqlite:///file.db"
        )
    if not create and not name.startswith("file:") and not Path(name).is_file():
        raise Failed(f"there is no file {name}; three slashes begin a relative path, four an absolute one")


def _connect_args(url: URL, lock_timeout: float) -> dict[str, Any]:
    driver = url.get_driver_name()
    arguments: dict[str, Any] = {"prepare_threshold": None} if driver == "psycopg" else {}  # fits a PgBouncer too
    if driver in ("psycopg", "psycopg2", "pymysql", "mysqldb") and "connect_timeout" not in url.query:
        arguments["connect_timeout"] = _CONNECT_TIMEOUT
    if driver == "pysqlite":  # the journal mode of the file stays as its owner chose it
        arguments["timeout"] = lock_timeout  # seconds to wait for a writer
    return arguments
