"""The last line of `check` and `stats`: what to do next."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Engine, inspect

from projector_dedup import DedupTables
from projector_dedup.commands import CommandTables
from projector_dedup.dialects import Finding
from projector_dedup.maintenance.stats import Ages


def after_check(findings: Sequence[Finding], found: Ages | None, tables: DedupTables) -> str:
    """Return what to do after a check; ``found`` is None where the tables are not right."""
    if found is None or any(finding.fatal for finding in findings):
        return "Next: solve what is called a problem above, then run this again."
    if not all(finding.informs for finding in findings):
        return "Next: follow the advice above; deliveries may go on meanwhile."
    return _for_cleanup(found, tables) or "Next: nothing. Run this after each deploy, and alert on exit code 1."


def after_stats(found: Ages, tables: DedupTables) -> str:
    """Return what to do after a look at the statistics."""
    command = f"`idempotency check{tables.option}`"
    return _for_cleanup(found, tables) or f"Next: nothing. {command} tells when there is something to do."


def commands_beside(engine: Engine, tables: DedupTables) -> str:
    """Return a sentence on how to look at the tables of commands, if they are beside ``tables`` and not meant."""
    if isinstance(tables, CommandTables):
        return ""
    there = inspect(engine).has_table(CommandTables.default_name, tables.marker.schema)
    return f" The tables of commands are here too: with{CommandTables.option} this looks at those." if there else ""


def _for_cleanup(found: Ages, tables: DedupTables) -> str | None:
    state, cleanup = found.state, f"`idempotency cleanup{tables.option}`"
    if state.horizon_hours is None:
        return (
            f"Next: declare how late a message may come again, by `idempotency horizon{tables.option} HOURS`: cleanup "
            "then keeps what it must."
        )
    if state.cleaned_at is None:
        return f"Next: put {cleanup} into cron (docs/runbook.md: prune from cron)."
    return f"Next: {cleanup} deletes what has expired." if found.has_expired else None
