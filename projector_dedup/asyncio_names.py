"""SQLAlchemy's names for asyncio, or stand-ins that nothing is an instance of where it has none: without greenlet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

__all__ = ["AsyncEngine", "AsyncSession", "async_scoped_session", "async_sessionmaker"]

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
else:
    try:
        from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
    except ImportError:
        S = TypeVar("S")

        class AsyncEngine:
            """Not there."""

        class AsyncSession:
            """Not there."""

        class async_scoped_session(Generic[S]):  # noqa: N801  # SQLAlchemy's name
            """Not there."""

        class async_sessionmaker(Generic[S]):  # noqa: N801
            """Not there."""
