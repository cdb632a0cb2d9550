"""Show where the time of a decode step goes: the device's parts from one trace, the CPU's from counters.

Tracing slows the step, so parts are only compared with one another, and the step's time is measured without it. A
part's time is that in which at least one of its events ran. Streams overlap, so parts may add up to more than the step;
idle time is what no event covers.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import cast

import torch
from rich.table import Table
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import DeviceType, ProfilerActivity, profile

from lab.speed.trace_events import COPIES, WAITS, DeviceEvent, covered_us
from lab.speed.trace_lanes import HostSpan, hidden_share, lanes_of, write_lanes

STEPS = 8
_WARMUP_STEPS = 2  # with the tracer attached, but not recording
Counters = Callable[[], dict[str, float]]


def device_parts(events: Sequence[DeviceEvent], span_us: float, steps: int) -> dict[str, float]:
    """Return milliseconds per step, of `steps` steps in `span_us`.

    device_busy_ms: kernels that compute. wait_for_cpu_ms: a kernel that spins until the CPU has answered. copies_ms:
    over the link or on the device, and kernels of offloads. idle_ms: none of these.
    """
    waits = [event for event in events if any(part in event.name for part in WAITS)]
    copies = [event for event in events if any(part in event.name for part in COPIES)]
    others = set(events).difference(waits, copies)
    times = {
        "device_busy_ms": covered_us(others),
        "wait_for_cpu_ms": covered_us(waits),
        "copies_ms": covered_us(copies),
        "idle_ms": max(0.0, span_us - covered_us(events)),
    }
    return {name: us / 1e3 / steps for name, us in times.items()}


def trace_steps(
    step: Callable[[], None], counters: Counters, device: torch.device, path: Path | None,
    spans: Callable[[], Sequence[HostSpan]] = tuple,
) -> dict[str, float]:  # fmt: skip
    """Trace STEPS calls of `step`, and return milliseconds of the parts of a step.

    They are `step_ms`, on CUDA `device_parts`, and each counter (seconds so far, by name) as `<name>_ms`. If the driver
    does not allow traces, the device's parts are missing. path: file for a Chrome trace; on the CPU nothing is traced
    without it. If there are events of a device, another file, `path` with `.lanes` before its suffix, has them by what
    they do, beside `spans` of the CPU's threads (`trace_lanes`), and `hidden_share` is the hidden share of fetching.
    """
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    tracer = profile(activities=[activity]) if device.type == "cuda" or path is not None else None
    if tracer is not None:
        os.environ.setdefault("TEARDOWN_CUPTI", "0")  # captured graphs are replayed after the trace
        tracer.prepare_trace()
    for _ in range(_WARMUP_STEPS):
        step()
    _synchronize(device)
    if tracer is not None:
        tracer.start_trace()
    before, began = counters(), perf_counter()
    for _ in range(STEPS):
        step()
    _synchronize(device)
    span_us, after = 1e6 * (perf_counter() - began), counters()
    parts = {"step_ms": span_us / 1e3 / STEPS}
    if tracer is not None:
        tracer.stop_trace()
        events = device_events(tracer)
        if events:
            parts |= device_parts(events, span_us, STEPS)
        if path is not None:
            tracer.export_chrome_trace(str(path))
        if path is not None and events:
            lanes = lanes_of(events, spans(), _start_ns(tracer))
            write_lanes(path.with_suffix(f".lanes{path.suffix}"), lanes)
            share = hidden_share(lanes)
            parts |= {} if share is None else {"hidden_share": share}
    return parts | {f"{name}_ms": 1e3 * (after[name] - before[name]) / STEPS for name in before}


def tabulate_parts(parts: dict[str, float]) -> Table:
    """Return a table with a line for each part, in milliseconds and as a share of the step."""
    table = Table(box=None, pad_edge=False)
    table.add_column("part")
    for column in ("ms a step", "of it"):
        table.add_column(column, justify="right")
    for name, ms in parts.items():
        if name == "hidden_share":
            table.add_row("fetching hidden", "", f"{ms:.0%}")
            continue
        table.add_row(name.removesuffix("_ms").replace("_", " "), f"{ms:.3f}", f"{ms / parts['step_ms']:.0%}")
    return table


def device_events(tracer: profile) -> list[DeviceEvent]:
    """Return the kernels and copies of a trace that has ended."""
    events: Iterable[FunctionEvent] = tracer.events() or ()  # type: ignore[no-untyped-call]
    return [
        DeviceEvent(event.name, event.time_range.start, event.time_range.end - event.time_range.start)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def _start_ns(tracer: profile) -> int:
    """Return the time from which the events' times count, in nanoseconds since the epoch."""
    results = tracer.profiler.kineto_results if tracer.profiler is not None else None
    assert results is not None, "trace: it has ended"
    return cast(int, results.trace_start_ns())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
