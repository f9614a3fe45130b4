"""The pytest plugin of projector-dedup: the fixture `exactly_once`. It imports the library when a test uses it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from projector_dedup.testing.exactly_once import ExactlyOnce


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    group = parser.getgroup("projector-dedup")
    group.addoption(
        "--projector-dedup-url",
        metavar="URL",
        help="the empty database on which exactly_once runs, as an SQLAlchemy URL (default: an SQLite file)",
    )
    group.addoption(
        "--projector-dedup-seed",
        metavar="N",
        type=int,
        default=1,
        help="the seed from which exactly_once generates its schedules (default: 1)",
    )


@pytest.fixture
def projector_dedup_engine() -> Engine | AsyncEngine | None:
    """Override this fixture to have `exactly_once` use an engine of yours, on an empty database."""
    return None


@pytest.fixture
def exactly_once(
    request: pytest.FixtureRequest, tmp_path: Path, projector_dedup_engine: Engine | AsyncEngine | None
) -> ExactlyOnce:
    """Deliver messages to a projector by many schedules, and fail if the read model is ever wrong."""
    from projector_dedup.testing import exactly_once as kit
    from projector_dedup.testing.pasting import regression_test

    def check(
        projector: Any,
        messages: Sequence[Any],
        *,
        seed: int | None = None,
        schedules: int = 30,
        schedule: Sequence[Any] | None = None,
        **arguments: Any,
    ) -> None:
        engine = projector_dedup_engine
        if engine is None:
            url = request.config.getoption("--projector-dedup-url") or tmp_path / "exactly_once.sqlite3"
            engine = kit.create_engine_for(projector, url)
        seed = request.config.getoption("--projector-dedup-seed") if seed is None else seed
        subject = kit.Check(projector, messages, engine=engine, **arguments)
        report = subject.run(seed, schedules) if schedule is None else subject.run_one(schedule)
        if report is not None:
            lines = [*report.lines(subject.names), f"Seed {seed}, schedule {report.tried}."]
            if schedule is None:
                lines += regression_test(request.function, "exactly_once", report.schedule)
            pytest.fail("\n".join(lines), pytrace=False)

    return check
