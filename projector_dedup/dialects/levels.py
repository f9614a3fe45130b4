"""The isolation levels of the SQL standard, and which of two is the stricter one."""

from __future__ import annotations

LEVELS = ("READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
LEVEL_OF_BEGIN = "projector_dedup_level"  #: the execution option that says it where ``Dialect.claim_begins``


def is_as_strict(found: str, level: str) -> bool:
    """True if ``found`` is ``level``, or rules out all that ``level`` rules out."""
    return found == level or (found in LEVELS and level in LEVELS[: LEVELS.index(found)])
