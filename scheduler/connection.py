"""The engine process's end of its two sockets. Messages are read, and requests made ready, by a thread of their own.

Knows nothing of steps. What costs time in a submission, unpacking and hashing its prompts, is done while the engine
steps, a tenth of a millisecond at a time: the loop never waits longer than that for the interpreter. Invariant:
messages are handed over in the order in which they were sent, each once.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from scheduler.capacity import TooLargeError
from scheduler.messages import Cancel, EngineRequest, FromEngine, Refused, Shutdown, Submit, ToEngine
from scheduler.sequence import Sequence

_POLL_MS = 100
_REST_SECONDS = 50e-6  # long enough for whoever waits for the interpreter to have it

Prepare = Callable[[list[EngineRequest], Callable[[], None]], list[Sequence]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A submission that only has to be queued."""

    submit_id: str
    sequences: list[Sequence]


Arrival = Prepared | Refused | Cancel | Shutdown


class Connection:
    """Messages to and from the API process: `send` and `receive` are the loop's, and nobody else's."""

    def __init__(self, requests: str, replies: str) -> None:
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PULL)
        self._replies = self._context.socket(zmq.PUSH)
        for socket, address in ((self._requests, requests), (self._replies, replies)):
            socket.set_hwm(0)
            socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._arrivals: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._reader: threading.Thread | None = None

    def listen(self, prepare: Prepare) -> None:
        """Messages are read from now on; `prepare` makes sequences of requests, in the thread that reads."""
        self._reader = threading.Thread(target=self._read, args=(prepare,), name="reader", daemon=True)
        self._reader.start()

    def receive(self, wait_seconds: float) -> list[Arrival]:
        """All that has come; waits for a first one at most this long. Raises RuntimeError if nothing more can come."""
        arrivals: list[Arrival] = []
        try:
            arrival = self._arrivals.get(timeout=wait_seconds) if wait_seconds else self._arrivals.get_nowait()
            while True:
                if arrival is None:
                    raise RuntimeError("connection: its reader has ended, so no request can come; see the error above")
                arrivals.append(arrival)
                arrival = self._arrivals.get_nowait()
        except queue.Empty:
            return arrivals

    def send(self, message: FromEngine) -> None:
        self._replies.send(self._encoder.encode(message))

    def close(self) -> None:
        self._is_closing.set()
        if self._reader is not None:
            self._reader.join()
        self._context.destroy(linger=2000)

    def _read(self, prepare: Prepare) -> None:
        decoder = msgspec.msgpack.Decoder(ToEngine)
        try:
            while not self._is_closing.is_set():
                if self._requests.poll(_POLL_MS):
                    self._arrivals.put(_make_ready(decoder.decode(self._requests.recv()), prepare))
        finally:
            self._arrivals.put(None)


def _make_ready(message: ToEngine, prepare: Prepare) -> Arrival:
    if not isinstance(message, Submit):
        return message
    try:
        return Prepared(message.submit_id, prepare(message.requests(), _rest))
    except TooLargeError as error:
        return Refused(message.submit_id, "too_large", str(error))


def _rest() -> None:
    """Let the loop have the interpreter."""
    time.sleep(_REST_SECONDS)
