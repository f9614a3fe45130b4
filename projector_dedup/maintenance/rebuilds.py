"""The open rebuilds in the state table, and the handlers whose markers cleanup keeps for them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime

from sqlalchemy.engine import Connection

from ..errors import RefusedError
from ..message import MAX_HANDLER_BYTES, printable
from ..tables import DedupTables, full_name
from .state import read_state, write_state

# The open rebuilds: each has a row until it is verified or ended. Cleanup keeps the markers of both generations of an
# open one: otherwise a rebuild that is started again after the retention would apply messages again.

_PREFIX = "rebuild:"


@dataclass(frozen=True)
class OpenRebuild:
    """A rebuild, as the state table stores it.

    - ``opened``: when the rebuild began, by the database's clock.
    - ``beside``: the old generation.
    - ``handlers``: all names under which both generations have markers.
    - ``known_since``: the time up to which markers were deleted when the rebuild began.
    - ``complete``: True if a run has read a source to its end, and no message failed.
    """

    opened: str
    beside: str
    handlers: list[str] = field(default_factory=list)
    known_since: str | None = None
    complete: bool = False

    @property
    def opened_at(self) -> datetime:
        """The moment ``opened``, in UTC."""
        return datetime.fromisoformat(self.opened)

    @property
    def known_since_at(self) -> datetime | None:
        """The moment ``known_since``, in UTC."""
        return None if self.known_since is None else datetime.fromisoformat(self.known_since)


def open_rebuilds(connection: Connection, tables: DedupTables) -> dict[str, OpenRebuild]:
    """Return the open rebuilds by the names of their projectors. Raises ``RefusedError`` for a wrong value."""
    found = {key: value for key, value in read_state(connection, tables).items() if key.startswith(_PREFIX)}
    try:
        return {key.removeprefix(_PREFIX): OpenRebuild(**json.loads(value)) for key, value in found.items()}
    except (TypeError, ValueError) as error:
        raise RefusedError(
            f"{full_name(tables.state, connection)} has a value that is no rebuild of this version, though its key "
            f"begins with {_PREFIX!r}: delete that row, and start the rebuild again"
        ) from error


def kept_handlers(rebuilds: Mapping[str, OpenRebuild]) -> frozenset[str]:
    """Return the names of these open rebuilds' handlers, whose markers cleanup keeps."""
    return frozenset(name for each in rebuilds.values() for name in each.handlers)


def refuse_kept(connection: Connection, tables: DedupTables, names: Collection[str]) -> None:
    """Raise ``RefusedError`` if an open rebuild needs the markers of these names."""
    for projector, each in open_rebuilds(connection, tables).items():
        if not {*names}.isdisjoint(each.handlers):
            raise RefusedError(
                f"the rebuild of {printable(projector)} is open, and needs these markers: finish it with `idempotency "
                "rebuild --verify`, or drop the new generation (docs/rebuild.md), and do this then"
            )


def write_rebuild(connection: Connection, tables: DedupTables, projector: str, rebuild: OpenRebuild) -> None:
    """Write the row of a rebuild in the caller's transaction."""
    key = _PREFIX + projector
    if len(key.encode()) > MAX_HANDLER_BYTES:
        raise RefusedError(
            f"the name {printable(projector[:40])}... is too long for a rebuild: it has more than "
            f"{MAX_HANDLER_BYTES - len(_PREFIX)} bytes; give the projector a shorter one"
        )
    write_state(connection, tables, {key: json.dumps(asdict(rebuild))})


def end(connection: Connection, tables: DedupTables, projector: str) -> bool:
    """Delete the row of a rebuild, even if its value is wrong. Return False if there was none."""
    state = tables.state
    return connection.execute(state.delete().where(state.c.key == _PREFIX + projector)).rowcount > 0
