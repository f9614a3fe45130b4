"""The rules of ACP, UCP and AdCP for an idempotency key, on the code of docs/agents-commerce.md and on commands."""

import asyncio
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import fastapi
import httpx
import pytest
from sqlalchemy import MetaData, String, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.util import greenlet_spawn

from command_rig import Placed, PlaceOrder, desk_on, place
from cut_proxy import CutProxy
from databases import Driver
from http_rig import WEB, Reply, Shop, shop_on
from projector_dedup.commands import AsyncCommands, Call, KeyReusedError, default_command_tables
from projector_dedup.errors import InProgress
from projector_dedup.http import recording
from projector_dedup.http.recording import Answers, Problem
from projector_dedup.http.starlette import endpoint_session
from projector_dedup.maintenance.cleanup import prune
from projector_dedup.options import RetryPolicy

PAGE = (Path(__file__).parents[2] / "docs" / "agents-commerce.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
MERCHANTS = [driver for driver in WEB if driver.is_async and driver.engine in ("postgresql", "sqlite")]
SMALL = [driver for driver in WEB if driver.engine == "sqlite"]
SESSIONS = "/checkout_sessions"
UnitSession = Annotated[AsyncSession, fastapi.Depends(endpoint_session)]


class Base(DeclarativeBase):
    """The base of the merchant's entity."""

    metadata = MetaData()


class Checkout(Base):
    """A checkout session: the page leaves it to the reader."""

    __tablename__ = "checkouts"
    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    status: Mapped[str] = mapped_column(String(20))


def agent_of(request: fastapi.Request) -> str:
    """Return whose token it is: here, the token is the name."""
    return request.headers["authorization"].removeprefix("Bearer ")


@dataclass
class Merchant:
    """The page's application on one database, and what its database has."""

    shop: Shop
    page: dict[str, Any]

    def post(self, path: str = SESSIONS, key: Any = "k1", agent: str = "agent-1", **request: Any) -> httpx.Response:
        """Send a POST as an agent does."""
        if not {"json", "content"} & request.keys():
            request["json"] = {"line_items": [{"id": "item_1", "quantity": 1}]}
        request["headers"] = {"Authorization": f"Bearer {agent}", **request.get("headers", {})}
        return self.shop.send(path=path, key=key, **request)

    def serve(self, path: str, endpoint: Any) -> None:
        """Serve one more endpoint beside those of the page."""
        more = fastapi.APIRouter(route_class=self.page["router"].route_class)
        more.post(path)(endpoint)
        self.shop.app.include_router(more)

    def statuses(self) -> list[str]:
        """The status of each checkout, as another connection sees them."""
        statement = select(Checkout.status).order_by(Checkout.status)
        return list(self.shop.harness.transact(lambda session: session.scalars(statement).all()))

    def records(self) -> list[str]:
        """The operation of each record, in order."""
        return [operation for _, operation, _ in self.shop.desk.records()]


def open_on(shop: Shop, url: Any, code: str = CODE, **options: Any) -> Merchant:
    """Run the page's code on a database, and let the shop send requests to its app."""
    engine = create_async_engine(url)
    shop._engines.append(engine)
    commands = AsyncCommands(shop.harness.factory_for(engine), **options)
    page: dict[str, Any] = {"commands": commands, "Checkout": Checkout, "agent_of": agent_of, "__name__": "page"}
    exec(code, page)
    shop.app = page["app"]
    return Merchant(shop, page)


@pytest.fixture(params=MERCHANTS, ids=str)
def merchant(request: pytest.FixtureRequest) -> Iterator[Merchant]:
    """The page's application, on PostgreSQL and on SQLite."""
    with shop_on(request, request.param) as shop:
        shop.harness.transact(lambda session: Base.metadata.create_all(session.connection()))
        yield open_on(shop, shop.harness.subject.url)


def error(answer: httpx.Response) -> tuple[int, str, str]:
    """The status, the type and the code of an error in ACP's shape, which has nothing else but a message."""
    assert answer.headers["content-type"] == "application/json"
    told = answer.json()
    assert set(told) == {"type", "code", "message"}
    assert all(isinstance(each, str) and each for each in told.values())
    return answer.status_code, told["type"], told["code"]


# ACP, rfcs/rfc.agentic_checkout.md -----------------------------------------------------------------------------------


def test_acp_3_1_an_error_is_a_flat_object(merchant: Merchant) -> None:
    """ACP 3.1: type, code and message, as application/json: also for a rejection of the endpoint and a bad key."""
    missing = merchant.post(f"{SESSIONS}/none/complete")
    again = merchant.post(f"{SESSIONS}/none/complete")
    assert error(missing) == error(again) == (422, "invalid_request", "no_such_checkout")
    assert again.headers["idempotent-replayed"] == "true"
    assert error(merchant.post(key="a b")) == (400, "invalid_request", "key-malformed")


def test_acp_3_1_a_response_repeats_the_key(merchant: Merchant) -> None:
    """ACP 3.1: the first answer and each repetition have the key; an answer to a wrong key has none."""
    first, again, other = (merchant.post(json={"quantity": each}) for each in (1, 1, 2))
    assert first.headers["idempotency-key"] == again.headers["idempotency-key"] == "k1"
    assert other.status_code == 422
    assert "idempotency-key" not in other.headers


def test_acp_6_1_a_post_needs_a_key(merchant: Merchant) -> None:
    """ACP 6.1: without the header 400, in the standard's words, and nothing runs."""
    assert error(merchant.post(key=None)) == (400, "invalid_request", "idempotency_key_required")
    assert (merchant.statuses(), merchant.records()) == ([], [])


@pytest.mark.parametrize(("key", "status"), [("k" * 255, 201), ("k" * 256, 400), ('"a b, c"', 201)])
def test_acp_6_1_a_key_has_up_to_255_characters(merchant: Merchant, key: str, status: int) -> None:
    """ACP 6.1: 255 characters are taken, 256 are not; blanks and commas need quotes."""
    assert merchant.post(key=key).status_code == status


def test_acp_6_1_a_key_belongs_to_one_agent(merchant: Merchant) -> None:
    """ACP 6.1: another agent's key is another key, and nobody sees the answer of another."""
    answers = [merchant.post(agent=agent) for agent in ("agent-1", "agent-2", "agent-1", "agent-2")]
    assert [answer.status_code for answer in answers] == [201] * 4
    ids = [answer.json()["id"] for answer in answers]
    assert (ids[:2] == ids[2:], len(set(ids))) == (True, 2)
    assert len(merchant.statuses()) == 2


def test_acp_6_1_one_key_at_two_endpoints_is_two_requests(merchant: Merchant) -> None:
    """ACP 6.1: each endpoint has its own records, and repeats its own answer."""
    created = merchant.post(json={})
    path = f"{SESSIONS}/{created.json()['id']}/complete"
    completed, again = merchant.post(path, json={}), merchant.post(path, json={})
    assert (completed.status_code, completed.json()["status"]) == (200, "completed")
    assert (again.status_code, again.content) == (200, completed.content)
    assert merchant.post(json={}).content == created.content
    assert merchant.statuses() == ["completed"]
    assert merchant.records() == ["acp.complete", "acp.create"]


def test_acp_6_1_two_sessions_of_one_endpoint_share_their_keys(merchant: Merchant) -> None:
    """ACP 6.1: the endpoint is the route; its path is compared, so that the key at another session is refused."""
    first, second = (f"{SESSIONS}/{merchant.post(key=key).json()['id']}/complete" for key in ("k1", "k2"))
    assert merchant.post(first).status_code == 200
    assert error(merchant.post(second)) == (422, "invalid_request", "idempotency_conflict")
    assert merchant.statuses() == ["completed", "ready_for_payment"]


BODY = b'{"a": 1, "b": [1, 2], "c": null}'


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (b'{"c":null,"b":[1,2],"a":1}', True),
        (b'{"a": 1.0, "b": [1, 2.00], "c": null}', True),
        (b'{"a": 1, "b": [2, 1], "c": null}', False),
        (b'{"a": 1, "b": [1, 2]}', False),
        (b'{"a": 1, "b": [1, 2], "c": null, "extension": {}}', False),
    ],
)
def test_acp_6_2_and_6_7_the_body_is_compared_as_a_value(merchant: Merchant, other: bytes, same: bool) -> None:
    """ACP 6.2 and 6.7: names have no order, 1.0 is 1, arrays have an order, null is a value, extensions count."""
    json = {"Content-Type": "application/json"}
    first = merchant.post(content=BODY, headers=json)
    again = merchant.post(content=other, headers={**json, "User-Agent": "another", "Request-Id": "r2"})
    assert first.status_code == 201
    if same:
        assert (again.status_code, again.content) == (201, first.content)
    else:
        assert error(again) == (422, "invalid_request", "idempotency_conflict")
    assert len(merchant.statuses()) == 1


def test_acp_6_3_a_repetition_gets_the_first_answer(merchant: Merchant) -> None:
    """ACP 6.3: the same status and bytes, marked as replayed, though the checkout has changed; nothing runs again."""
    first = merchant.post()
    assert merchant.post(f"{SESSIONS}/{first.json()['id']}/complete", "k2").status_code == 200
    again = merchant.post()
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert merchant.statuses() == ["completed"]


def test_acp_6_4_a_key_with_another_body_is_422(merchant: Merchant) -> None:
    """ACP 6.4: idempotency_conflict, as often as it comes, and the first answer remains."""
    first = merchant.post(json={"quantity": 1})
    for _ in range(2):
        assert error(merchant.post(json={"quantity": 2})) == (422, "invalid_request", "idempotency_conflict")
    assert merchant.post(json={"quantity": 1}).content == first.content
    assert len(merchant.statuses()) == 1


def test_acp_6_4_a_key_whose_request_still_runs_is_409(merchant: Merchant, monkeypatch: pytest.MonkeyPatch) -> None:
    """ACP 6.4: idempotency_in_flight with Retry-After once the wait is over, and the answer after that."""
    monkeypatch.setattr(recording, "CLAIM_TIMEOUT", 0.3)
    entered, go_on = threading.Event(), threading.Event()

    async def slow(session: UnitSession) -> dict[str, str]:
        session.add(Checkout(id="slow", status="ready"))
        entered.set()
        assert await asyncio.to_thread(go_on.wait, 30)
        return {"id": "slow"}

    merchant.serve("/slow", slow)
    first = merchant.shop.harness.start(merchant.post, "/slow")
    try:
        assert entered.wait(30)
        busy = merchant.post("/slow")
    finally:
        go_on.set()
    assert error(busy) == (409, "invalid_request", "idempotency_in_flight")
    assert busy.headers["retry-after"] == "1"
    assert first.result().status_code == 200
    assert merchant.post("/slow").content == first.result().content
    assert (merchant.statuses(), merchant.records()) == (["ready"], ["acp.slow"])


def test_acp_6_5_a_5xx_is_not_recorded(merchant: Merchant) -> None:
    """ACP 6.5: the endpoint runs afresh with the same key, and its own writes are gone before."""
    statuses = [503, 200]

    async def stumble(session: UnitSession) -> fastapi.Response:
        session.add(Checkout(id="once", status="ready"))
        return fastapi.Response(status_code=statuses.pop(0))

    merchant.serve("/stumble", stumble)
    assert merchant.post("/stumble").status_code == 503
    assert (merchant.statuses(), merchant.records()) == ([], [])
    again = merchant.post("/stumble")
    assert (again.status_code, "idempotent-replayed" in again.headers) == (200, False)
    assert merchant.statuses() == ["ready"]


@pytest.mark.parametrize(("hours", "kept"), [(25, True), (167, True), (169, False)])
def test_acp_6_6_a_record_is_kept_for_24_hours(merchant: Merchant, hours: int, kept: bool) -> None:
    """ACP 6.6 and UCP, Replay Protection: cleanup keeps it for a week; the key is new after that."""
    first = merchant.post()
    merchant.shop.desk.age(hours / 24)
    harness = merchant.shop.harness
    harness.run(greenlet_spawn, prune, harness.engine, tables=default_command_tables)
    again = merchant.post()
    assert again.status_code == 201
    assert (again.content == first.content) is kept
    assert len(merchant.statuses()) == (1 if kept else 2)


def test_acp_6_8_key_and_rows_commit_in_one_transaction(merchant: Merchant) -> None:
    """ACP 6.8: while the transaction is open, another connection sees neither; after an error, neither is there."""
    seen: list[tuple[list[str], list[str]]] = []

    async def broken(session: UnitSession) -> None:
        session.add(Checkout(id="broken", status="ready"))
        await session.flush()
        seen.append(await asyncio.to_thread(lambda: (merchant.statuses(), merchant.records())))
        raise RuntimeError

    merchant.serve("/broken", broken)
    assert merchant.post("/broken").status_code == 500
    assert seen == [([], [])]
    assert (merchant.statuses(), merchant.records()) == ([], [])
    merchant.post()
    assert (merchant.statuses(), merchant.records()) == (["ready_for_payment"], ["acp.create"])


# UCP, signatures.md "Replay Protection" and checkout-rest.md "HTTP Headers" -------------------------------------------


def test_ucp_a_key_with_another_payload_is_409(merchant: Merchant) -> None:
    """UCP, HTTP Headers: 409 for other parameters, the first result for the same ones."""
    code = CODE.replace("body=", "mismatch_status=409, body=")
    merchant = open_on(merchant.shop, merchant.shop.harness.subject.url, code)
    first, again, other = (merchant.post(json={"quantity": each}) for each in (1, 1, 2))
    assert (again.status_code, again.content, other.status_code) == (201, first.content, 409)
    assert len(merchant.statuses()) == 1


def test_ucp_unreleased_bytes_are_not_compared(merchant: Merchant) -> None:
    """UCP's unreleased text would refuse the same JSON in other bytes; the library repeats the answer."""
    json = {"Content-Type": "application/json"}
    first, again = (merchant.post(content=body, headers=json) for body in (b'{"quantity":1}', b'{"quantity": 1}'))
    assert (again.status_code, again.content) == (201, first.content)


@pytest.mark.parametrize("driver", [driver for driver in MERCHANTS if driver.engine == "postgresql"], ids=str)
def test_ucp_without_the_database_503(request: pytest.FixtureRequest, driver: Driver) -> None:
    """UCP, Replay Protection: the request is refused with 503 if the key cannot be stored."""
    with shop_on(request, driver) as shop, CutProxy(request.getfixturevalue(driver.engine).url()) as proxy:
        url = proxy.through(shop.harness.subject.url)
        merchant = open_on(shop, url, retry=RetryPolicy(attempts=2))
        proxy.__exit__(None, None, None)
        refused = merchant.post()
        assert error(refused) == (503, "service_unavailable", "try-again")
        assert refused.headers["retry-after"] == "1"


# AdCP, security.mdx "Idempotency": tasks whose arguments have the key ------------------------------------------------

EXCLUDED = ("idempotency_key", "context", "governance_context")


def payload(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a task without the fields that AdCP excludes."""
    compared = {name: value for name, value in asked.items() if name not in EXCLUDED}
    if config := compared.get("push_notification_config"):
        signing = {name: value for name, value in config["authentication"].items() if name != "credentials"}
        compared["push_notification_config"] = {**config, "authentication": signing}
    return compared


class Seller:
    """A seller of media: one operation for all tasks."""

    def __init__(self, desk: Any, body: Any = None) -> None:
        self.desk = desk

        def run(asked: dict[str, Any], call: Call) -> Placed:
            return place(PlaceOrder(asked["budget"]), call)

        self.operation = desk.operation(body or run, "adcp", fingerprint=payload)

    def ask(self, account: str = "a1", commands: Any = None, **arguments: Any) -> Any:
        """Run a task of one agent."""
        asked = {"idempotency_key": "k" * 16, "budget": 3, **arguments}
        key = asked["idempotency_key"]
        return self.desk.handle(self.operation, asked, key, commands, scope=f"agent-1:{account}")


@pytest.fixture(params=MERCHANTS, ids=str)
def desk(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A desk on PostgreSQL and on SQLite."""
    with desk_on(request, request.param) as desk:
        yield desk


def test_adcp_2_and_4_a_repetition_gets_the_first_success(desk: Any) -> None:
    """AdCP, rules 2 and 4: the result as it was, marked as replayed, for the same agent and account."""
    seller = Seller(desk)
    first, other, again = seller.ask(), seller.ask("a2"), seller.ask()
    assert [each.replayed for each in (first, other, again)] == [False, False, True]
    assert again.result == first.result != other.result
    assert desk.spent() == 6


def test_adcp_3_an_error_is_not_recorded(desk: Any) -> None:
    """AdCP, rule 3: after an exception of the handler, a retry with the key executes."""
    failures = [LookupError("no inventory")]

    def run(asked: dict[str, Any], call: Call) -> Placed:
        placed = place(PlaceOrder(asked["budget"]), call)
        if failures:
            raise failures.pop()
        return placed

    seller = Seller(desk, run)
    with pytest.raises(LookupError):
        seller.ask()
    assert (desk.spent(), desk.records()) == (0, [])
    assert not seller.ask().replayed
    assert desk.spent() == 3


PUSH = {"url": "https://buyer.example/hook", "authentication": {"schemes": ["Bearer"], "credentials": "s1"}}


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"context": {"trace": 2}, "governance_context": "t2"}, True),
        ({"push_notification_config": {**PUSH, "authentication": {"schemes": ["Bearer"], "credentials": "s2"}}}, True),
        ({"push_notification_config": {**PUSH, "url": "https://buyer.example/other"}}, False),
        ({"budget": 4}, False),
        ({"ext": {}}, False),
        ({"note": None}, False),
        ({"task": "update_media_buy"}, False),
    ],
    ids=str,
)
def test_adcp_5_another_payload_is_a_conflict(desk: Any, other: dict[str, Any], same: bool) -> None:
    """AdCP, rule 5 and Payload equivalence: the four fields are not compared, all others are, and null is a value."""
    seller = Seller(desk)
    before: dict[str, Any] = {"task": "create_media_buy", "push_notification_config": PUSH, "context": {"trace": 1}}
    seller.ask(**before)
    if same:
        assert seller.ask(**{**before, **other}).replayed
    else:
        with pytest.raises(KeyReusedError):
            seller.ask(**{**before, **other})
    assert desk.spent() == 3


def test_adcp_6_an_expired_key_runs_again(desk: Any) -> None:
    """AdCP, rule 6 is not met: after its record was deleted, a key is new."""
    seller = Seller(desk)
    seller.ask()
    desk.harness.transact(lambda session: session.execute(default_command_tables.marker.delete()))
    assert not seller.ask().replayed
    assert desk.spent() == 6


def test_adcp_9_a_concurrent_request_waits_or_is_refused(desk: Any) -> None:
    """AdCP, rule 9: the second one gets the answer of the first, or ``InProgress`` after the claim timeout.

    Another payload is a conflict when the first one has ended, and not before.
    """
    entered, go_on = threading.Event(), threading.Event()

    def slow(asked: dict[str, Any], call: Call) -> Placed:
        entered.set()
        desk.harness.blocking(go_on.wait, 30)
        return place(PlaceOrder(asked["budget"]), call)

    seller = Seller(desk, slow)
    first = desk.harness.start(seller.ask)
    try:
        assert entered.wait(30)
        for budget in (3, 4):
            with pytest.raises(InProgress):
                seller.ask(commands=desk.commands(claim_timeout=0.3), budget=budget)
        waiting = [desk.harness.start(seller.ask, budget=budget) for budget in (3, 4)]
        desk.harness.waits()
        assert not any(each.done() for each in waiting)
    finally:
        go_on.set()
    assert waiting[0].result().result == first.result().result
    with pytest.raises(KeyReusedError):
        waiting[1].result()
    assert desk.spent() == 3


# The two options of the library --------------------------------------------------------------------------------------


def test_records_of_the_one_operation_are_found_under_each_route(merchant: Merchant) -> None:
    """With ``formerly``, old code and new code find each other's records, and a key at another route is still 422."""
    shop, url = merchant.shop, merchant.shop.harness.subject.url
    before = open_on(shop, url, CODE.replace(', name="acp", each_route=True', ""))
    app = shop.app
    first = before.post()
    assert before.records() == ["http-endpoint"]
    after = open_on(shop, url, CODE.replace("each_route=True", 'each_route=True, formerly=["http-endpoint"]'))
    assert after.post().content == first.content
    second = after.post(key="k2")
    complete = f"{SESSIONS}/{second.json()['id']}/complete"
    assert error(after.post(complete, "k2"))[0] == 422
    shop.app = app
    assert before.post(key="k2").content == second.content
    assert len(merchant.statuses()) == 2
    shop.app = open_on(shop, url).shop.app  # formerly is gone
    assert merchant.post(key="k2").content == second.content
    assert merchant.post(complete, "k2").status_code == 200


def test_the_name_of_a_route_is_declared(merchant: Merchant) -> None:
    """A prefix changes no operation, because the path is not part of its name; a new name finds no old record."""
    merchant.page["app"].include_router(merchant.page["router"], prefix="/v1")
    assert merchant.post().status_code == 201
    assert error(merchant.post(f"/v1{SESSIONS}")) == (422, "invalid_request", "idempotency_conflict")
    assert merchant.post(f"/v1{SESSIONS}", "k2").status_code == 201
    assert merchant.records() == ["acp.create"] * 2
    renamed = open_on(merchant.shop, merchant.shop.harness.subject.url, CODE.replace('name="create"', 'name="open"'))
    assert "idempotent-replayed" not in renamed.post().headers
    assert sorted(merchant.records()) == ["acp.create", "acp.create", "acp.open"]


@pytest.mark.parametrize("driver", [driver for driver in SMALL if not driver.is_async], ids=str)
def test_flask_names_each_endpoint_and_shapes_its_errors(request: pytest.FixtureRequest, driver: Driver) -> None:
    """In Flask, each decorator has a ``name=``, and ``install`` takes ``body=`` too."""
    with shop_on(request, driver) as shop:
        shop.install(type_base="", body=lambda told: {"code": told.members["type"], "status": told.status})
        for path in ("/create", "/complete"):
            shop.records(lambda _asked, _session: Reply(200, {}), path, name=f"acp.{path[1:]}")
        assert [shop.send(path=path).status_code for path in ("/create", "/complete")] == [200, 200]
        assert [operation for _, operation, _ in shop.desk.records()] == ["acp.complete", "acp.create"]
        other = shop.send(path="/create", json={"amount": 4})
        assert (other.status_code, other.headers["content-type"]) == (422, "application/json")
        assert other.json() == {"code": "key-reused", "status": 422}


def test_a_shape_changes_neither_status_nor_headers() -> None:
    """``body`` is given the problem, and replaces its members and its content type only."""
    given: list[Problem] = []

    def shape(told: Problem) -> dict[str, Any]:
        given.append(told)
        return {"code": "x"}

    usual, shaped = Answers().to(InProgress("busy")), Answers(body=shape).to(InProgress("busy"))
    assert given == [usual]
    assert (shaped.status, shaped.headers, shaped.body) == (usual.status, usual.headers, b'{"code":"x"}')
    assert (usual.content_type, shaped.content_type) == ("application/problem+json", "application/json")
