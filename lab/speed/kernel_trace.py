"""Trace a window of a serving engine's kernels: the device's time by group of kernels, and the lengths of its gaps.

The window lasts while a file exists, so that another process decides when. Tracing slows launches, so a window shows
shares and gaps; for times, run without a trace.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from lab.speed.prefill_trace import group_events, most_kernels
from lab.speed.trace_events import DeviceEvent

GAPS_US = (2.0, 10.0, 50.0, 250.0, 1000.0, float("inf"))
"""Upper bounds of the classes that gaps are counted in."""


class KernelTrace:
    """A window of a trace. told: its results after it has ended; None before."""

    def __init__(self, switch: Path) -> None:
        self._switch = switch
        self._profile: profile | None = None
        self._began_s = 0.0
        self.told: dict[str, Any] | None = None

    def look(self) -> None:
        """Begin or end the window if the file appeared or disappeared. Ending may take seconds."""
        if self._profile is None and self.told is None and self._switch.exists() and torch.cuda.is_available():
            os.environ.setdefault("TEARDOWN_CUPTI", "0")  # captured graphs are replayed after the trace
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()
            self._began_s = time.perf_counter()
        elif self._profile is not None and not self._switch.exists():
            torch.cuda.synchronize()
            span_us = 1e6 * (time.perf_counter() - self._began_s)
            self._profile.stop()
            self.told = describe_window(_events_of(self._profile), span_us)
            self._profile = None


def describe_window(events: Sequence[DeviceEvent], span_us: float) -> dict[str, Any]:
    """Return milliseconds by group (with `whole` and `idle`), the kernels that took most, and gaps by length with their
    number and total milliseconds. Groups are empty if the driver does not allow traces.
    """
    groups = group_events(events, span_us) if events else {}
    return {"groups": groups, "kernels": most_kernels(events), "gaps": gaps_of(events), "num_events": len(events)}


def gaps_of(events: Sequence[DeviceEvent]) -> list[tuple[float, int, float]]:
    """Return gaps between events by class: its upper bound in microseconds, count, milliseconds."""
    found = [[bound, 0, 0.0] for bound in GAPS_US]
    end: float | None = None
    for _, start, duration in sorted(events, key=lambda event: event.start_us):
        if end is not None and start > end:
            of = next(one for one in found if start - end <= one[0])
            of[1] += 1
            of[2] += (start - end) / 1e3
        end = max(end or start, start + duration)
    return [(bound, int(count), ms) for bound, count, ms in found]


def _events_of(tracer: profile) -> list[DeviceEvent]:
    """Return the device's events from the tracer's own list: with many thousands `profile.events` takes minutes."""
    assert tracer.profiler is not None
    results = tracer.profiler.kineto_results
    return [
        DeviceEvent(event.name(), event.start_ns() / 1e3, event.duration_ns() / 1e3)
        for event in (() if results is None else results.events())
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0
    ]
