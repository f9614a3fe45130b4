"""A webhook in an application, and requests of each provider, of our own making."""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import fastapi
import flask
import httpx
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import Session

from http_rig import FRAMEWORK
from projector_dedup import AsyncDispatcher, Dispatcher
from projector_dedup.http.webhook import Provider, github, shopify, standard_webhooks, stripe
from projector_dedup.observer import Observation
from rig import QUICK, Rig, add, handler_of

SECRET = "whsec_" + base64.b64encode(b"twenty-four bytes or more").decode()
OCCURRED = datetime(2026, 11, 3, 9, 30, 15, tzinfo=UTC)
APP: dict[bool, Callable[[], Any]] = {True: fastapi.FastAPI, False: lambda: flask.Flask("hook")}


# Requests as the providers send them: the values are ours, the shape is theirs. They are signed by hand, not by code of
# the library or of a provider.


@dataclass(frozen=True)
class Sent:
    """A request: its body, and its headers."""

    body: bytes
    headers: dict[str, str]


def _mac(body: bytes, key: bytes = SECRET.encode()) -> bytes:
    return hmac.new(key, body, hashlib.sha256).digest()


def from_github(body: bytes = b'{"ref": "refs/heads/main", "pusher": {"name": "ann"}}', kind: str = "push") -> Sent:
    """A push."""
    headers = {
        "User-Agent": "GitHub-Hookshot/044aadd",
        "Content-Type": "application/json",
        "X-GitHub-Delivery": "72d3162e-cc78-11e3-81ab-4c9367dc0958",
        "X-GitHub-Event": kind,
        "X-GitHub-Hook-ID": "292430182",
        "X-Hub-Signature-256": f"sha256={_mac(body).hex()}",
    }
    return Sent(body, headers)


def from_shopify(
    body: bytes = b'{"id": 820982911946154508, "total_price": "398.00"}', kind: str = "orders/create"
) -> Sent:
    """An order."""
    headers = {
        "Content-Type": "application/json",
        "X-Shopify-Topic": kind,
        "X-Shopify-Webhook-Id": "b54557e4-bdd9-4b37-8a5f-bf7d70bcd043",
        "X-Shopify-Event-Id": "98880550-7158-44d4-b7cd-2c97c8a091b5",
        "X-Shopify-Triggered-At": "2026-11-03T09:30:15.877041743Z",
        "X-Shopify-Shop-Domain": "shop.myshopify.com",
        "X-Shopify-Hmac-SHA256": base64.b64encode(_mac(body)).decode(),
    }
    return Sent(body, headers)


def from_standard(body: bytes | None = None, kind: str = "invoice.paid", at: float | None = None) -> Sent:
    """A payment of an invoice."""
    if body is None:
        event = {"type": kind, "timestamp": "2026-11-03T09:30:15Z", "data": {"id": "inv_1"}}
        body = json.dumps(event).encode()
    moment = str(int(time.time() if at is None else at))
    signed = _mac(f"msg_p5jXN8AQM9LWM0D4loKWxJek.{moment}.".encode() + body, b"twenty-four bytes or more")
    headers = {
        "Content-Type": "application/json",
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": moment,
        "webhook-signature": f"v1,{base64.b64encode(signed).decode()}",
    }
    return Sent(body, headers)


def from_stripe(body: bytes | None = None, kind: str = "invoice.paid", at: float | None = None) -> Sent:
    """A payment of an invoice."""
    if body is None:
        event = {
            "id": "evt_1NG8Du2eZvKYlo2CUI79vXWy",
            "object": "event",
            "created": int(OCCURRED.timestamp()),
            "type": kind,
            "data": {"object": {"id": "in_1", "object": "invoice"}},
        }
        body = json.dumps(event).encode()
    moment = int(time.time() if at is None else at)
    signature = _mac(f"{moment}.".encode() + body).hex()
    headers = {"Content-Type": "application/json; charset=utf-8", "Stripe-Signature": f"t={moment},v1={signature}"}
    return Sent(body, headers)


SENT: dict[str, Callable[..., Sent]] = {
    "github": from_github,
    "shopify": from_shopify,
    "standard_webhooks": from_standard,
    "stripe": from_stripe,
}
PROVIDERS: dict[str, Callable[..., Provider]] = {
    "github": github,
    "shopify": shopify,
    "standard_webhooks": standard_webhooks,
    "stripe": stripe,
}
IDS = {
    "github": "72d3162e-cc78-11e3-81ab-4c9367dc0958",
    "shopify": "b54557e4-bdd9-4b37-8a5f-bf7d70bcd043",
    "standard_webhooks": "msg_p5jXN8AQM9LWM0D4loKWxJek",
    "stripe": "evt_1NG8Du2eZvKYlo2CUI79vXWy",
}
TYPES = {"github": "push", "shopify": "orders/create", "standard_webhooks": "invoice.paid", "stripe": "invoice.paid"}


class Seen:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.all: list[Observation] = []

    def observed(self, observation: Observation) -> None:
        """Keep it."""
        self.all.append(observation)


class Hook:
    """An app with a webhook at POST /hook, on a rig: FastAPI on asynchronous drivers, Flask on the others."""

    def __init__(
        self,
        rig: Rig,
        provider: Provider,
        body: Callable[[Any, Session], object] = lambda _event, session: add(session),
        *,
        takes: str = "added",
        factory: Any = None,
        max_bytes: int | None = None,
        source: str | None = None,
        on_reject: str = "answer",
        parked: Any = None,
        **options: Any,
    ) -> None:
        self.rig, self.seen = rig, Seen()
        self.asynchronous = rig.driver.is_async
        dispatcher = dispatcher_of(factory or rig.factory, body, takes, observer=self.seen, **options)
        self.app = APP[self.asynchronous]()
        endpoint = FRAMEWORK[self.asynchronous].webhook_endpoint
        chosen = {"max_bytes": max_bytes, "source": source, "on_reject": on_reject, "parked": parked}
        made: Any = endpoint(dispatcher, provider, **chosen)
        self.webhook = made.webhook
        if self.asynchronous:
            self.app.add_route("/hook", made, methods=["POST"])
        else:
            self.app.post("/hook")(made)

    def send(self, sent: Sent, **request: Any) -> httpx.Response:
        """Send a request straight into the app, once."""
        (answer,) = self.send_all([sent], **request)
        return answer

    def send_all(self, requests: list[Sent], **request: Any) -> list[httpx.Response]:
        """Send requests straight into the app, all at once."""
        arguments = [{"headers": each.headers, "content": each.body, **request} for each in requests]
        if self.asynchronous:
            answers: list[httpx.Response] = self.rig.run(self._awaited(arguments))
            return answers
        transport = httpx.WSGITransport(app=self.app)
        with (
            httpx.Client(transport=transport, base_url="http://hook") as client,
            ThreadPoolExecutor(len(arguments)) as senders,
        ):
            return list(senders.map(lambda each: client.post("/hook", **each), arguments))

    async def _awaited(self, arguments: list[dict[str, Any]]) -> list[httpx.Response]:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://hook") as client:
            return list(await asyncio.gather(*(client.post("/hook", **each) for each in arguments)))

    def rows(self) -> list[tuple[str, Any]]:
        """Return the ids and the times of all markers, as another connection sees them."""
        rows = self.rig.outside.execute("select message_id, occurred_at from processed_message")
        return [(found.decode() if isinstance(found, bytes) else found, at) for found, at in rows]


def dispatcher_of(factory: Any, body: Any, takes: str, **options: Any) -> Any:
    """A dispatcher of the factory's kind, which delivers one type of events to a handler."""
    kind: Any = AsyncDispatcher if isinstance(factory, async_sessionmaker) else Dispatcher
    return kind(factory, handler_of(factory, body, "totals", takes), **{"retry": QUICK, **options})


def yours(**parts: Any) -> Provider:
    """A provider of one's own, which signs by a password in a header."""
    found: dict[str, Any] = {"id": "X-Id", "type": "X-Type", "max_bytes": 1000, **parts}
    return Provider("yours", lambda _body, headers: headers["x-password"] == "open", **found)


def from_yours(body: bytes = b"{}", **headers: str) -> Sent:
    """A request that adds 1."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Sent(body, {"X-Password": "open", "X-Id": "7", "X-Type": "added", **named})
