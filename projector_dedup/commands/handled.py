"""The answer to a caller: the recorded result of the command, or its recorded rejection."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar, cast

from ..outcome import Outcome
from .errors import Rejected

R = TypeVar("R")


@dataclass(frozen=True)
class Rejection:
    """A refusal that a handler returns instead of a result: recorded together with the handler's writes.

    ``detail`` is what JSON can say. A handler whose writes are to be rolled back raises ``Rejected`` instead.
    """

    code: str
    detail: Any = None


@dataclass(frozen=True)
class Handled(Generic[R]):
    """The result of ``Commands.handle``, which returns only if an outcome is recorded, and raises otherwise.

    ``outcome`` is ``APPLIED`` for the caller whose command ran, ``DUPLICATE`` for all who asked again. ``rejection`` is
    None if the command has a result. ``recorded_at`` is when the record was begun, by the database's clock; only those
    who asked again know it, so it is None for the first. ``durable`` is False only inside
    ``testing.external_transaction``.
    """

    outcome: Outcome
    value: R | None
    rejection: Rejection | None = None
    recorded_at: datetime | None = None
    durable: bool = True

    @property
    def replayed(self) -> bool:
        """True if the command was handled before, and this is the recorded answer."""
        return self.outcome is Outcome.DUPLICATE

    @property
    def result(self) -> R:
        """The recorded result. Raises ``Rejected`` if the recorded answer is a rejection."""
        if self.rejection is not None:
            raise Rejected(self.rejection.code, self.rejection.detail, replayed=self.replayed)
        return cast(R, self.value)
