"""What was said up to each response, for those that follow it: kept for a time, and up to so many bytes.

Knows no shape. Invariants: who asks with another key finds nothing; the oldest goes first when there is no room; a
restart forgets all.
"""

import time
from dataclasses import dataclass

import msgspec

from server.bodies import Message

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Message]).decode


@dataclass(frozen=True, slots=True)
class _Kept:
    messages: bytes
    until_s: float


class ResponseStore:
    def __init__(self, seconds: float, limit_bytes: int) -> None:
        self._seconds = seconds
        self._limit_bytes = limit_bytes
        self._kept: dict[tuple[str, str], _Kept] = {}  # by owner and id, oldest first
        self.num_bytes = 0

    def keep(self, owner: str, response_id: str, messages: list[Message]) -> None:
        """One that is larger than all the room is not kept."""
        raw = _encode(messages)
        if len(raw) > self._limit_bytes or not self._seconds:
            return
        now = time.monotonic()
        self._kept[owner, response_id] = _Kept(raw, now + self._seconds)
        self.num_bytes += len(raw)
        while self.num_bytes > self._limit_bytes or next(iter(self._kept.values())).until_s <= now:
            self._drop(next(iter(self._kept)))

    def find(self, owner: str, response_id: str) -> list[Message] | None:
        kept = self._kept.get((owner, response_id))
        if kept is None:
            return None
        if kept.until_s <= time.monotonic():
            self._drop((owner, response_id))
            return None
        return _decode(kept.messages)

    def _drop(self, key: tuple[str, str]) -> None:
        self.num_bytes -= len(self._kept.pop(key).messages)
