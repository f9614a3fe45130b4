"""Detect two messages with the same id: the marker stores a digest of the body's bytes, and a duplicate compares it.

A marker without a digest compares with nothing. Tables of the version before have no column for it: each claim with a
digest fails there, and the delivery runs again without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import BindParameter, Select, Table, bindparam, select
from sqlalchemy.engine import Connection

from .dialects import LastStatement, handler_parameters, parts
from .message import logger_of

logger = logger_of("projector_dedup")

SHOWN = 12  #: digits of a digest in log lines and errors


@cache
def log_lacking(_engine: str, table: str) -> None:
    """Log, once for each engine and table, that the marker table has no column for digests. Decides nothing."""
    logger.warning(
        "the table %s has no column digest, so another body under a known id is an ordinary duplicate: run the SQL of "
        "`idempotency schema --upgrade`",
        table,
    )


def other_body(marker: Table, key: Mapping[str, Any], names: Sequence[str]) -> LastStatement:
    """Return the statement that reads the digest of a duplicate, if it differs from that of ``key``."""
    asked = dict(zip(handler_parameters(len(names)), names, strict=True))
    parameters = {"message_id": key["message_id"], "digest": key["digest"], **asked}
    return LastStatement(_other_body(marker, len(names)), parameters)


@cache
def _other_body(marker: Table, names: int) -> Select[Any]:
    """Return a SELECT without a row if the digests are equal, or one is missing: NULL is not another digest."""
    name, digest = marker.c.handler, marker.c.digest
    message_id = marker.c.message_id == bindparam("message_id", type_=marker.c.message_id.type)
    handler = name.in_([bindparam(each, type_=name.type) for each in handler_parameters(names)])
    return select(digest).where(message_id, handler, digest != bindparam("digest", type_=digest.type)).limit(1)


def stored_digests(
    connection: Connection, marker: Table, keys: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, bytes | None]:
    """Return, by message id, the digest of each duplicate of ``keys``; None if its marker has none."""
    own = {key["message_id"]: key["digest"] for key in keys}
    found: dict[str, bytes | None] = dict.fromkeys(own)
    for ids in parts(list(own)):
        asked = {"message_ids": ids, "handlers": list(names)}
        for message_id, digest in connection.execute(_digests(marker), asked):
            if found[message_id] is None or bytes(digest) != own[message_id]:  # the claim may have inserted its own
                found[message_id] = bytes(digest)
    return found


@cache
def _digests(marker: Table) -> Select[Any]:
    message_id, handler, digest = marker.c.message_id, marker.c.handler, marker.c.digest
    ids: BindParameter[Any] = bindparam("message_ids", expanding=True)
    names: BindParameter[Any] = bindparam("handlers", expanding=True)
    return select(message_id, digest).where(message_id.in_(ids), handler.in_(names), digest.is_not(None))
