"""Keep responses, and the messages up to each for those that follow it, for a time and up to a number of bytes.

Another key finds nothing. The oldest is evicted when there is no room; a restart forgets all.
"""

import time
from dataclasses import dataclass

import msgspec

from server.bodies.chat_message import Message

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Message]).decode


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A `response` as it was answered, the `messages` up to and with its own, and the name of its session."""

    response: bytes
    messages: list[Message]
    session: str = ""


@dataclass(frozen=True, slots=True)
class _Kept:
    response: bytes
    messages: bytes
    session: str
    until_s: float

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    def __init__(self, seconds: float, limit_bytes: int) -> None:
        self._seconds = seconds
        self._limit_bytes = limit_bytes
        self._kept: dict[tuple[str, str], _Kept] = {}  # by owner and id, oldest first
        self.num_bytes = 0

    def keep(self, owner: str, response_id: str, response: bytes, messages: list[Message], session: str = "") -> None:
        """Keep a response, unless it alone exceeds the limit."""
        now = time.monotonic()
        one = _Kept(response, _encode(messages), session, now + self._seconds)
        if one.num_bytes > self._limit_bytes or not self._seconds:
            return
        self._kept[owner, response_id] = one
        self.num_bytes += one.num_bytes
        while self.num_bytes > self._limit_bytes or next(iter(self._kept.values())).until_s <= now:
            self._drop(next(iter(self._kept)))

    def find(self, owner: str, response_id: str) -> KeptResponse | None:
        kept = self._kept.get((owner, response_id))
        if kept is None:
            return None
        if kept.until_s <= time.monotonic():
            self._drop((owner, response_id))
            return None
        return KeptResponse(kept.response, _decode(kept.messages), kept.session)

    def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response, and return whether it was there. Responses that follow it stay, with their messages."""
        if self.find(owner, response_id) is None:
            return False
        self._drop((owner, response_id))
        return True

    def _drop(self, key: tuple[str, str]) -> None:
        self.num_bytes -= self._kept.pop(key).num_bytes
