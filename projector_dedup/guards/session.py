"""The session that a handler gets: it reports to the guard, and gives rows that were read ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.orm.exc import FlushError

from ..errors import UnsafeSessionError

if TYPE_CHECKING:
    from .guard import Guard

T = TypeVar("T")
C = TypeVar("C", bound=type[Session])
P = ParamSpec("P")

_FLUSHES = 100  # as many as a COMMIT of SQLAlchemy's tries


class GuardedSession(Session):
    """The private Session class of a unit of work; the user's own sessions are never listened to."""

    guard: Guard | None = None  # while a handler has the session
    taken: tuple[Connection, ...] = ()  # connections, by the transactions that it has begun

    def get(self, entity: Any, ident: Any, **options: Any) -> Any:
        """Return the entity; from memory, if its row was read ahead and nobody could tell."""
        if self.guard is None or self.guard.rows is None or _are_asked_for(options):
            return super().get(entity, ident, **options)
        return self.guard.rows.get(entity, ident, super().get)

    def remember_locked(self, instance: object) -> None:
        """Called after an instance was read under lock, past this session's own loading."""

    def connection(self, bind_arguments: Any = None, execution_options: Any = None) -> Connection:
        """Return the connection of the claim. Raises ``UnsafeSessionError`` for a schema map, which comes too late.

        SQLAlchemy would drop the map, with no more than a warning.
        """
        if self.guard is not None and "schema_translate_map" in (execution_options or {}):
            raise UnsafeSessionError(
                "session.connection(execution_options={'schema_translate_map': ...}) comes too late in a handler: "
                "the transaction has begun. Give the dispatcher an engine that has the map, or give it to the statement"
            )
        return super().connection(bind_arguments=bind_arguments, execution_options=execution_options)


def _are_asked_for(options: Mapping[str, Any]) -> bool:
    """True if ``session.get`` is asked for more than a row by its key; ``with_for_update={}`` asks for a lock."""
    given = [name for name, value in options.items() if value is not None and value is not False]
    return bool(given) and (given != ["execution_options"] or bool(options["execution_options"]))


def end_message(session: Session, flush: Callable[[], object]) -> None:
    """Write what a message of a batch has changed, by ``flush``, and empty the session, as after a COMMIT.

    Listeners to a flush may add more to flush. Raises ``FlushError`` if that does not end, as a COMMIT does.
    """
    for _ in range(_FLUSHES):
        flush()
        if not (session.identity_map.check_modified() or session.new or session.deleted):
            break
    else:
        raise FlushError(f"{_FLUSHES} flushes in a row left something to flush; look at what listens to them")
    if session.expire_on_commit:
        session.expire_all()
    session.expunge_all()


def kept_on_class(make: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Cache the results of a function of a class on that class, so that they are forgotten with it.

    ``functools.cache`` would keep for ever the class that every ``sessionmaker`` makes.
    """
    attribute = f"_projector_dedup_{make.__name__}"

    @wraps(make)
    def find(target: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if attribute not in vars(target):
            setattr(target, attribute, {})
        kept: dict[tuple[Any, ...], T] = vars(target)[attribute]
        if args not in kept:
            kept[args] = make(target, *args, **kwargs)
        return kept[args]

    return find


@kept_on_class
def guarded_session(session_class: type[Session]) -> type[GuardedSession]:
    """Return a subclass of the user's Session class, to which the guard's listeners listen."""
    return type(f"Guarded{session_class.__name__}", (GuardedSession, session_class), {})


# Once for all subclasses: SQLAlchemy keeps every listener that was ever registered, also when its class is gone.
@event.listens_for(GuardedSession, "before_commit")
def _before_commit(session: GuardedSession) -> None:
    # It also fires for savepoints, which are the handler's to release.
    if session.guard is not None and not session.in_nested_transaction():
        session.guard.before_commit("session.commit")


@event.listens_for(GuardedSession, "after_begin")
def _after_begin(session: GuardedSession, _transaction: SessionTransaction, connection: Connection) -> None:
    if connection not in session.taken:  # else it is a savepoint that begins
        session.taken = (*session.taken, connection)
    if session.guard is not None:
        session.guard.connected(connection)
