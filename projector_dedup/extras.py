"""Name the extra to install, where the package that a module needs is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Import what ``extra`` installs; raise a ``ModuleNotFoundError`` that names the extra if it is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed; run: pip install 'projector-dedup[{extra}]'", name=error.name
        ) from error
