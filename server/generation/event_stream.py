"""Stream a generation as server-sent events or lines of JSON: chunks, keepalives, progress, an end or an error."""

import asyncio
import time
from asyncio import TimerHandle
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler.messages import Progress
from server import logs
from server.api_error import ApiError
from server.deployment import ServerConfig
from server.engine.mailbox import ClientGone, Tick
from server.generation.generation import Disconnected, Generation, Update

CLIENT_GONE = 499  # a status for the log alone: nobody reads it
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
_KEEPALIVE = b": keepalive\n\n"


class Shape(Protocol):
    def chunk(self, update: Update) -> bytes:
        """Return the events or lines for one update; empty if there is nothing to send yet."""

    def progress_chunk(self, progress: Progress, seconds: float) -> bytes: ...

    def begin(self) -> bytes:
        """Return the beginning of a stream, before anything is generated."""

    def end(self) -> bytes:
        """Return the end of a complete stream."""

    def error(self, error: ApiError) -> bytes:
        """Return the end of a stream that failed."""

    def whole(self, gathered: Sequence[list[Update]]) -> bytes: ...


class EventStream(Response):
    """A response that begins with status 200 at once, and sends later errors as events. It always closes the
    generation.

    idle_line: an empty line for keepalives, if the stream has lines of JSON.
    """

    def __init__(
        self,
        generation: Generation,
        shape: Shape,
        settings: ServerConfig,
        with_progress: bool,
        idle_line: bytes | None = None,
    ) -> None:
        super().__init__(None, headers=STREAM_HEADERS, media_type=EVENTS if idle_line is None else LINES)
        del self.headers["content-length"]
        self._keepalive = _KEEPALIVE if idle_line is None else idle_line
        self._generation = generation
        self._shape = shape
        self._keepalive_s = settings.keepalive_seconds
        self._progress_s = settings.progress_seconds
        self._with_progress = with_progress
        self._began_s = self._last_sent_s = time.monotonic()
        self._last_progress_s = [0.0] * len(generation.choices)
        self._timer: TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(watch_disconnect(receive, self._generation))
        self._tick()
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            opening = self._shape.begin()
            if opening:
                await send({"type": "http.response.body", "body": opening, "more_body": True})
            last = await self._run(send)
            await send({"type": "http.response.body", "body": last, "more_body": False})
        except Disconnected:
            logs.info("client_gone", id=self._generation.id)
        finally:
            self._generation.close()
            watch.cancel()
            if self._timer is not None:
                self._timer.cancel()

    async def _run(self, send: Send) -> bytes:
        """Send all pieces but the last, and return that."""
        generation, shape = self._generation, self._shape
        try:
            while True:
                events = []
                for update in await generation.updates():
                    if isinstance(update, Update):
                        events.append(shape.chunk(update))
                    elif isinstance(update, Progress):
                        events.append(self._progress(update))
                    else:
                        events.append(self._keepalive)
                data = b"".join(events)
                if generation.done:
                    return data + shape.end()
                if data:
                    self._last_sent_s = time.monotonic()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except ApiError as error:
            logs.warning("stream_failed", id=generation.id, code=error.code, message=error.message)
            return shape.error(error)

    def _progress(self, progress: Progress) -> bytes:
        """Return a chunk that reports progress, at most once in `progress_seconds` for each choice."""
        now = time.monotonic()
        index = self._generation.progress_index(progress)
        if not self._with_progress or now - self._last_progress_s[index] < self._progress_s:
            return b""
        self._last_progress_s[index] = now
        return self._shape.progress_chunk(progress, now - self._began_s)

    def _tick(self) -> None:
        """Check whether the stream has been silent for too long; runs once for each keepalive, not for each token."""
        left_s = self._last_sent_s + self._keepalive_s - time.monotonic()
        if left_s <= 0:
            self._generation.mailbox.put(Tick())
            left_s = self._keepalive_s
        self._timer = asyncio.get_running_loop().call_later(left_s, self._tick)


@asynccontextmanager
async def watched(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """End the generation if the client leaves, and close it afterwards in every case."""
    watch = asyncio.create_task(watch_disconnect(receive, generation))
    try:
        yield
    finally:
        generation.close()
        watch.cancel()


async def watch_disconnect(receive: Receive, generation: Generation) -> None:
    """Cancel in the engine as soon as the connection closes, even while a send is waiting.

    Other wake-ups mean that the client has closed its sending half. The stream then sends something, to find out
    whether the client still reads.
    """
    while (await receive())["type"] != "http.disconnect":
        generation.mailbox.put(Tick())
    generation.close()
    generation.mailbox.put(ClientGone())
