"""Tools for tests of users: an outer transaction around a test, and the contract that a database must keep.

`external_transaction` needs nothing but the library. The contract suite needs pytest, so it is imported by name:
`from projector_dedup.testing.contract import ProjectorContract, Subject`. A private PostgreSQL server is in
`projector_dedup.testing.postgres`, and a payment provider that lies, for tests of effects, in
`projector_dedup.testing.provider`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ..commands import AsyncCommands, Commands
    from ..dispatcher import AsyncDispatcher, Dispatcher

__all__ = ["external_transaction"]

if "pytest" in sys.modules:  # before the contract is imported, so that pytest explains its asserts
    parts = ("contract", "convergence", "kit", "races")
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{part}" for part in parts))


D = TypeVar("D", bound="Dispatcher | AsyncDispatcher | Commands | AsyncCommands")


@contextmanager
def external_transaction(dispatcher: D) -> Iterator[D]:
    """Permit sessions, in the block, that are bound to a Connection whose transaction the test rolls back.

    ::

        with engine.connect() as connection:
            with external_transaction(Dispatcher(sessionmaker(connection), Totals())) as dispatcher:
                assert not dispatcher.deliver(event).durable
            connection.rollback()

    Yields the dispatcher, which may also be ``Commands``. Duplicates are recognised as usual. Every ``Delivery`` and
    ``Handled`` has ``durable=False``: nothing is durable until the outer transaction commits. For tests only: there is
    one connection, so deliver one message at a time.
    """
    before = dispatcher.permit_external_transaction(True)
    try:
        yield dispatcher
    finally:
        dispatcher.permit_external_transaction(before)
