"""Serve one client's connection: uvicorn's httptools protocol, with limits and deadlines that it lacks.

uvicorn keeps headers of any size and number, waits for headers, bodies and readers for ever, answers malformed HTTP in
plain text, and drops a client that has closed its sending half. Its h11 protocol limits only an unfinished event, and
takes several times the CPU. hypercorn and granian limit sizes, but have no deadlines for headers and bodies, and do not
answer with our error objects. So this is uvicorn's protocol with counters and one timer.

The size of an unread message is bounded before it is parsed. A connection either waits for the application or has a
deadline. Nothing is written into an answer that has begun.
"""

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from server import logs
from server.api_error import ApiError, connections_full, headers_too_large, malformed, too_slow

MOST_HEADERS = 100
MOST_HEADER_BYTES = 32 * 1024  # request line and all headers; trailers as well
MOST_PIPELINED = 16  # requests that may wait while one is being answered
_LINGER_S = 2.0  # time in which a refused client may go on sending; closed at once, it might not read the answer
_PROBE_S = 0.5  # interval at which a client that closed its sending half is tested for still reading
_SPARE_CONNECTIONS = 32  # connections beyond the limit that get an answer; further ones are closed without
_STILL_WORKING = b"HTTP/1.1 100 Continue\r\n\r\n"  # allowed before any answer, and to be ignored by every client


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of connections. header_seconds: from the first byte to the end of headers. body_seconds: from there to
    the end of the body. stall_seconds: without a byte read by the client.
    """

    connections: int
    header_seconds: float
    body_seconds: float
    stall_seconds: float


class Connection(HttpToolsProtocol):
    """One client's connection.

    _phase: what the client is sending, `headers` or `body`; `idle` between messages.
    """

    def __init__(self, limits: Limits, **given: Any) -> None:
        super().__init__(**given)
        self._limits = limits
        self._phase = "idle"
        self._has_moved = False  # whether the phase has changed since the timer was set
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._num_headers = 0
        self._header_bytes = 0
        self._unread_bytes = 0  # received since the parser last completed something
        self._fault: ApiError | None = None  # why a callback stopped the parser
        self._is_refused = False
        self._last_words: ApiError | None = None  # sent after the running answers

    # --- called by the transport --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        num_over = len(self.connections) - self._limits.connections
        if num_over > _SPARE_CONNECTIONS:
            transport.abort()
        elif num_over > 0:
            self.refuse(connections_full(self._limits.connections))
        else:
            self._wait(self._limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._reading_resumed()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            self._read(data)

    def _read(self, data: bytes) -> None:
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._is_refused:
            return
        if self._unread_bytes > MOST_HEADER_BYTES:
            self.refuse(headers_too_large(MOST_HEADERS, MOST_HEADER_BYTES))
        elif self._has_moved or (self._phase == "idle" and not self._is_answering):
            self._follow_phase()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that closed its sending half and waits for its answer."""
        if not self._is_refused:
            if self._phase != "idle":
                self.refuse(malformed(f"the connection ended before the {self._phase} did"))
            elif self._is_answering:
                self._answer_no_more()
        if not self._is_answering:
            return False
        self._probe()
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self._limits.stall_seconds, self._abort, "stalled")

    def resume_writing(self) -> None:
        self._reading_resumed()
        super().resume_writing()

    # --- called by the parser -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MOST_PIPELINED:
            self._stop_parser(malformed(f"more than {MOST_PIPELINED} requests sent ahead of their answers"))
        super().on_message_begin()
        self._num_headers = self._header_bytes = 0
        self._move("headers")

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count(len(name) + len(value))
        if self._phase == "headers":  # trailers are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._require_host()
        super().on_headers_complete()
        self._unread_bytes = 0
        self._move("body")

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._unread_bytes = 0
        self._move("idle")

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP; uvicorn calls this when the parser has stopped."""
        self.refuse(self._fault or malformed("this is not HTTP/1.1"))

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore a request to upgrade the protocol."""

    # --- called for the application -----------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._last_words is not None and not self._is_answering and not self.transport.is_closing():
            self.transport.write(self._whole_answer(self._last_words))
            self._linger()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._wait(self._limits.stall_seconds)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self._abort("stalled")
        else:
            super().timeout_keep_alive_handler()

    def refuse(self, error: ApiError) -> None:
        """Answer the unanswered request with the error, and read no more. Running answers are completed."""
        self._is_refused = True
        self._stop_timer()
        logs.info("refused", status=error.status, code=error.code, why=error.message)
        if self._is_answering and self._phase != "body":
            self._last_words = error
        elif self._is_answering and (self.pipeline or self.cycle.response_started):
            self.transport.abort()  # the message will never be complete, and an earlier answer is in the way
        elif not self.transport.is_closing():
            if self._is_answering:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self.transport.write(self._whole_answer(error))
            self._linger()

    def end(self, error: ApiError) -> None:
        """Accept nothing new: close an idle connection, or refuse a request whose body is incomplete."""
        if not self._is_answering and self._phase != "body":
            self.transport.close()
        elif self._phase == "body" and not self._is_refused:
            self.refuse(error)

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.disconnected

    def _whole_answer(self, error: ApiError) -> bytes:
        body = error.body()
        headers = [
            *self.server_state.default_headers,
            *((name.encode(), value.encode()) for name, value in error.headers.items()),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            (b"x-request-id", uuid.uuid4().hex.encode()),
        ]
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        return STATUS_LINE[error.status] + lines + b"\r\n" + body

    def _linger(self) -> None:
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _answer_no_more(self) -> None:
        self.cycle.keep_alive = False
        for cycle, _ in self.pipeline:
            cycle.keep_alive = False

    def _probe(self) -> None:
        """Write something harmless, so that the connection of a client that is gone is reset.

        Before an answer, it is an interim response. In a stream, the application's `receive` is woken, and it writes.
        """
        if self.transport.is_closing() or not self._is_answering:
            return
        if not self.pipeline:
            if self.cycle.response_started:
                self.cycle.message_event.set()
            elif self.cycle.scope["http_version"] == "1.1":
                self.transport.write(_STILL_WORKING)
        self._timer = self.loop.call_later(_PROBE_S, self._probe)

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._num_headers > MOST_HEADERS or self._header_bytes > MOST_HEADER_BYTES:
            self._stop_parser(headers_too_large(MOST_HEADERS, MOST_HEADER_BYTES))

    def _require_host(self) -> None:
        """Check that an HTTP/1.1 request has exactly one Host header (RFC 9112, 3.2); HTTP/1.0 may have none."""
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() != "1.0"):
            self._stop_parser(malformed(f"{num_hosts} Host headers; HTTP/1.1 wants one"))

    def _stop_parser(self, fault: ApiError) -> None:
        self._fault = fault
        raise fault  # an exception in a callback stops the parser, and uvicorn calls `send_400_response`

    def _move(self, phase: str) -> None:
        self._phase = phase
        self._has_moved = True

    def _follow_phase(self) -> None:
        """Set the timer for what the client has to send next; there is none while the application works."""
        self._has_moved = False
        if self._phase == "idle" and self._is_answering:
            self._stop_timer()
        else:
            self._wait(self._limits.body_seconds if self._phase == "body" else self._limits.header_seconds)

    def _wait(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self.transport.is_closing():
            self._abort("stalled")
        elif self._phase == "idle":
            self.transport.close()
        else:
            seconds = self._limits.body_seconds if self._phase == "body" else self._limits.header_seconds
            self.refuse(too_slow(self._phase, seconds))

    def _reading_resumed(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _abort(self, why: str) -> None:
        request_id = self.cycle.scope.get("request_id") if self.cycle is not None else None
        logs.info("aborted", why=why, **({} if request_id is None else {"request_id": request_id}))
        self.transport.abort()


def connection_type(limits: Limits) -> Any:
    """Return the function that uvicorn calls for each connection."""

    def connect(
        config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: asyncio.AbstractEventLoop | None
    ) -> Connection:
        return Connection(limits, config=config, server_state=server_state, app_state=app_state, _loop=_loop)

    return connect
