"""The call that a handler is given beside the command: the session, and names that follow from the key."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Generic, TypeVar
from uuid import UUID, uuid5

from sqlalchemy.orm import Session

from ..asyncio_names import AsyncSession
from .errors import InvalidKeyError

S = TypeVar("S")

_NAMESPACE = UUID("6f1b9a52-43c1-5f0e-9d5c-2a7c1f6d3b84")  # of this library: any would do, but never another
_READABLE = 200  # bytes; longer names are hashed


def derived_key(*parts: str) -> str:
    """Return a key that follows from ``parts``, such as a step's name and an event's id, and from no other parts.

    The same parts give the same key in every process: a saga that is run again asks for the same commands. A long one
    is hashed.
    """
    if not parts or not all(isinstance(part, str) for part in parts):
        raise InvalidKeyError("derived_key takes texts, as in derived_key('ship', event_id)")
    joined = "".join(f"{len(part)}:{part}" for part in parts)
    encoded = joined.encode("utf-8", "surrogatepass")
    return joined if len(encoded) <= _READABLE else f"sha256:{sha256(encoded).hexdigest()}"


def derived_id(*parts: str) -> UUID:
    """Return a UUID (version 5) that follows from ``parts``, and from no other parts."""
    return uuid5(_NAMESPACE, derived_key(*parts))


@dataclass(frozen=True)
class _Call(Generic[S]):
    session: S
    key: str | None
    scope: str | None = None
    operation: str = ""

    def derived_id(self, *parts: str) -> UUID:
        """Return an id for something that this command makes: the same whenever the same command runs again.

        A retry that comes after its record was deleted meets that primary key, instead of making a second one.
        Raises ``InvalidKeyError`` if the command was given without a key.
        """
        return derived_id(*self._parts("id"), *parts)

    def key_for(self, name: str) -> str:
        """Return the key under which another system, ``name``, is asked on behalf of this command.

        Raises ``InvalidKeyError`` if the command was given without a key.
        """
        return str(derived_id(*self._parts("key"), name))

    def _parts(self, kind: str) -> tuple[str, ...]:
        if self.key is None:
            raise InvalidKeyError("the command has no key, so nothing can be derived from it; give key=")
        return kind, self.scope or "", self.operation, self.key


@dataclass(frozen=True)
class Call(_Call[Session]):
    """Holds what a handler is given beside the command: the transaction's ``session``, and the caller's ``key``.

    The handler must not commit. A test makes one by hand: ``Call(session, key="k")``.
    """


@dataclass(frozen=True)
class AsyncCall(_Call[AsyncSession]):
    """Holds what an ``async def`` handler is given beside the command. See ``Call``."""
