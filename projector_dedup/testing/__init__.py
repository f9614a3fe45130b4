"""Tools for your tests: an outer transaction around a test, and the contract suite for a database.

`external_transaction` needs only the library. The contract suite needs pytest, so import it by name:
`from contract import ProjectorContract, Subject`. `private_postgres` starts a
private PostgreSQL server. `projector_dedup.testing.provider` is an unreliable payment provider, for tests of effects.
`projector_dedup.testing.exactly_once` is the check behind the pytest fixture `exactly_once`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ..commands import AsyncCommands, Commands
    from ..dispatcher import AsyncDispatcher, Dispatcher
    from ..effects import AsyncEffects, Effects

__all__ = ["external_transaction"]

if "pytest" in sys.modules:  # before the contract is imported, so that pytest explains its asserts
    parts = ("contract", "convergence", "kit", "races")
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{part}" for part in parts))


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
