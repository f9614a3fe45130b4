"""All mutants, by the promise or the part of the library that they break. A new module is added to `GROUPS`."""

from __future__ import annotations

from collections.abc import Mapping

from . import (
    batches,
    claims,
    commands,
    connections,
    consumers,
    consumers_celery,
    consumers_kafka,
    consumers_polling,
    deliveries,
    faststream,
    guards,
    handling,
    http,
    ids,
    mended,
    mistakes,
    observing,
    operating,
    outcomes,
    pruning_and_names,
    races,
    refusals,
    verdicts,
)
from .mutant import Mutant

GROUPS: Mapping[str, tuple[Mutant, ...]] = {
    "claims": claims.MUTANTS,
    "guards": guards.MUTANTS,
    "outcomes": outcomes.MUTANTS,
    "races": races.MUTANTS,
    "ids": ids.MUTANTS,
    "refusals": refusals.MUTANTS,
    "deliveries": deliveries.MUTANTS,
    "batches": batches.MUTANTS,
    "connections": connections.MUTANTS,
    "pruning-and-names": pruning_and_names.MUTANTS,
    "commands": commands.MUTANTS,
    "handling": handling.MUTANTS,
    "http": http.MUTANTS,
    "observing": observing.MUTANTS,
    "faststream": faststream.MUTANTS,
    "consumers": consumers.MUTANTS,
    "operating": operating.MUTANTS,
    "consumers-polling": consumers_polling.MUTANTS,
    "consumers-kafka": (*consumers_kafka.MUTANTS, *consumers_celery.MUTANTS),
    "mended": mended.MUTANTS,
    "verdicts": verdicts.MUTANTS,
    "mistakes": mistakes.MUTANTS,
}
MUTANTS: tuple[Mutant, ...] = tuple(mutant for mutants in GROUPS.values() for mutant in mutants)
