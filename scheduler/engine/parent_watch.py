"""End a process with the one that started it, whatever its other threads do. Imports nothing but Python's own."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

_LOOK_SECONDS = 1.0
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


def end_with_parent(parent_id: int, clean_up: Callable[[], None] = lambda: None) -> None:
    """End this process once `parent_id` is no longer its parent, also while it loads or a step hangs. clean_up: is
    called before the end.
    """

    def watch() -> None:
        while os.getppid() == parent_id:
            time.sleep(_LOOK_SECONDS)
        clean_up()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def be_killed_with_parent() -> None:
    """Have the system kill this process with the thread that started it, also while it is stopped."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
