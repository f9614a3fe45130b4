"""Apply each message to a SQLAlchemy read model once: the marker of the message commits with the handler's writes.

These eight names are enough for a projector. Errors are in ``projector_dedup.errors``. docs/api/index.md lists the
other modules that you may import.
"""

from .dispatcher import AsyncDispatcher, Dispatcher
from .errors import Defer
from .message import Message
from .outcome import Outcome
from .projector import on, projector
from .tables import make_tables

__all__ = ["AsyncDispatcher", "Defer", "Dispatcher", "Message", "Outcome", "make_tables", "on", "projector"]


def __dir__() -> list[str]:
    """Return the public names, so that completion shows no internal module."""
    return __all__
