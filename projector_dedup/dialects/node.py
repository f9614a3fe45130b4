"""Define what is compared between the servers of one cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """One server of a cluster in which each takes writes, and its settings that a delivery depends on."""

    cluster: str  #: the identity that all servers of the cluster have in common
    name: str
    settings: Mapping[str, str]
