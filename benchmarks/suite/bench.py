"""What a section is given: servers, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass

from .servers import Server


@dataclass(frozen=True)
class Bench:
    """``quick`` tries everything out in about two minutes; its figures mean nothing."""

    postgresql: Server
    mariadb: Server | None = None
    quick: bool = False

    @property
    def seconds(self) -> float:
        """How long a turn takes, about."""
        return 0.01 if self.quick else 0.06

    def rounds(self, full: int) -> int:
        """How many of them."""
        return 1 if self.quick else full

    def size(self, full: int) -> int:
        """How many messages, markers, ..."""
        return full // 100 if self.quick else full
