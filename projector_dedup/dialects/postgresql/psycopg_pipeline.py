"""Send a statement, and commands around it, in one message by a pipeline of libpq, and read the answers."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

from psycopg import Binary, OperationalError, pq
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Ready, Wait

Replies = Generator[Wait, Ready, list[PGresult]]

_OK = pq.ConnStatus.OK
_DONE, _SYNC = pq.ExecStatus.COMMAND_OK, pq.ExecStatus.PIPELINE_SYNC
_READ, _READ_OR_WRITE = Wait.R, Wait.RW
_PREPARED_AT_MOST = 16  # for each connection: schemas, and listeners that add comments, change the text of a claim

_numbers = count()


def replies_to(
    pgconn: PGconn,
    before: Sequence[bytes],
    statement: bytes,
    values: list[bytes | None],
    prepared: dict[bytes, bytes] | None,
    after: Sequence[bytes] = (),
) -> Replies:
    """Send the ``statement`` between other commands in a pipeline, wait once, and return the answers.

    Of commands after one that fails, the server runs none. The statement is looked up in what is ``prepared``, or put
    there, unless that is None. An interruption half-way leaves the connection busy, as it does for any statement.
    """
    pgconn.enter_pipeline_mode()
    for command in before:
        pgconn.send_query_params(command, None)
    name = None if prepared is None else prepared.get(statement)
    if new := name is None:
        room = prepared is not None and len(prepared) < _PREPARED_AT_MOST
        name = b"projector_dedup_%d" % next(_numbers) if room else b""
        pgconn.send_prepare(name, statement)  # behind BEGIN: it takes a snapshot, after which no level can be set
    pgconn.send_query_prepared(name, values)
    for command in after:
        pgconn.send_query_params(command, None)
    pgconn.pipeline_sync()
    while pgconn.flush():
        if (yield _READ_OR_WRITE) & Ready.R:
            pgconn.consume_input()
    replies: list[PGresult] = []
    while not replies or replies[-1].status != _SYNC:
        while pgconn.is_busy():
            if (yield _READ):
                pgconn.consume_input()
        if (reply := pgconn.get_result()) is not None:
            replies.append(reply)
        elif pgconn.status != _OK:
            raise OperationalError("the connection was lost")
    pgconn.exit_pipeline_mode()
    if prepared is not None and new and name and replies[len(before)].status == _DONE:
        prepared[statement] = name
    return replies[:-1]


def as_text(value: Any) -> bytes | None:
    """Return a parameter as libpq sends it: text; of bytes, which SQLAlchemy has wrapped, their digits."""
    if isinstance(value, Binary):
        return b"\\x" + bytes(value.obj).hex().encode()
    return None if value is None else str(value).encode()


@lru_cache(256)
def numbered(sql: str) -> tuple[bytes, list[str]]:
    """Return the statement as libpq takes it, with ``$1`` for ``%(name)s``, and the names in their order."""
    names: list[str] = []

    def number(found: re.Match[str]) -> str:
        if found[1] is None:
            return "%"
        if found[1] not in names:
            names.append(found[1])
        return f"${names.index(found[1]) + 1}"

    return re.sub(r"%%|%\((\w+)\)s", number, sql).encode(), names
