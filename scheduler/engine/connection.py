"""Serve the engine process's end of its two sockets, read by a thread that also prepares submissions.

Prompts are unpacked and hashed while the engine steps, a tenth of a millisecond at a time, so the loop never waits
longer for the interpreter. Invariants: all messages but submissions are handed over as they are read. Submissions wait
in one of two queues; those with many tokens to hash, or with a grammar, take the long one. Each queue keeps its order,
each submission is handed over once, and short ones interrupt the preparation of a long one. A request that is cancelled
before it is ready is not handed over.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from scheduler.constraints.constraints import GrammarError
from scheduler.messages import (
    AskSessions,
    Cancel,
    DropChunks,
    EngineRequest,
    Expect,
    FromEngine,
    ReadSaved,
    Refused,
    SaveContext,
    Shutdown,
    StoreChunks,
    Submit,
    ToEngine,
)
from scheduler.sequences.capacity import TooLargeError
from scheduler.sequences.sequence import Sequence

_POLL_MS = 100
_REST_SECONDS = 50e-6  # long enough for a waiting thread to get the interpreter
_SHORT_TOKENS = 8192  # hashing them takes about 3 ms

Prepare = Callable[[list[EngineRequest], Callable[[], None]], list[Sequence]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A submission that is ready to be queued."""

    submit_id: str
    sequences: tuple[Sequence, ...]


Message = Cancel | StoreChunks | DropChunks | Expect | AskSessions | SaveContext | ReadSaved
Arrival = Prepared | Refused | Shutdown | Message


class Connection:
    """Messages to and from the API process. Only the loop's thread may call `send` and `receive`."""

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
        self._reader: _Reader | None = None

    def listen(self, prepare: Prepare) -> None:
        """Start the thread that reads messages. prepare: makes sequences of requests, in that thread."""
        self._reader = _Reader(self._requests, self._arrivals, prepare, self._is_closing)
        self._reader.start()

    def receive(self, wait_seconds: float) -> list[Arrival]:
        """Return all messages so far, waiting at most this long for a first one. Raises RuntimeError if the reader has
        ended.
        """
        arrivals: list[Arrival] = []
        try:
            arrival = self._arrivals.get(timeout=wait_seconds) if wait_seconds else self._arrivals.get_nowait()
            while True:
                if arrival is None:
                    raise RuntimeError(
                        "connection: its reader thread has ended, so no request can arrive; see the error above"
                    )
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


class _Reader(threading.Thread):
    """The reading thread, with the submissions not handed over yet. _unready: the ids of their requests."""

    def __init__(
        self,
        requests: zmq.Socket[bytes],
        arrivals: queue.SimpleQueue[Arrival | None],
        prepare: Prepare,
        is_closing: threading.Event,
    ) -> None:
        super().__init__(name="reader", daemon=True)
        self._requests = requests
        self._arrivals = arrivals
        self._prepare = prepare
        self._is_closing = is_closing
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._short: deque[Submit] = deque()
        self._long: deque[Submit] = deque()
        self._unready: set[str] = set()

    def run(self) -> None:
        try:
            while not self._is_closing.is_set():
                self._read(0 if self._short or self._long else _POLL_MS)
                if self._short:
                    self._make_ready(self._short.popleft(), self._rest)
                elif self._long:
                    self._make_ready(self._long.popleft(), self._rest_in_long)
        finally:
            self._arrivals.put(None)

    def _read(self, wait_ms: int) -> None:
        """Read all messages so far, waiting at most this long for a first one."""
        while self._requests.poll(wait_ms):
            wait_ms = 0
            message = self._decoder.decode(self._requests.recv())
            if isinstance(message, Submit):
                self._unready.update(request.request_id for request in message.packed)
                (self._short if _is_short(message) else self._long).append(message)
                continue
            if isinstance(message, Cancel):
                self._unready.difference_update(message.request_ids)
            self._arrivals.put(message)

    def _make_ready(self, message: Submit, rest: Callable[[], None]) -> None:
        """Prepare a submission and hand it over, without requests cancelled by then. If all are, there is no answer."""
        requests = [request for request in message.requests() if request.request_id in self._unready]
        arrival: Prepared | Refused
        try:
            sequences = self._prepare(requests, rest)
        except TooLargeError as error:
            arrival = Refused(message.submit_id, "too_large", str(error))
        except GrammarError as error:
            arrival = Refused(message.submit_id, "grammar", str(error))
        else:
            arrival = Prepared(message.submit_id, tuple(each for each in sequences if each.request_id in self._unready))
        names = {request.request_id for request in requests}
        if names & self._unready:
            self._unready -= names
            self._arrivals.put(arrival)

    def _rest(self) -> None:
        """Let the loop have the interpreter, and read new messages."""
        time.sleep(_REST_SECONDS)
        self._read(0)

    def _rest_in_long(self) -> None:
        if self._short:
            self._make_ready(self._short.popleft(), self._rest)
        self._rest()


def _is_short(message: Submit) -> bool:
    """Return whether a submission has no grammar and few tokens to hash; a shared prompt counts once."""
    num_tokens = sum(request.num_prompt_tokens for request in message.packed)
    return num_tokens <= _SHORT_TOKENS and not any(request.grammar for request in message.packed)
