"""Publish cache events over ZeroMQ as vLLM does, and send those again that somebody has missed.

A message is (topic, sequence number, batch). Each model has a topic, whose numbers begin at 0 and have no gaps, so a
subscriber sees what it has missed. It asks for it at the replay address with the first number that it wants; for
several models, with the topic behind that. It gets (number, batch) of each that is kept, and (-1, nothing) at the end.

A thread has the sockets. Nobody waits for it: where it is behind by MOST_QUEUED messages, the next ones are not
published but only kept, and counted.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from scheduler.block_changes import CacheChanges
from server import logs
from server.engine.event_wire import encode_batch
from server.observing_config import EventsConfig

MOST_QUEUED = 10_000
_MOST_UNREAD = 100_000  # messages that a subscriber has not read, as vLLM allows; the next ones are lost to it
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_LAST_WORDS_MS = 500
_MIB = 2**20


class EventsError(Exception):
    """Report in one line that an address of the events cannot be used."""


@dataclass(eq=False, slots=True)
class _Topic:
    """One model's events: `kept` are the last ones, the first of which has the number `first`."""

    name: bytes
    adapters: Sequence[str]
    count_dropped: Callable[[], None]
    first: int = 0
    kept: deque[CacheChanges] = field(default_factory=deque)

    @property
    def next(self) -> int:
        return self.first + len(self.kept)


class EventPublisher:
    """The sockets of a server's events, and the thread that has them. Raises EventsError."""

    def __init__(self, config: EventsConfig) -> None:
        self._config = config
        self._most_bytes = int(config.replay_mib * _MIB)
        self._num_bytes = 0  # of all that is kept
        self._topics: list[_Topic] = []
        self._lock = threading.Lock()  # of what is kept
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = self._context.socket(zmq.PUB)
        self._events.set_hwm(_MOST_UNREAD)
        self._replays = self._context.socket(zmq.ROUTER)
        self._replays.set_hwm(0)  # one answer may be all that is kept
        self._inbox, self._queue = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._inbox.set_hwm(MOST_QUEUED // 2)
        self._queue.set_hwm(MOST_QUEUED // 2)
        self._inbox.bind("inproc://queue")
        self._queue.connect("inproc://queue")
        try:
            self._open(self._events, "endpoint", config.endpoint, config.is_bound)
            if config.replay_endpoint is not None:
                self._open(self._replays, "replay_endpoint", config.replay_endpoint, is_bound=True)
        except EventsError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="cache-events", daemon=True)
        self._thread.start()

    def add_model(
        self, model: str, adapters: Sequence[str], count_dropped: Callable[[], None]
    ) -> Callable[[CacheChanges], None]:
        """Return what publishes a model's events; it is called from one thread and does not wait.

        adapters: names by their numbers, from 1 on. count_dropped: is told of each message that is not published.
        """
        topic, index = _Topic(self._config.topic_of(model).encode(), tuple(adapters), count_dropped), len(self._topics)
        self._topics.append(topic)
        return lambda message: self._publish(index, topic, message)

    def close(self) -> None:
        """Publish what is queued, and give the addresses back."""
        self._queue.send(b"")
        self._thread.join()
        self._context.destroy(linger=_LAST_WORDS_MS)

    # --- from the event loop ------------------------------------------------------------------------------------------

    def _publish(self, index: int, topic: _Topic, message: CacheChanges) -> None:
        with self._lock:
            number = topic.next
            topic.kept.append(message)
            self._num_bytes += message.num_bytes
            while self._num_bytes > self._most_bytes and len(topic.kept) > 1:
                self._num_bytes -= topic.kept.popleft().num_bytes
                topic.first += 1
        try:
            self._queue.send(index.to_bytes(_NUMBER_BYTES, "big") + number.to_bytes(_NUMBER_BYTES, "big"), zmq.NOBLOCK)
        except zmq.Again:
            topic.count_dropped()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for one in (self._inbox, self._replays):
            poller.register(one, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._inbox in ready:
                asked = self._inbox.recv()
                if not asked:
                    return
                topic = self._topics[int.from_bytes(asked[:_NUMBER_BYTES], "big")]
                self._send(topic, int.from_bytes(asked[_NUMBER_BYTES:], "big"))
            if self._replays in ready:
                self._replay(self._replays.recv_multipart())

    def _send(self, topic: _Topic, number: int) -> None:
        with self._lock:
            message = topic.kept[number - topic.first] if number >= topic.first else None
        if message is None:  # it was let go before its turn came
            topic.count_dropped()
            return
        parts = (topic.name, number.to_bytes(_NUMBER_BYTES, "big"), encode_batch(message, topic.adapters))
        self._events.send_multipart(parts)

    def _replay(self, frames: list[bytes]) -> None:
        """Answer a request: identity, an empty frame, the first number, and maybe a topic."""
        identity, asked = frames[0], frames[2:]
        topics = [topic for topic in self._topics if len(asked) < 2 or topic.name == asked[1]]
        if len(asked) not in (1, 2) or len(asked[0]) != _NUMBER_BYTES or not topics:
            logs.warning("cache_replay_refused", frames=len(frames), wanted="a number of 8 bytes, and a topic or none")
            self._replays.send_multipart((identity, b"", _END, b""))
            return
        topic, begin = topics[0], int.from_bytes(asked[0], "big")
        with self._lock:
            begin = max(begin, topic.first)
            messages = list(topic.kept)[begin - topic.first :]
        for number, message in enumerate(messages, begin):
            batch = encode_batch(message, topic.adapters)
            self._replays.send_multipart((identity, b"", number.to_bytes(_NUMBER_BYTES, "big"), batch))
        self._replays.send_multipart((identity, b"", _END, b""))

    @staticmethod
    def _open(socket: "zmq.Socket[bytes]", key: str, address: str, is_bound: bool) -> None:
        try:
            (socket.bind if is_bound else socket.connect)(address)
        except zmq.ZMQError as error:
            raise EventsError(f"server.events.{key}: {address} cannot be used: {error.strerror or error}") from None
