"""An endpoint that calls ``handle`` and renders the result, in FastAPI and in Flask, on every engine."""

import threading
from collections.abc import Iterator

import pytest

import command_rig
from command_rig import Placed, PlaceOrder, place
from cut_proxy import Cut, CutProxy
from databases import Driver
from http_rig import SERVERS, WEB, Shop, commits, problem, shop_on
from projector_dedup.commands import Call, Rejected
from projector_dedup.options import RetryPolicy
from walk import files_entered, map_anew


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


def test_a_request_is_done_once_and_answered_as_often_as_it_comes(shop: Shop) -> None:
    """The second answer says that it is a recorded one, and is otherwise the first."""
    shop.sells()
    first, quoted, other = shop.send(), shop.send(key='"k1"'), shop.send(key="k2")
    assert (first.status_code, first.json()) == (201, {"number": 1, "left": 999_997})
    assert (quoted.status_code, quoted.content) == (first.status_code, first.content)
    assert "idempotent-replayed" not in first.headers
    assert quoted.headers["idempotent-replayed"] == "true"
    assert first.headers["idempotency-key"] == quoted.headers["idempotency-key"] == "k1"
    assert other.json()["number"] == 2
    assert shop.desk.orders() == ["k1", "k2"]


@pytest.mark.parametrize(
    ("key", "kind"),
    [(None, "key-missing"), ("a b", "key-malformed"), ("x" * 256, "key-malformed"), (["a", "a"], "key-malformed")],
    ids=["none", "malformed", "long", "twice"],
)
def test_a_key_that_cannot_be_read_is_400(small: Shop, key: str | list[str] | None, kind: str) -> None:
    """Nothing ran."""
    small.sells()
    assert problem(small.send(key=key)) == (400, kind)
    assert small.desk.ran == []


def test_a_key_that_is_too_long_with_its_scope_is_400(small: Shop) -> None:
    """Both together have the room of a message id."""
    small.sells(scope="s" * 300)
    assert problem(small.send(key="x" * 255)) == (400, "key-unusable")


@pytest.mark.parametrize("scope", [7, None])
def test_a_scope_that_the_program_gets_wrong_is_500(small: Shop, scope: object) -> None:
    """The client's key is innocent, and somebody is told: a number is no scope, nor is none where one is required."""
    small.sells(commands=small.desk.commands(scope="required"), scope=scope)
    assert small.send().status_code == 500
    assert small.desk.ran == []


def test_a_request_may_come_without_a_key_where_none_is_required(small: Shop) -> None:
    """It is done each time that it comes."""
    small.sells(required=False)
    answers = [small.send(key=None) for _ in range(2)]
    assert [answer.json()["number"] for answer in answers] == [1, 2]
    assert all("idempotency-key" not in answer.headers for answer in answers)
    assert small.desk.records() == []


def test_a_key_that_comes_with_another_request_is_422(shop: Shop) -> None:
    """Nothing of the first request's answer is shown."""
    shop.sells()
    shop.send()
    reused = shop.send(json={"amount": 4})
    assert problem(reused) == (422, "key-reused")
    assert "left" not in reused.text
    assert "retry-after" not in reused.headers
    assert shop.desk.spent() == 3


def test_a_request_that_is_still_in_progress_is_409(shop: Shop) -> None:
    """The client learns when to ask again, and gets the answer then."""
    entered, go_on = threading.Event(), threading.Event()

    def slow(order: PlaceOrder, call: Call) -> Placed:
        entered.set()
        shop.harness.blocking(go_on.wait, 30)
        return place(order, call)

    shop.sells(slow, shop.desk.commands(claim_timeout=0.3))
    first = shop.harness.start(shop.send)
    assert entered.wait(30)
    busy = shop.send()
    go_on.set()
    assert problem(busy) == (409, "in-progress")
    assert busy.headers["retry-after"] == "1"
    assert first.result().status_code == 201
    assert shop.send().json() == first.result().json()
    assert len(shop.desk.ran) == 1


def test_the_same_key_with_another_request_waits_for_the_first_and_is_422(shop: Shop) -> None:
    """What the first was is not visible until it has committed: the second learns then that the key was reused."""
    entered, go_on = threading.Event(), threading.Event()

    def slow(order: PlaceOrder, call: Call) -> Placed:
        entered.set()
        shop.harness.blocking(go_on.wait, 30)
        return place(order, call)

    shop.sells(slow)
    first = shop.harness.start(shop.send)
    assert entered.wait(30)
    second = shop.harness.start(shop.send, json={"amount": 4})
    shop.harness.waits()
    assert not second.done()
    go_on.set()
    assert first.result().status_code == 201
    assert problem(second.result()) == (422, "key-reused")
    assert (len(shop.desk.ran), shop.desk.spent()) == (1, 3)


def test_concurrent_requests_get_one_answer(shop: Shop) -> None:
    """One of them runs, and the others wait for its answer."""
    shop.sells()
    together = threading.Barrier(4)

    def send() -> tuple[int, bytes]:
        together.wait(30)
        answer = shop.send()
        return answer.status_code, answer.content

    answers = [each.result() for each in [shop.harness.start(send) for _ in range(4)]]
    assert len(set(answers)) == 1
    assert answers[0][0] == 201
    assert (shop.desk.orders(), shop.desk.spent()) == (["k1"], 3)


def test_a_rejection_is_an_answer_that_is_recorded(shop: Shop) -> None:
    """Its code decides the status; the second time it is a recorded one."""

    def refuse(order: PlaceOrder, call: Call) -> Placed:
        place(order, call)
        raise Rejected("too_late" if order.amount == 3 else "insufficient_funds", {"missing": 5})

    shop.install(on_rejected={"too_late": 410})
    shop.sells(refuse)
    first, again, other = shop.send(), shop.send(), shop.send(key="k2", json={"amount": 4})
    assert problem(first) == problem(again) == (410, "rejected")
    assert (first.json()["code"], first.json()["info"]) == ("too_late", {"missing": 5})
    assert again.content == first.content
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert (problem(other), other.json()["code"]) == ((422, "rejected"), "insufficient_funds")
    assert (len(shop.desk.ran), shop.desk.orders()) == (2, [])


def test_a_duplicate_that_the_endpoint_did_not_want_is_409(small: Shop) -> None:
    """``raise_on_duplicate=True`` is for endpoints that do not give the answer twice."""
    small.sells(raise_on_duplicate=True)
    assert small.send().status_code == 201
    assert problem(small.send()) == (409, "duplicate")


def test_a_bug_is_the_frameworks_500_and_leaves_the_key_free(shop: Shop) -> None:
    """It is no answer: the next request with the key runs."""
    fails = [True, False]

    def stumble(order: PlaceOrder, call: Call) -> Placed:
        placed = place(order, call)
        if fails.pop(0):
            raise ValueError("a bug")
        return placed

    shop.sells(stumble)
    assert shop.send().status_code == 500
    assert (shop.desk.orders(), shop.desk.records()) == ([], [])
    assert shop.send().status_code == 201


# C14: no byte of an answer before its COMMIT --------------------------------------------------------------------------


@pytest.fixture
def proxy(request: pytest.FixtureRequest) -> Iterator[CutProxy]:
    """A line to the driver's server that can be cut at COMMIT."""
    driver: Driver = request.getfixturevalue("driver")
    with CutProxy(request.getfixturevalue(driver.engine).url()) as proxy:
        yield proxy


@pytest.fixture
def cut_shop(request: pytest.FixtureRequest, driver: Driver) -> Iterator[Shop]:
    """A shop whose commands go through the proxy, and that looks at the database on a line of its own."""
    with shop_on(request, driver) as shop:
        shop.install()
        yield shop


on_servers = pytest.mark.parametrize("driver", SERVERS, ids=str)


def commands_through(shop: Shop, proxy: CutProxy, **options: object) -> object:
    """Commands whose connections go through the proxy."""
    return shop.desk.commands(shop.factory_through(proxy), **options)


@on_servers
def test_no_byte_of_an_answer_leaves_before_its_commit(cut_shop: Shop, proxy: CutProxy) -> None:
    """The server has answered COMMIT before the first byte, for the first answer and for a recorded one."""
    cut_shop.sells(commands=commands_through(cut_shop, proxy))

    def look(where: Cut, trip: list[str]) -> None:
        if commits(trip):
            cut_shop.heard.append(f"{where} COMMIT")

    cut_shop.send(key="before")  # what an engine commits first is not the answer
    cut_shop.heard.clear()
    proxy.at_trip = look
    assert cut_shop.send().status_code == 201
    assert cut_shop.heard == ["before COMMIT", "after COMMIT", "http.response.start", "http.response.body"]


@on_servers
@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_cut_commit_is_503_and_the_same_key_gets_the_result(cut_shop: Shop, proxy: CutProxy, cut: Cut) -> None:
    """Nobody knows what became of it until the client asks again; then there is one order and one answer."""
    commands = commands_through(cut_shop, proxy, retry=RetryPolicy(attempts=1))
    cut_shop.sells(commands=commands)
    proxy.cut_commit(cut)
    unknown = cut_shop.send()
    assert problem(unknown) == (503, "try-again")
    assert unknown.headers["retry-after"] == "1"
    assert cut_shop.desk.orders() == ([] if cut == "before" else ["k1"])
    again = cut_shop.send()
    assert (again.status_code, again.json()["left"]) == (201, 999_997)
    assert again.headers.get("idempotent-replayed") == (None if cut == "before" else "true")
    assert (cut_shop.desk.orders(), cut_shop.desk.spent()) == (["k1"], 3)


@on_servers
def test_a_server_that_cannot_be_reached_is_503(cut_shop: Shop, proxy: CutProxy) -> None:
    """It is not 500: the client is told to send the request again."""
    commands = commands_through(cut_shop, proxy, retry=RetryPolicy(attempts=2))
    proxy.__exit__(None, None, None)
    cut_shop.sells(commands=commands)
    assert problem(cut_shop.send()) == (503, "try-again")


MOST = 25  # files of the library; one more tells the numbers that a float rounds


@pytest.mark.parametrize("driver", [driver for driver in WEB if driver.engine == "postgresql"], ids=str)
def test_a_command_enters_few_files(
    request: pytest.FixtureRequest, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the request to the answer, once the engine is known."""
    map_anew(monkeypatch, command_rig, "Balance", "Order")
    with shop_on(request, driver) as shop:
        shop.sells()
        for key in ("k1", "k2", "k3"):
            shop.send(key=key)
        shop.walking = files_entered
        assert shop.send(key="measured").status_code == 201
        assert 15 < len(shop.entered) <= MOST, " ".join(sorted(shop.entered))
