"""Detect SQL text that ends its transaction, changes a setting of it, takes a lock, or reads its snapshot."""

from __future__ import annotations

import re
from functools import lru_cache

from sqlalchemy.engine import Dialect as EngineDialect
from sqlalchemy.orm import FromStatement
from sqlalchemy.schema import DDL, ExecutableDDLElement
from sqlalchemy.sql.elements import TextClause
from sqlalchemy.sql.selectable import TextualSelect

OPAQUE = (r"'(?:[^']|'')*'", r'"(?:[^"]|"")*"', r"--[^\n]*", r"/\*.*?\*/")
COMMANDS = (
    r"COMMIT|END|ABORT|BEGIN|(?:START|PREPARE)\s+TRANSACTION",
    r"ROLLBACK(?!(?:\s+(?:WORK|TRANSACTION))?\s+TO\b)",  # a handler may roll back to a savepoint
)
SETTINGS = r"\bSET\s+(?:LOCAL|TRANSACTION|CONSTRAINTS)\s+[\w\"]|\bset_config\"?\s*\("
"""Settings of a transaction, in the SQL standard and on PostgreSQL.

The pattern requires another word after it, so that a column with such a name (``SET local = 1``) does not match.
"""

LOCKS = r"\bFOR\s+(?:NO\s+KEY\s+)?UPDATE\b|\bFOR\s+(?:KEY\s+)?SHARE\b"
"""SELECTs that lock the rows that they read."""

_BODY_BEGINS = re.compile(r"\s*CREATE\b.*\b(TRIGGER|FUNCTION|PROCEDURE)\b.*\bBEGIN\b", re.IGNORECASE | re.DOTALL)
_BODY_ENDS = re.compile(r"\s*END\b", re.IGNORECASE)


class Grammar:
    """The patterns that find transaction commands in the SQL text of one database.

    - ``opaque``: strings, quoted names and comments, which are ignored.
    - ``commands``: commands at the beginning of a statement that begin or end a transaction.
    - ``hidden``: commands that may run such commands invisibly, such as CALL of a stored procedure.
    - ``settings``: SQL that changes a setting until the transaction ends.
    - ``locks``: SQL that locks rows, a table or a name.
    - ``reads``: SQL that reads rows as the snapshot of the transaction shows them.
    - ``one_at_a_time``: True if the drivers report only an error of the first statement of a text.
    """

    def __init__(
        self,
        opaque: tuple[str, ...] = OPAQUE,
        commands: tuple[str, ...] = COMMANDS,
        hidden: str = "(?!)",
        settings: str = SETTINGS,
        locks: str = LOCKS,
        reads: str = "(?!)",
        *,
        one_at_a_time: bool = False,
    ) -> None:
        flags = re.DOTALL | re.IGNORECASE
        self._opaque = re.compile("|".join(opaque), flags)
        self._command = re.compile(rf"\W*({'|'.join(commands)})\b", flags)
        self._hidden = re.compile(rf"\W*(?:{hidden})\b", flags)
        self._setting = re.compile(settings, flags)
        self._lock = re.compile(locks, flags)
        self._read = re.compile(reads, flags)
        self._one_at_a_time = one_at_a_time

    def transaction_command(self, sql: str) -> str | None:
        """Return the first command in ``sql`` that would begin or end a transaction, or None."""
        in_body = False  # True inside the unquoted body of a routine, whose BEGIN and END are no commands
        for statement in self._statements(sql):
            if in_body:
                in_body = not _BODY_ENDS.match(statement)
            elif found := self._command.match(statement):
                return " ".join(found[1].upper().split())
            elif _BODY_BEGINS.match(statement):
                in_body = True
        return None

    def hides_errors(self, sql: str) -> bool:
        """True if the driver would not report an error of the second statement in ``sql`` or of a later one."""
        return self._one_at_a_time and sum(bool(re.search(r"\w", each)) for each in self._statements(sql)) > 1

    def hides_commands(self, sql: str) -> bool:
        """True if ``sql`` may end the transaction invisibly, for example by CALL of a stored procedure."""
        return any(self._hidden.match(statement) for statement in self._statements(sql))

    def sets_for_transaction(self, sql: str) -> bool:
        """True if ``sql`` may change a setting of its transaction, also in the body of a ``DO``.

        Text that only looks like such a setting counts too.
        """
        return bool(self._setting.search(sql) or self._setting.search(self._opaque.sub(" ", sql)))

    def takes_lock(self, sql: str) -> bool:
        """True if ``sql`` locks rows, a table or a name."""
        return _finds(self._lock, self._opaque, sql)

    def reads_snapshot(self, sql: str) -> bool:
        """True if ``sql`` reads rows as the snapshot of the transaction shows them."""
        return _finds(self._read, self._opaque, sql)

    def _statements(self, sql: str) -> list[str]:
        return self._opaque.sub(" ", sql).split(";")


@lru_cache(1000)
def _finds(pattern: re.Pattern[str], opaque: re.Pattern[str], sql: str) -> bool:
    return pattern.search(opaque.sub(" ", sql)) is not None


def sql_text(statement: object, dialect: EngineDialect) -> str | None:
    """Return the text of a statement that the user wrote as text, or the SQL of DDL.

    Return None for every other statement, because no statement that SQLAlchemy compiles ends a transaction.
    """
    if isinstance(statement, FromStatement):
        statement = statement.element
    if isinstance(statement, TextualSelect):
        statement = statement.element
    if isinstance(statement, TextClause):
        return statement.text
    if isinstance(statement, DDL):
        return statement.statement
    if isinstance(statement, ExecutableDDLElement):
        return str(statement.compile(dialect=dialect))
    return statement if isinstance(statement, str) else None


def sql_sent(result: object) -> str:
    """Return the SQL of ``result`` as it was sent to the database, or an empty text."""
    return getattr(getattr(result, "context", None), "statement", None) or ""
