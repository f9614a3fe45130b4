"""``arm`` inserts a row for an effect in the caller's transaction. ``settle`` or ``run`` sends it after the COMMIT."""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy.orm import Session

from ..asyncio_names import AsyncSession
from ..commands.codecs import encoded
from ..commands.errors import KeyReusedError, ResultError
from ..commands.fingerprint import digest
from ..commands.record import RecordKey
from ..dialects import dialect_of
from ..errors import HandlerDefinitionError, OvertakenError, RefusedError
from ..markers import bind_of_marker, claim_errors, connection_of, session_of
from ..message import printable
from .definition import AsyncEffect, Definition, Effect
from .record import EffectTables, NewRow, default_effect_tables, mark_armed, new_token, read

I = TypeVar("I")  # noqa: E741
MAX_REQUEST_BYTES = 64 * 1024


def arm(
    session: Session,
    effect: Effect[I, Any] | AsyncEffect[I, Any],
    request: I,
    *,
    key: object,
    scope: object = None,
    tables: EffectTables = default_effect_tables,
) -> None:
    """Schedule an effect in your transaction. ``Effects.settle`` sends it after the COMMIT, and never after a rollback.

    ``arm`` itself sends nothing. To arm again with the same key and the same request changes nothing.

    - ``session``: the session of your transaction, for example that of a handler.
    - ``effect``: a function with ``@effect``.
    - ``request``: the first argument of the function, at most 64 KiB when stored.
    - ``key``: a text or a UUID that identifies the effect, such as an order id.
    - ``scope``: the owner of the key. Give one if several databases or schemas share an account at the provider,
      because the key for the provider is derived from scope, name and ``key``.
    - ``tables``: the result of ``make_effect_tables``.

    Raises ``KeyReusedError`` if the key was armed with another request, ``InvalidKeyError``, ``ResultError`` for a
    request that cannot be stored, and ``RefusedError`` in a projector that is building or is rebuilt. Raises
    ``MissingTableError``, and ``UnsafeSessionError`` if the row could not commit together with your other writes.
    """
    session = session_of(session, "arm()", "await aarm()")
    new = new_row(effect, request, key, scope)
    if getattr(session, "building", False):
        raise RefusedError(
            f"{printable(new.identity)} was armed by a projector that is building, or by a rebuild: the effects of "
            "these messages were already armed at the first delivery, and would happen twice. Arm effects in a "
            "separate projector, which you do not rebuild"
        )
    connection = connection_of(session, tables, bind_of_marker(session, tables))
    dialect, table = dialect_of(connection), tables.marker
    with claim_errors(connection, dialect, tables):
        if dialect.insert_new(connection, table, new.values(armed=True, token=new_token())):
            return
    mark_armed(connection, table, new.key.stored, new.identity)
    found = read(connection, table, new.key.stored, new.identity)
    if found is None:
        raise OvertakenError("the row of the effect is not visible yet; run the transaction again")
    refuse_other_request(found.fingerprint, new)


async def aarm(
    session: AsyncSession,
    effect: Effect[I, Any] | AsyncEffect[I, Any],
    request: I,
    *,
    key: object,
    scope: object = None,
    tables: EffectTables = default_effect_tables,
) -> None:
    """Schedule an effect in your transaction of an ``AsyncSession``. See ``arm``."""
    await session.run_sync(arm, effect, request, key=key, scope=scope, tables=tables)


def new_row(effect: Definition[Any, Any], request: object, key: object, scope: object) -> NewRow:
    """Return the row for an effect with this request."""
    if not isinstance(effect, Definition):
        raise HandlerDefinitionError(f"{effect!r} is no effect; pass a function with @effect(...)")
    data = encoded(effect.request_codec, request, f"the request of {effect.identity} is {type(request).__name__}")
    refuse_large(data, MAX_REQUEST_BYTES, f"the request of {effect.identity}")
    return NewRow(effect.identity, RecordKey.of(key, scope), data, digest(request))


def refuse_large(data: bytes, max_bytes: int, whose: str) -> None:
    """Raise ``ResultError`` if ``data`` has more than ``max_bytes``."""
    if len(data) > max_bytes:
        raise ResultError(f"{whose} has {len(data)} bytes, and at most {max_bytes} are allowed; send an id instead")


def refuse_other_request(fingerprint: bytes, new: NewRow) -> None:
    """Raise ``KeyReusedError`` if the row with this ``fingerprint`` has another request."""
    if fingerprint != new.fingerprint:
        raise KeyReusedError(
            f"the key {printable(new.key.key)[:80]} of {new.identity} was used for another request before; nothing was "
            "sent. Give each effect its own key, and use a key again only with the same request"
        )
