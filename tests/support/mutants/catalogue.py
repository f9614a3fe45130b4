"""All mutants, by the promise or the part of the library that they break. A new module is added to `GROUPS`."""

from __future__ import annotations

from collections.abc import Mapping

from . import (
    batches,
    claims,
    commands,
    connections,
    deliveries,
    guards,
    handling,
    ids,
    mended,
    outcomes,
    pruning_and_names,
    races,
    refusals,
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
    "mended": mended.MUTANTS,
}
MUTANTS: tuple[Mutant, ...] = tuple(mutant for mutants in GROUPS.values() for mutant in mutants)
