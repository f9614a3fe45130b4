"""What is Flask's own about recorded endpoints: uploads, mounted apps, its ``g``, and a real server of WSGI."""

import threading
from collections.abc import Iterator
from typing import Any

import flask
import httpx
import pytest
from sqlalchemy.orm.exc import StaleDataError
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.serving import make_server

from command_rig import Order
from http_rig import WEB, Shop, problem, shop_on
from projector_dedup.errors import HandlerDefinitionError, UnsafeSessionError
from projector_dedup.http.flask import endpoint_session, install, recorded_endpoint

SYNC = [driver for driver in WEB if driver.engine == "sqlite" and not driver.is_async]  # the engine has no part in it


@pytest.fixture(params=SYNC, ids=str)
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    """A shop in Flask."""
    with shop_on(request, request.param) as shop:
        shop.install()
        yield shop


def serve(shop: Shop, view: Any, app: flask.Flask | None = None) -> None:
    """Serve a recorded view at POST /things."""
    recorded = recorded_endpoint(shop.desk.commands(), scope=lambda: "tenant")(view)
    (app or shop.app).post("/things")(recorded)


def test_an_upload_is_read_again_by_each_attempt(shop: Shop) -> None:
    """Werkzeug parses a form once, so its files begin anew."""
    read: list[bytes] = []

    def view() -> dict[str, int]:
        read.append(flask.request.files["file"].read())
        if len(read) == 1:
            raise StaleDataError("somebody was faster")
        return {}

    serve(shop, view)
    assert shop.send(path="/things", files={"file": b"bytes"}).status_code == 200
    assert read == [b"bytes", b"bytes"]


def test_a_session_is_lent_for_the_time_of_the_view(shop: Shop) -> None:
    """Before and after it there is none, and nobody gets a closed one."""
    sessions: list[object] = []

    def look(response: Any) -> Any:
        with pytest.raises(UnsafeSessionError):
            endpoint_session()
        return response

    def view() -> dict[str, int]:
        sessions.append(endpoint_session())
        return {}

    shop.app.after_request(look)
    serve(shop, view)
    assert shop.send(path="/things").status_code == 200
    assert len(sessions) == 1


def test_a_stream_that_is_refused_is_closed(shop: Shop) -> None:
    """It may be a file, which nobody else would close."""
    closed: list[bool] = []

    def view() -> flask.Response:
        response = flask.Response(iter([b"piece"]))
        response.call_on_close(lambda: closed.append(True))
        return response

    serve(shop, view)
    assert shop.send(path="/things").status_code == 500
    assert closed == [True]


def test_apps_may_be_mounted(shop: Shop) -> None:
    """The whole path is compared, with the part that belongs to the mount."""

    def view() -> dict[str, int]:
        endpoint_session().add(Order(note="sold", amount=1))
        return {}

    apps = {}
    for mount in ("/v1", "/v2"):
        apps[mount] = flask.Flask(mount)
        install(apps[mount])
        serve(shop, view, apps[mount])
    shop.app = DispatcherMiddleware(shop.app, apps)  # type: ignore[arg-type]
    assert shop.send(path="/v1/things").status_code == 200
    assert problem(shop.send(path="/v2/things")) == (422, "key-reused")
    assert shop.desk.orders() == ["sold"]


def test_wrong_views_are_refused_when_they_are_defined(shop: Shop) -> None:
    """Flask runs an async def in another thread, where the session is not."""

    async def view() -> dict[str, int]:
        return {}

    with pytest.raises(HandlerDefinitionError, match="async def"):
        serve(shop, view)
    with pytest.raises(HandlerDefinitionError, match="Commands"):
        recorded_endpoint(object(), scope=lambda: "tenant")  # type: ignore[arg-type]


def test_a_real_server_joins_two_keys_and_neither_is_taken(shop: Shop) -> None:
    """Servers of WSGI make one value of two headers, with a comma."""
    shop.sells()
    server = make_server("127.0.0.1", 0, shop.app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", verify=False) as client:
            answers = [
                client.post("/orders", json={"amount": 3}, headers=[("Idempotency-Key", key) for key in keys])
                for keys in (["a", "b"], ["a"], ['"a"'])
            ]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert problem(answers[0]) == (400, "key-malformed")
    assert [answer.status_code for answer in answers[1:]] == [201, 201]
    assert answers[2].headers["idempotent-replayed"] == "true"
    assert shop.desk.orders() == ["a"]
