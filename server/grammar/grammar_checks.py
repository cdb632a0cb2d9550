"""Check in child processes whether grammars compile, and end checks that take too long or too much memory.

The answer comes within a bounded time, whatever the grammar. Answers are cached. There are at most as many processes as
slots, and none before the first check.
"""

import hashlib
import json
import selectors
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from queue import LifoQueue
from threading import Lock
from typing import IO

from scheduler.constraints.grammar import MOST_MEMORY_BYTES, MOST_SECONDS
from scheduler.constraints.grammar_worker import HEAD
from scheduler.constraints.lexeme_trial import Lexeme

_PROCESSES = 2
_PATIENCE = 8.0  # of a machine whose cores are busy: wall seconds for one of processor time, and ...
_START_SECONDS = 20.0  # ... for a process to begin
_MOST_KEPT = 1024  # answers


class GrammarChecks:
    """Checks grammars. seconds: processor time for one. memory_bytes: memory for one, beyond that at a
    process's start.
    """

    def __init__(self, num_processes: int, seconds: float, memory_bytes: int) -> None:
        self._seconds, self._memory_bytes = seconds, memory_bytes
        self._slots: LifoQueue[subprocess.Popen[bytes] | None] = LifoQueue()
        for _ in range(num_processes):
            self._slots.put(None)
        self._lock = Lock()
        self._answers: OrderedDict[bytes, str] = OrderedDict()

    def check(self, grammar: str, lexemes: Sequence[Lexeme]) -> str:
        """Return why it cannot be compiled, is not within what one may take, or which of the lexemes cannot be held;
        empty if all is well. Any thread may ask."""
        raw = json.dumps([grammar, lexemes]).encode()
        key = hashlib.blake2b(raw, digest_size=16).digest()
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
                return self._answers[key]
        why, is_final = self._ask(raw)
        with self._lock:
            if is_final:
                self._answers[key] = why
            while len(self._answers) > _MOST_KEPT:
                self._answers.popitem(last=False)
        return why

    def shutdown(self) -> None:
        """End the processes that nobody asks anything of; one that is asked ends with its answer, or with this one."""
        for _ in range(self._slots.qsize()):
            process = self._slots.get()
            if process is not None:
                _end(process)
            self._slots.put(None)

    def _ask(self, raw: bytes) -> tuple[str, bool]:
        """Return the answer, and whether it would be the same another time: not so where a busy machine may be the
        cause.
        """
        process = self._slots.get()
        try:
            is_heard = process is not None and _hears(process, raw)
            if process is not None and not is_heard:  # it is gone since its last answer
                _end(process)
                process = None
            if process is None:
                process = self._start()
                is_heard = _hears(process, raw)
            until = time.monotonic() + self._seconds * _PATIENCE + _START_SECONDS
            answer = _answer(process, until) if is_heard else None
            if answer is not None:
                return answer.decode("utf-8", "surrogatepass"), True
            code = _end(process)
            process = None
        finally:
            self._slots.put(process)
        is_final = code < 0 and code != -signal.SIGKILL  # the kernel's bounds ended it
        if code in (-signal.SIGPROF, -signal.SIGKILL):
            why = f"takes more than {self._seconds:g} s to compile, the most that a grammar may; make it simpler"
            return why, is_final
        most = f"{self._memory_bytes >> 20} MiB"
        return (
            f"takes more than {most} to compile, the most that a grammar may, or cannot be; make it simpler",
            is_final,
        )

    def _start(self) -> "subprocess.Popen[bytes]":
        """Start a process, in a session of its own so that a terminal's Ctrl-C does not reach it."""
        limits = [str(self._seconds), str(self._memory_bytes)]
        command = [sys.executable, "-m", "scheduler.constraints.grammar_worker", *limits]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True, bufsize=0
        )


def _hears(process: "subprocess.Popen[bytes]", raw: bytes) -> bool:
    """Send a question; False: the process is gone."""
    assert process.stdin is not None
    try:
        process.stdin.write(HEAD.pack(len(raw)) + raw)
    except BrokenPipeError:
        return False
    return True


def _answer(process: "subprocess.Popen[bytes]", until: float) -> bytes | None:
    """Return the answer, None if the process or the time ends first."""
    assert process.stdout is not None
    head = _read(process.stdout, HEAD.size, until)
    return None if head is None else _read(process.stdout, HEAD.unpack(head)[0], until)


def _read(stream: IO[bytes], size: int, until: float) -> bytes | None:
    """Return so many bytes, None if the stream or the time ends before."""
    found = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while len(found) < size:
            if not selector.select(max(0.0, until - time.monotonic())):
                return None
            more = stream.read(size - len(found))
            if not more:
                return None
            found += more
    return found


def _end(process: "subprocess.Popen[bytes]") -> int:
    """End the process, and return its exit code."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    try:
        return process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


_CHECKS = GrammarChecks(_PROCESSES, MOST_SECONDS, MOST_MEMORY_BYTES)


def check_in_process(grammar: str, lexemes: Sequence[Lexeme]) -> str:
    """Check a grammar in the processes that all requests share."""
    return _CHECKS.check(grammar, lexemes)


def end_checks() -> None:
    """End the shared processes."""
    _CHECKS.shutdown()
