"""Run an engine in a benchmark's own process under the interpreter settings of a serving process.

Threads switch as often as there. Garbage collections skip all objects from before the first request, since a full
collection takes longer than a token. Invariant: the interpreter's settings are restored at the end.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from scheduler.engine.engine import HANDOVER_SECONDS


@contextmanager
def interpreter_as_served() -> Iterator[None]:
    """Apply a serving process's interpreter settings. Enter it after an engine is loaded."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(HANDOVER_SECONDS)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before)
