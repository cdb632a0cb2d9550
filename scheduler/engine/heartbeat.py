"""Report from a thread how long the current turn of the engine's loop has taken.

By these messages the server distinguishes a slow step from a process that hangs.
"""

import threading
import time

import msgspec
import zmq

from scheduler.messages import Pulse

_SECONDS = 0.5


class Heartbeat:
    """The heartbeat of the engine's loop. Call `start`, `begin_turn` at every turn of the loop, and `stop`."""

    def __init__(self, replies: str) -> None:
        self._replies = replies
        self._turn_began_s: float | None = None
        self._has_stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin_turn(self) -> None:
        self._turn_began_s = time.monotonic()

    def stop(self) -> None:
        self._has_stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(0)
        socket.connect(self._replies)
        while not self._has_stopped.is_set():
            began_s = self._turn_began_s
            turn_seconds = 0.0 if began_s is None else time.monotonic() - began_s
            socket.send(msgspec.msgpack.encode(Pulse(turn_seconds)))
            self._has_stopped.wait(_SECONDS)
        context.destroy(linger=0)
