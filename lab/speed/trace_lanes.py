"""Write a Chrome trace that shows a decode step's overlap: a lane for each kind of work, on whatever stream it ran.

Kernels of a captured graph are all traced on the stream that launched it, so lanes are chosen by what a kernel does.
Times are of the device's trace. The CPU's spans are of its wall clock, to which the trace converts its own times.
Invariant: no two events of one row overlap; a lane has as many rows as events that run at once.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lab.speed.trace_events import COPIES, WAITS, DeviceEvent, covered_us

FETCH, PREDICTION, EXCHANGE = "fetch over the link", "prediction and choice", "ask and await"
COPY, COMPUTE, HOST = "copies", "compute", "CPU: asks awaited and answered"
LANES = (COMPUTE, EXCHANGE, HOST, PREDICTION, FETCH, COPY)
"""Lanes from the top of the page."""
_PARTS = {
    FETCH: ("_fetch_kernel", "_look_kernel"),
    PREDICTION: ("_predict_kernel", "_choose_blocks_kernel", "_force_kernel", "_replay_kernel"),
    EXCHANGE: ("_pack_kernel", *WAITS),
    COPY: COPIES,
}
_ROWS = 100  # most rows of a lane: the page numbers its threads by lane and row


class HostSpan(NamedTuple):
    """A span of work of a CPU thread, in nanoseconds since the epoch."""

    name: str
    begin_ns: int
    end_ns: int


def lane_of(name: str) -> str:
    """Return the lane of a kernel or copy by its name."""
    return next((lane for lane, parts in _PARTS.items() if any(part in name for part in parts)), COMPUTE)


def lanes_of(
    events: Sequence[DeviceEvent], spans: Sequence[HostSpan], trace_start_ns: int
) -> dict[str, list[DeviceEvent]]:
    """Return the events of all LANES, each in order of time. Times are microseconds from the trace's start."""
    lanes: dict[str, list[DeviceEvent]] = {lane: [] for lane in LANES}
    for event in events:
        lanes[lane_of(event.name)].append(event)
    for name, begin_ns, end_ns in spans:
        lanes[HOST].append(DeviceEvent(name, (begin_ns - trace_start_ns) / 1e3, (end_ns - begin_ns) / 1e3))
    return {lane: sorted(own, key=lambda event: event.start_us) for lane, own in lanes.items()}


def hidden_share(lanes: dict[str, list[DeviceEvent]]) -> float | None:
    """Return the share of fetching time in which something is computed as well; None if nothing is fetched."""
    fetch, compute = lanes[FETCH], lanes[COMPUTE]
    if not fetch:
        return None
    both = covered_us(fetch) + covered_us(compute) - covered_us([*fetch, *compute])
    return both / covered_us(fetch)


def chrome_trace(lanes: dict[str, list[DeviceEvent]]) -> dict[str, Any]:
    """Return the trace in the trace-event format: complete events, and names of rows."""
    told: list[dict[str, Any]] = []
    for order, (lane, events) in enumerate(lanes.items()):
        ends: list[float] = []  # of rows
        for name, start, duration in events:
            row = next((row for row, end in enumerate(ends) if end <= start), len(ends))
            ends[row : row + 1] = [start + duration]
            told.append({"ph": "X", "name": name, "cat": lane, "pid": 0, "tid": _ROWS * order + row, "ts": start,
                         "dur": duration})  # fmt: skip
        for row in range(len(ends)):
            tid = _ROWS * order + row
            told.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": lane}})
            told.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": tid, "args": {"sort_index": tid}})
    return {"traceEvents": told, "displayTimeUnit": "ms"}


def write_lanes(path: Path, lanes: dict[str, list[DeviceEvent]]) -> None:
    """Write a trace file for chrome://tracing or ui.perfetto.dev."""
    path.write_text(json.dumps(chrome_trace(lanes)))
