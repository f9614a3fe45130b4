"""An endpoint whose answers are recorded is done once for each key, in FastAPI and in Flask, on every engine."""

import gzip
import itertools
import threading
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fastapi
import flask
import pytest
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError
from starlette.middleware.sessions import SessionMiddleware

from command_rig import Balance, Order
from cut_proxy import Cut, CutProxy
from databases import Driver
from http_rig import FRAMEWORK, WEB, Reply, Shop, commits, problem, shop_on
from projector_dedup.commands import Rejected
from projector_dedup.errors import HandlerDefinitionError
from projector_dedup.http import recording as plug
from projector_dedup.http.recording import CLAIM_TIMEOUT, CODEC, PUBLIC, Answer, Received
from projector_dedup.options import RetryPolicy


@pytest.fixture(params=WEB, ids=str)
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    """A shop on each engine, in FastAPI and in Flask."""
    with shop_on(request, request.param) as shop:
        shop.install()
        yield shop


@pytest.fixture(params=[driver for driver in WEB if driver.engine == "sqlite"], ids=str)
def small(request: pytest.FixtureRequest) -> Iterator[Shop]:
    """A shop in FastAPI and in Flask on SQLite, for what no engine has a part in."""
    with shop_on(request, request.param) as shop:
        shop.install()
        yield shop


def sell(asked: Any, session: Session) -> Reply:
    """Ordinary ORM code of an endpoint."""
    amount = asked["amount"] if isinstance(asked, dict) else 1
    session.get_one(Balance, "alice").amount -= amount
    order = Order(note="sold", amount=amount)
    session.add(order)
    session.flush()
    return Reply(201, {"number": order.number, "amount": amount}, (("Location", f"/things/{order.number}"),))


def test_an_answer_is_recorded_as_it_is(shop: Shop) -> None:
    """Who asks again gets the same bytes under the same status, and the order is placed once."""
    shop.records(sell)
    first, again, other = (shop.send(path="/things", key=key) for key in ("k1", '"k1"', "k2"))
    assert (first.status_code, first.json()) == (201, {"number": 1, "amount": 3})
    assert (again.status_code, again.content) == (201, first.content)
    for name in ("content-type", "content-length", "location"):
        assert again.headers[name] == first.headers[name]
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert first.headers["idempotency-key"] == again.headers["idempotency-key"] == "k1"
    assert other.json()["number"] == 2
    assert (len(shop.desk.orders()), shop.desk.spent()) == (2, 6)
    assert [operation for _, operation, _ in shop.desk.records()] == ["http-endpoint"] * 2


def test_only_headers_that_describe_the_body_are_recorded(small: Shop) -> None:
    """Others are of the first answer alone: a cookie above all, which may be somebody's session."""
    headers = (
        *(("ETag", '"v1"'), ("Link", "<a>; rel=a"), ("Link", "<b>; rel=b"), ("Content-Language", "de")),
        *(("Set-Cookie", "session=secret"), ("X-Chosen", "1"), ("X-Other", "2")),
    )
    small.records(lambda _asked, _session: Reply(200, {}, headers), headers=["x-chosen"])
    first, again = (small.send(path="/things") for _ in range(2))
    for name in ("etag", "content-language", "x-chosen"):
        assert again.headers[name] == first.headers[name]
    assert again.headers.get_list("link") == ["<a>; rel=a", "<b>; rel=b"]
    assert {"set-cookie", "x-other"} & set(first.headers) == {"set-cookie", "x-other"}
    assert {"set-cookie", "x-other"} & set(again.headers) == set()


def test_a_refusal_that_is_returned_is_recorded_with_its_writes(small: Shop) -> None:
    """What an endpoint returns below 500 is its answer."""

    def refuse(asked: Any, session: Session) -> Reply:
        sell(asked, session)
        return Reply(409, {"why": "late"})

    small.records(refuse)
    first, again = (small.send(path="/things") for _ in range(2))
    assert (first.status_code, first.content) == (again.status_code, again.content) == (409, first.content)
    assert again.headers["idempotent-replayed"] == "true"
    assert len(small.desk.orders()) == 1


LATER = [Reply(409, kind="raised"), Reply(500, {}), Reply(503, {}), Reply(401, {}), Reply(429, {})]


@pytest.mark.parametrize("reply", LATER, ids=lambda reply: f"{reply.kind}-{reply.status}")
def test_what_is_raised_or_says_later_is_rolled_back_and_not_recorded(small: Shop, reply: Reply) -> None:
    """The next request with the key is evaluated anew."""
    replies = [reply, Reply(200, {})]

    def stumble(asked: Any, session: Session) -> Reply:
        sell(asked, session)
        return replies.pop(0)

    small.records(stumble)
    assert small.send(path="/things").status_code == reply.status
    assert (small.desk.orders(), small.desk.records()) == ([], [])
    again = small.send(path="/things")
    assert again.status_code == 200
    assert "idempotent-replayed" not in again.headers
    assert len(small.desk.orders()) == 1


def test_a_rejection_is_recorded_without_writes(shop: Shop) -> None:
    """An endpoint may raise what a command's handler may."""

    def refuse(asked: Any, session: Session) -> Reply:
        sell(asked, session)
        raise Rejected("insufficient_funds")

    shop.records(refuse)
    first, again = (shop.send(path="/things") for _ in range(2))
    assert problem(first) == problem(again) == (422, "rejected")
    assert again.headers["idempotent-replayed"] == "true"
    assert (shop.desk.orders(), len(shop.desk.records())) == ([], 1)


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_an_answer_that_is_sent_in_pieces_is_refused(small: Shop, kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It cannot be recorded before it is sent, so nothing is applied."""

    def stream(asked: Any, session: Session) -> Reply:
        sell(asked, session)
        return Reply(200, kind=kind)

    small.records(stream)
    assert small.send(path="/things").status_code == 500
    assert "piece by piece" in caplog.text or small.asynchronous  # which leaves it to the server to log
    assert (small.desk.orders(), small.desk.records()) == ([], [])


def test_an_answer_that_is_too_large_is_refused(small: Shop) -> None:
    """Nothing is cut, and nothing is applied."""

    def talk(asked: Any, session: Session) -> Reply:
        sell(asked, session)
        return Reply(200, "x" * 1_000)

    small.records(talk, commands=small.desk.commands(max_result_bytes=1_000))
    assert small.send(path="/things").status_code == 500
    assert (small.desk.orders(), small.desk.records()) == ([], [])


@pytest.mark.parametrize(
    "other",
    [
        {"json": {"amount": 4}},
        {"json": {"amount": 3, "note": ""}},
        {"params": {"a": "2", "b": "2"}},
        {"params": {}},
        {"path": "/things/8"},
        {"path": "/other"},
        {"params": [("a", "0"), ("a", "1"), ("b", "2")]},
        {"method": "PATCH", "json": {"amount": 3}},
        {"content": b'{"amount": 3}', "headers": {"Content-Type": "text/plain"}},
    ],
    ids=str,
)
def test_a_key_that_comes_with_another_request_is_422(small: Shop, other: dict[str, Any]) -> None:
    """Method, route, path, query and body are compared, and nothing runs."""
    small.records(sell, "/things/{n}")
    small.records(sell, "/other")
    request: dict[str, Any] = {"method": "POST", "path": "/things/7", "params": {"a": "1", "b": "2"}}
    assert small.send(**request).status_code == 201
    assert problem(small.send(**{**request, **other})) == (422, "key-reused")
    assert len(small.desk.orders()) == 1


def test_a_form_may_come_with_another_boundary(small: Shop) -> None:
    """A client that sends an upload again encodes it anew: its parts are compared, each byte by byte."""
    small.records(sell)
    parts: list[dict[str, Any]] = [
        {"data": {"amount": "3"}, "files": {"file": ("a.txt", content)}} for content in (b"x", b"x", b"y")
    ]
    first, again, other = (small.send(path="/things", **each) for each in parts)
    assert (first.status_code, again.content) == (201, first.content)
    assert first.request.headers["content-type"] != again.request.headers["content-type"]
    assert problem(other) == (422, "key-reused")


@pytest.mark.parametrize("path", ["/things/7%3F8", "/things/7%238", "/things/7%09"])
def test_the_whole_path_is_compared(small: Shop, path: str) -> None:
    """A decoded question mark, hash or tab belongs to the path."""
    small.records(sell, "/things/{n}")
    assert small.send(path="/things/7").status_code == 201
    assert problem(small.send(path=path)) == (422, "key-reused")


@pytest.mark.parametrize(
    "same",
    [
        {"content": b' {"note": "x",\n "amount": 3.0 } '},
        {"headers": {"Content-Type": "application/json", "User-Agent": "another"}},
        {"params": [("b", "2"), ("a", "1"), ("a", "0")]},
    ],
    ids=str,
)
def test_the_same_request_in_other_words_is_the_same(small: Shop, same: dict[str, Any]) -> None:
    """JSON is compared as a value, the query in any order of its names, and headers not at all."""
    small.records(sell)
    request: dict[str, Any] = {
        "path": "/things",
        "content": b'{"amount":3,"note":"x"}',
        "params": [("a", "1"), ("a", "0"), ("b", "2")],
        "headers": {"Content-Type": "application/json"},
    }
    first, again = small.send(**request), small.send(**{**request, **same})
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["idempotent-replayed"] == "true"


JSON = {"Content-Type": "application/json"}


def test_amounts_that_one_float_stands_for_are_two_requests(shop: Shop) -> None:
    """100000000000000000.01 and .02 are one float in Python; in other words, the first one is the same request."""
    shop.records(sell)
    amounts = ("100000000000000000.01", "100000000000000000.02", "1.0000000000000000001e17", "100000000000000000.010")
    bodies = [
        f'{{"amount": 3, "price": {amount}}}'.encode() for amount in (*amounts, f'"{amounts[0]}"', f'["{amounts[0]}"]')
    ]
    first, other, *_ = answers = [shop.send(path="/things", content=body, headers=JSON) for body in bodies]
    assert (first.status_code, problem(other)) == (201, (422, "key-reused"))
    assert [each.content == first.content for each in answers] == [True, False, True, True, False, False]
    assert len(shop.desk.orders()) == 1


def test_a_body_that_is_compressed_anew_is_the_same_request(shop: Shop) -> None:
    """A client compresses by its own clock and level; what it has compressed is compared."""
    shop.records(sell)
    bodies = [gzip.compress(b'{"amount": %d}' % amount, mtime=at) for amount, at in ((3, 1), (3, 2), (4, 1))]
    assert len(set(bodies)) == 3
    kinds = ("application/json", "text/json; charset=utf-8", "application/vnd.shop+json", "text/plain")
    for number, kind in enumerate(kinds, 1):
        said: dict[str, Any] = {"headers": {"Content-Type": kind, "Content-Encoding": "gzip"}, "key": f"k{number}"}
        first, again, other = [shop.send(path="/things", content=body, **said) for body in bodies]
        assert (first.status_code, again.status_code, again.content) == (201, 201, first.content)
        assert problem(other) == (422, "key-reused")
        assert (len(shop.desk.orders()), shop.desk.spent()) == (number, 3 * number)


def test_text_json_is_compared_as_a_value(small: Shop) -> None:
    """It is JSON by another name."""
    small.records(sell)
    bodies = (b'{"a": 1, "b": 2}', b'{"b":2,"a":1}', b'{"b":2,"a":2}')
    answers = [small.send(path="/things", content=body, headers={"Content-Type": "text/json"}) for body in bodies]
    assert answers[1].content == answers[0].content
    assert problem(answers[2]) == (422, "key-reused")


def received(body: bytes, encoding: str = "gzip", kind: str = "application/json", limit: int = 1_000) -> Any:
    """What is compared of a request."""
    return Received("POST", "/", [], kind, body, encoding, limit).fingerprint()


def test_a_request_is_inflated_up_to_its_limit_only() -> None:
    """What is larger, is cut off, has something behind it, or is in another coding, is compared by its bytes."""
    fits, larger = (gzip.compress(b"%-*d" % (length, 7), mtime=1) for length in (1_000, 1_001))
    plain = Received("POST", "/", [], "application/json", b"7").fingerprint()
    assert received(fits) == received(fits, " X-GZIP ") == plain
    torn = [larger, fits[:-1], fits + b"x", fits + fits, b"7" + fits, zlib.compress(b"7"), b""]
    for body in torn:
        assert received(body) == received(body, "") == received(body, kind="text/plain")
    for coding in ("deflate", "br", "gzip, gzip", "identity"):
        assert received(fits, coding) == received(fits, "")
    assert received(b"7") == plain  # the server has inflated it, and left the header


@pytest.mark.parametrize("app_has_a_limit", [True, False])
def test_a_bomb_is_not_inflated(small: Shop, app_has_a_limit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kilobyte holds a megabyte: no more of it is inflated than the app takes, and it is compared by its bytes."""
    inflated: list[int] = []
    make = zlib.decompressobj

    class Inflating:
        def __init__(self, **options: Any) -> None:
            self.inner = make(**options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def decompress(self, *arguments: Any) -> bytes:
            result: bytes = self.inner.decompress(*arguments)
            inflated.append(len(result))
            return result

    counted = SimpleNamespace(decompressobj=Inflating, error=zlib.error, MAX_WBITS=zlib.MAX_WBITS)
    monkeypatch.setattr(plug, "zlib", counted)  # not in gzip, by which the endpoint inflates
    limit = plug.MAX_INFLATED
    if app_has_a_limit and not small.asynchronous:
        limit = small.app.config["MAX_CONTENT_LENGTH"] = 100_000
    small.records(lambda _asked, session: sell({"amount": 3}, session))
    bombs = [gzip.compress(b" " * 50_000_000 + b"3", mtime=at) for at in (1, 1, 2)]
    headers = {"Content-Type": "text/plain", "Content-Encoding": "gzip"}
    first, again, other = [small.send(path="/things", content=bomb, headers=headers) for bomb in bombs]
    assert (first.status_code, again.content) == (201, first.content)
    assert problem(other) == (422, "key-reused")
    assert inflated == [limit + 1] * 3


RECORDED_BEFORE = [
    (
        b'{"amount":3,"note":"x"}',
        ["json", "d68cc6b8d77028d2abaa4ca7a3664a355214fc718240c09fb3964f6c6ce28e39"],
    ),
    (
        b"[1.5, 0.1, 1e3, -0.0, 30.0, 1e22, 123456789012345.6, 5e-324, 1.7976931348623157e308]",
        ["json", "736c239f74bb6ec031dd736d12accd799c4a847133448a3dcac367fa1b532eb5"],
    ),
    (
        b'{"a": 100000000000000000000001, "b": [true, null, "1.5"], "a": 2.50}',
        ["json", "44105dfba8429be6adcae6f6981cc073ce763c57bfabc502df502448574224e5"],
    ),
    (
        b"[1e999]",
        ["bytes", "a844476cdcca918383dd7ed3ef8bf750b95bbe7abc750e6c39f85b03eca87b7a"],
    ),
    (
        b'{"a": NaN}',
        ["bytes", "13ef7bbcda554c8b199abec178787dcc66021c7746aac5b2af8770a3709d9970"],
    ),
]
"""JSON bodies, and what version 0.2.0 records of them."""


@pytest.mark.parametrize(("body", "recorded"), RECORDED_BEFORE)
def test_what_was_recorded_before_is_found(body: bytes, recorded: list[str]) -> None:
    """A number that its float tells apart has the form that it always had."""
    assert Received("POST", "/", [], "application/json", body).fingerprint()["body"] == recorded


def test_scopes_have_keys_of_their_own(small: Shop) -> None:
    """Two users may send one key, and neither sees the other's answer."""
    users = itertools.cycle(["alice", "bob"])
    small.records(sell, scope=(lambda _request: next(users)) if small.asynchronous else (lambda: next(users)))
    answers = [small.send(path="/things") for _ in range(4)]
    assert [answer.json()["number"] for answer in answers] == [1, 2, 1, 2]
    assert [key for key, _, _ in small.desk.records()] == ["3:bobk1", "5:alicek1"]


def test_services_on_one_database_are_told_apart_by_name(small: Shop) -> None:
    """One key at the same path of two services is two requests, and each runs."""
    payments = Shop(small.desk)
    small.records(sell, "/confirm", name="orders")
    payments.records(sell, "/confirm", name="payments")
    answers = [shop.send(path="/confirm") for shop in (small, payments, payments)]
    assert [answer.json()["number"] for answer in answers] == [1, 2, 2]
    assert {operation for _, operation, _ in small.desk.records()} == {"orders", "payments"}


def test_a_service_gets_its_name_in_a_rolling_deploy(small: Shop) -> None:
    """With the name from before in ``formerly``, the older and the newer code find each other's records."""
    named = Shop(small.desk)
    small.records(sell)
    named.records(sell, name="payments", formerly=["http-endpoint"])
    for key, first, second in (("k1", small, named), ("k2", named, small)):
        answers = [shop.send(path="/things", key=key) for shop in (first, second)]
        assert answers[0].content == answers[1].content
    assert len(small.desk.orders()) == 2


@pytest.mark.parametrize("nobody", [None, "", 7], ids=repr)
def test_a_scope_that_names_nobody_is_a_fault_of_the_program(small: Shop, nobody: object) -> None:
    """Strangers would share their answers: 500, and nothing runs."""
    small.records(sell, scope=(lambda _request: nobody) if small.asynchronous else (lambda: nobody))
    assert small.send(path="/things").status_code == 500
    assert small.desk.orders() == []


def test_a_shared_scope_is_written_out(small: Shop) -> None:
    """There is no default; PUBLIC says that anybody may see any answer."""
    with pytest.raises(TypeError, match="scope"):
        FRAMEWORK[small.asynchronous].recorded_endpoint(small.desk.commands())
    with pytest.raises(HandlerDefinitionError, match="PUBLIC"):
        small.records(sell, scope=None)
    small.records(sell, "/public", scope=PUBLIC)
    assert [small.send(path="/public").json()["number"] for _ in range(2)] == [1, 1]


def test_wrong_arguments_are_found_when_the_endpoint_is_defined(small: Shop) -> None:
    """Not when the first request comes."""
    arguments: list[dict[str, Any]] = [
        {"headers": ["Set-Cookie"]},
        {"methods": ["GET"]},
        {"methods": []},
        {"commands": object()},
    ]
    for wrong in arguments:
        with pytest.raises(HandlerDefinitionError):
            small.records(sell, **wrong)


def test_methods_that_change_nothing_are_never_recorded(small: Shop) -> None:
    """GET needs no key, and has no session of the unit of work; PUT is recorded if asked."""
    small.records(lambda _asked, _session: Reply(200, {}), "/plain")
    small.records(sell, "/put", methods=["PUT"])
    assert small.send("GET", "/plain", key=None).status_code == 500  # the endpoint asks for a session that is not there
    assert small.send("PUT", "/plain", key=None).status_code == 500
    assert [small.send("PUT", "/put", json={"amount": 1}).json()["number"] for _ in range(2)] == [1, 1]


def test_a_key_is_required_unless_it_is_not(small: Shop) -> None:
    """Without a key the endpoint runs in a transaction of the same kind, and nothing is recorded."""
    small.records(sell)
    small.records(sell, "/optional", required=False)
    assert problem(small.send(path="/things", key=None)) == (400, "key-missing")
    assert [small.send(path="/optional", key=None).json()["number"] for _ in range(2)] == [1, 2]
    assert small.desk.records() == []


def test_an_endpoint_must_not_commit(small: Shop) -> None:
    """The commit is the unit of work's, with the record in it."""

    def commit(asked: Any, session: Session) -> Reply:
        sell(asked, session)
        session.commit()
        return Reply()

    small.records(commit)
    assert small.send(path="/things").status_code == 500


def test_an_endpoint_runs_again_after_a_conflict(shop: Shop) -> None:
    """The whole endpoint, on a new session, with the body from its beginning; the answer is that of the last run."""
    runs: list[Session] = []

    def collide(asked: Any, session: Session) -> Reply:
        reply = sell(asked, session)
        runs.append(session)
        if len(runs) < 3:
            raise StaleDataError("somebody was faster")
        return reply

    shop.records(collide)
    assert shop.send(path="/things").status_code == 201
    assert len({id(session) for session in runs}) == 3
    assert (len(shop.desk.orders()), shop.desk.spent()) == (1, 3)


class Retried(Exception):  # noqa: N818
    """A conflict on every database."""


def test_each_run_of_an_endpoint_gets_the_json_as_it_was(shop: Shop) -> None:
    """An endpoint that changes the JSON of its request gets the JSON of the client when it runs again."""
    failures = [Retried(), Retried()]

    def cents(asked: Any, session: Session) -> Reply:
        asked["amount"] *= 100
        reply = sell(asked, session)
        if failures:
            raise failures.pop()
        return reply

    shop.records(cents, commands=shop.desk.commands(retry=RetryPolicy(also=(Retried,), base=0)))
    assert shop.send(path="/things").json()["amount"] == 300
    assert (len(shop.desk.orders()), shop.desk.spent()) == (1, 300)


def test_each_run_of_an_endpoint_gets_the_session_as_it_was(small: Shop) -> None:
    """An endpoint that counts in the session of the browser counts once, and the browser gets the new session."""
    failures, browsers = [Retried(), Retried()], list[Any]()

    def count(_asked: Any, session: Session) -> Reply:
        browser = browsers[-1]
        browser["seen"] = browser.get("seen", 0) + 1
        browser["items"].append("book")
        sell({"amount": 3}, session)
        if failures:
            raise failures.pop()
        return Reply(201, dict(browser))

    small.records(count, commands=small.desk.commands(retry=RetryPolicy(also=(Retried,), base=0)))
    _keep_sessions(small, browsers)
    answer = small.send(path="/things")
    assert answer.json() == {"seen": 1, "items": ["book"]}
    assert "session=" in answer.headers["set-cookie"]


def _keep_sessions(shop: Shop, browsers: list[Any]) -> None:
    """Have the app keep sessions in cookies, begin each, and note it in ``browsers``."""
    if not shop.asynchronous:
        shop.app.secret_key = "s"

        def enter() -> None:
            flask.session["items"] = []
            browsers.append(flask.session)

        shop.app.before_request(enter)
        return

    async def around(request: fastapi.Request, call_next: Any) -> fastapi.Response:
        request.session["items"] = []
        browsers.append(request.session)
        response: fastapi.Response = await call_next(request)
        return response

    shop.app.middleware("http")(around)
    shop.app.add_middleware(SessionMiddleware, secret_key="s")


def test_concurrent_requests_get_one_answer(shop: Shop) -> None:
    """One of them runs, and the others wait for its answer."""
    shop.records(sell)
    together = threading.Barrier(4)

    def send() -> tuple[int, bytes]:
        together.wait(30)
        answer = shop.send(path="/things")
        return answer.status_code, answer.content

    answers = [each.result() for each in [shop.harness.start(send) for _ in range(4)]]
    assert set(answers) == {(201, answers[0][1])}
    assert (len(shop.desk.orders()), shop.desk.spent()) == (1, 3)


@pytest.mark.parametrize("driver", [driver for driver in WEB if driver.engine == "postgresql"], ids=str)
def test_a_duplicate_waits_for_a_bounded_time(
    request: pytest.FixtureRequest, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who sends a slow request again holds no connection for longer than 5 s, without a word in ``Commands``."""
    assert CLAIM_TIMEOUT == 5.0
    monkeypatch.setattr(plug, "CLAIM_TIMEOUT", 0.3)
    with shop_on(request, driver) as shop:
        shop.install()
        entered, go_on = threading.Event(), threading.Event()

        def slow(asked: Any, session: Session) -> Reply:
            entered.set()
            shop.harness.blocking(go_on.wait, 30)
            return sell(asked, session)

        shop.records(slow)
        first = shop.harness.start(shop.send, path="/things")
        assert entered.wait(30)
        try:
            busy = shop.harness.start(shop.send, path="/things").result(timeout=10)
        finally:
            go_on.set()
        assert problem(busy) == (409, "in-progress")
        assert busy.headers["retry-after"] == "1"
        assert first.result().status_code == 201
        assert shop.send(path="/things").content == first.result().content


USUAL_SERVERS = [driver for driver in WEB if driver.engine != "sqlite"]  # test_endpoints.py tries every driver


# C14 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", USUAL_SERVERS, ids=str)
@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_cut_commit_is_503_and_the_same_key_gets_the_answer(
    request: pytest.FixtureRequest, driver: Driver, cut: Cut
) -> None:
    """No byte leaves before the server has answered COMMIT, and an answer that is lost is found again."""
    with shop_on(request, driver) as shop, CutProxy(request.getfixturevalue(driver.engine).url()) as proxy:
        shop.install()
        factory = shop.factory_through(proxy)
        shop.records(sell, commands=shop.desk.commands(factory, retry=RetryPolicy(attempts=1)))
        proxy.cut_commit(cut)
        unknown = shop.send(path="/things")
        assert problem(unknown) == (503, "try-again")
        assert unknown.headers["retry-after"] == "1"
        assert len(shop.desk.orders()) == (cut == "after")
        shop.heard.clear()
        proxy.at_trip = lambda where, trip: shop.heard.append(where) if commits(trip) else None
        again = shop.send(path="/things")
        assert (again.status_code, again.json()["amount"]) == (201, 3)
        assert (len(shop.desk.orders()), shop.desk.spent()) == (1, 3)
        if cut == "before":
            assert shop.heard == ["before", "after", "http.response.start", "http.response.body"]


@pytest.mark.parametrize("driver", USUAL_SERVERS, ids=str)
def test_who_lost_the_commit_gets_the_answer_that_was_recorded(request: pytest.FixtureRequest, driver: Driver) -> None:
    """A rival may have been faster than the second attempt: the answer of the first, rolled back, is not sent."""
    with shop_on(request, driver) as shop, CutProxy(request.getfixturevalue(driver.engine).url()) as proxy:
        runs = itertools.count(1)
        rival: list[Any] = []

        def view(_asked: Any, session: Session) -> Reply:
            session.add(Order(note="sold", amount=1))
            return Reply(201, {"run": next(runs)})

        def overtake(where: Cut, trip: list[str]) -> None:
            if where == "before" and commits(trip) and not rival:
                rival.append(shop.harness.start(direct.send, path="/things"))
                shop.harness.waits()  # for the claim of the attempt that is about to be lost
                raise EOFError

        direct = Shop(shop.desk)
        direct.records(view)
        shop.records(view, commands=shop.desk.commands(shop.factory_through(proxy)))
        shop.send(path="/things", key="before")  # what an engine commits first is not the answer
        proxy.at_trip = overtake
        answer = shop.send(path="/things")
        assert answer.status_code == 201
        assert answer.content == rival[0].result().content
        assert len(shop.desk.orders()) == 2


# Without a framework -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [Answer(204, (), b""), Answer(201, (("Content-Type", "a"), ("Link", "é\n"), ("Link", "b")), b"\n\x00\xff\n")],
    ids=str,
)
def test_an_answer_comes_back_as_it_was(answer: Answer) -> None:
    """Bytes are bytes, and headers keep their order."""
    assert CODEC.loads(CODEC.dumps(answer)) == answer


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[NaN]", b"1e400", b"[" * 100_000, b"\xff"], ids=lambda body: repr(body[:9])
)
def test_a_body_that_is_no_json_is_compared_byte_by_byte(body: bytes) -> None:
    """Whatever a client says that it is."""
    one, other = (Received("POST", "/", [], "application/json", each).fingerprint() for each in (body, body + b" "))
    assert one["body"] != other["body"]
    assert one["body"][0] == "bytes"  # type: ignore[index]


@pytest.mark.parametrize(
    ("boundary", "body", "same"),
    [
        ("b", b"--b\r\n\r\nx\r\n--b--\r\n", True),
        ('"b c"', b"--b c\r\n\r\nx\r\n--b c--\r\n", True),
        ("b", b"--b \t\r\n\r\nx\r\n--b--\r\n", False),  # what stands behind a boundary is compared
        ("b", b"--b\r\n\r\nx--b--\r\n", False),  # no boundary: it begins no line
        ("b", b"--b\r\n\r\nx\r\n--bc\r\n", False),  # another one, which begins like it
        ("b", b"--b\r\n\r\nx\r\n--b\r\n\r\n\r\n--b--\r\n", False),
        ("b", b"--a\r\n\r\nx\r\n--a--\r\n", False),
        ("", b"--a\r\n\r\nx\r\n--a--\r\n", False),
    ],
)
def test_only_the_boundary_may_differ(boundary: str, body: bytes, same: bool) -> None:
    """Whatever else differs in a multipart body makes another request."""
    usual = Received("POST", "/", [], "multipart/form-data; boundary=a", b"--a\r\n\r\nx\r\n--a--\r\n")
    other = Received("POST", "/", [], f"multipart/form-data; charset=utf-8; boundary={boundary}", body)
    assert (usual.fingerprint() == other.fingerprint()) is same


def test_both_frameworks_offer_the_same_names() -> None:
    """Who knows one module knows the other."""
    starlette, flask = (set(FRAMEWORK[asynchronous].__all__) for asynchronous in (True, False))
    assert flask - starlette == {"idempotency_key"}
    assert starlette - flask == {"IdempotencyKey", "recorded_route"}
