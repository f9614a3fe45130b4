"""Apply each message to a SQLAlchemy read model once: the marker of the message commits with the handler's writes."""

from .building import building
from .dialects import configure_sqlite
from .dispatcher import AsyncDispatcher, Dispatcher
from .errors import (
    BatchFailed,
    BeyondRetention,
    CleanupInterruptedError,
    CommitOutcomeUnknown,
    Defer,
    DeliveryFailed,
    HandlerDefinitionError,
    InProgress,
    InvalidMessageError,
    InvalidMessageIdError,
    MissingTableError,
    OvertakenError,
    ProjectorDedupError,
    RefusedError,
    RetentionTooShortError,
    RetriesExhaustedError,
    TransactionViolatedError,
    UncopyableError,
    UnhandledMessage,
    UnlockedWriteError,
    UnsafeSessionError,
    UnsupportedDatabaseError,
)
from .markers import claim
from .message import Message, by_path, cloudevents, from_ulid, from_uuid7, hashed, kafka
from .observer import Observation, Observer
from .options import RetryPolicy
from .outcome import Delivery, Outcome
from .projector import on, projector
from .tables import DedupTables, ProcessedMessage, make_tables
from .unit_of_work import AsyncUnitOfWork, UnitOfWork
from .verdict import Action, Verdict, verdict_of

__all__ = [
    "Action",
    "AsyncDispatcher",
    "AsyncUnitOfWork",
    "BatchFailed",
    "BeyondRetention",
    "CleanupInterruptedError",
    "CommitOutcomeUnknown",
    "DedupTables",
    "Defer",
    "Delivery",
    "DeliveryFailed",
    "Dispatcher",
    "HandlerDefinitionError",
    "InProgress",
    "InvalidMessageError",
    "InvalidMessageIdError",
    "Message",
    "MissingTableError",
    "Observation",
    "Observer",
    "Outcome",
    "OvertakenError",
    "ProcessedMessage",
    "ProjectorDedupError",
    "RefusedError",
    "RetentionTooShortError",
    "RetriesExhaustedError",
    "RetryPolicy",
    "TransactionViolatedError",
    "UncopyableError",
    "UnhandledMessage",
    "UnitOfWork",
    "UnlockedWriteError",
    "UnsafeSessionError",
    "UnsupportedDatabaseError",
    "Verdict",
    "building",
    "by_path",
    "claim",
    "cloudevents",
    "configure_sqlite",
    "from_ulid",
    "from_uuid7",
    "hashed",
    "kafka",
    "make_tables",
    "on",
    "projector",
    "verdict_of",
]


def __dir__() -> list[str]:
    """Return the public names, so that completion shows no internal module."""
    return __all__
