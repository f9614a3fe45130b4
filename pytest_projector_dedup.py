"""The pytest plugin of projector-dedup: the fixtures `exactly_once`, `answered_once` and `settled`.

It imports the library when a test uses one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from projector_dedup.testing.answered_once import AnsweredOnce
    from projector_dedup.testing.checking import Check
    from projector_dedup.testing.exactly_once import ExactlyOnce
    from projector_dedup.testing.settled import Settled


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    group = parser.getgroup("projector-dedup")
    group.addoption(
        "--projector-dedup-url",
        metavar="URL",
        help="the empty database on which the checks run, as an SQLAlchemy URL (default: an SQLite file)",
    )
    group.addoption(
        "--projector-dedup-seed",
        metavar="N",
        type=int,
        default=1,
        help="the seed from which the checks generate schedules (default: 1)",
    )


@pytest.fixture
def projector_dedup_engine() -> Engine | AsyncEngine | None:
    """Override this fixture to have the checks use an engine of yours, on an empty database."""
    return None


class Checks:
    """Makes the fixtures: each runs one kind of check on the database that the user chose."""

    def __init__(self, request: pytest.FixtureRequest, tmp_path: Path, engine: Engine | AsyncEngine | None) -> None:
        self._request, self._tmp_path, self._engine = request, tmp_path, engine

    def fixture(self, name: str, kind: Callable[..., Check], is_async: Callable[[Any], bool]) -> Any:
        """Return the function ``name``, which makes a check of this kind and runs it."""
        from projector_dedup.testing.checking import engine_on
        from projector_dedup.testing.pasting import regression_test

        config = self._request.config

        def check(
            subject: Any,
            messages: Sequence[Any],
            *,
            seed: int | None = None,
            schedules: int = 30,
            schedule: Sequence[Any] | None = None,
            **arguments: Any,
        ) -> None:
            engine = self._engine
            if engine is None:
                url = config.getoption("--projector-dedup-url") or self._tmp_path / f"{name}.sqlite3"
                engine = engine_on(url, asynchronous=is_async(subject))
            seed = config.getoption("--projector-dedup-seed") if seed is None else seed
            made = kind(subject, messages, engine=engine, **arguments)
            report = made.run(seed, schedules) if schedule is None else made.run_one(schedule)
            if report is not None:
                lines = [*report.lines(made.names), f"Seed {seed}, schedule {report.tried}."]
                if schedule is None and report.schedule:
                    lines += regression_test(self._request.function, name, report.schedule)
                pytest.fail("\n".join(lines), pytrace=False)

        return check


@pytest.fixture
def projector_dedup_checks(
    request: pytest.FixtureRequest, tmp_path: Path, projector_dedup_engine: Engine | AsyncEngine | None
) -> Checks:
    """Make the other fixtures. Not for tests."""
    return Checks(request, tmp_path, projector_dedup_engine)


@pytest.fixture
def exactly_once(projector_dedup_checks: Checks) -> ExactlyOnce:
    """Deliver messages to a projector by many schedules, and fail if the read model is ever wrong."""
    from projector_dedup.testing.exactly_once import ProjectorCheck, is_async

    check: ExactlyOnce = projector_dedup_checks.fixture("exactly_once", ProjectorCheck, is_async)
    return check


@pytest.fixture
def answered_once(projector_dedup_checks: Checks) -> AnsweredOnce:
    """Send requests to a command by many schedules, and fail if one is done twice or answered in two ways."""
    from projector_dedup.testing.answered_once import CommandCheck
    from projector_dedup.testing.checking import is_async

    check: AnsweredOnce = projector_dedup_checks.fixture("answered_once", CommandCheck, is_async)
    return check


@pytest.fixture
def settled(projector_dedup_checks: Checks) -> Settled:
    """Run effects at a provider that fails in many ways, and fail if it and the database disagree in the end."""
    from projector_dedup.testing.checking import is_async
    from projector_dedup.testing.settled import EffectCheck

    check: Settled = projector_dedup_checks.fixture("settled", EffectCheck, is_async)
    return check
