"""Tell which values a column of PostgreSQL stores without an error and gives back as they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.types import TypeEngine

from ..cacheable_tables import CacheableColumn, is_integer, is_text


def cacheable_column(
    kind: int, modifier: int, mapped: TypeEngine[Any], *, not_null: bool, bound: bool
) -> CacheableColumn | None:
    """Return which values a column takes whose type has the number ``kind`` in the catalogue.

    Return None if the type is not known, or mapped to a type of SQLAlchemy's that changes values. ``modifier`` is the
    catalogue's, such as a length; ``bound`` is True if the column is in an index or a constraint.
    """
    known = _KNOWN.get(kind)
    if known is None or not known.fits(mapped, modifier):
        return None
    accepts = partial(known.accepts, modifier)
    return CacheableColumn(accepts if not_null else partial(_null_or, accepts), can_change=not bound)


@dataclass(frozen=True)
class _Known:
    """Describes a type of PostgreSQL, with the types of SQLAlchemy that pass values on to it unchanged."""

    types: frozenset[type[TypeEngine[Any]]]
    accepts: Callable[..., bool]

    def fits(self, mapped: TypeEngine[Any], modifier: int) -> bool:
        """True if the type ``mapped`` passes values on unchanged; a type of the user's may do anything with them."""
        if type(mapped) not in self.types or mapped._variant_mapping:
            return False
        if isinstance(mapped, sa.Float):
            return mapped.precision is None and not mapped.asdecimal
        if isinstance(mapped, sa.Numeric):
            said = (mapped.precision, mapped.scale)
            return mapped.asdecimal and said in ((None, None), _precision_and_scale(modifier))
        if isinstance(mapped, sa.DateTime):
            return not mapped.timezone
        return not isinstance(mapped, sa.Uuid) or bool(mapped.as_uuid)


def _precision_and_scale(modifier: int) -> tuple[int, int]:
    return modifier - 4 >> 16 & 0xFFFF, modifier - 4 & 0xFFFF


def _null_or(accepts: Callable[[Any], bool], value: Any) -> bool:
    return value is None or accepts(value)


def _integer(_modifier: int, value: Any, *, bits: int) -> bool:
    return is_integer(value, bits=bits)


def _text(modifier: int, value: Any) -> bool:
    return is_text(value) and "\0" not in value and (modifier <= 0 or len(value) <= modifier - 4)


def _decimal(modifier: int, value: Any) -> bool:
    """True if the value has exactly the digits that the column keeps."""
    if type(value) is not Decimal or not value.is_finite() or (value.is_signed() and not value):
        return False
    _, digits, exponent = value.as_tuple()
    if modifier < 0:
        return -1000 < exponent <= 0 and len(digits) < 1000  # type: ignore[operator]  # it is finite
    precision, scale = _precision_and_scale(modifier)
    return exponent == -scale and len(digits) <= precision


def _is(kind: type[Any]) -> Callable[..., bool]:
    return lambda _modifier, value: type(value) is kind


def _float(_modifier: int, value: Any) -> bool:
    return type(value) is float and math.isfinite(value) and (value != 0 or math.copysign(1, value) > 0)


def _moment(modifier: int, value: Any) -> bool:
    return type(value) is datetime and value.tzinfo is None and not value.fold and modifier == -1


def _types(*types: type[TypeEngine[Any]]) -> frozenset[type[TypeEngine[Any]]]:
    return frozenset(types)


_TEXTS = _types(sa.String, sa.Text, sa.Unicode, sa.UnicodeText, sa.VARCHAR, sa.TEXT)

_KNOWN = {  # by the numbers of the types, which never change
    16: _Known(_types(sa.Boolean, sa.BOOLEAN), _is(bool)),
    20: _Known(_types(sa.BigInteger, sa.BIGINT), partial(_integer, bits=64)),
    21: _Known(_types(sa.SmallInteger, sa.SMALLINT), partial(_integer, bits=16)),
    23: _Known(_types(sa.Integer, sa.INTEGER), partial(_integer, bits=32)),
    25: _Known(_TEXTS, _text),
    701: _Known(_types(sa.Float, sa.Double, sa.DOUBLE_PRECISION), _float),
    1043: _Known(_TEXTS, _text),
    1082: _Known(_types(sa.Date, sa.DATE), _is(date)),
    1114: _Known(_types(sa.DateTime, sa.DATETIME, sa.TIMESTAMP, postgresql.TIMESTAMP), _moment),  # 1184 changes zones
    1700: _Known(_types(sa.Numeric, sa.NUMERIC, sa.DECIMAL), _decimal),
    2950: _Known(_types(sa.Uuid, sa.UUID), _is(UUID)),
}
