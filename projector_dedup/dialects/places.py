"""Tell by the URLs of two engines whether they lead to one database or to two."""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable
from urllib.parse import unquote, urlsplit

from sqlalchemy import URL


def place_of_server(url: URL, *, port: int | None = None, names: Collection[str] | None = None) -> Hashable | None:
    """Return a key of the server and the database on it; None if the URL says neither.

    ``port`` is the drivers' default. ``names`` are the arguments of the URL that may lead to another database; without
    ``names``, any argument may.
    """
    given = {name: value for name, value in url.query.items() if names is None or name in names}
    if not (url.host or url.database or given):
        return None
    server = url.host or given.pop("host", None), str(url.port or given.pop("port", port))
    return url.get_backend_name(), server, url.database, frozenset(given.items())


def place_of_sqlite(url: URL) -> Hashable | None:
    """Return a key of the file, or of a database in memory that connections share; None if each has its own."""
    path = _path(url)
    if not is_in_memory(url):
        return "file", os.path.realpath(path)
    shared = url.query.get("cache") == "shared" or url.query.get("vfs") == "memdb"
    return ("memory", path) if shared and path else None


def is_in_memory(url: URL) -> bool:
    """True if the SQLite database is gone when its last connection is closed."""
    in_memory = url.query.get("mode") == "memory" or url.query.get("vfs") == "memdb"
    return in_memory or _path(url) in ("", ":memory:")


def _path(url: URL) -> str:
    database = url.database or ""
    return unquote(urlsplit(database).path) if database.startswith("file:") else database
