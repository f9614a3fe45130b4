"""The parts that a scene of the demo brings: its messages, its tables, both sides that handle them, and its words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from sqlalchemy import URL, Connection, MetaData
from sqlalchemy.orm import Session, sessionmaker

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)

Sums = tuple[int, int]
"""The two totals of a group: how many, and how much."""


class Delivered(NamedTuple):
    """The result of one delivery: True if it was a duplicate, and the answer, as two numbers, if there is one."""

    duplicate: bool
    answer: Sums | None = None


class Target(Protocol[M_contra]):
    """One side of a scene: its database, and how it handles a message. It is sent to every worker process."""

    @property
    def url(self) -> str:
        """The URL of the database, with its password."""

    def open(self, factory: sessionmaker[Session]) -> Callable[[M_contra], Delivered]:
        """Return the function that handles one message. Called once in each process."""


@dataclass(frozen=True)
class Words:
    """The words in which a scene is told."""

    sides: tuple[str, str]  # without the library, and with it
    columns: tuple[str, str, str]  # both sides, and the input
    group: str
    fields: tuple[str, str]
    messages: str
    deliveries: str
    acknowledged: str
    acknowledgement: str
    duplicates: str


class Scene(Protocol[M]):
    """A scene of the demo: the same messages for two sides, and their totals computed from the input alone."""

    words: Words
    messages: Sequence[M]
    redelivered: float
    window: int

    def opening(self, workers: int) -> str:
        """Return the sentence that says what is about to happen."""

    def expected(self) -> Mapping[str, Sums]:
        """Return the true totals of each group, computed from the input in plain Python."""

    def add_tables(self, metadata: MetaData, run_id: str) -> None:
        """Add the tables of a run, under names that begin with ``run_id``."""

    def target(self, url: URL, run_id: str, *, idempotent: bool) -> Target[M]:
        """Return one of the two sides."""

    def prepare(self, connection: Connection, run_id: str) -> None:
        """Write the rows that are there before the first message."""

    def totals(self, connection: Connection, run_id: str, *, idempotent: bool) -> dict[str, Sums]:
        """Return the totals of each group as one side has left them in the database."""
