"""`settled` finds mistakes of effects, and has no complaint about right ones."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kit_effects
from kit_effects import MISTAKES, REQUESTS, RIGHT, Base, paid, read_paid
from projector_dedup.testing.checking import Report, UnusableError, engine_on, is_async
from projector_dedup.testing.provider import Provider
from projector_dedup.testing.settled import EffectCheck

Checked = Callable[..., Report | None]


@pytest.fixture(name="checked")
def checked_fixture(tmp_path: Path) -> Iterator[Checked]:
    """Check an effect on a database, at a provider of its own."""
    with Provider(tmp_path / "provider.jsonl", delay=0.1) as provider:
        kit_effects.URL["provider"] = provider.url

        def checked(effect: Any, where: Path | str = tmp_path / "kit.sqlite3", **arguments: Any) -> Report | None:
            settings = {"expected": paid, "read": read_paid, "metadata": Base.metadata, **arguments}
            engine = engine_on(where, asynchronous=is_async(effect))
            return EffectCheck(effect, [*REQUESTS, REQUESTS[0]], provider=provider, engine=engine, **settings).run(
                seed=1, count=4
            )

        yield checked


def told(report: Report | None) -> str:
    """The text of a report."""
    return "" if report is None else "\n".join(report.lines([key for key, _ in [*REQUESTS, REQUESTS[0]]]))


@pytest.mark.by_turns
@pytest.mark.parametrize("effect", MISTAKES, ids=lambda each: each.__name__)
def test_a_mistake_is_found(effect: Any, checked: Checked) -> None:
    """By one of a few schedules."""
    assert checked(effect) is not None


@pytest.mark.nightly
@pytest.mark.parametrize("effect", RIGHT, ids=lambda each: each.__name__)
def test_a_right_effect_passes(effect: Any, checked: Checked) -> None:
    """On SQLite."""
    assert told(checked(effect)) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["postgresql", "mariadb"])
def test_a_right_effect_passes_on_a_server(engine: str, checked: Checked, request: pytest.FixtureRequest) -> None:
    """Where effects of a burst do run at the same time."""
    database = request.getfixturevalue(engine)
    (asks,) = [each for each in RIGHT if each.__name__ == "asks"]
    assert told(checked(asks, database.url().render_as_string(hide_password=False))) == ""


def test_a_value_for_all_requests_is_refused(checked: Checked) -> None:
    """The provider rejects some of them."""
    with pytest.raises(UnusableError, match="give expected= a function of the requests done"):
        checked(RIGHT[0], expected=4)
