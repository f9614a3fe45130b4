"""The codec for whatever Pydantic can validate; needs the extra ``projector-dedup[pydantic]``."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from .codecs import Codec


def pydantic_json(kind: Any) -> Codec[Any]:
    """Return a codec that stores values of ``kind`` as JSON, written and validated by a Pydantic ``TypeAdapter``."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    return Codec("pydantic-json", adapter.dump_json, adapter.validate_json, exact=True)
