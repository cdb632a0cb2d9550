"""Run one engine process: its sockets, its start and its end.

Each run has sockets of its own in a private folder, so nothing of a dead engine reaches the next one.
"""

import asyncio
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, suppress

import msgspec
import zmq

from scheduler.messages import FromEngine, ToEngine
from server.engine.head_start import HeadStart, addresses_in, make_folder, run_engine

_MOST_AT_ONCE = 16  # messages, then others have a turn: an engine may speak faster than it can be listened to
_LAST_WORDS_S = 0.2  # a message sent just before the process ended may still be on its way


class EngineGone(Exception):
    """The engine process cannot be reached."""


class EngineStartError(Exception):
    """The sockets of an engine process cannot be made; the message is one line."""


class EngineProcess:
    """One engine process. Call `start`, `send`, iterate over `messages` until the process is gone, then `close`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        command: Sequence[str],
        start_json: bytes,
        ahead: HeadStart | None = None,
    ) -> None:
        """Make the folder and the sockets; `close` removes them. `ahead`: the process, if it runs already. Raises
        EngineStartError, and then none is left.
        """
        taken = ahead.take() if ahead is not None else None
        self._process: subprocess.Popen[bytes] | None = None if taken is None else taken[0]
        self._ended: asyncio.Future[int] | None = None
        self._start_json = start_json
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._command = command
        with ExitStack() as made:
            made.callback(self.kill)
            try:
                self.folder = make_folder() if taken is None else taken[1]
                made.callback(self.remove_folder)
                self._requests, self._replies = (
                    _bind(context, kind, address, made)
                    for kind, address in zip((zmq.PUSH, zmq.PULL), addresses_in(self.folder), strict=True)
                )
            except (OSError, zmq.ZMQError) as error:
                reason = " ".join(str(error).split())
                raise EngineStartError(
                    f"engine: its sockets cannot be made ({reason}); set TMPDIR to a folder that can be written to and "
                    "has a short path"
                ) from None
            self._made = made.pop_all()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the process, unless it runs already, and send it its configuration. Raises OSError."""
        if self._process is None:
            self._process = run_engine(self._command, self.folder)
        self._ended = asyncio.get_running_loop().create_future()
        watch = threading.Thread(target=_watch, args=(self._process, self._ended), name="engine-end", daemon=True)
        watch.start()
        await asyncio.to_thread(_hand_over, self._process, self._start_json)  # which it reads behind its libraries

    def send(self, message: ToEngine) -> None:
        """Send a message without blocking. Raises EngineGone if the other end is gone."""
        try:
            self._requests.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise EngineGone(f"engine process: cannot be reached ({error})") from None

    async def messages(self) -> AsyncIterator[FromEngine]:
        """Yield all messages of the process, until it has ended and its last message is read."""
        assert self._ended is not None
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        ended = asyncio.ensure_future(asyncio.shield(self._ended))
        ended.add_done_callback(lambda _: arrived.set())
        descriptor = self._replies.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        loop.add_reader(descriptor, arrived.set)
        try:
            while not ended.done():
                arrived.clear()
                for num_before, message in enumerate(self._receive()):
                    yield message
                    if num_before % _MOST_AT_ONCE == _MOST_AT_ONCE - 1:
                        await asyncio.sleep(0)
                await arrived.wait()
            quiet_s = time.monotonic() + _LAST_WORDS_S
            while time.monotonic() < quiet_s:
                for message in self._receive():
                    yield message
                await asyncio.sleep(_LAST_WORDS_S / 10)
        finally:
            loop.remove_reader(descriptor)
            ended.cancel()

    def _receive(self) -> Iterator[FromEngine]:
        """Return all waiting messages, without blocking: the descriptor announces the next one only after the last is
        read.
        """
        while True:
            try:
                raw = self._replies.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield self._decoder.decode(raw)

    async def wait(self) -> str:
        """Wait for the process, and return how it ended, in words."""
        assert self._ended is not None
        code = await asyncio.shield(self._ended)
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def kill(self) -> None:
        """Send SIGKILL at once; safe to call from anywhere and more than once."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Close the sockets and remove their folder."""
        self._made.close()

    def remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _watch(process: subprocess.Popen[bytes], ended: "asyncio.Future[int]") -> None:
    """Wait for a process, and set the future to its exit status."""
    code = process.wait()

    def tell() -> None:
        if not ended.done():
            ended.set_result(code)

    with suppress(RuntimeError):  # the loop is closed: nobody asks any more
        ended.get_loop().call_soon_threadsafe(tell)


def _hand_over(process: subprocess.Popen[bytes], text: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(text)


def _bind(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str, made: ExitStack) -> "zmq.Socket[bytes]":
    """Return a socket that listens at the address, without a bound on what it queues; `made` closes it."""
    socket = context.socket(kind)
    made.callback(socket.close)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    return socket
