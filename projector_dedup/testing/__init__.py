"""Tools for your tests of handlers, commands and effects.

The pytest fixtures ``exactly_once``, ``answered_once`` and ``settled`` prove a projector, a command and an effect
(docs/testing.md). ``projector_dedup.testing.provider`` is an unreliable payment provider. ``external_transaction``
rolls back what a test has delivered. The contract of a database is in the repository, in ``tests/contract``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ..commands import AsyncCommands, Commands
    from ..dispatcher import AsyncDispatcher, Dispatcher
    from ..effects import AsyncEffects, Effects

__all__ = ["external_transaction"]

D = TypeVar("D", bound="Dispatcher | AsyncDispatcher | Commands | AsyncCommands | Effects | AsyncEffects")


@contextmanager
def external_transaction(dispatcher: D) -> Iterator[D]:
    """Let a dispatcher use a Connection whose transaction your test rolls back.

    ::

        with engine.connect() as connection:
            with external_transaction(Dispatcher(sessionmaker(connection), Totals())) as dispatcher:
                assert not dispatcher.deliver(event).durable
            connection.rollback()

    Yields the dispatcher, which may also be ``Commands`` or ``Effects``. Duplicates are detected as usual. No message
    is late. Every ``Delivery`` and ``Handled`` has ``durable=False``, because nothing is durable until the outer
    transaction commits. Use it only in tests. There is one connection, so deliver one message at a time. A delivery
    with a session factory that is bound to an Engine raises ``UnsafeSessionError``, because it would commit.
    """
    before = dispatcher.permit_external_transaction(True)
    try:
        yield dispatcher
    finally:
        dispatcher.permit_external_transaction(before)
