"""Protean's own way: a projector with ``idempotent=True`` on its SQLAlchemy provider (psycopg 3).

It has no batches. Events are made before the clock runs; its engine would make them from stored messages.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

from protean import Domain
from protean.core.projector import on
from protean.fields import Identifier, Integer
from protean.utils.eventing import MessageHeaders, Metadata
from protean.utils.globals import current_domain
from sqlalchemy import URL
from sqlalchemy.exc import SAWarning

from ..harness import ROWS, Contender, Item
from ..servers import Place

# There is one domain for each database, and their models are namesakes.
warnings.filterwarnings("ignore", "This declarative base already contains", SAWarning)


class Protean(Contender):
    """Its projector, called as its engine calls it."""

    name = "Protean, idempotent"
    markers = "processed_message"

    def __init__(self) -> None:
        self._made: dict[URL, tuple[Any, Any, Any]] = {}

    def create(self, place: Place) -> None:
        """Its own tables, its own index, and the rows."""
        self.connect(place.url)
        self.domain.setup_database()
        self.disconnect()
        place.run(f"INSERT INTO total (id, amount) SELECT n, 0 FROM generate_series(0, {ROWS - 1}) n")

    def connect(self, url: URL) -> None:
        """The context in which its engine would handle a message. Its domain is made once for each URL."""
        if url not in self._made:
            self._made[url] = _domain(url)
        self.domain, self._added, self._projector = self._made[url]
        self._context = self.domain.domain_context()
        self._context.__enter__()

    def disconnect(self) -> None:
        """Close its connections; its pool opens new ones."""
        self._context.__exit__(None, None, None)
        self.domain.providers["default"]._engine.dispose()

    def messages(self, items: Sequence[Item]) -> Sequence[Any]:
        """Its events, with the id in their headers."""
        return [
            self._added(row=str(item.row), _metadata=Metadata(headers=MessageHeaders(id=item.id))) for item in items
        ]

    def deliver(self, messages: Sequence[Any]) -> None:
        """One by one."""
        for message in messages:
            self._projector._handle(message)


def _domain(url: URL) -> tuple[Any, Any, Any]:
    """A domain, its event and its projector."""
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
    domain: Any = Domain(
        name="benchmark", config={"databases": {"default": {"provider": "postgresql", "database_uri": plain}}}
    )

    class Account:
        name = Identifier()

    class Added:
        row = Identifier()

    class Total:
        id = Identifier(identifier=True)
        amount = Integer(default=0)

    account = domain.aggregate(Account)
    added = domain.event(Added, part_of=account)
    total = domain.projection(Total, schema_name="total")

    class Totals:
        @on(added)  # type: ignore[untyped-decorator]
        def add(self, event: Any) -> None:
            repository = current_domain.repository_for(total)
            found = repository.get(event.row)
            found.amount += 1
            repository.add(found)

    projector = domain.projector(Totals, projector_for=total, aggregates=[account], idempotent=True)
    domain.init(traverse=False)
    logging.getLogger().setLevel(logging.WARNING)  # it has turned everybody's up
    for name in logging.root.manager.loggerDict:
        if name.startswith("protean"):  # a line for each message would be a handicap
            logging.getLogger(name).setLevel(logging.CRITICAL)
    return domain, added, projector


def contenders() -> list[Contender]:
    """It has no batches."""
    return [Protean()]
