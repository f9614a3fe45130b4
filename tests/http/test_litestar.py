"""Litestar: the program of docs/http.md, as it is printed there, applies a request once and answers it as often."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "http.md"
Send = Callable[..., httpx.Response]


@pytest.fixture
def send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Send]:
    """Sends a request to the program, in one event loop."""
    monkeypatch.chdir(tmp_path)
    module: Any = ModuleType("bank")
    monkeypatch.setitem(sys.modules, "bank", module)  # where Litestar and dataclasses look for annotations
    source = PAGE.read_text(encoding="utf-8").partition("<!-- litestar -->\n```python\n")[2].partition("```")[0]
    exec(compile(source, str(PAGE), "exec"), vars(module))

    async def post(key: Any, customer: str = "alice", amount: int = 30) -> httpx.Response:
        keys = [] if key is None else [("Idempotency-Key", each) for each in ([key] if isinstance(key, str) else key)]
        transport = httpx.ASGITransport(module.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://bank") as client:
            return await client.post("/payments", json={"customer": customer, "amount": amount}, headers=keys)

    with asyncio.Runner() as runner:

        def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
            return runner.run(coroutine)

        run(module.create_tables())
        yield lambda *args, **options: run(post(*args, **options))
        run(module.engine.dispose())


def test_a_request_is_done_once_and_answered_as_often_as_it_comes(send: Send) -> None:
    """The second answer is the recorded one, and says so; another key is another request."""
    first, second, other = send("k1"), send('"k1"'), send("k2")
    assert [each.status_code for each in (first, second, other)] == [201, 201, 201]
    assert [each.json()["balance"] for each in (first, second, other)] == [30, 30, 60]
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"] == "k1"


@pytest.mark.parametrize(
    ("key", "status", "kind"),
    [(None, 400, "key-missing"), ("a b", 400, "key-malformed"), (["a", "a"], 400, "key-malformed")],
    ids=["none", "malformed", "twice"],
)
def test_a_key_that_cannot_be_read_is_answered(send: Send, key: Any, status: int, kind: str) -> None:
    """By a problem, and nothing ran."""
    answer = send(key)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert answer.json()["type"] == f"urn:projector-dedup:problem:{kind}"
    assert send("k1").json() == {"balance": 30}


def test_errors_of_commands_are_answered(send: Send) -> None:
    """A key that came with another request, and a rejection, which is recorded."""
    send("k1")
    reused, rejected, again = send("k1", amount=31), send("k2", amount=-1), send("k2", amount=-1)
    assert (reused.status_code, reused.json()["type"][-10:]) == (422, "key-reused")
    assert (rejected.status_code, rejected.json()["code"]) == (400, "no_amount")
    assert again.content == rejected.content
    assert again.headers["idempotent-replayed"] == "true"
