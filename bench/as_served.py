"""Run an engine in a benchmark's own process as it runs in the process that serves one.

Threads hand the interpreter over as often there, and collections do not look at what stands before the first request:
the whole of it takes longer than a token does. Invariant: the interpreter is left as it was found.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from scheduler.engine.engine import HANDOVER_SECONDS


@contextmanager
def interpreter_as_served() -> Iterator[None]:
    """Set the interpreter as a serving process does, from when an engine is loaded until it ends."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(HANDOVER_SECONDS)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before)
