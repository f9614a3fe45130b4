"""The Idempotency-Key header is read one way, and every error of a command has one answer."""

import asyncio
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flask
import httpx
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from pages import snippets
from projector_dedup import Defer
from projector_dedup.commands import Handled, InvalidKeyError, KeyReusedError, Rejected, UnusableKeyError
from projector_dedup.commands.fingerprint import digest
from projector_dedup.commands.record import RecordKey
from projector_dedup.errors import (
    CommitOutcomeUnknown,
    InProgress,
    MissingTableError,
    RetriesExhaustedError,
    UncopyableError,
)
from projector_dedup.http.recording import Answers, IdempotencyKeyError, Received, read_key, replay_headers
from projector_dedup.outcome import Outcome

UUID = "8e03978e-40d5-43e8-bc93-6894a57f9324"


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (UUID, UUID),
        (f'"{UUID}"', UUID),
        (f"  {UUID}\t", UUID),
        ("a", "a"),
        ("x" * 255, "x" * 255),
        (f'"{"x" * 255}"', "x" * 255),
        ('"a b, c"', "a b, c"),
        (r'"say \"hi\" \\ bye"', r'say "hi" \ bye'),
        ("dGVzdA==", "dGVzdA=="),
        ("tenant:7/order;8[9]{1}~", "tenant:7/order;8[9]{1}~"),
    ],
)
def test_a_key_is_read_with_and_without_quotes(value: str, key: str) -> None:
    """A String of RFC 9651 and the bare text, as most clients send it, are one key."""
    assert read_key([value]) == key


@pytest.mark.parametrize(
    "values",
    [
        [""], ["  "], ['""'], ["a b"], ["a,b"], ['"a", "b"'], ['"a'], ['a"'], ['"'], [r'"\a"'], [r"a\b"], ["é"],
        ['"é"'], ["a\x00b"], ['"a\nb"'], ["a\r\nSet-Cookie:b"], ["x" * 256], [f'"{"x" * 256}"'], ["a", "b"], ["a", "a"],
        ['"a";q=1'],
    ],
)  # fmt: skip
def test_a_key_that_could_be_read_two_ways_is_refused(values: list[str]) -> None:
    """Empty, twice, too long, not ASCII, half quoted: none is guessed at, required or not."""
    for required in (True, False):
        with pytest.raises(IdempotencyKeyError) as told:
            read_key(values, required=required)
        assert told.value.flaw == "key-malformed"


def test_a_key_may_be_required() -> None:
    """A request without the header has no key, or is refused."""
    assert read_key([], required=False) is None
    with pytest.raises(IdempotencyKeyError) as told:
        read_key([])
    assert told.value.flaw == "key-missing"


@pytest.mark.parametrize("key", [UUID, "a b", 'say "hi"', "back\\slash", "a,b"])
def test_an_echoed_key_is_read_as_the_key_that_came(key: str) -> None:
    """A client may compare, or send the echo again; and only a recorded answer says that it is one."""
    first = replay_headers(Handled(Outcome.APPLIED, 1), key)
    again = replay_headers(Handled(Outcome.DUPLICATE, 1), key)
    assert read_key([first["Idempotency-Key"]]) == key
    assert again == {**first, "Idempotent-Replayed": "true"}
    assert replay_headers(Handled(Outcome.APPLIED, 1), None) == {}


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (IdempotencyKeyError("no", "key-missing"), 400, "key-missing", None),
        (IdempotencyKeyError("no"), 400, "key-malformed", None),
        (UnusableKeyError("secret"), 400, "key-unusable", None),
        (KeyReusedError("secret"), 422, "key-reused", None),
        (InProgress("secret"), 409, "in-progress", "1"),
        (Rejected("late"), 422, "rejected", None),
        (RetriesExhaustedError("secret"), 503, "try-again", "1"),
        (UncopyableError("secret"), 503, "try-again", "1"),
        (CommitOutcomeUnknown("secret"), 503, "try-again", "1"),
        (Defer("secret"), 503, "try-again", "1"),
    ],
)
def test_every_error_of_a_command_has_one_answer(
    error: Exception, status: int, kind: str, retry_after: str | None
) -> None:
    """Clients tell the answers apart by their type, and learn nothing of the database from them."""
    problem = Answers().to(error)
    assert problem.status == problem.members["status"] == status
    assert problem.members["type"] == f"urn:projector-dedup:problem:{kind}"
    assert problem.headers.get("Retry-After") == retry_after
    assert b"secret" not in problem.body


def test_an_error_of_the_program_is_not_an_answer() -> None:
    """A table that is missing is for the operator, and for the framework's 500."""
    with pytest.raises(MissingTableError):
        Answers().to(MissingTableError("gone"))


@pytest.mark.parametrize("fault", [lambda: RecordKey.of("k", 7), lambda: digest(object()), lambda: digest({1: 2})])
def test_a_fault_of_the_program_is_not_an_answer(fault: Callable[[], object]) -> None:
    """A number as scope, or a command without a canonical form: no client can send a better request."""
    with pytest.raises(InvalidKeyError) as raised:
        fault()
    with pytest.raises(InvalidKeyError):
        Answers().to(raised.value)


@pytest.mark.parametrize(
    "value",
    [float("nan"), Decimal("Infinity"), Decimal("1E+5000"), 10**5000],
    ids=["nan", "infinite", "exponent", "digits"],
)
def test_a_value_that_cannot_be_compared_is_the_clients(value: object) -> None:
    """Such as NaN, which JSON of some clients has: 400, and another value is taken."""
    with pytest.raises(UnusableKeyError) as raised:
        digest({"amount": value})
    assert Answers().to(raised.value).status == 400


def test_a_rejection_says_its_code_and_its_detail() -> None:
    """A text is the problem's detail; anything else stands beside it."""
    answers = Answers(on_rejected={"late": 410}, type_base="https://example.org/")
    text, data = (answers.to(Rejected("late", detail)).members for detail in ("by a day", {"days": 1}))
    assert (text["status"], text["type"], text["code"]) == (410, "https://example.org/rejected", "late")
    assert (text["detail"], data["info"]) == ("by a day", {"days": 1})
    assert "detail" not in data
    replayed = answers.to(Rejected("late", replayed=True), ["k1"])
    assert replayed.headers == {"Idempotency-Key": "k1", "Idempotent-Replayed": "true"}


@pytest.mark.parametrize(
    "wrong", [{"on_rejected": {"x": 200}}, {"mismatch_status": 500}, {"retry_after": 0.5}, {"retry_after": -1}]
)
def test_an_answer_that_would_mislead_is_refused(wrong: dict[str, object]) -> None:
    """A rejection is no success and no fault of the server's, and seconds are whole."""
    with pytest.raises(ValueError, match=r"statuses|seconds"):
        Answers(**wrong)  # type: ignore[arg-type]


def test_the_page_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each endpoint of docs/http.md is done once for each key, on what docs/commands.md defines."""
    monkeypatch.chdir(tmp_path)  # where docs/commands.md makes its shop.db, with 70 on alice's account
    user = SimpleNamespace(id="tenant-7")
    page: dict[str, Any] = {"__name__": "page"}
    exec(snippets("docs/commands.md")[0], page)
    fastapi_handles, flask_handles, fastapi_records, _by_hand = snippets("docs/http.md")

    page["app"] = flask.Flask("page")
    page["app"].before_request(lambda: setattr(flask.g, "user", user))
    exec(flask_handles, page)
    client = page["app"].test_client()
    order = {"customer": "alice", "amount": 30}
    by_flask = [client.post("/orders", json=order, headers={"Idempotency-Key": "k1"}) for _ in range(2)]
    assert [(answer.status_code, answer.json["left"]) for answer in by_flask] == [(201, 40)] * 2

    engine = create_async_engine("sqlite+aiosqlite:///shop.db")
    page |= {"engine": engine, "User": SimpleNamespace, "current_user": lambda: user}
    page["verified_user_id"] = lambda _request: user.id
    exec(fastapi_handles, page)
    exec(fastapi_records, page)
    page["app"].include_router(page["router"])

    async def ask() -> list[tuple[int, Any]]:
        transport = httpx.ASGITransport(page["app"])
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            key = {"Idempotency-Key": "k2"}
            answers = [await client.post("/orders", json=order, headers=key) for _ in range(2)]
            answers += [await client.post("/accounts/bob", headers=key) for _ in range(2)]
        await engine.dispose()
        return [(answer.status_code, answer.json().get("left")) for answer in answers]

    assert asyncio.run(ask()) == [(201, 10)] * 2 + [(201, None)] * 2


@pytest.mark.parametrize(
    "parameters",
    ["boundary*=idna''%ff", "boundary*=undefined''ab", "boundary*9=1; boundary*=x", 'charset="\0"; boundary='],
)
def test_a_boundary_that_cannot_be_read_is_none(parameters: str) -> None:
    """The client has written it: its form is compared byte by byte, and nobody is answered 500."""
    received = Received("POST", "/", [], f"multipart/form-data; {parameters}", b"--x\r\n")
    assert received.fingerprint() == Received("POST", "/", [], "text/plain", b"--x\r\n").fingerprint()
