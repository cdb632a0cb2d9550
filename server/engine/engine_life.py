"""One life of the engine process: its sockets, its start and its end. Knows messages, not requests.

Each life has sockets of its own in a private folder, so nothing of a dead engine reaches the next one.
"""

import asyncio
import os
import shutil
import signal
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, suppress

import msgspec
import zmq

from scheduler.messages import FromEngine, ToEngine

# Threads that wait by spinning take the cores from the API process and from each other: on two busy cores a decode step
# of the reference model took 196 ms with the library's default and 19 ms with this.
# A short spin is no better in between: with GOMP_SPINCOUNT=1000 (some 50 microseconds) a step of `sampled` on two cores
# took 22 ms for 31 to 39 alone, but 29 to 33 for 20 beside one busy process; with 10,000 it took 19 and 135.
ENGINE_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
_MOST_AT_ONCE = 16  # messages, then others have a turn: an engine may speak faster than it can be listened to
_LAST_WORDS_S = 0.2  # a message sent just before the process ended may still be on its way


class EngineGone(Exception):
    """Report that the engine process cannot be reached."""


class EngineStartError(Exception):
    """Report in one line that the engine process cannot be given sockets."""


class EngineProcess:
    """Run one engine process: `start`, `send`, iterate `messages` until the process is gone, then `close`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], command: Sequence[str], start_json: bytes) -> None:
        """Make the folder and the sockets; `close` removes them. Raises EngineStartError, and then none is left."""
        self._start_json = start_json
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._process: Process | None = None
        with ExitStack() as made:
            try:
                self._folder = tempfile.mkdtemp(prefix="tandem-")
                made.callback(self.remove_folder)
                addresses = [f"ipc://{self._folder}/{name}" for name in ("requests", "replies")]
                self._requests, self._replies = (
                    _bind(context, kind, address, made)
                    for kind, address in zip((zmq.PUSH, zmq.PULL), addresses, strict=True)
                )
            except (OSError, zmq.ZMQError) as error:
                reason = " ".join(str(error).split())
                raise EngineStartError(
                    f"engine: its sockets cannot be made ({reason}); set TMPDIR to a folder that can be written to and "
                    "has a short path"
                ) from None
            self._made = made.pop_all()
        self._command = [*command, *addresses, str(os.getpid())]

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the process and hand it what it is to serve. A session of its own keeps a terminal's Ctrl-C from it."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, start_new_session=True, env=ENGINE_ENVIRONMENT | os.environ
        )
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            stdin.write(self._start_json)
            await stdin.drain()
            stdin.close()
            await stdin.wait_closed()

    def send(self, message: ToEngine) -> None:
        """Send a message without blocking. Raises EngineGone if nobody is at the other end."""
        try:
            self._requests.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise EngineGone(f"engine process: cannot be reached ({error})") from None

    async def messages(self) -> AsyncIterator[FromEngine]:
        """Yield everything the process says, until it has ended and its last words are read."""
        assert self._process is not None
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        ended = asyncio.ensure_future(self._process.wait())
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
        assert self._process is not None
        code = await self._process.wait()
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def kill(self) -> None:
        """Send SIGKILL at once; safe to call from anywhere and more than once."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the sockets and remove their folder."""
        self._made.close()

    def remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _bind(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str, made: ExitStack) -> "zmq.Socket[bytes]":
    """Return a socket that listens at the address, without a bound on what it queues; `made` closes it."""
    socket = context.socket(kind)
    made.callback(socket.close)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    return socket
