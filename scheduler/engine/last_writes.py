"""Write an engine's contexts to disk before it ends, and report the progress."""

import math
import time
from collections.abc import Callable

from scheduler.messages import Writing
from scheduler.residence.disk_contexts import DiskContexts

PATIENCE_SECONDS = 10.0  # without a byte written; then the disk counts as dead
_REPORT_SECONDS = 0.25
_LOOK_SECONDS = 0.01

Report = Callable[[Writing], None]


def report_nothing(_: Writing) -> None:
    """Report nothing; the default of `report`."""


def write_contexts(disk: DiskContexts, step: Callable[[], object], report: Report) -> None:
    """Write the waiting contexts as long as that makes progress, and for at most `disk.end_seconds`.

    step: launches the next copy from the device. report: called with bytes written and left, four times a second.
    """
    if disk.side is None:
        return
    store = disk.side.store
    now = progress_s = time.monotonic()
    ends_s, reported_s = now + store.config.end_seconds, -math.inf
    last: Writing | None = None
    while (disk.has_work or store.is_writing) and now < min(ends_s, progress_s + PATIENCE_SECONDS):
        words = Writing(store.folder.bytes_written, disk.num_unsaved_bytes)
        if words != last:
            last, progress_s = words, now
        if now >= reported_s + _REPORT_SECONDS:
            report(words)
            reported_s = now
        if disk.has_work:
            step()
        else:
            time.sleep(_LOOK_SECONDS)
        now = time.monotonic()
