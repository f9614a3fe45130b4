"""Compare the servers of one cluster: a delivery must mean the same on each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sqlalchemy.engine import Engine

from ..dialects import dialect_of
from ..dialects.findings import Finding
from ..dialects.node import Node


def node_of(engine: Engine) -> Node | None:
    """Return the server that ``engine`` leads to if it is one of a cluster in which each takes writes, else None."""
    with engine.connect() as connection:
        return dialect_of(engine).node(connection)


def compare(node: Node, others: Iterable[Node]) -> Iterator[Finding]:
    """Yield a fatal finding for each setting of ``node`` that differs on the first of ``others`` in its cluster."""
    other = next((each for each in others if each.cluster == node.cluster), None)
    if other is None:
        return
    for name in sorted(node.settings.keys() | other.settings.keys()):
        here, there = node.settings.get(name), other.settings.get(name)
        if here != there:
            yield Finding(
                f"the nodes of one cluster differ in {name}: {_shown(here)} on {node.name}, {_shown(there)} on "
                f"{other.name}",
                "one message would be handled in two ways: write one value into the configuration of every node, and "
                f"SET GLOBAL {name} on the one that is wrong (docs/clusters.md)",
            )


def _shown(value: str | None) -> str:
    return "not known" if value is None else repr(value)
