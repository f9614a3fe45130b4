"""Read from Alembic's configuration which tables the revisions create."""

from __future__ import annotations

import re

from alembic.config import Config

from projector_dedup.commands import CommandTables
from projector_dedup.effects import EffectTables
from projector_dedup.http.parked import ParkedTables
from projector_dedup.tables import DEFAULT_NAME, DedupTables

_NAMED_BY = {
    DedupTables: ("projector_dedup_tables", DEFAULT_NAME),
    CommandTables: ("projector_dedup_command_tables", ""),
    EffectTables: ("projector_dedup_effect_tables", ""),
    ParkedTables: ("projector_dedup_parked_tables", ""),
}
"""The option of alembic.ini that names the tables of each kind, and the names if the option is missing."""


def table_sets(config: Config | None, kind: type[DedupTables] = DedupTables) -> list[tuple[str | None, str]]:
    """Return the schema (None for the default one) and the name of each table set of one kind.

    The user names the table sets in alembic.ini: ``projector_dedup_tables = processed_message, billing.inbox``,
    ``projector_dedup_command_tables = processed_command``, ``projector_dedup_effect_tables = external_effect`` and
    ``projector_dedup_parked_tables = parked_webhook``. An option without names means no tables.
    """
    option, usual = _NAMED_BY[kind]
    found: str | list[str] | None = config.get_alembic_option(option) if config else None
    if found is None:
        found = usual
    names = found if isinstance(found, list) else [name for name in re.split(r"[,\s]+", found) if name]
    return [(schema or None, name) for schema, _, name in (each.rpartition(".") for each in names)]
