"""What a delivery costs: statements and round trips, by driver, counted and compared with tests/core/costs.md.

Counts, not times: they are the same on every machine. After an intended change:
`APPROVE=1 python -m pytest tests/core/test_round_trips.py`, then read the difference.
"""

import os

import pytest

from costs import COUNTED, PATH, column, rendered, written
from databases import ENGINES, Driver
from deliveries import ROWS, WAYS
from kit import Total
from meter import metered
from reached import reached

INTENDED = (
    "If that is intended, APPROVE=1 python -m pytest tests/core/test_round_trips.py writes it down; say in the "
    "commit what the new cost buys. If not, it is a statement too many."
)


@pytest.mark.by_turns
@pytest.mark.parametrize("driver", COUNTED, ids=str)
def test_a_delivery_costs_what_is_written_down(request: pytest.FixtureRequest, driver: Driver) -> None:
    """No statement and no round trip more than in the table; none less either, for then the table is too high."""
    if not driver.installed:
        reached.give_up(driver.engine, str(driver), f"{driver.module} is not installed")
    url = request.getfixturevalue(driver.engine).url().set(drivername=driver.name_in_url)
    with metered(url) as meter:
        harness = meter.harness
        harness.create_tables()
        harness.transact(lambda session: session.add_all([Total(key=key, amount=0) for key in ROWS]))
        found = {name: meter.cost_of(way(harness, name)) for name, way in WAYS.items()}
    cells = {name: str(cost) for name, cost in found.items()}
    if os.environ.get("APPROVE"):
        PATH.write_text(rendered({**written(), column(driver): cells}, list(WAYS)))
    expected = written().get(column(driver), {})
    wrong = [
        f"{name}: {expected.get(name)} in the table, {cells.get(name)} counted (statements / round trips)\n"
        + (found[name].sent if name in found else "")
        for name in WAYS
        if expected.get(name) != cells.get(name)
    ]
    if wrong:
        pytest.fail(
            "\n".join([f"{driver} does not cost what tests/core/costs.md says. {INTENDED}", *wrong]), pytrace=False
        )


def test_the_table_is_what_is_counted() -> None:
    """No driver without a column, no column without a driver, no way left over."""
    table = written()
    assert list(table) == [column(driver) for engine in ENGINES for driver in COUNTED if driver.engine == engine]
    assert {name for cells in table.values() for name in cells} == set(WAYS)
    assert PATH.read_text() == rendered(table, list(WAYS))
