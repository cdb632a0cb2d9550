"""Publish cache events over ZeroMQ as vLLM does, and send missed events again on request.

A message is (topic, sequence number, batch). Each model has a topic, whose numbers begin at 0 and have no gaps, so a
subscriber notices missed messages. It asks for them at the replay address with the first number that it wants, and, if
there are several models, with the topic after that. It gets (number, batch) of each message that is still kept, and
(-1, nothing) at the end.

A thread owns the sockets. Callers do not wait for it: if it is behind by MOST_QUEUED messages, further ones are only
kept for replays, and counted. Replays are sent in pieces, and new messages in between.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from scheduler.block_changes import CacheChanges
from server.engine.event_replays import NUMBER_BYTES, Replays, Topic
from server.engine.event_wire import AdapterTag, encode_batch
from server.observing_config import EventsConfig

MOST_QUEUED = 10_000
_MOST_QUEUED_BYTES = 256 * 2**20  # of messages that are not published yet
_MOST_UNREAD = 10_000  # messages that a subscriber has not read; the next ones are lost to it
_LAST_WORDS_MS = 500
_HEARTBEAT_MS, _SILENCE_MS = 10_000, 30_000  # a peer that is gone without a word is let go
_MIB = 2**20


class EventsError(Exception):
    """An address of the events cannot be used; the message is one line."""


@dataclass(slots=True)
class _Queue:
    """Messages for the thread, each with its topic and number. is_told: the thread was already woken."""

    messages: deque[tuple[Topic, int, CacheChanges]] = field(default_factory=deque)
    num_bytes: int = 0
    is_told: bool = False

    @property
    def is_full(self) -> bool:
        return len(self.messages) >= MOST_QUEUED or self.num_bytes > _MOST_QUEUED_BYTES


class EventPublisher:
    """The sockets of a server's events, and the thread that owns them. Raises EventsError."""

    def __init__(self, config: EventsConfig) -> None:
        self._config = config
        self._most_bytes = int(config.replay_mib * _MIB)
        self._topics: list[Topic] = []
        self._lock = threading.Lock()  # of what is kept and what is queued
        self._queue = _Queue()
        self._is_closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = self._make_socket(zmq.PUB)
        self._events.set_hwm(_MOST_UNREAD)
        self._replays = Replays(self._make_socket(zmq.ROUTER), self._topics, self._lock)
        self._woken, self._wake = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._woken.bind("inproc://queue")
        self._wake.connect("inproc://queue")
        try:
            self._open(self._events, "endpoint", config.endpoint, config.is_bound)
            if config.replay_endpoint is not None:
                self._open(self._replays.socket, "replay_endpoint", config.replay_endpoint, is_bound=True)
        except EventsError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="cache-events", daemon=True)
        self._thread.start()

    def add_model(
        self, model: str, adapters: Sequence[AdapterTag], count_dropped: Callable[[], None]
    ) -> Callable[[CacheChanges], None]:
        """Return a function that publishes a model's events; only one thread may call it, and it does not block.

        adapters: by number, from 1 on. count_dropped: called for each message that is not published.
        """
        topic = Topic(self._config.topic_of(model).encode(), tuple(adapters), count_dropped)
        self._topics.append(topic)
        return lambda message: self._publish(topic, message)

    def close(self) -> None:
        """Publish what is queued, and free the addresses."""
        self._is_closing = True
        self._wake.send(b"")
        self._thread.join()
        self._context.destroy(linger=_LAST_WORDS_MS)

    # --- from the event loop ------------------------------------------------------------------------------------------

    def _publish(self, topic: Topic, message: CacheChanges) -> None:
        with self._lock:
            number = topic.next
            topic.keep(message)
            self._trim()
            if is_queued := not self._queue.is_full:
                self._queue.messages.append((topic, number, message))
                self._queue.num_bytes += message.num_bytes
            wakes = not self._queue.is_told
            self._queue.is_told = True
        if wakes:
            self._wake.send(b"")
        if not is_queued:
            topic.count_dropped()

    def _trim(self) -> None:
        """Drop the oldest messages of the model that keeps the most, until all fit."""
        while sum(topic.num_bytes for topic in self._topics) > self._most_bytes:
            longest = max((topic for topic in self._topics if len(topic.kept) > 1), key=_num_bytes, default=None)
            if longest is None:
                return
            longest.let_go()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for one in (self._woken, self._replays.socket):
            poller.register(one, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(self._replays.wait_ms))
            if self._woken in ready:
                self._woken.recv()
                is_last = self._is_closing
                self._send_queued()
                if is_last:
                    return
            if self._replays.socket in ready:
                self._replays.take(self._replays.socket.recv_multipart())
            self._replays.send_some()

    def _send_queued(self) -> None:
        """Publish what is in the queue now."""
        with self._lock:
            self._queue.is_told, num_messages = False, len(self._queue.messages)
        for _ in range(num_messages):
            with self._lock:
                topic, number, message = self._queue.messages.popleft()
                self._queue.num_bytes -= message.num_bytes
            batch = encode_batch(message, topic.adapters)
            self._events.send_multipart((topic.name, number.to_bytes(NUMBER_BYTES, "big"), batch))

    # --- sockets ------------------------------------------------------------------------------------------------------

    def _make_socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        return socket

    @staticmethod
    def _open(socket: "zmq.Socket[bytes]", key: str, address: str, is_bound: bool) -> None:
        if "//[" in address:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            (socket.bind if is_bound else socket.connect)(address)
        except zmq.ZMQError as error:
            raise EventsError(f"server.events.{key}: {address} cannot be used: {error.strerror or error}") from None


def _num_bytes(topic: Topic) -> int:
    return topic.num_bytes
