"""SQLAlchemy's classes for asyncio. If greenlet is not installed, which they need, empty classes stand in for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

__all__ = ["AsyncEngine", "AsyncSession", "async_sessionmaker"]

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
else:
    try:
        from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
    except ImportError:
        S = TypeVar("S")

        class AsyncEngine:
            """Stand-in for SQLAlchemy's ``AsyncEngine``."""

        class AsyncSession:
            """Stand-in for SQLAlchemy's ``AsyncSession``."""

        class async_sessionmaker(Generic[S]):  # noqa: N801  # SQLAlchemy's name
            """Stand-in for SQLAlchemy's ``async_sessionmaker``."""
