"""Find the tables that a run of the revisions is about, in the configuration of the Alembic environment."""

from __future__ import annotations

import re

from alembic.config import Config

from projector_dedup.tables import DEFAULT_NAME, DedupTables

OPTION = "projector_dedup_tables"


def table_sets(config: Config | None) -> list[tuple[str | None, str]]:
    """Return the schema (None for the default one) and the name of each marker table.

    They are written in alembic.ini: ``projector_dedup_tables = processed_message, billing.inbox``. ``migrate()`` sets
    its tables as the configuration's attribute of the same name, which wins.
    """
    given: DedupTables | None = config.attributes.get(OPTION) if config else None
    if given is not None:
        return [(given.marker.schema, given.marker.name)]
    found = _option(config) if config else None
    names = found if isinstance(found, list) else re.split(r"[,\s]+", (found or DEFAULT_NAME).strip(", \n"))
    return [(schema or None, name) for schema, _, name in (each.rpartition(".") for each in names)]


def _option(config: Config) -> str | list[str] | None:
    read = getattr(config, "get_alembic_option", config.get_main_option)  # since 1.16 also from pyproject.toml
    value: str | list[str] | None = read(OPTION)
    return value
