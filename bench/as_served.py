"""Run an engine in a benchmark's own process as a server would: the same layers on the device, the same interpreter.

Threads switch as often as there. Garbage collections skip all objects from before the first request, since a full
collection takes longer than a token. Invariant: the interpreter's settings are restored at the end.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from gpu.model.architecture import load_architecture
from scheduler.engine.engine import HANDOVER_SECONDS
from server.deployment import Deployment
from server.planning.default_profile import with_layers_of_default


def layers_as_served(deployment: Deployment) -> Deployment:
    """Return the deployment with the dense layers that its default profile is served with. Raises ModelError."""
    return with_layers_of_default(deployment, load_architecture(deployment.model))


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
