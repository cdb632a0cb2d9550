"""A router's side of cache events: structs as vLLM documents them for subscribers, and an index from the wire."""

import time
from collections import defaultdict
from collections.abc import Iterator
from random import Random

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Subscriber:
    """Follows one topic, and asks for what it misses. loses: the share of messages that do not reach it."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str, loses: float = 0.0) -> None:
        self.index: dict[str, set[int]] = defaultdict(set)
        self.tokens: dict[int, list[int]] = {}
        self.adapters: dict[int, str | None] = {}
        self.fronts: dict[int, int | None] = {}
        self.events: list[KVCacheEvent] = []
        self.num_lost = self.num_gaps = 0
        self.next = 0
        self._last_live = -1  # numbers only grow, so one that does not is a new server's
        self._topic, self._loses, self._random = topic.encode(), loses, Random(1)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._context = zmq.Context()
        self._events, self._replays = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._events.subscribe(self._topic)
        self._events.connect(endpoint)
        self._replays.connect(replay_endpoint)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def read(self, wait_s: float = 0.0) -> None:
        """Take all that has come, waiting for a first message at most so long."""
        while self._events.poll(1e3 * wait_s):
            topic, number, payload = self._events.recv_multipart()
            assert topic == self._topic
            if self._random.random() < self._loses:
                self.num_lost += 1
                continue
            self.take(int.from_bytes(number, "big"), payload)
            wait_s = 0.0

    def take(self, number: int, payload: bytes) -> None:
        if number <= self._last_live:
            self.index.clear()
            self.next = 0
        self._last_live = number
        if number > self.next:
            self.num_gaps += 1
            self.replay(number)
        if number == self.next:
            self._apply(payload)

    def replay(self, end: int | None = None) -> None:
        """Ask for what is kept from the next message on, and take it up to `end`."""
        for number, payload in self.ask(self.next.to_bytes(8, "big"), self._topic):
            if int.from_bytes(number, "big") == self.next and self.next != end:
                self._apply(payload)

    def ask(self, *frames: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Ask for a replay, and return what comes in front of its end."""
        self._replays.send_multipart((b"", *frames))
        while True:
            assert self._replays.poll(20_000), "no answer to a replay"
            _, number, payload = self._replays.recv_multipart()
            if number == END:
                assert payload == b""
                return
            yield number, payload

    def await_index(self, medium: str, wanted: int, seconds: float = 20) -> None:
        """Read until a medium has so many blocks."""
        ends = time.monotonic() + seconds
        while len(self.index[medium]) != wanted and time.monotonic() < ends:
            self.read(0.1)
        assert len(self.index[medium]) == wanted

    def _apply(self, payload: bytes) -> None:
        self.next += 1
        batch = self._decoder.decode(payload)
        assert abs(time.time() - batch.ts) < 600
        for event in batch.events:
            self.events.append(event)
            if isinstance(event, AllBlocksCleared):
                self.index.clear()
            elif isinstance(event, BlockRemoved):
                self.index[event.medium] -= set(event.block_hashes)
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        self.index[event.medium] |= set(event.block_hashes)
        if not event.token_ids:
            return
        for place, (front, one) in enumerate(
            zip([event.parent_block_hash, *event.block_hashes], event.block_hashes, strict=False)
        ):
            self.fronts[one], self.adapters[one] = front, event.lora_name
            self.tokens[one] = event.token_ids[place * event.block_size : (place + 1) * event.block_size]
            assert len(self.tokens[one]) == event.block_size

    def prompt_of(self, block: int) -> list[int]:
        """Return the tokens to a block's end."""
        front = self.fronts[block]
        return (self.prompt_of(front) if front is not None else []) + self.tokens[block]
