"""The example application, as a process that is killed while clients send every request three times."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine, text

from databases import Database
from http_rig import serving
from projector_dedup.testing.provider import Behaviour, Provider, free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "orders"
AUTHORIZED = {"Authorization": "Bearer secret-of-north"}
START = 10_000
ORDERS: dict[str, dict[str, Any]] = {
    f"order-{number}": {"customer": f"customer-{number % 3}", "amount": number + 1, "reference": f"order-{number}"}
    for number in range(60)
}
Serving = contextlib.AbstractContextManager[subprocess.Popen[bytes]]
KILLS = (20, 40)  # answers after which the server is killed; then it is left alone
NO_TLS = False  # httpx would load certificates, which conftest.py has taken away
TIMES = 3  # that each request is sent, at once


def _environment(database: Database, provider: str) -> dict[str, str]:
    given = {
        "ORDERS_DATABASE_URL": database.async_url.render_as_string(hide_password=False),
        "ORDERS_BANK_URL": provider,
        "ORDERS_MAIL_URL": provider,
    }
    return {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"} | given


def server(database: Database, port: int, provider: str = "http://127.0.0.1:9") -> Serving:
    """The example under uvicorn, in a process of its own, which answers when the block is entered."""
    return serving("app:app", port, EXAMPLE, _environment(database, provider))


def _client(port: int) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=AUTHORIZED, verify=NO_TLS)


class Clients:
    """Send every request three times, at once, and write down every answer that comes."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.answers: dict[str, list[tuple[int, bytes]]] = {reference: [] for reference in ORDERS}
        self.lost = 0

    async def send_all(self, process: subprocess.Popen[bytes], kill_after: int | None) -> None:
        """Send all, and kill the server once ``kill_after`` answers have come."""
        answered = 0

        async def send(reference: str) -> None:
            nonlocal answered
            async with at_once:
                try:
                    answer = await client.post(
                        "/orders", json=ORDERS[reference], headers={"Idempotency-Key": reference, **AUTHORIZED}
                    )
                except httpx.TransportError:
                    self.lost += 1
                    return
            assert answer.status_code in {201, 409, 503}, answer.text
            if answer.status_code == 201:
                self.answers[reference].append((answer.status_code, answer.content))
                answered += 1
                if answered == kill_after:
                    process.send_signal(signal.SIGKILL)

        at_once = asyncio.Semaphore(24)
        async with httpx.AsyncClient(base_url=self.url, timeout=60, verify=NO_TLS) as client:
            await asyncio.gather(*(send(reference) for reference in [*ORDERS] * TIMES))


@pytest.mark.nightly
def test_every_order_is_placed_once_though_the_server_is_killed(mariadb: Database) -> None:
    """Whatever the clients were told or not told, one order for each key, and one answer to each."""
    port = free_port()
    clients = Clients(port)
    for kill_after in (*KILLS, None):
        with server(mariadb, port) as process:
            for customer in range(3):
                for _ in range(TIMES):  # recorded endpoints, before and after a kill
                    answer = httpx.post(
                        verify=NO_TLS,
                        url=f"{clients.url}/accounts/customer-{customer}",
                        params={"balance": START},
                        headers={"Idempotency-Key": f"account-{customer}", **AUTHORIZED},
                    )
                    assert (answer.status_code, answer.json()["balance"]) == (201, START)
            asyncio.run(clients.send_all(process, kill_after))
            assert (process.poll() is None) is (kill_after is None)
    assert clients.lost > 0
    assert {reference: len(set(answers)) for reference, answers in clients.answers.items()} == dict.fromkeys(ORDERS, 1)
    engine = create_engine(mariadb.url())
    with engine.connect() as connection:
        placed = Counter(connection.scalars(text("SELECT reference FROM shop_order")))
        balances = {row.customer: row.balance for row in connection.execute(text("SELECT * FROM account"))}
        records = connection.execute(text("SELECT count(*) FROM processed_command")).scalar_one()
    engine.dispose()
    assert placed == dict.fromkeys(ORDERS, 1)
    spent = Counter[str]()
    for order in ORDERS.values():
        spent[order["customer"]] += order["amount"]
    assert balances == {customer: START - amount for customer, amount in spent.items()}
    assert records == len(ORDERS) + len(balances)


def test_a_real_server_answers_the_whole_table(sqlite: Database) -> None:
    """By uvicorn's parser of headers, and through its sockets."""
    port = free_port()
    with server(sqlite, port), _client(port) as client:
        opened = client.post("/accounts/c", params={"balance": 10}, headers={"Idempotency-Key": "k"})
        assert opened.status_code == 201
        order = {"customer": "c", "amount": 4}

        def post(key: str | list[str], **changed: object) -> httpx.Response:
            keys = [key] if isinstance(key, str) else key
            return client.post(
                "/orders", json={**order, **changed}, headers=[("Idempotency-Key", each) for each in keys]
            )

        first, again, quoted = post("k"), post("k"), post('"k"')
        assert [answer.status_code for answer in (first, again, quoted)] == [201, 201, 201]
        assert first.content == again.content == quoted.content
        assert [answer.headers.get("idempotent-replayed") for answer in (first, again, quoted)] == [
            None,
            "true",
            "true",
        ]
        assert client.post("/orders", json=order).json()["type"].endswith("key-missing")
        assert [post(key).status_code for key in (["a", "b"], "a b", "x" * 256)] == [400, 400, 400]
        assert (post("k", amount=5).status_code, post("k2", customer="d").status_code) == (422, 404)
        rejected = post("k3", amount=99)
        assert (rejected.status_code, rejected.json()["code"]) == (409, "insufficient_funds")
        assert rejected.json()["info"] == {"missing": 93}
        assert client.post("/orders", json=order, headers={"Authorization": ""}).status_code == 401
        stranger = {"Authorization": "Bearer secret-of-south", "Idempotency-Key": "k"}
        assert "idempotent-replayed" not in client.post("/orders", json=order, headers=stranger).headers


# Orders by card: effects ----------------------------------------------------------------------------------------------


def _settle(database: Database, provider: Provider) -> str:
    """Run the command that cron runs; return what it said."""
    ran = subprocess.run(
        [sys.executable, "-m", "projector_dedup", "effects", "settle", "--app", "app:effects"],
        cwd=EXAMPLE,
        env=_environment(database, provider.url),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ", ".join(part for part in ran.stdout.strip(" .\n").split(", ") if not part.startswith("0 "))


class Shop:
    """A client that orders by card."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        opened = client.post("/accounts/c", params={"balance": 10}, headers={"Idempotency-Key": "account"})
        assert opened.status_code == 201

    def order(self, key: str, amount: int, *, waits: bool = True) -> tuple[int, str, bool]:
        """Order; return status, state, and whether the order was there before."""
        headers = {"Idempotency-Key": key} | ({} if waits else {"Prefer": "respond-async"})
        answer = self.client.post("/orders", json={"customer": "c", "amount": amount, "card": "4242"}, headers=headers)
        shown = self.client.get(answer.headers["Location"]).json()
        assert shown == answer.json()
        return answer.status_code, shown["state"], answer.headers.get("Idempotent-Replayed") == "true"


def test_an_order_by_card_is_charged_by_its_endpoint(sqlite: Database, tmp_path: Path) -> None:
    """It waits for the charge. If nobody knows of the charge it answers 202; a replay shows the state of now."""
    port = free_port()
    with Provider(tmp_path / "log.jsonl") as bank, server(sqlite, port, bank.url), _client(port) as client:
        shop = Shop(client)
        assert [shop.order("a", 11) for _ in range(2)] == [(201, "paid", False), (201, "paid", True)]
        bank.next(Behaviour.LOSE_REPLY_AFTER)
        assert shop.order("b", 12) == (202, "pending", False)
        assert shop.order("b", 12) == (201, "paid", True)
        bank.next(Behaviour.REJECT)
        assert [shop.order("c", 13) for _ in range(2)] == [(402, "declined", False), (402, "declined", True)]
        assert Counter(deed.body["amount"] for deed in bank.deeds()) == {11: 1, 12: 1}
        assert _settle(sqlite, bank) == "2 done"  # the receipts
        assert Counter(deed.body.get("customer") for deed in bank.deeds()) == {None: 2, "c": 2}


@pytest.mark.nightly
def test_an_order_is_charged_by_the_sweep_if_its_server_was_killed(postgresql: Database, tmp_path: Path) -> None:
    """The charge was armed with the order; the client asks again, and is shown what became of it."""
    port = free_port()
    with Provider(tmp_path / "log.jsonl") as bank:
        with server(postgresql, port, bank.url) as process, _client(port) as client:
            shop = Shop(client)
            assert [shop.order("a", 11, waits=False) for _ in range(2)] == [
                (202, "pending", False),
                (202, "pending", True),
            ]
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert bank.calls() == []
        assert [_settle(postgresql, bank) for _ in range(3)] == ["1 done", "1 done", ""]  # the charge, the receipt
        with server(postgresql, port, bank.url), _client(port) as client:
            assert Shop(client).order("a", 11, waits=False) == (201, "paid", True)
        assert [deed.body.get("amount") for deed in bank.deeds()] == [11, None]
