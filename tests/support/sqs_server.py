"""Amazon SQS as moto emulates it, in a process of its own: ``python sqs_server.py 5000``.

moto changes its lists of messages without a lock, and can lose one if two requests come at once. So requests are
answered one after the other, and one that waits for messages waits outside. moto takes any number of messages whose
visibility changes in one request: a request with more than ten is passed to it as one that sends, which it refuses.
"""

import io
import json
import sys
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

RECEIVE, SEND = "AmazonSQS.ReceiveMessage", "AmazonSQS.SendMessageBatch"
MANY = 10  # entries of one request
PAUSE = 0.05  # seconds between two looks for messages


class OneAfterTheOther:
    """An application of WSGI that gives one request at a time to another application."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer a request; ask again and again for messages, until there is one or the time is over."""
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        until = time.monotonic()
        if environ.get("HTTP_X_AMZ_TARGET") == RECEIVE:
            asked = json.loads(body)
            until += asked.pop("WaitTimeSeconds", 0)
            body = json.dumps({**asked, "WaitTimeSeconds": 0}).encode()
        elif b'"Entries"' in body and len((asked := json.loads(body))["Entries"]) > MANY:
            body = json.dumps(
                {**asked, "Entries": [{**each, "MessageBody": "x"} for each in asked["Entries"]]}
            ).encode()
            environ = {**environ, "HTTP_X_AMZ_TARGET": SEND}
        while True:
            given: dict[str, Any] = {}
            again = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
            with self._lock:
                answer = b"".join(self._application(again, partial(_keep, given)))
            if time.monotonic() >= until or b'"Messages"' in answer or not given["status"].startswith("200"):
                start_response(given["status"], given["headers"])
                return [answer]
            time.sleep(PAUSE)


def _keep(given: dict[str, Any], status: str, headers: list[tuple[str, str]], _: object = None) -> None:
    given.update(status=status, headers=headers)


if __name__ == "__main__":
    moto = DomainDispatcherApplication(create_backend_app)
    run_simple("127.0.0.1", int(sys.argv[1]), OneAfterTheOther(moto), threaded=True)
