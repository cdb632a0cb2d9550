"""End a process when its parent ends, whatever its other threads do. Imports only Python's standard library."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

_LOOK_SECONDS = 1.0
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


def end_with_parent(parent_id: int, clean_up: Callable[[], None] = lambda: None) -> None:
    """End this process once `parent_id` is no longer its parent, even while it loads or a step hangs. clean_up: called
    before that.
    """

    def watch() -> None:
        while os.getppid() == parent_id:
            time.sleep(_LOOK_SECONDS)
        clean_up()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def be_killed_with_parent() -> None:
    """Let the system kill this process when the thread that started it ends, even if this process is stopped."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
