"""A session for many messages: it keeps the rows that they meet on, and writes as late as nobody can tell."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import event, inspect
from sqlalchemy.orm import Mapper, Session

from .guarded import kept_on_class

_EAGER = {"joined", "subquery", "selectin", "immediate"}


class KeepingSession(Session):
    """SQLAlchemy's session refers to its objects weakly; this one refers to them until it is closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: dict[int, object] = {}

    def close(self) -> None:
        """Forget them."""
        self._kept.clear()
        super().close()

    def get(self, entity: Any, ident: Any, **options: Any) -> Any:
        """As ever, but without a flush where what is not written yet cannot be what is looked for."""
        mapper = inspect(entity, raiseerr=False)
        plain = isinstance(mapper, Mapper) and _loads_one_row(mapper) and not any(options.values())
        if not plain or self._new or self.misleads():
            return super().get(entity, ident, **options)
        with self.no_autoflush:
            return super().get(entity, ident, **options)

    def misleads(self) -> bool:
        """Whether a row that was changed is found where it will not be once it is written: elsewhere, or nowhere."""
        changed = self.identity_map._modified
        return bool(self._deleted) or any(
            not _key_names(state.mapper).isdisjoint(state.committed_state) for state in changed
        )


@cache
def _loads_one_row(mapper: Mapper[Any]) -> bool:
    """Of one table, and nothing beside it."""
    eager = any(relationship.lazy in _EAGER for relationship in mapper.relationships)
    return not eager and mapper.inherits is None and mapper.polymorphic_on is None


@cache
def _key_names(mapper: Mapper[Any]) -> frozenset[str]:
    return frozenset(mapper.get_property_by_column(column).key for column in mapper.primary_key)


@kept_on_class
def keeping_session(session_class: type[Session]) -> type[Session]:
    """The Session class, which keeps what it loads."""
    return type(f"Keeping{session_class.__name__}", (KeepingSession, session_class), {})


# Once for all subclasses: SQLAlchemy keeps every listener that was ever registered, also when its class is gone.
@event.listens_for(KeepingSession, "loaded_as_persistent")
@event.listens_for(KeepingSession, "pending_to_persistent")
def _keep(session: KeepingSession, instance: object) -> None:
    session._kept[id(instance)] = instance


@event.listens_for(KeepingSession, "persistent_to_detached")
@event.listens_for(KeepingSession, "persistent_to_deleted")
def _forget(session: KeepingSession, instance: object) -> None:
    session._kept.pop(id(instance), None)
