"""Parked webhooks: what can never succeed is stored before its 200, and a person replays or drops it."""

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import MetaData, create_engine
from sqlalchemy.orm import Session, sessionmaker

from cut_proxy import Cut, CutProxy
from databases import Driver
from http_rig import WEB
from projector_dedup import Defer, Dispatcher
from projector_dedup.brokers.dead_letters import DeadLetter, Decide, Fate, Sifted, replay_each
from projector_dedup.errors import RefusedError
from projector_dedup.http.parked import default_parked_tables, make_parked_tables
from projector_dedup.http.webhook import Webhook
from rig import NOTHING, ONCE, ONE_ATTEMPT, Durable, Rig, RigOn, add, handler_of
from webhook_rig import IDS, PROVIDERS, SECRET, SENT, TYPES, Hook, Sent, from_yours, yours

TABLE = "parked_webhook"
HASH = f"sha256:{hashlib.sha256(b'[').hexdigest()}"
everywhere = pytest.mark.parametrize("driver", WEB, ids=str)
in_each_framework = pytest.mark.parametrize("driver", [each for each in WEB if each.engine == "sqlite"], ids=str)
on_servers = pytest.mark.parametrize("driver", [each for each in WEB if each.engine != "sqlite"], ids=str)


class Parks:
    """A webhook that parks, on empty tables. Its handler fails on every event while ``fails`` is set."""

    def __init__(self, rig: Rig, provider: Any = None, **options: Any) -> None:
        engine = create_engine(rig.outside.database.url())
        default_parked_tables.marker.metadata.create_all(engine)
        engine.dispose()
        self.rig, self.fails = rig, "the account 4711 is unknown"
        self.hook = Hook(rig, provider or yours(), self._handle, on_reject="park", **options)
        self.webhook: Webhook = self.hook.webhook

    def _handle(self, _event: Any, session: Session) -> None:
        add(session)
        if self.fails:
            raise ValueError(self.fails)

    def send(self, sent: Sent) -> tuple[int, str]:
        """Send a request. Return the status and the outcome of the answer."""
        answer = self.hook.send(sent)
        assert "4711" not in answer.text
        return answer.status_code, answer.json()["outcome"]

    def rows(self) -> list[tuple[Any, ...]]:
        """Return id, provider, reason, headers and body of each row, as another connection sees them."""
        found = self.rig.outside.execute(f"select message_id, handler, reason, headers, body from {TABLE} order by 1")
        return [(*map(_text, row[:3]), json.loads(_text(row[3])), bytes(row[4])) for row in found]

    def ids(self) -> list[str]:
        """Return the ids of the parked requests."""
        return [row[0] for row in self.rows()]

    def settle(self, decide: Decide) -> Sifted:
        """Settle the parked requests as a person decides."""
        sifted: Sifted = self.rig.result(self.webhook.settle_dead_letters(decide))
        return sifted

    def replay(self) -> list[str]:
        """Replay every parked request, and return the outcomes of the messages."""
        self.hook.seen.all.clear()
        self.settle(replay_each)
        return [each.outcome for each in self.hook.seen.all if each.kind == "message"]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else value


@pytest.fixture(name="parks")
def parks_fixture(driver: Driver, rig_on: RigOn) -> Iterator[Parks]:
    """A webhook that parks, on the driver of the test."""
    rig = rig_on(driver, connect_args={"timeout": 30} if driver.engine == "sqlite" else {})
    with emptied(rig):
        yield Parks(rig)


@contextlib.contextmanager
def emptied(rig: Rig) -> Iterator[None]:
    """Delete the parked requests at the end: the other tests of the module have the same database."""
    yield
    rig.outside.execute(f"delete from {TABLE}")


# The endpoint ---------------------------------------------------------------------------------------------------------


@everywhere
def test_what_can_never_succeed_is_parked_before_its_200(parks: Parks) -> None:
    """The row has the exact body, the id and the reason; nothing else is stored, and the observer counts it."""
    body = '{"note": "für\\u0000 dich"} '.encode()
    assert parks.send(from_yours(body)) == (200, "parked")
    ((key, provider, reason, headers, stored),) = parks.rows()
    assert (key, provider, stored) == ("7", "yours", body)
    assert reason == "ValueError: the account 4711 is unknown"
    assert (headers["x-id"], headers["x-type"]) == ("7", "added")
    parks.rig.assert_settled(NOTHING)
    deliveries = [(each.outcome, each.broker) for each in parks.hook.seen.all if each.kind == "delivery"]
    assert deliveries == [("rejected", "webhook"), ("dead_letter", "webhook")]


@everywhere
def test_a_request_that_comes_again_stays_one_row(parks: Parks) -> None:
    """Also 32 at once, each of them answered 200. The first body stays."""
    assert parks.send(from_yours(b'{"first": 1}')) == (200, "parked")
    answers = parks.hook.send_all([from_yours(b'{"first": 2}')] * 32)
    assert {(each.status_code, each.json()["outcome"]) for each in answers} == {(200, "parked")}
    assert [(row[0], row[4]) for row in parks.rows()] == [("7", b'{"first": 1}')]


@in_each_framework
def test_a_request_without_an_id_has_the_hash_of_its_body(parks: Parks) -> None:
    """So has one whose id cannot be stored. One that is no JSON has the id of its header."""
    without = Sent(b"[", {"X-Password": "open", "X-Type": "added"})
    sent = [without, from_yours(b"[", X_Id="x" * 513), from_yours(b"[", X_Id="8"), from_yours(b"\xff", X_Id="9")]
    assert {parks.send(each) for each in sent} == {(200, "parked")}
    assert parks.ids() == ["8", "9", HASH]


@in_each_framework
def test_an_id_in_the_body_is_that_of_the_row(driver: Driver, rig_on: RigOn) -> None:
    """An id that is not text is none."""
    rig = rig_on(driver)
    with emptied(rig):
        parks = Parks(rig, yours(id=lambda body: body["id"]))
        for body in (b'{"id": "evt"}', b'{"id": 7}', b'{"id": "\\ud800"}'):
            assert parks.send(from_yours(body)) == (200, "parked")
        assert [each[:7] for each in parks.ids()] == ["evt", "sha256:", "sha256:"]


@everywhere
def test_what_cannot_be_parked_is_503(driver: Driver, rig_on: RigOn, caplog: pytest.LogCaptureFixture) -> None:
    """The table is missing: the provider sends the request again, and the log says how to create the table."""
    parks = Parks(rig_on(driver), parked=make_parked_tables(MetaData(), "nowhere"))
    answer = parks.hook.send(from_yours())
    assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (503, {"outcome": "try again"}, "60")
    (said,) = [each for each in caplog.messages if "cannot be parked" in each]
    assert "`idempotency schema --parked --table nowhere`" in said
    assert parks.rows() == []
    parks.rig.assert_settled(NOTHING)
    parks.fails = ""
    assert parks.send(from_yours()) == (200, "applied")


@in_each_framework
def test_a_request_that_a_column_would_cut_is_503(
    driver: Driver, rig_on: RigOn, caplog: pytest.LogCaptureFixture
) -> None:
    """A body of 16 MiB, and headers of 64 KiB; the log says so."""
    parks = Parks(rig_on(driver), max_bytes=1 << 25)
    large = json.dumps("x" * (1 << 24)).encode()
    for sent in (from_yours(large), from_yours(X_Note="x" * (1 << 16))):
        assert parks.send(sent) == (503, "try again")
    assert caplog.text.count("a parked request has at most") == 2
    assert parks.rows() == []


@on_servers
@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_commit_of_a_parked_request_whose_outcome_is_unknown_is_503(driver: Driver, rig_on: RigOn, cut: Cut) -> None:
    """The next request is answered 200, and is one row in both cases."""
    rig = rig_on(driver)
    with emptied(rig), CutProxy(rig.outside.database.url()) as line:
        Parks(rig)  # the tables
        with Rig(driver, rig.outside, url=line.through(rig.outside.database.url())) as through:
            parks = Parks(through, retry=ONE_ATTEMPT)
            line.cut_commit(cut)
            assert parks.send(from_yours()) == (503, "try again")
            assert parks.ids() == (["7"] if cut == "after" else [])
            assert parks.send(from_yours()) == (200, "parked")
            assert parks.ids() == ["7"]


@in_each_framework
def test_401_413_and_503_are_never_parked(parks: Parks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has signed the first, nobody has read the second whole, and the third may succeed."""
    unsigned = replace(from_yours(), headers={"X-Id": "7", "X-Type": "added"})
    assert parks.send(unsigned) == (401, "not verified")
    assert parks.send(from_yours(b'"' + b"x" * 1000 + b'"')) == (413, "too large")

    def wait(_event: object, _session: Session) -> None:
        raise Defer("not yet")

    early = Parks(parks.rig)
    monkeypatch.setattr(early, "fails", "")
    early.hook = Hook(parks.rig, yours(), wait, on_reject="park")
    assert early.send(from_yours()) == (503, "try again")
    assert parks.rows() == []


@in_each_framework
def test_by_default_nothing_is_parked(driver: Driver, rig_on: RigOn) -> None:
    """The endpoint answers 400 and 422, and needs no table."""
    parks = Parks(rig_on(driver))
    hook = Hook(parks.rig, yours(), parks._handle)
    assert [hook.send(each).status_code for each in (from_yours(), from_yours(b"["))] == [422, 400]
    assert parks.rows() == []
    with pytest.raises(ValueError, match="parks no requests"):
        parks.rig.result(hook.webhook.settle_dead_letters(replay_each))


@pytest.mark.parametrize("provider", PROVIDERS)
@in_each_framework
def test_no_secret_is_stored(driver: Driver, provider: str, rig_on: RigOn) -> None:
    """No signature, which would permit a replay, and no password; what a replay needs is kept."""
    rig = rig_on(driver)
    with emptied(rig):
        parks = Parks(rig, PROVIDERS[provider](SECRET), takes=TYPES[provider])
        sent = SENT[provider]()
        secrets = {
            "Authorization": "Bearer abc-1",
            "Proxy-Authorization": "Basic abc-2",
            "Cookie": "session=abc-3",
            "X-Api-Key": "abc-4",
            "X-Access-Token": "abc-5",
            "X-Gateway-Secret": "abc-6",
        }
        assert parks.send(replace(sent, headers=sent.headers | secrets)) == (200, "parked")
        ((key, *_, headers, body),) = parks.rows()
        assert (key, body) == (IDS[provider], sent.body)
        signed = [value for name, value in sent.headers.items() if "sig" in name.lower() or "hmac" in name.lower()]
        assert len(signed) == 1
        assert [value for value in (*signed, *secrets.values()) if value in headers.values()] == []
        assert "content-type" in headers
        parks.fails = ""
        assert parks.replay() == ["applied"]


@in_each_framework
def test_a_header_with_the_id_is_kept_whatever_its_name_is(driver: Driver, rig_on: RigOn) -> None:
    """A replay could not find the id without it."""
    rig = rig_on(driver)
    with emptied(rig):
        parks = Parks(rig, yours(id="Idempotency-Key"))
        assert parks.send(from_yours(Idempotency_Key="k-1")) == (200, "parked")
        parks.fails = ""
        assert parks.replay() == ["applied"]
    assert rig.durable() == ONCE


# Replay ---------------------------------------------------------------------------------------------------------------


@everywhere
def test_a_parked_request_is_replayed_once(parks: Parks) -> None:
    """It is applied, and gone; the provider's own retry is a duplicate then."""
    assert parks.send(from_yours()) == (200, "parked")
    found: list[DeadLetter] = []

    def keep(letter: DeadLetter) -> Fate:
        found.append(letter)
        return "keep"

    assert parks.settle(keep) == Sifted(1, 0)
    (letter,) = found
    assert (letter.id, letter.body, letter.reason) == ("7", b"{}", "ValueError: the account 4711 is unknown")
    parks.fails = ""
    assert parks.replay() == ["applied"]
    assert (parks.rows(), parks.replay()) == ([], [])
    assert parks.send(from_yours()) == (200, "duplicate")
    parks.rig.assert_settled(ONCE)


@everywhere
def test_what_was_applied_meanwhile_is_a_duplicate(parks: Parks) -> None:
    """The provider has sent it again after the handler was corrected: the replay applies nothing, and deletes it."""
    assert parks.send(from_yours()) == (200, "parked")
    parks.fails = ""
    assert parks.send(from_yours()) == (200, "applied")
    assert parks.replay() == ["duplicate"]
    assert parks.rows() == []
    parks.rig.assert_settled(ONCE)


@everywhere
def test_two_people_who_replay_a_request_at_once_apply_it_once(parks: Parks) -> None:
    """Both have read the row before one of them begins, and neither gets an error."""
    assert parks.send(from_yours()) == (200, "parked")
    parks.hook.seen.all.clear()
    parks.fails, barrier = "", threading.Barrier(2)

    def replay(_letter: DeadLetter) -> Fate:
        if parks.rig.driver.is_async:
            return "replay"  # the first await of a replay lets the other one begin
        barrier.wait(10)
        return "replay"

    async def both() -> Any:
        return await asyncio.gather(*(parks.webhook.settle_dead_letters(replay) for _ in range(2)))

    if parks.rig.driver.is_async:
        parks.rig.run(both())
    else:
        with ThreadPoolExecutor(2) as people:
            list(people.map(parks.webhook.settle_dead_letters, (replay, replay)))
    assert sorted(each.outcome for each in parks.hook.seen.all if each.kind == "message")[0] == "applied"
    assert parks.rows() == []
    parks.rig.assert_settled(ONCE)


@everywhere
def test_a_replay_that_is_killed_before_it_deletes_is_repeated(parks: Parks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row stays; the second replay finds a duplicate, and deletes the row."""
    assert parks.send(from_yours()) == (200, "parked")
    parks.fails = ""

    def killed(_key: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parks.webhook._parking, "drop", killed)
        with pytest.raises(KeyboardInterrupt):
            parks.replay()
    assert (parks.ids(), parks.rig.durable()) == (["7"], ONCE)
    assert parks.replay() == ["duplicate"]
    assert parks.rows() == []
    parks.rig.assert_settled(ONCE)


@everywhere
def test_what_is_rejected_again_stays_with_its_new_reason(parks: Parks) -> None:
    """Also one that cannot be read."""
    assert {parks.send(each) for each in (from_yours(), from_yours(b"[", X_Id="8"))} == {(200, "parked")}
    parks.fails = "the currency is für uns unknown"
    assert parks.replay() == ["failed"]
    (seven, eight) = parks.rows()
    assert (seven[0], seven[2]) == ("7", "ValueError: the currency is f\\xfcr uns unknown")
    assert (eight[0], eight[2].partition(":")[0]) == ("8", "InvalidMessageError")
    parks.rig.assert_settled(NOTHING)


@everywhere
def test_what_a_replay_skips_stays_parked(driver: Driver, rig_on: RigOn) -> None:
    """No handler takes the type any more, or the webhook is another one of the provider: nothing was applied."""
    rig = rig_on(driver)
    with emptied(rig):
        parks = Parks(rig)
        assert parks.send(from_yours()) == (200, "parked")
        parks.hook = Hook(rig, yours(), parks._handle, on_reject="park", takes="another")
        parks.webhook = parks.hook.webhook
        assert parks.settle(replay_each) == Sifted(1, 0)
        assert [(row[0], row[2]) for row in parks.rows()] == [
            ("7", "skipped: no handler took the event, or it is late")
        ]


@in_each_framework
def test_one_that_cannot_be_read_is_listed_by_its_row(parks: Parks) -> None:
    """By its id, though it has no type: a person drops it by what the list shows."""
    assert parks.send(Sent(b"{}", {"X-Password": "open", "X-Id": "7"})) == (200, "parked")
    assert parks.settle(lambda letter: "drop" if letter.id == "7" else "keep") == Sifted(1, 1)


@in_each_framework
def test_a_person_may_keep_drop_or_stop(parks: Parks) -> None:
    """The library counts what it has settled, and what was there."""
    for number in range(4):
        assert parks.send(from_yours(X_Id=f"m{number}")) == (200, "parked")
    fates: list[Fate] = ["keep", "drop", "stop"]
    assert parks.settle(lambda _letter: fates.pop(0)) == Sifted(4, 1)
    assert (parks.ids(), fates) == (["m0", "m2", "m3"], [])


@everywhere
def test_two_sources_of_a_provider_have_rows_of_their_own(driver: Driver, rig_on: RigOn) -> None:
    """The same id of two sources is parked twice, and each webhook replays its own."""
    rig = rig_on(driver)
    with emptied(rig):
        both = [Parks(rig, source=source) for source in (None, "billing")]
        assert [each.send(from_yours()) for each in both] == [(200, "parked")] * 2
        assert [row[:2] for row in both[0].rows()] == [("7", "yours"), ("7", "yours:billing")]
        for each in both:
            each.fails = ""
            assert each.replay() == ["applied"]
        assert both[0].rows() == []
    assert rig.durable() == Durable(2, 2)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"on_reject": "keep"}, ValueError),
        ({"parked": default_parked_tables}, ValueError),
        ({"on_reject": "park", "parked": MetaData()}, TypeError),
        ({"on_reject": "park", "source": "s" * 300}, RefusedError),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], error: type[Exception]) -> None:
    """At start-up."""
    nothing = Dispatcher(sessionmaker(create_engine("sqlite://")), handler_of(None, lambda _e, _s: None, "none"))
    with pytest.raises(error):
        Webhook(nothing, yours(), **options)
