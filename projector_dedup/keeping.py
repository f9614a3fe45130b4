"""A session that keeps the rows it has loaded: the messages of a batch meet on them, and would load them again."""

from __future__ import annotations

from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import Session

from .guarded import kept_on_class


class KeepingSession(Session):
    """SQLAlchemy's session refers to its objects weakly; this one refers to them until it is closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: dict[int, object] = {}

    def close(self) -> None:
        """Forget them."""
        self._kept.clear()
        super().close()


@kept_on_class
def keeping_session(session_class: type[Session]) -> type[Session]:
    """The Session class, which keeps what it loads."""
    return type(f"Keeping{session_class.__name__}", (KeepingSession, session_class), {})


# Once for all subclasses: SQLAlchemy keeps every listener that was ever registered, also when its class is gone.
@event.listens_for(KeepingSession, "loaded_as_persistent")
@event.listens_for(KeepingSession, "pending_to_persistent")
def _keep(session: KeepingSession, instance: object) -> None:
    session._kept[id(instance)] = instance  # its own listener


@event.listens_for(KeepingSession, "persistent_to_detached")
@event.listens_for(KeepingSession, "persistent_to_deleted")
def _forget(session: KeepingSession, instance: object) -> None:
    session._kept.pop(id(instance), None)
