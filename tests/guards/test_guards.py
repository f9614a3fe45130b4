"""Invariant I4: a handler that ends or breaks its transaction is prevented, or found out, and never `APPLIED`."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from databases import DRIVERS, USUAL_DRIVERS, Driver
from endings import Ending, assert_found_out, fails, returns, swallows, writes_on
from misbehaviour import (
    BELOW,
    COMMITS,
    OTHERS,
    ROLLBACKS,
    SAVEPOINTS,
    SWALLOWED,
    TEXTS,
    Misbehaviour,
    Verdict,
    told_apart,
)
from rig import Outside, Rig

ENDINGS = [returns, fails, swallows, writes_on]
TABLE = [(cases, ENDINGS) for cases in (COMMITS, ROLLBACKS, SAVEPOINTS, SWALLOWED, OTHERS, BELOW)]
TABLE.append((TEXTS, [returns, swallows]))  # what follows was seen with session.commit


def _cases() -> Iterator[Any]:
    """Everything on one driver of each database; on the others what may depend on the driver, with one ending."""
    for driver in DRIVERS:
        usual = driver in USUAL_DRIVERS and not driver.is_async
        for cases, endings in TABLE:
            for case in cases if usual or cases is BELOW else told_apart(cases, driver):
                if (verdict := case.verdict(driver)) is not None:
                    for ending in endings if usual or verdict is Verdict.BREAKS else endings[:1]:
                        marks = [] if ending is endings[0] else [pytest.mark.slow]
                        name = f"{driver}-{case}-{ending.__name__}"
                        yield pytest.param(driver, case, verdict, ending, id=name, marks=marks)


@pytest.fixture(scope="module")
def _procedures(outsides: dict[str, Outside | str]) -> None:
    """What MariaDB's handlers call."""
    if isinstance(mariadb := outsides["mariadb"], Outside):
        mariadb.execute("create procedure harmless() select 1")
        mariadb.execute("create procedure commits() commit")
        mariadb.execute("create procedure commits_and_begins() begin commit; start transaction; end")


@pytest.mark.usefixtures("_procedures")
@pytest.mark.parametrize(("driver", "case", "verdict", "ending"), list(_cases()))
def test_what_becomes_of_a_misbehaviour(
    driver: Driver,
    case: Misbehaviour,
    verdict: Verdict,
    ending: Ending,
    rig_on: Callable[[Driver], Rig],
) -> None:
    """It is prevented, found out or harmless, as `misbehaviour.py` says; nothing stays open; a redelivery is right."""
    assert_found_out(rig_on(driver), case, verdict, ending)
