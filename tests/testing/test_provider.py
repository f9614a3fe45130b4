"""The provider that lies: each lie as a client sees it, and as the log tells it."""

import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from projector_dedup.testing.provider import Behaviour, Provider, _State

CUT = "cut"  # the client finds its connection closed, or refused
CLIENT = httpx.Client(verify=False, trust_env=False, timeout=30)  # no certificates to read
Background = Callable[..., Future[Any]]


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[Provider]:
    """A provider that forgets nothing, whose index does not lag, and that is late by half a second."""
    with Provider(tmp_path / "log", delay=0.5) as provider:
        yield provider


@pytest.fixture
def background() -> Iterator[Background]:
    """Run a function in a thread."""
    with ThreadPoolExecutor(8) as threads:
        yield threads.submit


def post(provider: Provider, key: str | None = "k", patience: float = 30, **body: Any) -> tuple[Any, Any]:
    """Call once; return the status and the JSON value of the answer, or `CUT` and None."""
    headers = {"Idempotency-Key": key} if key else {}
    timeout = httpx.Timeout(30, read=patience)
    try:
        answer = CLIENT.post(f"{provider.url}/deeds", json=body, headers=headers, timeout=timeout)
    except (httpx.RemoteProtocolError, httpx.ConnectError, httpx.ReadError):
        return CUT, None
    return answer.status_code, answer.json()


def listed(provider: Provider, key: str = "k") -> list[str]:
    """Return the ids of the deeds that the index has for a key."""
    answer = CLIENT.get(f"{provider.url}/deeds", params={"key": key})
    return [deed["id"] for deed in answer.raise_for_status().json()["deeds"]]


@pytest.mark.parametrize(
    ("behaviour", "first", "done", "again"),
    [
        (Behaviour.NORMAL, 201, True, 201),
        (Behaviour.LOSE_REPLY_BEFORE, CUT, False, 201),
        (Behaviour.LOSE_REPLY_AFTER, CUT, True, 201),
        (Behaviour.ANSWER_LATE, 201, True, 201),
        (Behaviour.DO_LATE, 201, True, 201),
        (Behaviour.REJECT, 402, False, 201),
        (Behaviour.ERROR_BEFORE, 500, False, 201),
        (Behaviour.ERROR_AFTER, 500, True, 500),
    ],
)
def test_each_behaviour(provider: Provider, behaviour: Behaviour, first: int | str, done: bool, again: int) -> None:
    """The answer, the deed, and what the same key gets afterwards: never a second deed."""
    provider.next(behaviour)
    assert [post(provider)[0], post(provider)[0]] == [first, again]
    lied, normal = provider.calls()
    assert (lied.behaviour, bool(lied.done), lied.answered) == (behaviour, done, None if first == CUT else first)
    assert (normal.behaviour, bool(normal.done), normal.answered) == (Behaviour.NORMAL, not done, again)
    assert listed(provider) == [f"deed_{deed.number}" for deed in provider.deeds()] != []


@pytest.mark.parametrize("late", [Behaviour.ANSWER_LATE, Behaviour.DO_LATE])
def test_late_answers(provider: Provider, late: Behaviour) -> None:
    """The deed is done before the delay, or after it, although the client gives up meanwhile."""
    provider.next(late)
    with pytest.raises(httpx.ReadTimeout):
        post(provider, patience=0.1)
    while not provider.calls()[0].answered:
        time.sleep(0.01)
    [deed] = provider.deeds()
    assert deed.done
    before, after = deed.done - deed.at, datetime.now(UTC) - deed.done
    assert (after if late is Behaviour.ANSWER_LATE else before).total_seconds() >= 0.5


def test_keys_and_tags(provider: Provider) -> None:
    """One key is one deed with one body; without the header each call is a deed, and its tag finds it."""
    assert [post(provider, amount=1) for _ in range(2)] == [(201, {"id": "deed_1"})] * 2
    assert post(provider, amount=2)[0] == 422
    tagged = [post(provider, None, tag="t")[1]["id"] for _ in range(2)]
    assert listed(provider, "t") == tagged == ["deed_4", "deed_5"]
    assert [(call.key, call.body) for call in provider.deeds("t")] == [(None, {"tag": "t"})] * 2
    assert post(provider, "t", tag="t") == (201, {"id": "deed_6"})  # a tag is no key that is known
    assert CLIENT.post(f"{provider.url}/deeds", content=b"no json").status_code == 400
    assert (provider.calls()[-1].body, provider.calls()[-1].done) == ("no json", None)


def test_orders_for_the_key_go_first_then_those_for_any_call_then_chances(provider: Provider) -> None:
    """Each list is used up in its order."""
    provider.chances(seed=1, reject=1.0)
    provider.next(Behaviour.LOSE_REPLY_BEFORE, times=2)
    provider.on_key("a", [Behaviour.ERROR_BEFORE, Behaviour.NORMAL])
    assert [post(provider, key)[0] for key in "aababb"] == [500, 201, CUT, CUT, 402, 402]


def test_chances_do_not_depend_on_the_order_among_keys(tmp_path: Path) -> None:
    """The same seed, key and number is the same behaviour; the shares are those that were asked for."""
    keys = [f"{number}" for number in range(40)]
    drawn = []
    for run, (seed, order) in enumerate([(7, keys), (7, keys[::-1]), (8, keys)]):
        with Provider(tmp_path / f"{run}") as provider:
            provider.chances(seed, error_before=0.25, reject=0.25)
            for key in order:
                post(provider, key)
            drawn.append({call.key: call.behaviour for call in provider.calls()})
    assert drawn[0] == drawn[1] != drawn[2]
    assert 10 <= Counter(drawn[0].values())[Behaviour.NORMAL] <= 30


def test_the_index_lags_and_keys_are_forgotten(tmp_path: Path) -> None:
    """Each after its seconds since the deed, also in a provider that was started again."""
    with Provider(tmp_path / "log", index_lag=3600, forget_after=3600) as provider:
        assert [post(provider), post(provider)] == [(201, {"id": "deed_1"})] * 2
        assert listed(provider) == []
    with Provider(tmp_path / "log", index_lag=0.5, forget_after=0.5) as provider:
        while not listed(provider):
            time.sleep(0.02)
        [deed] = provider.deeds()
        assert time.time() - deed.at.timestamp() >= 0.5
        assert post(provider) == (201, {"id": "deed_3"})


@pytest.mark.parametrize("done", [False, True])
def test_calls_that_are_held(provider: Provider, background: Background, done: bool) -> None:
    """Their number is chosen, the next one passes, and the second to act gets the answer of the one deed."""
    with provider.held("k", calls=1, done=done):
        held = background(post, provider)
        provider.arrived("k")
        passed = post(provider)
        assert not held.done()
        with pytest.raises(TimeoutError, match="2 of 3 calls"):
            provider.arrived("k", 3, timeout=0.01)
        with pytest.raises(ValueError, match="already held"), provider.held("k"):
            pass
    assert [bool(call.done) for call in provider.calls()] == [done, not done]
    assert held.result() == passed == (201, {"id": "deed_1" if done else "deed_2"})


def test_many_calls_at_once_with_one_key_are_one_deed(provider: Provider, background: Background) -> None:
    """All of them are inside when they are released together."""
    with provider.held("k"):
        calls = [background(post, provider) for _ in range(8)]
        provider.arrived("k", 8)
        assert provider.deeds() == []
    assert len({call.result()[1]["id"] for call in calls}) == len(provider.deeds()) == 1


def test_a_kill_loses_nothing_that_was_answered(provider: Provider) -> None:
    """The log has it, half a line is cut off, and the provider knows keys, bodies, saved errors and tags again."""
    url = provider.url
    for key, status in (("a", 201), ("b", 500)):
        provider.on_key("b", [Behaviour.ERROR_AFTER])
        answer = post(provider, key, tag="t")
        provider.kill()
        assert [(call.key, call.answered) for call in provider.deeds(key)] == [(key, status)]
        with provider.log.open("ab") as log:
            log.write(b'{"call": 4, "at"')
        provider.start()
        assert (post(provider, key, tag="t"), post(provider, key)[0]) == (answer, 422)
    assert (listed(provider, "t"), provider.url) == (["deed_1", "deed_4"], url)


def test_a_provider_that_is_down_and_a_kill_within_a_call(provider: Provider, background: Background) -> None:
    """While it is down, the log has no call; after a kill, it has the call, and no deed that was not done."""
    with provider.down():
        assert post(provider, amount=0)[0] == CUT
        with pytest.raises(httpx.RemoteProtocolError):
            listed(provider)
    with provider.held("k"):
        held = background(post, provider, amount=1)
        [call] = provider.arrived("k")
        provider.kill()
    assert held.result()[0] == post(provider)[0] == CUT
    assert (call.body, call.done, call.answered) == ({"amount": 1}, None, None)


def test_calls_and_deeds_are_synced_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is on the disk before the deed is done, and again before the answer is sent."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append([*Provider(tmp_path / "log").calls()]))
    state = _State(tmp_path / "log", math.inf, 0, 0)
    assert state.post("k", {}) == (201, {"id": "deed_1"})
    state._log.close()
    assert [[bool(call.done) for call in calls] for calls in synced] == [[False], [True]]


def test_the_provider_ends_with_the_test_process(tmp_path: Path) -> None:
    """A test process that is killed leaves no provider behind."""
    script = (
        "import pathlib, time; from projector_dedup.testing.provider import Provider\n"
        "with Provider(pathlib.Path('log')) as provider: print(provider.url, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout
        url = test.stdout.readline().strip()
        assert CLIENT.get(url).status_code == 404
        test.kill()
    with pytest.raises(httpx.TransportError):  # noqa: PT012  # the provider looks twice a second
        while True:
            CLIENT.get(url)


def test_wrong_arguments(provider: Provider, tmp_path: Path) -> None:
    """Each is refused with a text that names it."""
    (tmp_path / "foreign").write_text('{"level": "INFO"}\n', encoding="utf-8")
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("delay=inf", lambda: Provider(tmp_path, delay=math.inf)),
        ("index_lag=nan", lambda: Provider(tmp_path, index_lag=math.nan)),
        ("forget_after=-1", lambda: Provider(tmp_path, forget_after=-1)),
        ("lose_replies", lambda: provider.next("lose_replies")),  # type: ignore[arg-type]
        ("'key': 1", lambda: provider.on_key(1, [Behaviour.REJECT])),  # type: ignore[arg-type]
        ("at most 1", lambda: provider.chances(1, reject=0.6, error_before=0.6)),
        ("no provider wrote", Provider(tmp_path / "foreign").start),
    ]
    for text, call in wrong:
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.parametrize(
    ("argument", "status", "text"), [("--help", 0, "--forget-after"), ("--delay=-1", 2, "delay=-1.0: give seconds")]
)
def test_the_command(tmp_path: Path, argument: str, status: int, text: str) -> None:
    """Help and wrong arguments are answered without a traceback or a warning."""
    command = [sys.executable, "-m", "projector_dedup.testing.provider", f"--log={tmp_path / 'log'}", argument]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, text in run.stdout + run.stderr) == (status, True)
    assert re.search("Traceback|Warning", run.stderr) is None
