"""Webhooks: verify a request, deliver its event to a dispatcher, and answer by the result (docs/webhooks.md).

``github``, ``shopify``, ``standard_webhooks`` and ``stripe`` describe providers; ``Provider`` describes any other one.
``webhook_endpoint`` in ``projector_dedup.http.starlette`` and in ``projector_dedup.http.flask`` makes the endpoint.
``Webhook`` is for other frameworks.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, Literal, TypedDict, TypeVar

from sqlalchemy.util import greenlet_spawn

from ..brokers.dead_letters import Decide, Sifted
from ..brokers.incoming import Convert, Incoming, json_event, json_of
from ..brokers.settling import Settled, Settling, reason_of
from ..dispatcher import AsyncDispatcher, Dispatcher
from ..errors import HandlerDefinitionError, InvalidMessageError
from ..extras import needs
from ..message import by_path, logger_of, valid_message_id
from ..outcome import Outcome
from .parked import ParkedTables, Parking, default_parked_tables, without_secrets

__all__ = ["Provider", "Reply", "Webhook", "WebhookOptions", "github", "shopify", "standard_webhooks", "stripe"]

logger = logger_of("projector_dedup.consumers")

TOLERANCE = 300  # seconds by which a signed time may differ from this machine's clock
MEBIBYTE = 1 << 20
PARK_AGAIN = "60"  # seconds after which the provider should send a request again that could not be parked

T = TypeVar("T")

Headers = Mapping[str, str] | Iterable[tuple[str, str]]

Verify = Callable[[bytes, Mapping[str, str]], bool]
"""A function that gets the raw body and the headers, and returns True if the provider has signed the request."""

Place = str | Callable[[Any], object]
"""The name of a header, or an extractor that finds a value in the decoded JSON body, such as ``by_path("id")``."""


@dataclass(frozen=True)
class Provider:
    """How a provider signs its requests, and where a request contains the id, the type and the time of the event.

    - ``name``: the name in log lines.
    - ``verify``: gets the raw body and the headers, with names in lower case. The endpoint refuses a request for which
      ``verify`` raises an exception or returns anything but True.
    - ``id``: the name of the header with the id, or an extractor for the decoded body. The id must be the same each
      time the provider sends the event. A header with an id or a type must come once, and contain no comma.
    - ``type``: the same for the type. None lets the dispatcher find the type in the event.
    - ``occurred_at``: the same for the time at which the event occurred, which is not the time of the request. None
      if the provider does not send it.
    - ``max_bytes``: the largest body that the provider sends, in bytes.
    """

    name: str
    verify: Verify = field(repr=False)
    id: Place
    type: Place | None = None
    occurred_at: Place | None = None
    max_bytes: int = MEBIBYTE


@dataclass(frozen=True)
class Reply:
    """The answer to a request: the status, a body of JSON, and headers beside the content type."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class WebhookOptions(TypedDict, total=False):
    """The options of a webhook.

    - ``source``: a text that becomes a part of each message id, if another source of these tables may send the same
      ids.
    - ``max_bytes``: the largest body. The default is the provider's.
    - ``on_reject``: ``"park"`` stores each verified request that would be answered 400 or 422, and answers 200. The
      default, ``"answer"``, stores nothing.
    - ``parked``: the tables of parked requests, with ``on_reject="park"``. The default is ``default_parked_tables``.
    """

    source: str | None
    max_bytes: int | None
    on_reject: Literal["answer", "park"]
    parked: ParkedTables | None


class Webhook:
    """Verifies requests of one provider, delivers their events to a dispatcher, and answers. Knows no framework.

    - ``dispatcher``: a ``Dispatcher`` (call ``deliver``) or an ``AsyncDispatcher`` (await ``adeliver``). If no handler
      takes the type of an event, the dispatcher skips the event, whatever its ``unhandled=`` is.
    - ``provider``: such as ``stripe(secret)``, or a ``Provider`` of your own.
    - ``convert``: builds the event from an ``Incoming``, as in a consumer of a broker. The names of its headers are in
      lower case.

    The other options are ``WebhookOptions``.

    Raises ``HandlerDefinitionError``, ``RefusedError``, ``TypeError`` or ``ValueError`` for a wrong argument.
    """

    def __init__(
        self,
        dispatcher: Dispatcher | AsyncDispatcher,
        provider: Provider,
        convert: Convert = json_event,
        *,
        source: str | None = None,
        max_bytes: int | None = None,
        on_reject: Literal["answer", "park"] = "answer",
        parked: ParkedTables | None = None,
    ) -> None:
        if not isinstance(provider, Provider):
            raise TypeError(f"provider is a Provider, such as stripe(secret), not {type(provider).__name__}")
        self.max_bytes = provider.max_bytes if max_bytes is None else max_bytes
        if type(self.max_bytes) is not int or self.max_bytes < 1:
            raise ValueError(f"max_bytes is a whole number of bytes of at least 1, not {self.max_bytes!r}")
        if not isinstance(dispatcher, (Dispatcher, AsyncDispatcher)):
            raise HandlerDefinitionError(
                f"a webhook takes a Dispatcher or an AsyncDispatcher, not {type(dispatcher).__name__}"
            )
        if on_reject not in ("answer", "park"):
            raise ValueError(f"on_reject must be 'answer' or 'park', not {on_reject!r}")
        if parked is not None and on_reject != "park":
            raise ValueError('parked= is only for on_reject="park"')
        if not isinstance(parked, (ParkedTables, NoneType)):
            raise TypeError(f"parked is what make_parked_tables returns, not {type(parked).__name__}")
        self.dispatcher, self.asynchronous = dispatcher, isinstance(dispatcher, AsyncDispatcher)
        self._provider = provider
        self._settling = Settling(
            dispatcher.skipping_unhandled(),
            convert,
            source=source,
            asynchronous=self.asynchronous,
            broker="webhook",
            digest=False,  # a provider may write the body of an event anew: Stripe's contains ``pending_webhooks``
        )
        name = provider.name if source is None else f"{provider.name}:{source}"  # the rows of each source are its own
        parks = on_reject == "park"
        self._parking = Parking(dispatcher, parked or default_parked_tables, name) if parks else None

    def deliver(self, body: bytes, headers: Headers) -> Reply:
        """Return the answer to a request, after the transaction of its event has ended. Never raises an ``Exception``.

        ``body`` is the raw body, of which you need not read more than ``max_bytes + 1`` bytes. ``headers`` are a
        mapping, or pairs of a name and a value if a name may come twice.

        The status is 200 if the event was applied or skipped, is a duplicate, or was parked; 400 if the body or the id
        cannot be used; 401 if the request is not verified; 413 if the body is too large; 422 if another delivery would
        fail too; and 503 with ``Retry-After`` if the provider should send the event again.
        """
        name, joined = self._provider.name, _joined(headers)
        if len(body) > self.max_bytes:
            logger.warning("a webhook of %s has more than %d bytes, and is answered 413", name, self.max_bytes)
            return _reply(413, "too large")
        if not self._is_verified(body, joined):
            return _reply(401, "not verified")
        settled = self._deliver(body, joined)
        answer = _answer(settled)
        if self._parking is None or answer.status not in (400, 422):
            return answer
        try:
            self._parking.park(self._key(body, joined), body, self._kept(joined), settled.reason)
        except Exception as error:  # noqa: BLE001  # whatever it is, the provider must send the request again
            logger.error("a webhook of %s cannot be parked, and is answered 503: %s", name, reason_of(error))
            return _reply(503, "try again", {"Retry-After": PARK_AGAIN})
        self._settling.kept(settled)
        return _reply(200, "parked")

    async def adeliver(self, body: bytes, headers: Headers) -> Reply:
        """Like ``deliver``, for an ``AsyncDispatcher``."""
        return await greenlet_spawn(self.deliver, body, headers)

    def settle_dead_letters(self, decide: Decide) -> Any:
        """Keep, replay or drop each parked request, as ``decide`` says. `idempotency dead` calls it.

        Returns a ``Sifted``; with an ``AsyncDispatcher``, a coroutine that returns it. A replay delivers the request,
        which it does not verify again, and deletes the row if the event was applied, now or earlier. Otherwise the
        request stays parked, with the new reason. If the process ends before the row is deleted, replay it again: the
        event is a duplicate then, if its handler is idempotent.

        Raises ``ValueError`` without ``on_reject="park"``, ``MissingTableError``, or the database's error.
        """
        return greenlet_spawn(self._settle, decide) if self.asynchronous else self._settle(decide)

    def _settle(self, decide: Decide) -> Sifted:
        if self._parking is None:
            raise ValueError('this webhook parks no requests; give it on_reject="park"')
        judge, settled, ids = self._settling.judge(decide), 0, self._parking.ids()
        for key in ids:
            if (parked := self._parking.find(key)) is None:
                continue  # another person was faster
            body, headers, reason = parked
            incoming = Incoming(body, key, headers=headers)
            with suppress(Exception):  # it may be parked because it cannot be read
                incoming = self._incoming(body, headers)
            fate = judge(incoming, reason, None)
            if fate == "stop":
                break
            if fate == "replay":
                delivered = self._deliver(body, headers)
                if delivered.delivery is None or delivered.delivery.outcome is Outcome.SKIPPED:
                    self._parking.explain(key, delivered.reason or "skipped: no handler took the event, or it is late")
                    continue
            if fate != "keep":
                self._parking.drop(key)
                settled += 1
        return Sifted(len(ids), settled)

    def _deliver(self, body: bytes, headers: Mapping[str, str]) -> Settled:
        try:
            incoming = self._incoming(body, headers)
        except Exception as error:  # noqa: BLE001  # of the user's extractor, too
            settled = self._settling.unread(error)
            logger.error("a webhook of %s cannot be read, and is rejected: %s", self._provider.name, settled.reason)
            return settled
        return self._settling.deliver(incoming)

    def _key(self, body: bytes, headers: Mapping[str, str]) -> str:
        """Return the id of a request, or the hash of its body if it has no id that can be stored."""
        place = self._provider.id
        with suppress(Exception):
            return valid_message_id(place(json_of(Incoming(body))) if callable(place) else headers.get(place.lower()))
        return f"sha256:{hashlib.sha256(body).hexdigest()}"

    def _kept(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers without secrets. A replay needs those with the id, the type and the time."""
        places = (self._provider.id, self._provider.type, self._provider.occurred_at)
        return without_secrets(headers, [each.lower() for each in places if isinstance(each, str)])

    def _is_verified(self, body: bytes, headers: Mapping[str, str]) -> bool:
        why = "the signature differs" if body else "the body is empty; code before the endpoint may have read it"
        try:
            if self._provider.verify(body, headers) is True:
                return True
        except Exception as error:  # noqa: BLE001  # anybody may send anything, and each package has its own errors
            why = reason_of(error)
        logger.warning("a webhook of %s is not verified, and is answered 401: %s", self._provider.name, why)
        return False

    def _incoming(self, body: bytes, headers: Mapping[str, str]) -> Incoming:
        """Return the request as a message. Raises an exception for a body that is not JSON, and for a missing id."""
        provider = self._provider
        incoming = Incoming(
            body,
            content_type=headers.get("content-type"),
            headers=headers,
            origin=f"the webhook of {provider.name}",
            body_name="body of the request",
        )
        places = {"id": provider.id, "type": provider.type, "occurred_at": provider.occurred_at}
        decoded = json_of(incoming) if any(map(callable, places.values())) else None
        found = {
            name: place(decoded) if callable(place) else headers.get((place or "").lower())
            for name, place in places.items()
        }
        for name in ("id", "type"):  # without its type, an event would look like one that no handler takes
            place, value = places[name], found[name]
            where = "body" if callable(place) else f"header {place}"
            if place is not None and (value is None or str(value).isspace() or value == ""):
                raise InvalidMessageError(f"the {where} has no {name} of the event")
            if isinstance(place, str) and "," in str(value):
                raise InvalidMessageError(f"the {where} came more than once, or contains a comma")
        return replace(incoming, message_id=found["id"], type=found["type"], occurred_at=found["occurred_at"])


def _joined(headers: Headers) -> dict[str, str]:
    """Return the headers by their names in lower case. A comma joins the values of a repeated one, as in WSGI."""
    joined: dict[str, str] = {}
    for name, value in headers.items() if isinstance(headers, Mapping) else headers:
        lower = name.lower()
        joined[lower] = f"{joined[lower]},{value}" if lower in joined else value
    return joined


def _answer(settled: Settled) -> Reply:
    """Return the answer to a request whose event was delivered. It says nothing of the error."""
    if settled.delivery is not None:
        return _reply(200, settled.delivery.outcome.value)
    if settled.label in ("invalid_id", "invalid_message"):
        return _reply(400, "invalid")
    if settled.reject:
        return _reply(422, "rejected")
    return _reply(503, "try again", {"Retry-After": str(max(1, math.ceil(settled.delay)))})


def _reply(status: int, outcome: str, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(status, json.dumps({"outcome": outcome}).encode(), headers or {})


# Providers ------------------------------------------------------------------------------------------------------------


def github(*secrets: str) -> Provider:
    """Return the description of GitHub's webhooks, whose content type must be ``application/json``.

    ``secrets`` are the secret of the webhook, and the one before it while you replace it.

    GitHub signs the body only. The id is in the header ``X-GitHub-Delivery``, which is not signed.
    """

    def verify(body: bytes, headers: Mapping[str, str]) -> bool:
        signature = _signature(headers, "X-Hub-Signature-256")
        return any(_same(signature, f"sha256={_hmac(each, body).hex()}") for each in known)

    known = _checked(secrets)
    return Provider("github", verify, "X-GitHub-Delivery", "X-GitHub-Event", max_bytes=25 * MEBIBYTE)


def shopify(*secrets: str) -> Provider:
    """Return the description of Shopify's webhooks.

    ``secrets`` are the client secret of the app, and the one before it while you replace it.

    Shopify signs the body only. The id is in the header ``X-Shopify-Webhook-Id``, which is not signed.
    """

    def verify(body: bytes, headers: Mapping[str, str]) -> bool:
        signature = _signature(headers, "X-Shopify-Hmac-SHA256")
        return any(_same(signature, base64.b64encode(_hmac(each, body)).decode()) for each in known)

    known = _checked(secrets)
    return Provider("shopify", verify, "X-Shopify-Webhook-Id", "X-Shopify-Topic", "X-Shopify-Triggered-At")


def standard_webhooks(*secrets: str) -> Provider:
    """Return the description of webhooks of the specification Standard Webhooks, verified by ``standardwebhooks``.

    ``secrets`` are the secrets of the endpoint (``whsec_...``). Id, time of the request and body are signed. The type
    and the time of the event are ``type`` and ``timestamp`` in the body.

    Raises ``ModuleNotFoundError`` without the extra ``standardwebhooks``.
    """
    with needs("standardwebhooks"):
        import standardwebhooks

    def verify(body: bytes, headers: Mapping[str, str]) -> bool:
        return _any_verifies(known, lambda each: each.verify(body, {**headers}, json_parse=False))

    given = _checked(secrets)
    try:
        known = [standardwebhooks.Webhook(each) for each in given]
    except Exception as error:
        raise ValueError(f"a secret of Standard Webhooks is whsec_ and base64 ({error})") from error
    return Provider("standard-webhooks", verify, "webhook-id", by_path("type"), by_path("timestamp"))


def stripe(*secrets: str) -> Provider:
    """Return the description of Stripe's webhooks, verified by the package ``stripe``.

    ``secrets`` are the secrets of the endpoint (``whsec_...``). Time of the request and body are signed. The id, the
    type and the time of the event are ``id``, ``type`` and ``created`` in the body.

    Raises ``ModuleNotFoundError`` without the extra ``stripe``.
    """
    with needs("stripe"):
        from stripe import WebhookSignature

    def verify(body: bytes, headers: Mapping[str, str]) -> bool:
        signed = _signature(headers, "Stripe-Signature")
        text = body.decode()
        return _any_verifies(known, lambda each: WebhookSignature.verify_header(text, signed, each, TOLERANCE))

    known = _checked(secrets)
    return Provider("stripe", verify, by_path("id"), by_path("type"), by_path("created"))


def _checked(secrets: Sequence[str]) -> Sequence[str]:
    """Return the secrets. Raises ``TypeError`` or ``ValueError`` for one with which anybody could sign."""
    if not secrets:
        raise ValueError("pass the secret with which the provider signs, as in github(os.environ['GITHUB_SECRET'])")
    for each in secrets:
        if not isinstance(each, str):
            raise TypeError(f"the secret of a webhook is text, not {type(each).__name__}")
        if not each.strip():
            raise ValueError("the secret of a webhook is empty: set the variable from which you read it")
        if each != each.strip():
            raise ValueError("the secret of a webhook begins or ends with a blank or a line break: strip() it")
    return secrets


def _signature(headers: Mapping[str, str], name: str) -> str:
    if name.lower() not in headers:
        raise LookupError(f"the header {name} is missing")
    return headers[name.lower()]


def _hmac(secret: str, body: bytes) -> bytes:
    return hmac.digest(secret.encode(), body, "sha256")


def _same(given: str, computed: str) -> bool:
    return hmac.compare_digest(given.encode(), computed.encode())


def _any_verifies(known: Sequence[T], verify: Callable[[T], object]) -> bool:
    """True if ``verify`` returns for one of the secrets. Raises its last error if it raises for all of them."""
    for each in known[:-1]:
        with suppress(Exception):
            verify(each)
            return True
    verify(known[-1])
    return True
