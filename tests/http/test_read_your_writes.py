"""The endpoints of docs/read-your-writes.md wait for a message, and say by a header whether they have seen it."""

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine

from pages import snippets


@pytest.mark.parametrize("database", ["postgresql", "sqlite"], indirect=True)
def test_the_endpoints_of_the_page_wait_for_the_message(
    database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GET answers the old amount and false without the message, and the new one and true when it comes meanwhile."""
    monkeypatch.chdir(tmp_path)  # where README makes its read_model.db
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where SQLAlchemy and dataclasses look for annotations
    page = vars(module)
    for snippet in (
        snippets("README.md")[0],
        *(each for each in snippets("docs/handlers.md") if "AsyncTotals" in each),
    ):
        exec(snippet, page)
    engine = create_async_engine(database.async_url)
    published: list[tuple[str, Any]] = []

    async def publish(message_id: str, payment: Any) -> None:
        published.append((message_id, payment))

    page.update(engine=engine, publish=publish)
    (code,) = snippets("docs/read-your-writes.md")
    exec(code, page)

    async def ask() -> None:
        async with engine.begin() as connection:
            await connection.run_sync(page["Base"].metadata.create_all)
            await connection.execute(page["Totals"].__table__.insert().values(account_id="alice", amount=30))
        transport = httpx.ASGITransport(page["app"])
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            answer = await client.get("/accounts/alice")
            assert (answer.json(), "read-model-applied" in answer.headers) == ({"amount": 30}, False)

            answer = await client.post("/payments", json={"account_id": "alice", "amount": 12})
            assert (answer.status_code, answer.json()["id"]) == (202, published[0][0])
            after = {"after": published[0][0]}
            answer = await client.get("/accounts/alice", params=after)
            assert (answer.json(), answer.headers["read-model-applied"]) == ({"amount": 30}, "false")

            looked = asyncio.Event()
            event.listen(engine.sync_engine, "checkin", lambda *_: looked.set())

            async def deliver() -> None:
                await looked.wait()
                message_id, payment = published[0]
                await page["dispatcher"].deliver(payment, message_id=message_id)

            answer, _ = await asyncio.gather(client.get("/accounts/alice", params=after), deliver())
            assert (answer.json(), answer.headers["read-model-applied"]) == ({"amount": 42}, "true")
            assert (await client.get("/accounts/alice", params={"after": ""})).status_code == 400
        await engine.dispose()

    asyncio.run(ask())
