"""Answer a request once its model is loaded. A stream that waits for long begins before, and reports the reason.

If the request is refused before its stream has begun, the response has the error's status. After that the error is the
stream's last event.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server import logs
from server.api_error import ApiError
from server.bodies.keep_alive import read_keep_alive
from server.generation.event_stream import CLIENT_GONE, EVENTS, LINES, STREAM_HEADERS
from server.generation.time_limit import choose_limit
from server.loading.served_model import Lease

if TYPE_CHECKING:
    from server.routes.route import Call

MESSAGES_PATH = "/v1/messages"  # and what is below it
RESPONSES_PATH = "/v1/responses"
OLLAMA_PATH = "/api/"

Answer = Callable[[], Awaitable[Response]]
IdleLine = Callable[["Call[Any]"], bytes]


async def answer_loaded(call: "Call[Any]", answer: Answer, idle_line: IdleLine | None) -> Response:
    """Answer once the call's model is loaded; it stays loaded until the request ends.

    idle_line: writes an empty line for keepalives, if streams are lines of JSON and the default. Raises ApiError.
    """
    keep_alive_s = read_keep_alive(getattr(call.body, "keep_alive", None))
    lease = call.models.try_admit(call.model)
    if lease is not None:
        _keep_for(call.request, lease, keep_alive_s)
        return await answer()
    settings = call.service.settings
    own_s = choose_limit(call.request.headers, getattr(call.body, "max_seconds", None), settings.max_request_seconds)
    most_s = settings.load_wait_seconds if own_s is None else min(own_s, settings.load_wait_seconds)
    wait = _Wait(call, most_s, keep_alive_s)
    stream = getattr(call.body, "stream", None)
    streams = stream is True or (idle_line is not None and hasattr(call.body, "stream") and stream is None)
    if await wait.ends_in(settings.keepalive_seconds if streams else None):
        if wait.is_client_gone:
            return Response(status_code=CLIENT_GONE)
        wait.take()
        return await answer()
    return _WaitingStream(wait, answer, idle_line, settings.keepalive_seconds)


def _keep_for(request: Request, lease: Lease, keep_alive_s: float | None) -> None:
    """Release the lease when the request's answer has been sent."""
    lease.keep_alive_s = keep_alive_s
    request.state.lease = lease


class _Wait:
    """Wait for a model, as long as the client does."""

    def __init__(self, call: "Call[Any]", most_s: float, keep_alive_s: float | None) -> None:
        self.call = call
        self._began_s = time.monotonic()
        self._is_taken = False
        self._keep_alive_s = keep_alive_s
        self._admitted = asyncio.create_task(call.models.admit(call.model, most_s))
        self._gone = asyncio.create_task(_await_end(call.request.receive))

    @property
    def is_client_gone(self) -> bool:
        return self._gone.done() and not self._admitted.done()

    async def ends_in(self, seconds: float | None) -> bool:
        """Wait for at most `seconds`, or without a limit. Returns whether the wait is over."""
        try:
            done, _ = await asyncio.wait({self._admitted, self._gone}, timeout=seconds, return_when="FIRST_COMPLETED")
        except BaseException:
            self.cancel()
            raise
        if done:
            self._gone.cancel()
            if self._admitted not in done:
                self._admitted.cancel()
        return bool(done)

    def take(self) -> None:
        """Return the lease that the request was given. Raises ApiError if it got none."""
        self._is_taken = True
        _keep_for(self.call.request, self._admitted.result(), self._keep_alive_s)
        self.call.request.state.waited_seconds = time.monotonic() - self._began_s

    def cancel(self) -> None:
        """Stop waiting, and release a lease that was not taken."""
        self._gone.cancel()
        self._admitted.cancel()
        if self._is_taken or not self._admitted.done() or self._admitted.cancelled():
            return
        if self._admitted.exception() is None:
            self._admitted.result().release()


async def _await_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _WaitingStream(Response):
    """A stream whose model is not loaded yet: keepalives, then the answer's own events."""

    def __init__(self, wait: _Wait, answer: Answer, idle_line: IdleLine | None, keepalive_s: float) -> None:
        super().__init__(None, headers=STREAM_HEADERS, media_type=EVENTS if idle_line is None else LINES)
        del self.headers["content-length"]
        self._idle_line = idle_line
        self._wait = wait
        self._answer = answer
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_body(message: Message) -> None:
            if message["type"] != "http.response.start":
                await send(message)

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while True:
                await send({"type": "http.response.body", "body": self._sign_of_life(), "more_body": True})
                if await self._wait.ends_in(self._keepalive_s):
                    break
            if self._wait.is_client_gone:
                logs.info("client_gone", waited_for=self._wait.call.model.name)
                return
            try:
                self._wait.take()
                response = await self._answer()
            except ApiError as error:
                logs.warning("stream_failed", code=error.code, message=error.message)
                last = stream_error(error, scope["path"])
                await send({"type": "http.response.body", "body": last, "more_body": False})
                return
            await response(scope, receive, send_body)
        finally:
            self._wait.cancel()

    def _sign_of_life(self) -> bytes:
        call = self._wait.call
        if self._idle_line is not None:
            return self._idle_line(call)
        return f": {call.model.name}: {call.models.describe_wait(call.model)}\n\n".encode()


def stream_error(error: ApiError, path: str) -> bytes:
    """Return what ends a stream that failed before its first token, as clients of the route expect it."""
    if path.startswith(OLLAMA_PATH):
        return error.ollama_body() + b"\n"
    if path.startswith(MESSAGES_PATH):
        return b"event: error\ndata: " + error.messages_body() + b"\n\n"
    if path.startswith(RESPONSES_PATH):
        said = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + msgspec.json.encode(said | {"sequence_number": 0}) + b"\n\n"
    return b"data: " + error.body() + b"\n\n"
