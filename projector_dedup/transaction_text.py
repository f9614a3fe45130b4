"""SQL text that would end or begin a transaction, recognised before it is sent."""

from __future__ import annotations

import re

from sqlalchemy.orm import FromStatement
from sqlalchemy.schema import DDL
from sqlalchemy.sql.elements import TextClause
from sqlalchemy.sql.selectable import TextualSelect

_OPAQUE = re.compile(
    r"""  (?<![a-z0-9_])e'(?:[^'\\]|\\.|'')*'  # PostgreSQL string with backslash escapes
        | '(?:[^']|'')*' | "(?:[^"]|"")*"      # strings and quoted names
        | \$(\w*)\$.*?\$\1\$                   # PostgreSQL dollar quotes
        | --[^\n]* | /\*.*?\*/                 # comments
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_COMMAND = re.compile(
    r"\W*(COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION|ROLLBACK(?!(\s+(WORK|TRANSACTION))?\s+TO\b))\b",
    re.IGNORECASE,
)
_BODY_BEGINS = re.compile(r"\s*CREATE\b.*\b(TRIGGER|FUNCTION|PROCEDURE)\b.*\bBEGIN\b", re.IGNORECASE | re.DOTALL)
_BODY_ENDS = re.compile(r"\s*END\b", re.IGNORECASE)


def transaction_command(sql: str) -> str | None:
    """The first command in ``sql`` that would begin or end a transaction; savepoints may come and go."""
    bare = _OPAQUE.sub(" ", sql)
    in_body = False  # of a routine, where it is not quoted: its BEGIN and END are no commands
    for statement in bare.split(";"):
        if in_body:
            in_body = not _BODY_ENDS.match(statement)
        elif _BODY_BEGINS.match(statement):
            in_body = True
        elif found := _COMMAND.match(statement):
            return found[1].upper()
    return None


def sql_text(statement: object) -> str | None:
    """The text that the user wrote; None for what SQLAlchemy compiles, which never ends a transaction."""
    if isinstance(statement, FromStatement):
        statement = statement.element
    if isinstance(statement, TextualSelect):
        statement = statement.element
    if isinstance(statement, TextClause):
        return statement.text
    if isinstance(statement, DDL):
        return statement.statement
    return statement if isinstance(statement, str) else None
