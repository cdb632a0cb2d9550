"""Start an engine process before it is known what it will serve, so that it imports its libraries meanwhile.

The imports take longer than all that the API process does before it sends the plan. With several models that take
turns, another process waits to load the next one while a model is served. Imports only Python's standard library.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from types import TracebackType

ENGINE_COMMAND = (sys.executable, "-m", "scheduler.engine.engine_process")

# Threads that wait by spinning take the cores from the API process and from each other: on two busy cores a decode step
# of the reference model took 196 ms with the library's default and 19 ms with this.
# A short spin is no better in between: with GOMP_SPINCOUNT=1000 (some 50 microseconds) a step of `sampled` on two cores
# took 22 ms for 31 to 39 alone, but 29 to 33 for 20 beside one busy process; with 10,000 it took 19 and 135.
ENGINE_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}


def make_folder() -> str:
    """Return a new private folder for an engine's sockets. Raises OSError."""
    return tempfile.mkdtemp(prefix="tandem-")


def addresses_in(folder: str) -> tuple[str, str]:
    """Return the addresses where an engine receives requests, and where it sends replies."""
    return f"ipc://{folder}/requests", f"ipc://{folder}/replies"


def run_engine(command: Sequence[str], folder: str) -> subprocess.Popen[bytes]:
    """Run an engine, which reads its configuration from standard input, and ends with this process.

    It has a session of its own, so that a terminal's Ctrl-C does not reach it. Raises OSError.
    """
    return subprocess.Popen(
        [*command, *addresses_in(folder), str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env=ENGINE_ENVIRONMENT | os.environ,
    )


class HeadStart:
    """An engine that has imported its libraries and waits to be taken, with a folder for its sockets. It is killed at
    the context's end if it was not taken. Any thread may call `renew`.
    """

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._waiting: tuple[subprocess.Popen[bytes], str] | None = None
        self._is_over = False

    def __enter__(self) -> "HeadStart":
        self.renew()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_over = True
            self._drop()

    @property
    def is_waiting(self) -> bool:
        """Return whether an engine waits, as of the last check."""
        return self._waiting is not None

    def renew(self) -> None:
        """Start another engine if the last one was taken or has ended. If that fails, there is none to take, and the
        supervisor's own attempt reports the reason.
        """
        with self._lock:
            if self._is_over or self._is_there():
                return
            folder = None
            try:
                folder = make_folder()
                self._waiting = run_engine(self._command, folder), folder
            except OSError:
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)

    def take(self) -> tuple[subprocess.Popen[bytes], str] | None:
        """Return the engine and its folder, once, to the caller who will end them; None: there is none, it was taken,
        or it has just been asked for.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            taken = self._waiting if self._is_there() else None
            self._waiting = None
            return taken
        finally:
            self._lock.release()

    def _is_there(self) -> bool:
        """Return whether an engine waits; the folder of one that has ended is removed."""
        if self._waiting is not None and self._waiting[0].poll() is not None:
            self._drop()
        return self._waiting is not None

    def _drop(self) -> None:
        if self._waiting is not None:
            process, folder = self._waiting
            self._waiting = None
            process.kill()
            process.communicate()
            shutil.rmtree(folder, ignore_errors=True)
