"""Numbers of JSON: those that a float rounds are told from those that it holds."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation


def finite(text: str) -> float:
    """Return the float of a JSON number. Raises ``ValueError`` for a number beyond its range: Python reads Infinity."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is beyond the range of a float")
    return value


def exact(text: str) -> float | Decimal:
    """Return the float of a JSON number, or the Decimal if the float is another number. Raises ``ValueError``."""
    value = finite(text)
    try:
        written = Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f"{text} is beyond the range of a Decimal") from error
    return value if Decimal(repr(value)) == written else written
