"""Collect everything that concerns one API call, in order: deltas, progress, ticks of the clock, its end.

One queue for all of it means that a response is a single loop, and that no timer is set for each token.
"""

import asyncio
from dataclasses import dataclass

from scheduler.messages import Delta, Progress


@dataclass(frozen=True, slots=True)
class Tick:
    """A tick of the keepalive clock."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client has closed its connection."""


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The requests will never be answered. message: for the client. code: as in ApiError."""

    message: str
    code: str


@dataclass(frozen=True, slots=True)
class TimeUp:
    """The call's time limit has passed."""


Mail = Delta | Progress | Tick | ClientGone | EngineLost | TimeUp


class Mailbox:
    """The queue of one call's events, with one reader. Only the event loop's thread may call `put`."""

    def __init__(self) -> None:
        self._mail: list[Mail] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, mail: Mail) -> None:
        self._mail.append(mail)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Mail]:
        """Return all that has arrived, at least one item."""
        while not self._mail:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        mail, self._mail = self._mail, []
        return mail
