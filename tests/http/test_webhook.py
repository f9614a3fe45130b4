"""Webhooks: requests of each provider, of our own making, are verified, delivered once, and answered by the result."""

import asyncio
import base64
import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fastapi
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine, insert
from sqlalchemy.orm import Session, sessionmaker

from cut_proxy import Cut, CutProxy
from databases import Driver
from http_rig import FRAMEWORK, WEB, serving
from pages import snippets
from projector_dedup import Defer, Dispatcher, Message
from projector_dedup.errors import HandlerDefinitionError
from projector_dedup.http.webhook import Provider, Webhook, github, stripe
from projector_dedup.testing.provider import free_port
from rig import NOTHING, ONCE, ONE_ATTEMPT, TOTAL, Durable, Rig, RigOn, add, handler_of
from webhook_rig import (
    IDS,
    OCCURRED,
    PROVIDERS,
    SECRET,
    SENT,
    TYPES,
    Hook,
    Sent,
    dispatcher_of,
    from_github,
    from_stripe,
    from_yours,
    yours,
)

SMALL = [driver for driver in WEB if driver.engine == "sqlite"]
SENDERS = 64
on_servers = pytest.mark.parametrize("driver", [driver for driver in WEB if driver.engine != "sqlite"], ids=str)
everywhere = pytest.mark.parametrize("driver", WEB, ids=str)
in_each_framework = pytest.mark.parametrize("driver", SMALL, ids=str)
each_provider = pytest.mark.parametrize("provider", PROVIDERS)


@in_each_framework
def test_a_body_that_the_provider_writes_anew_is_a_duplicate(driver: Driver, rig_on: RigOn) -> None:
    """Stripe's ``pending_webhooks`` counts down; also with ``other_body="reject"``."""
    hook = Hook(rig_on(driver), stripe(SECRET), takes="invoice.paid", other_body="reject")
    sent = from_stripe()
    anew = [{**json.loads(sent.body), "pending_webhooks": count} for count in (2, 1)]
    answers = [hook.send(from_stripe(json.dumps(each).encode())).json()["outcome"] for each in anew]
    assert answers == ["applied", "duplicate"]


@each_provider
@everywhere
def test_an_event_that_is_sent_twice_is_applied_once(driver: Driver, provider: str, rig_on: RigOn) -> None:
    """The first request is answered "applied", the second "duplicate"; both are 200."""
    hook = Hook(rig_on(driver), PROVIDERS[provider](SECRET), takes=TYPES[provider])
    answers = [hook.send(SENT[provider]()) for _ in range(2)]
    assert [(each.status_code, each.json()) for each in answers] == [
        (200, {"outcome": "applied"}),
        (200, {"outcome": "duplicate"}),
    ]
    assert hook.rig.durable() == ONCE
    ((found, occurred_at),) = hook.rows()
    assert found == IDS[provider]
    time_is_sent = provider != "github"
    assert (occurred_at is not None) == time_is_sent
    if time_is_sent:
        assert str(occurred_at).startswith("2026-11-03 09:30:15")


def damaged(sent: Sent) -> dict[str, Sent]:
    """Return the request with each fault that makes it another request than the one that was signed."""
    found = {"another body": Sent(sent.body.replace(b"{", b"{ ", 1), sent.headers)}
    for name, value in sent.headers.items():
        if name.lower().endswith(("signature", "signature-256", "hmac-sha256")):
            without = {each: kept for each, kept in sent.headers.items() if each != name}
            found["no signature"] = Sent(sent.body, without)
            for flaw in (
                "",
                " ",
                "v1",
                "t=,v1=",
                "t=x,v1=x",
                "sha256=",
                "v1,",
                "v2,AAAA",
                "=",
                ",",
                "v1,A",
                value[:-1],
            ):
                found[f"signature {flaw!r}"] = Sent(sent.body, {**sent.headers, name: flaw})
    return found


@each_provider
@in_each_framework
def test_a_request_that_is_not_verified_is_401(
    driver: Driver, provider: str, rig_on: RigOn, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the fault is, and before the body is read: nothing is stored, and the log says why."""
    hook = Hook(rig_on(driver), PROVIDERS[provider](SECRET), takes=TYPES[provider])
    wrong = damaged(SENT[provider]())
    assert len(wrong) > 10
    wrong["of somebody else, and no JSON"] = Sent(b"\xff[", SENT[provider]().headers)
    for fault, sent in wrong.items():
        answer = hook.send(sent)
        assert (answer.status_code, answer.json()) == (401, {"outcome": "not verified"}), fault
    assert hook.rig.durable() == NOTHING
    assert hook.seen.all == []
    assert len([each for each in caplog.messages if "is not verified" in each]) == len(wrong)
    assert hook.send(SENT[provider]()).status_code == 200


def test_a_signature_of_the_providers_documentation_is_verified() -> None:
    """GitHub's page "Validating webhook deliveries" has a secret, a body and their signature."""
    signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    verify = github("It's a Secret to Everybody").verify
    assert verify(b"Hello, World!", {"x-hub-signature-256": signature})
    assert not verify(b"Hello, World?", {"x-hub-signature-256": signature})


@pytest.mark.parametrize("provider", ["standard_webhooks", "stripe"])
@in_each_framework
def test_a_request_that_was_signed_long_ago_is_401(driver: Driver, provider: str, rig_on: RigOn) -> None:
    """A captured request cannot be sent again after five minutes."""
    hook = Hook(rig_on(driver), PROVIDERS[provider](SECRET), takes=TYPES[provider])
    assert hook.send(SENT[provider](at=time.time() - 310)).status_code == 401
    assert hook.send(SENT[provider](at=time.time() - 200)).status_code == 200


@each_provider
@in_each_framework
def test_a_secret_can_be_replaced(driver: Driver, provider: str, rig_on: RigOn) -> None:
    """The old and the new one are accepted, in any order, and no third one."""
    other, third = ("whsec_" + base64.b64encode(each * 24).decode() for each in (b"o", b"t"))
    rig = rig_on(driver)
    for secrets in ((SECRET, other), (other, SECRET)):
        hook = Hook(rig, PROVIDERS[provider](*secrets), takes=TYPES[provider])
        assert hook.send(SENT[provider]()).status_code == 200
    assert Hook(rig, PROVIDERS[provider](other, third)).send(SENT[provider]()).status_code == 401


@each_provider
@pytest.mark.parametrize(
    ("secrets", "error"),
    [
        ((), ValueError),
        (("",), ValueError),
        ((SECRET, " "), ValueError),
        ((f"{SECRET}\n",), ValueError),
        ((None,), TypeError),
    ],
)
def test_a_secret_with_which_anybody_could_sign_is_refused(
    provider: str, secrets: tuple[Any, ...], error: type[Exception]
) -> None:
    """At start-up: the variable of the environment is not set."""
    with pytest.raises(error, match="secret"):
        PROVIDERS[provider](*secrets)


def test_a_repeated_header_is_one_value_in_every_framework() -> None:
    """ASGI gives both values, and WSGI joins them: an id or a signature that comes twice lets nothing in."""
    webhook = Webhook(_nothing(), github(SECRET))
    sent = from_github()
    for name, status in (("X-Hub-Signature-256", 401), ("X-GitHub-Delivery", 400), ("X-GitHub-Event", 400)):
        twice = [*sent.headers.items(), (name, sent.headers[name])]
        assert webhook.deliver(sent.body, twice).status == status


@in_each_framework
def test_a_body_that_was_read_before_is_named_in_the_log(
    driver: Driver, rig_on: RigOn, caplog: pytest.LogCaptureFixture
) -> None:
    """Code before the endpoint has consumed it, so that no signature can fit."""
    hook = Hook(rig_on(driver), github(SECRET), takes="push")
    assert hook.send(Sent(b"", from_github().headers)).status_code == 401
    assert "the body is empty; code before the endpoint may have read it" in caplog.text


def test_an_error_that_cannot_be_printed_is_401() -> None:
    """Whatever ``verify`` raises, ``deliver`` answers."""

    class Wrong(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise RuntimeError

    def verify(_body: bytes, _headers: Any) -> bool:
        raise Wrong

    assert Webhook(_nothing(), Provider("yours", verify, id="X-Id")).deliver(b"{}", {"X-Id": "1"}).status == 401


def test_a_secret_that_is_none_of_the_specification_is_refused() -> None:
    """At start-up, as a ``ValueError``."""
    for secret in ("whsec_", "whsec_é"):
        with pytest.raises(ValueError, match="secret of Standard Webhooks"):
            PROVIDERS["standard_webhooks"](secret)


# Every answer ---------------------------------------------------------------------------------------------------------


@everywhere
def test_a_type_that_no_handler_takes_is_200(driver: Driver, rig_on: RigOn) -> None:
    """The event leaves no marker, and the observer counts it, also if the dispatcher raises for a consumer."""
    hook = Hook(rig_on(driver), github(SECRET), takes="issues", unhandled="raise")
    answer = hook.send(from_github(kind="ping"))
    assert (answer.status_code, answer.json()) == (200, {"outcome": "skipped"})
    assert hook.rig.durable() == NOTHING
    assert [(each.kind, each.outcome, each.message_type) for each in hook.seen.all] == [
        ("message", "skipped", "ping"),
        ("delivery", "acknowledged", None),
    ]
    assert hook.seen.all[1].broker == "webhook"


@pytest.mark.parametrize(
    "sent",
    [
        from_yours(b"", Content_Type="application/json"),
        from_yours(b"[1"),
        from_yours(b"\xff"),
        from_yours(b'{"amount": NaN}'),
        from_yours(X_Id=""),
        from_yours(X_Id="x" * 513),
        Sent(b"{}", {"X-Password": "open", "X-Type": "added"}),
        Sent(b'{"message_id": "8"}', {"X-Password": "open", "X-Type": "added"}),
        from_yours(X_Type="x" * 513),
        from_yours(X_Id=" "),
        from_yours(X_Type=""),
        from_yours(X_Id="7,7"),
        from_yours(X_Type="added,added"),
        Sent(b"{}", {"X-Password": "open", "X-Id": "7"}),
    ],
    ids=[
        "empty",
        "cut",
        "no UTF-8",
        "NaN",
        "empty id",
        "long id",
        "no id",
        "an id elsewhere",
        "long type",
        "blank id",
        "empty type",
        "id twice",
        "type twice",
        "no type",
    ],
)
@in_each_framework
def test_a_missing_id_and_a_malformed_body_are_400(driver: Driver, sent: Sent, rig_on: RigOn) -> None:
    """Nothing is stored, and the observer counts a rejected delivery."""
    hook = Hook(rig_on(driver), yours())
    answer = hook.send(sent)
    assert (answer.status_code, answer.json()) == (400, {"outcome": "invalid"})
    assert hook.rig.durable() == NOTHING
    (delivery,) = [each for each in hook.seen.all if each.kind == "delivery"]
    assert (delivery.outcome, delivery.broker) == ("rejected", "webhook")
    assert delivery.reason in ("invalid_message", "invalid_id")


@in_each_framework
@pytest.mark.parametrize("place", ["id", "type", "occurred_at"])
def test_an_extractor_that_fails_is_400(driver: Driver, place: str, rig_on: RigOn) -> None:
    """So does a time that is none; the next request is served."""
    hook = Hook(rig_on(driver), yours(**{place: lambda body: body["a"]["b"]}))
    assert hook.send(from_yours(b'{"a": 1}')).status_code == 400
    assert hook.send(from_yours(b'{"a": {"b": [1]}}')).status_code == 400
    assert hook.rig.durable() == NOTHING


def refusing(event: Any, _session: Session) -> None:
    """A handler that fails on each message, with an error that contains data of ours."""
    raise ValueError(f"the balance of account 4711 is 13: {event}")


@everywhere
def test_a_message_that_can_never_succeed_is_422(driver: Driver, rig_on: RigOn) -> None:
    """The answer says nothing of our data, and everything is rolled back."""
    hook = Hook(rig_on(driver), yours(), refusing)
    answer = hook.send(from_yours())
    assert (answer.status_code, answer.json()) == (422, {"outcome": "rejected"})
    assert "retry-after" not in answer.headers
    assert "4711" not in answer.text + str(answer.headers)
    assert hook.rig.durable() == NOTHING


@in_each_framework
def test_a_log_without_values_of_statements(driver: Driver, rig_on: RigOn, caplog: pytest.LogCaptureFixture) -> None:
    """With ``hide_parameters`` of the engine, an error of the database quotes nothing of the event."""

    def violates(event: Any, session: Session) -> None:
        add(session)
        session.execute(insert(TOTAL).values(account="a", amount=event["amount"]))

    for hidden, quoted in ((False, True), (True, False)):
        hook = Hook(rig_on(driver, hide_parameters=hidden), yours(), violates)
        assert hook.send(from_yours(b'{"amount": 4711}')).status_code == 422
        assert ("4711" in caplog.text) == quoted
        caplog.clear()


@everywhere
def test_a_message_that_a_handler_postpones_is_503(driver: Driver, rig_on: RigOn) -> None:
    """With the seconds after which the provider should send the event again; then it is applied."""
    early = [True]

    def waits(_event: Any, session: Session) -> None:
        add(session)
        if early.pop() if early else False:
            raise Defer("the account is not open yet")

    hook = Hook(rig_on(driver), yours(), waits)
    answer = hook.send(from_yours())
    assert (answer.status_code, answer.json()) == (503, {"outcome": "try again"})
    assert int(answer.headers["retry-after"]) >= 1
    assert hook.rig.durable() == NOTHING
    assert hook.send(from_yours()).json() == {"outcome": "applied"}
    assert hook.rig.durable() == ONCE


@in_each_framework
def test_a_body_that_is_too_large_is_413(driver: Driver, rig_on: RigOn) -> None:
    """By its length, and if the length is not told; the option of the endpoint has precedence."""
    rig = rig_on(driver)
    hook = Hook(rig, yours(max_bytes=30))
    fits, over = (from_yours(json.dumps("x" * size).encode()) for size in (28, 29))
    assert (len(fits.body), len(over.body)) == (30, 31)
    assert hook.send(over).status_code == 413
    assert rig.durable() == NOTHING
    assert hook.send(fits).status_code == 200
    assert Hook(rig, yours(max_bytes=30), max_bytes=31).send(over).status_code == 200
    assert Hook(rig, yours(max_bytes=31), max_bytes=30).send(over).status_code == 413


def test_a_body_in_pieces_is_read_up_to_the_limit() -> None:
    """A sender that never stops is answered 413 after the first pieces."""
    app = fastapi.FastAPI()
    webhook: Any = FRAMEWORK[True].webhook_endpoint(_nothing(), yours(max_bytes=30))
    app.add_route("/hook", webhook, methods=["POST"])
    pieces = 0

    async def endless() -> Any:
        nonlocal pieces
        while pieces < 1000:
            pieces += 1
            yield b"x" * 10

    async def send() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://hook") as client:
            return (await client.post("/hook", content=endless(), headers=from_yours().headers)).status_code

    assert asyncio.run(send()) == 413
    assert pieces < 10


@pytest.fixture(name="proxy")
def proxy_fixture(driver: Driver, rig_on: RigOn) -> Any:
    """A rig, and a line to its server that can be cut at COMMIT."""
    rig = rig_on(driver)
    with CutProxy(rig.outside.database.url()) as proxy:
        yield rig, proxy


@on_servers
@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_commit_whose_outcome_is_unknown_is_503(driver: Driver, proxy: tuple[Rig, CutProxy], cut: Cut) -> None:
    """The next request finds out, and the event is applied once in both cases."""
    rig, line = proxy
    with Rig(driver, rig.outside, url=line.through(rig.outside.database.url())) as through:
        hook = Hook(through, yours(), retry=ONE_ATTEMPT)
        line.cut_commit(cut)
        answer = hook.send(from_yours())
        assert (answer.status_code, answer.json()) == (503, {"outcome": "try again"})
        assert rig.durable() == (ONCE if cut == "after" else NOTHING)
        again = hook.send(from_yours())
        assert again.json() == {"outcome": "duplicate" if cut == "after" else "applied"}
    assert rig.durable() == ONCE


@on_servers
def test_a_database_that_is_down_is_503(driver: Driver, proxy: tuple[Rig, CutProxy]) -> None:
    """The provider sends the event again."""
    rig, line = proxy
    with Rig(driver, rig.outside, url=line.through(rig.outside.database.url())) as through:
        hook = Hook(through, yours(), retry=ONE_ATTEMPT)
        line.__exit__(None, None, None)
        assert hook.send(from_yours()).status_code == 503


# Many senders, and the arguments --------------------------------------------------------------------------------------


@everywhere
def test_64_senders_of_one_event_change_the_read_model_once(driver: Driver, rig_on: RigOn) -> None:
    """All at once: one is answered "applied", and nobody gets an error that the provider would show."""
    hook = Hook(rig_on(driver, connect_args={"timeout": 30} if driver.engine == "sqlite" else {}), yours())
    answers = hook.send_all([from_yours()] * SENDERS)
    outcomes = sorted(each.json()["outcome"] for each in answers)
    assert outcomes == ["applied"] + ["duplicate"] * (SENDERS - 1)
    assert {each.status_code for each in answers} == {200}
    hook.rig.assert_settled(ONCE)


@everywhere
def test_a_source_keeps_the_ids_of_two_providers_apart(driver: Driver, rig_on: RigOn) -> None:
    """The same id of two sources is two events."""
    rig = rig_on(driver)
    hooks = [Hook(rig, yours(), source=source) for source in (None, "billing", "billing")]
    assert [hook.send(from_yours()).json()["outcome"] for hook in hooks] == ["applied", "applied", "duplicate"]
    assert rig.durable() == Durable(2, 2)
    assert sorted(each for each, _ in hooks[0].rows()) == ["7", "7:billing1:7"]


def test_fastapi_runs_a_dispatcher_without_asyncio_in_threads(rig_on: RigOn) -> None:
    """An application with a synchronous engine has the same webhook."""
    (driver,) = [each for each in SMALL if not each.is_async]
    rig = rig_on(driver)
    app = fastapi.FastAPI()
    dispatcher: Any = dispatcher_of(rig.factory, lambda _event, session: add(session), "push")
    app.add_route("/hook", FRAMEWORK[True].webhook_endpoint(dispatcher, github(SECRET)), methods=["POST"])

    async def send() -> list[Any]:
        sent = from_github()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://hook") as client:
            return [(await client.post("/hook", content=sent.body, headers=sent.headers)).json() for _ in range(2)]

    assert asyncio.run(send()) == [{"outcome": "applied"}, {"outcome": "duplicate"}]
    assert rig.durable() == ONCE


def test_the_converter_gets_the_parts_of_the_request(rig_on: RigOn) -> None:
    """The body, the id, the type, the time, and the headers with names in lower case."""
    (driver,) = [each for each in SMALL if not each.is_async]
    rig, got = rig_on(driver), []

    def convert(incoming: Any) -> Message:
        got.append(incoming)
        return Message("another", {}, "added")

    dispatcher = dispatcher_of(rig.factory, lambda _event, session: add(session), "added")
    webhook = Webhook(dispatcher, stripe(SECRET), convert)
    sent = from_stripe()
    assert webhook.deliver(sent.body, sent.headers).status == 200
    (incoming,) = got
    assert (incoming.body, incoming.message_id, incoming.type) == (sent.body, IDS["stripe"], "invoice.paid")
    assert incoming.occurred_at == int(OCCURRED.timestamp())
    assert incoming.headers["stripe-signature"] == sent.headers["Stripe-Signature"]
    assert rig.outside.execute("select message_id from processed_message") == [("another",)]


@pytest.mark.parametrize("answer", [False, None, 1, "yes"])
def test_only_true_verifies_a_request(answer: Any) -> None:
    """A function that forgets to return, or returns what is only like True, lets nobody in."""
    provider = Provider("yours", lambda _body, _headers: answer, id="X-Id")
    assert Webhook(_nothing(), provider).deliver(b"{}", {"X-Id": "1"}).status == 401


def _nothing() -> Dispatcher:
    """A dispatcher that is never asked to deliver."""
    return Dispatcher(sessionmaker(create_engine("sqlite://")), handler_of(None, lambda _e, _s: None, "none"))


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((object(), yours()), {}, HandlerDefinitionError),
        ((_nothing(), github), {}, TypeError),
        ((_nothing(), yours()), {"max_bytes": 0}, ValueError),
        ((_nothing(), yours()), {"max_bytes": True}, ValueError),
        ((_nothing(), yours()), {"source": 7}, TypeError),
        ((_nothing(), yours(), dict), {}, ValueError),
    ],
)
def test_a_wrong_argument_is_refused(arguments: Any, options: Any, error: type[Exception]) -> None:
    """At start-up, and by name."""
    with pytest.raises(error):
        Webhook(*arguments, **options)


@given(body=st.binary(max_size=200), headers=st.dictionaries(st.text(max_size=30), st.text(max_size=60), max_size=4))
@pytest.mark.parametrize("provider", PROVIDERS)
def test_garbage_is_answered_401(provider: str, body: bytes, headers: dict[str, str]) -> None:
    """Whatever a stranger sends: no error leaves the webhook."""
    webhook = Webhook(_nothing(), PROVIDERS[provider](SECRET))
    named = {name: value for name, value in SENT[provider]().headers.items() if name.lower() != "content-type"}
    for each in (headers, {**named, **headers}, dict(zip(named, headers.values(), strict=False))):
        assert webhook.deliver(body, each).status == 401


# The page -------------------------------------------------------------------------------------------------------------

PAGE = "docs/webhooks.md"
SECRETS = {"STRIPE_SECRET": "whsec_test", "GITHUB_SECRET": "test"}


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("openssl")), reason="the page needs curl and openssl")
def test_the_page_typed_from_top_to_bottom(tmp_path: Path) -> None:
    """The program receives what the shell sends, prints what the page shows, and passes its test."""
    program, test, *_ = snippets(PAGE)
    (tmp_path / "webhooks.py").write_text(program, encoding="utf-8")
    environment = {**os.environ, **SECRETS}
    port = free_port()
    with serving("webhooks:app", port, tmp_path, environment):
        (shell,), (shown,) = snippets(PAGE, "bash"), snippets(PAGE, "text")
        sent = subprocess.run(
            ["bash", "-c", shell.replace("localhost:8000", f"127.0.0.1:{port}")],
            capture_output=True,
            text=True,
            check=True,
        )
        assert sent.stdout == shown
    with contextlib.closing(sqlite3.connect(tmp_path / "webhooks.db")) as connection:
        assert connection.execute("select * from revenue").fetchall() == [("cus_1", 3000)]
        assert connection.execute("select * from pushes").fetchall() == [("ann/shop", 1)]
    (tmp_path / "test_webhooks.py").write_text(test.replace("expected=", "schedules=2, expected="), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout
