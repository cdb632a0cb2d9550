"""Render chat templates in child processes, each for one thread at a time.

A template is bounded in processor time and memory, and costs at most the child that tried it. Another child is started
when none is free.
"""

import atexit
import pickle
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Lock
from typing import IO, Any

from server.prompting.template_child import LENGTH, MALFORMED, OVERRUN, REFUSED

SECONDS = 2.0  # of a render's processor time
_MOST_WAITED = 15  # times that, by the clock: for a machine that is busy
_CHUNK_BYTES = 2**20
_CHILD = Path(__file__).with_name("template_child.py")


class TemplateRefusal(Exception):
    """The template refuses its input; the message says why."""


class MalformedTemplate(Exception):
    """The template does not compile; the message says why."""


class TemplateOverrun(Exception):
    """The template was stopped; the message says why."""


class _Child:
    """A process that renders one template at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", str(_CHILD)]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        # A group of its own: Ctrl-C at a terminal ends the server, whose chats are finished first.
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, bufsize=0, process_group=0)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes, seconds: float) -> bytes:
        """Return the answer; the child then takes another request. Raises TemplateOverrun; then the child is gone."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None, "it is a pipe"
        assert answers is not None, "it is a pipe"
        ends = time.monotonic() + _MOST_WAITED * seconds
        try:
            _write(requests, LENGTH.pack(len(request)) + request)
            (length,) = LENGTH.unpack(_read(answers, LENGTH.size, ends))
            return _read(answers, length, ends)
        except TimeoutError:
            raise TemplateOverrun(f"ran for more than {_MOST_WAITED * seconds:g} s") from None
        except (BrokenPipeError, EOFError):
            ended = self._process.wait()
            if ended == -signal.SIGPROF:
                raise TemplateOverrun(f"ran for more than {seconds:g} s") from None
            raise TemplateOverrun(f"ended the process that tried it (exit status {ended})") from None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Renderers:
    """Renders templates for any number of threads; `close` ends the children."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._idle: list[_Child] = []

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """Render a template. Raises TemplateRefusal, MalformedTemplate and TemplateOverrun."""
        request = pickle.dumps((source, variables, SECONDS), pickle.HIGHEST_PROTOCOL)
        child = self._take()
        try:
            answer = child.ask(request, SECONDS)
        except BaseException:
            child.close()
            raise
        with self._lock:
            self._idle.append(child)
        kind, text = answer[:1], answer[1:].decode("utf-8", "surrogatepass")
        if kind == REFUSED:
            raise TemplateRefusal(text)
        if kind == MALFORMED:
            raise MalformedTemplate(text)
        if kind == OVERRUN:
            raise TemplateOverrun(text)
        return text

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()

    def _take(self) -> _Child:
        while True:
            with self._lock:
                child = self._idle.pop() if self._idle else None
            if child is None:
                return _Child()
            if child.is_alive:
                return child
            child.close()


def _write(file: IO[bytes], data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _read(file: IO[bytes], num_bytes: int, ends: float) -> bytes:
    """Return so many bytes. Raises EOFError, and TimeoutError at `ends` of the monotonic clock."""
    found = bytearray()
    with selectors.PollSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        while len(found) < num_bytes:
            if not selector.select(max(0.0, ends - time.monotonic())):
                raise TimeoutError
            data = file.read(min(num_bytes - len(found), _CHUNK_BYTES))
            if not data:
                raise EOFError
            found += data
    return bytes(found)


RENDERERS = Renderers()
atexit.register(RENDERERS.close)
