"""I6: reads that lock."""

from __future__ import annotations
from typing import Any
from sqlalchemy.orm import Session


def locking_session(session_class: type[Session], read_models: tuple[type[Any], ...]) -> type[Session]:
    raise NotImplementedError
