"""Keep the last cache events of each model, and send them again to peers that ask.

A replay is sent in pieces, as fast as its peer reads. A peer that does not read for PATIENCE_SECONDS gets no more.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from scheduler.block_changes import CacheChanges
from server import logs
from server.engine.event_wire import AdapterTag, encode_batch

NUMBER_BYTES = 8
PATIENCE_SECONDS = 10.0
_END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
_MOST_UNREAD = 100  # messages of a replay on their way to a peer
_PIECE = 32  # messages of a replay, between which live ones are sent
_RETRY_MS = 5


@dataclass(eq=False, slots=True)
class Topic:
    """One model's events. kept: the last ones. num_bytes: their size. first: the number of the first of them."""

    name: bytes
    adapters: Sequence[AdapterTag]
    count_dropped: Callable[[], None]
    first: int = 0
    num_bytes: int = 0
    kept: deque[CacheChanges] = field(default_factory=deque)

    @property
    def next(self) -> int:
        return self.first + len(self.kept)

    def keep(self, message: CacheChanges) -> None:
        self.kept.append(message)
        self.num_bytes += message.num_bytes

    def let_go(self) -> None:
        """Forget the oldest message."""
        self.num_bytes -= self.kept.popleft().num_bytes
        self.first += 1


@dataclass(slots=True)
class _Replay:
    """Messages `number` to `end` of a topic, for one peer. sent_s: when it took one last. batch: the one of `number`,
    for which there was no room yet.
    """

    topic: Topic
    number: int
    end: int
    sent_s: float
    batch: bytes | None = None


class Replays:
    """The running replays, at most one for each peer: a second request during one is ignored.

    lock: protects what the topics keep.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", topics: Sequence[Topic], lock: threading.Lock) -> None:
        self.socket = socket
        socket.set_hwm(_MOST_UNREAD)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message that has no room is refused, not lost
        self._topics = topics
        self._lock = lock
        self._under_way: dict[bytes, _Replay] = {}
        self._has_sent = False

    @property
    def wait_ms(self) -> int | None:
        """Return how long the thread may wait before it continues a replay; None: there is none."""
        if not self._under_way:
            return None
        return 0 if self._has_sent else _RETRY_MS

    def take(self, frames: list[bytes]) -> None:
        """Take a request: identity, an empty frame, the first number, and maybe a topic."""
        identity, asked = frames[0], frames[2:]
        if identity in self._under_way:
            return
        topics = [topic for topic in self._topics if len(asked) < 2 or topic.name == asked[1]]
        if len(asked) not in (1, 2) or len(asked[0]) != NUMBER_BYTES or not topics:
            logs.warning("cache_replay_refused", frames=len(frames), wanted="a number of 8 bytes, and a topic or none")
            self._send(identity, _END, b"")
            return
        topic, begin = topics[0], int.from_bytes(asked[0], "big")
        with self._lock:
            begin = topic.first if begin > topic.next else begin  # a number from an earlier server
            self._under_way[identity] = _Replay(topic, begin, topic.next, time.monotonic())
        self._has_sent = True

    def send_some(self) -> None:
        """Send the next messages of each replay, as many as its peer has room for."""
        self._has_sent = False
        for identity, replay in list(self._under_way.items()):
            if self._send_piece(identity, replay):
                del self._under_way[identity]
            elif time.monotonic() - replay.sent_s > PATIENCE_SECONDS:
                logs.warning("cache_replay_dropped", number=replay.number, wanted="a peer that reads its answer")
                del self._under_way[identity]

    def _send_piece(self, identity: bytes, replay: _Replay) -> bool:
        """Return whether that was all, or the peer is gone."""
        topic = replay.topic
        for _ in range(_PIECE):
            if replay.batch is None:
                with self._lock:
                    replay.number = max(replay.number, topic.first)
                    is_end = replay.number >= replay.end
                    message = None if is_end else topic.kept[replay.number - topic.first]
                if message is None:
                    return self._send(identity, _END, b"") is not False
                replay.batch = encode_batch(message, topic.adapters)
            was_sent = self._send(identity, replay.number.to_bytes(NUMBER_BYTES, "big"), replay.batch)
            if not was_sent:
                return was_sent is None
            replay.number, replay.batch = replay.number + 1, None
            replay.sent_s, self._has_sent = time.monotonic(), True
        return False

    def _send(self, identity: bytes, number: bytes, batch: bytes) -> bool | None:
        """Return whether the peer had room; None: it is gone."""
        try:
            self.socket.send_multipart((identity, b"", number, batch), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:  # EHOSTUNREACH
            return None
        return True
