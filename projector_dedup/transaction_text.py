"""SQL text that would end or begin a transaction, or set something for it, recognised."""

from __future__ import annotations

import re

from sqlalchemy.engine import Dialect as EngineDialect
from sqlalchemy.orm import FromStatement
from sqlalchemy.schema import DDL, ExecutableDDLElement
from sqlalchemy.sql.elements import TextClause
from sqlalchemy.sql.selectable import TextualSelect

OPAQUE = (r"'(?:[^']|'')*'", r'"(?:[^"]|"")*"', r"--[^\n]*", r"/\*.*?\*/")
COMMANDS = (
    r"COMMIT|END|ABORT|BEGIN|(?:START|PREPARE)\s+TRANSACTION",
    r"ROLLBACK(?!(?:\s+(?:WORK|TRANSACTION))?\s+TO\b)",  # savepoints may come and go
)
SETTINGS = r"\bSET\s+(?:LOCAL|TRANSACTION|CONSTRAINTS)\s+[\w\"]|\bset_config\"?\s*\("
"""Of the SQL standard and of PostgreSQL. The last word keeps out a column of that name, as in ``SET local = 1``."""

_BODY_BEGINS = re.compile(r"\s*CREATE\b.*\b(TRIGGER|FUNCTION|PROCEDURE)\b.*\bBEGIN\b", re.IGNORECASE | re.DOTALL)
_BODY_ENDS = re.compile(r"\s*END\b", re.IGNORECASE)


class Grammar:
    """How a database writes what is no command, and which commands end or begin a transaction.

    ``opaque`` are patterns of strings, quoted names and comments, which are passed over; ``commands``, of the words
    that a statement begins with; ``hidden``, of commands that run others out of sight, a stored procedure's say;
    ``settings``, of whatever sets something that lasts until the transaction ends.
    """

    def __init__(
        self,
        opaque: tuple[str, ...] = OPAQUE,
        commands: tuple[str, ...] = COMMANDS,
        hidden: str = "(?!)",
        settings: str = SETTINGS,
        *,
        one_at_a_time: bool = False,
    ) -> None:
        flags = re.DOTALL | re.IGNORECASE
        self._opaque = re.compile("|".join(opaque), flags)
        self._command = re.compile(rf"\W*({'|'.join(commands)})\b", flags)
        self._hidden = re.compile(rf"\W*(?:{hidden})\b", flags)
        self._setting = re.compile(settings, flags)
        self._one_at_a_time = one_at_a_time

    def transaction_command(self, sql: str) -> str | None:
        """The first command in ``sql`` that would begin or end a transaction."""
        in_body = False  # of a routine, where it is not quoted: its BEGIN and END are no commands
        for statement in self._statements(sql):
            if in_body:
                in_body = not _BODY_ENDS.match(statement)
            elif found := self._command.match(statement):
                return " ".join(found[1].upper().split())
            elif _BODY_BEGINS.match(statement):
                in_body = True
        return None

    def hides_errors(self, sql: str) -> bool:
        """Whether an error of its second statement, or of a later one, would be told to nobody."""
        return self._one_at_a_time and sum(bool(re.search(r"\w", each)) for each in self._statements(sql)) > 1

    def hides_commands(self, sql: str) -> bool:
        """Whether it may end the transaction without saying so."""
        return any(self._hidden.match(statement) for statement in self._statements(sql))

    def sets_for_transaction(self, sql: str) -> bool:
        """True if ``sql`` sets something for its transaction, perhaps in the body of a ``DO``; rather too often."""
        return bool(self._setting.search(sql) or self._setting.search(self._opaque.sub(" ", sql)))

    def _statements(self, sql: str) -> list[str]:
        return self._opaque.sub(" ", sql).split(";")


def sql_text(statement: object, dialect: EngineDialect) -> str | None:
    """The text that the user wrote, or DDL; None for what else SQLAlchemy compiles, which never ends a transaction."""
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
    """The SQL that gave ``result``, as it was sent to the database; that which SQLAlchemy has compiled, too."""
    return getattr(getattr(result, "context", None), "statement", None) or ""
