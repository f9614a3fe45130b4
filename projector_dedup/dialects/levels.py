"""Name the isolation levels of the SQL standard, and tell which of two is the stricter one."""

from __future__ import annotations

from sqlalchemy.engine import Connection, Engine

LEVELS = ("READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
LEVEL_OF_BEGIN = "projector_dedup_level"  #: the execution option with the level, where the claim sends BEGIN


def is_as_strict(found: str, level: str) -> bool:
    """True if the level ``found`` is ``level``, or rules out all anomalies that ``level`` rules out."""
    return found == level or (found in LEVELS and level in LEVELS[: LEVELS.index(found)])


def chosen_level(source: Engine | Connection) -> str | None:
    """Return the level that the user gave to ``execution_options()`` or ``create_engine()``; None if there is none."""
    level: str | None = source.get_execution_options().get("isolation_level")
    if level is None:  # create_engine() keeps it under a private name only
        level = getattr(source.dialect, "_on_connect_isolation_level", None)
    return level
