"""One request to a recorded endpoint of Starlette or FastAPI: run, perhaps several times, for one response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextlib import AsyncExitStack
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from ..commands import AsyncCall
from .recorded import Answer, NotCommittedError, Received, Recording

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]

SESSION = "projector_dedup.session"  # in the scope of the request that a recorded endpoint is given


class Exchange:
    """One request, and what became of it: the endpoint may run several times, and one response is sent."""

    def __init__(self, recording: Recording, endpoint: Endpoint, request: Request, body: bytes) -> None:
        content_type = request.headers.get("content-type", "")
        query = request.query_params.multi_items()
        self.received = Received(request.method, request.scope["path"], query, content_type, body)
        self.response: Response | None = None
        self._recording, self._endpoint, self._request = recording, endpoint, request
        self._stacks: list[tuple[AsyncExitStack, AsyncExitStack]] = []  # of the app, and of this attempt

    async def attempt(self, session: AsyncSession) -> Answer:
        """Run the endpoint, on a request of its own and the session of the unit of work."""
        await self.leave(NotCommittedError("the COMMIT of this attempt failed"))
        self._request.scope.setdefault("state", {})  # or middleware would not see what the endpoint sets in it
        scope: MutableMapping[str, Any] = {**self._request.scope, SESSION: session}
        for name, stack in self._request.scope.items():
            if isinstance(stack, AsyncExitStack):  # of FastAPI's, for dependencies with yield
                scope[name] = AsyncExitStack()
                self._stacks.append((stack, scope[name]))
        try:
            response = await self._endpoint(Request(scope, self._receive_again()))
            whole = type(response).__call__ is Response.__call__  # streams and files have another way to send
            answer = self._recording.answer(
                response, response.status_code, response.headers.items(), bytes(response.body) if whole else None
            )
        except BaseException as error:
            await self.leave(error)
            raise
        self.response = response
        return answer

    async def leave(self, error: BaseException) -> None:
        """Leave what an attempt has entered that came to nothing, such as dependencies with yield."""
        entered = AsyncExitStack()
        for _, own in self._stacks:
            entered.push_async_exit(own)
        self._stacks = []
        await entered.__aexit__(type(error), error, error.__traceback__)

    def hand_over(self) -> None:
        """Leave what the attempt has entered that was committed when the app leaves: after the response."""
        for app, own in self._stacks:
            app.push_async_exit(own)

    def _receive_again(self) -> Callable[[], Awaitable[MutableMapping[str, Any]]]:
        bodies = [self.received.body]

        async def receive() -> MutableMapping[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            return await self._request.receive()

        return receive


async def attempt(exchange: Exchange, call: AsyncCall) -> Answer:
    """Run the endpoint once: the function of the operation that a recorded endpoint is."""
    return await exchange.attempt(call.session)


def replayed(answer: Answer) -> Response:
    """Return the response of a recorded answer."""
    response = Response(answer.body, answer.status)
    for name, value in answer.headers:
        response.headers.append(name, value)
    return response
