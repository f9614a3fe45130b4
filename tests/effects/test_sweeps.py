"""Two processes settle at once, and are killed meanwhile. `make effects-sweep` has 100,000 rows, on each database."""

import dataclasses
from pathlib import Path
from typing import Any

from databases import USUAL_DRIVERS
from effect_rig import Till, tills
from effect_sweep import sweep

till = tills([each for each in USUAL_DRIVERS if str(each) == "postgresql+psycopg"])


def test_two_sweeps_that_are_killed(till: Till, tmp_path: Path) -> None:
    """The provider's file has no request twice; what a kill left open is listed; in the end each has one payment."""
    rows, kills = 300, 4
    swept: dict[str, Any] = dataclasses.asdict(sweep(till, tmp_path, rows, kills, seed=3))
    assert (swept["twice"], swept["unlisted"], swept["wrong"]) == (0, 0, 0)
    assert swept["done"] + swept["listed"] == rows
    assert swept["listed"] <= kills
