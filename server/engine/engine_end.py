"""Wait for an engine that was told to exit, as long as it writes contexts, and decide when it is killed."""

import asyncio
import math
import time

from scheduler.messages import Writing
from server.engine.engine_run import EngineProcess

EXIT_SECONDS = 5.0  # until it exits, or says that it writes
WRITE_PATIENCE_S = 15.0  # longer than an engine's own with its disk
_LOOK_S = 0.1


class EngineEnd:
    """The end of one engine. writing: its last report of its writes; None: it has sent none."""

    def __init__(self, quiet_s: float, most_write_s: float) -> None:
        """`quiet_s`: until it exits, or says that it writes. `most_write_s`: that it may write."""
        now = time.monotonic()
        self.writing: Writing | None = None
        self._quiet_until_s = now + quiet_s
        self._by_s = now + max(quiet_s, most_write_s + WRITE_PATIENCE_S)

    @property
    def due_s(self) -> float:
        """Return when the engine is killed."""
        return min(self._quiet_until_s, self._by_s)

    def note(self, writing: Writing) -> None:
        """Take a report of writes; it gives the engine more time if something was written since the last."""
        if writing != self.writing:
            self.writing, self._quiet_until_s = writing, time.monotonic() + WRITE_PATIENCE_S

    def end_by(self, by_s: float) -> None:
        """Kill the engine at this time at the latest."""
        self._by_s = min(self._by_s, by_s)

    async def wait(self, engine: EngineProcess) -> None:
        """Wait until the engine has exited, or is due to be killed."""
        ended = asyncio.ensure_future(engine.wait())
        try:
            while not ended.done() and time.monotonic() < self.due_s:
                await asyncio.wait({ended}, timeout=min(_LOOK_S, max(0.0, self.due_s - time.monotonic())))
        finally:
            ended.cancel()


def describe_writing(end: EngineEnd | None) -> str:
    """Describe in a few words what an ending engine does; "": nothing that takes long."""
    if end is None or end.writing is None:
        return ""
    left = end.writing.num_left_bytes / 2**20
    return "writes its contexts to disk" + (f", {math.ceil(left):,} MiB left" if left else "")
