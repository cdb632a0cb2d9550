"""Start an engine process before anybody knows what it is to serve, so that it reads its libraries meanwhile.

Those take longer than all that the API process does before it hands over the plan. Imports nothing but Python's own.
"""

import os
import shutil
import subprocess
import sys
import tempfile
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
    """Return where an engine listens for requests, and where it sends replies to."""
    return f"ipc://{folder}/requests", f"ipc://{folder}/replies"


def run_engine(command: Sequence[str], folder: str) -> subprocess.Popen[bytes]:
    """Run an engine, which reads what it is to serve from its standard input, and ends with this process. A session of
    its own keeps a terminal's Ctrl-C from it. Raises OSError.
    """
    return subprocess.Popen(
        [*command, *addresses_in(folder), str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env=ENGINE_ENVIRONMENT | os.environ,
    )


class HeadStart:
    """An engine under way, and the folder of its sockets, for whoever takes it; nobody's when the context ends, it is
    killed there. Where it cannot be run, there is none to take, and the supervisor's own try says why.
    """

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._command = command
        self._folder: str | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "HeadStart":
        try:
            self._folder = make_folder()
            self._process = run_engine(self._command, self._folder)
        except OSError:
            self._remove_folder()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._remove_folder()

    def take(self) -> tuple[subprocess.Popen[bytes], str] | None:
        """Return the engine and its folder to who will end them, once; None: there is none, or it was taken."""
        if self._process is None or self._folder is None:
            return None
        taken = self._process, self._folder
        self._process = self._folder = None
        return taken

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
