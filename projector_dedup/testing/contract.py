"""The contract: what must hold on every database, driver and isolation level that the library says it supports.

Run it against yours, with a class in a test file; register the mark ``contract`` in your pytest settings::

    class TestOurDatabase(ProjectorContract):
        @pytest.fixture
        def subject(self) -> Subject:
            return Subject(make_url("postgresql+psycopg://.../an_empty_database"))

``ConcurrencyContract`` is the part that an isolation level may change; ``ISOLATION`` holds the places where a level can
be set, as arguments of ``Subject``. Tests read results back after the commit, from another connection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

pytest.register_assert_rewrite(
    *(
        f"{__package__}.{name}"
        for name in ("batches", "claims", "convergence", "formerly", "lost_updates", "once", "races")
    )
)

from .batches import BatchContract, BatchRaceContract  # noqa: E402  # after the line above, so that pytest explains their asserts
from .claims import ClaimContract  # noqa: E402
from .convergence import ConvergenceContract, KilledContract  # noqa: E402
from .formerly import FormerlyContract  # noqa: E402
from .harness import Harness  # noqa: E402
from .lost_updates import LostUpdateContract  # noqa: E402
from .once import AcknowledgementContract, OnceContract  # noqa: E402
from .races import RaceContract  # noqa: E402
from .subject import Subject  # noqa: E402

__all__ = ["ISOLATION", "ConcurrencyContract", "ProjectorContract", "Subject"]

ISOLATION: Mapping[str, Mapping[str, str]] = {
    f"{level} on {place}": {f"{place}_isolation": level}
    for level in ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
    for place in ("engine", "option", "dispatcher")
}


class _OnOneSubject:
    @pytest.fixture
    def subject(self) -> Subject:
        """Override this fixture: return an empty database, which is empty again after each test."""
        raise NotImplementedError("override the fixture `subject`")

    @pytest.fixture
    def harness(self, subject: Subject) -> Iterator[Harness]:
        """Yield a harness of the subject, with the contract's tables; they are dropped afterwards."""
        with Harness(subject) as harness:
            harness.create_tables()
            yield harness
            harness.drop_tables()


@pytest.mark.contract
class ConcurrencyContract(
    ClaimContract, RaceContract, LostUpdateContract, ConvergenceContract, BatchRaceContract, _OnOneSubject
):
    """The part of the contract that depends on the isolation level."""


@pytest.mark.contract
class ProjectorContract(
    OnceContract, AcknowledgementContract, FormerlyContract, BatchContract, KilledContract, ConcurrencyContract
):
    """The whole contract."""
