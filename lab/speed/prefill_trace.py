"""Trace one prefill, and show where the time of a prompt goes: the device's kernels and copies in groups, and its gaps.

A group's time is that in which at least one of its kernels ran. Streams overlap, so groups may add up to more than the
whole; idle time is what no kernel covers.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from rich.table import Table
from torch.profiler import DeviceType, ProfilerActivity, profile

from lab.speed.step_trace import device_events
from lab.speed.trace_events import DeviceEvent, covered_us

GROUPS = {  # parts of kernels' names; the first group that has one
    "link": ("Memcpy HtoD", "Memcpy DtoH"),
    "merge": ("_merge_kernel",),
    "codes": ("_encode", "simhash", "_codes_kernel"),
    "deposit": ("_offload_kernel", "_restore_kernel", "_scatter_kernel", "reduce_kernel"),
    "attention": ("flash", "fmha", "attention", "sdpa", "cudnn"),
    "products": ("gemm", "nvjet", "cutlass", "gemv", "cublas", "splitK"),
    "norms": ("_rms_norm_kernel", "_swiglu_kernel"),
    "rope and write": ("_rope_kv_write_kernel",),
    "gathers and copies": ("index", "gather", "copy", "Memcpy", "Memset", "Cat", "elementwise", "fill"),
}
MOST_KERNELS = 12
MOST_GAPS = 8
Kernels = list[tuple[str, float, int]]  # name, milliseconds, launches
Gaps = list[tuple[str, str, float, int]]  # what ran before and behind, milliseconds, how often


def _traced(work: Callable[[], object]) -> tuple[profile, float]:
    """Call `work` while CUDA is traced; return the trace and the microseconds until the device was done."""
    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # captured graphs are replayed after the trace
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as tracer:
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        span_us = 1e6 * (time.perf_counter() - began)
    return tracer, span_us


def trace_prefill(prefill: Callable[[], object]) -> tuple[dict[str, float], Kernels, Gaps]:
    """Return milliseconds of a traced call by group (with `whole` and `idle`), the kernels that took most, and the gaps
    in which nothing ran. On CUDA. All are empty if the driver does not allow traces.
    """
    tracer, span_us = _traced(prefill)
    events = device_events(tracer)
    return (group_events(events, span_us), most_kernels(events), most_gaps(events, span_us)) if events else ({}, [], [])


def count_launches(work: Callable[[], object]) -> str:
    """Return in words how many kernels a call runs, how many launches and graphs the host requests, and how long the
    device computes. On CUDA. Tracing slows the host.
    """
    tracer, span_us = _traced(work)
    results = None if tracer.profiler is None else tracer.profiler.kineto_results
    events, launches, graphs = list[DeviceEvent](), 0, 0
    for event in () if results is None else results.events():
        name = event.name()
        if event.device_type() == DeviceType.CUDA:
            if event.duration_ns() > 0:
                events.append(DeviceEvent(name, event.start_ns() / 1e3, event.duration_ns() / 1e3))
        else:
            launches += "LaunchKernel" in name or "Memcpy" in name or "Memset" in name
            graphs += "GraphLaunch" in name
    return (
        f"{len(events):,} kernels and copies, {launches:,} launched one by one, {graphs:,} graphs; the device busy in "
        f"{covered_us(events) / 1e3:,.1f} of {span_us / 1e3:,.1f} ms"
    )


def group_events(events: Sequence[DeviceEvent], span_us: float) -> dict[str, float]:
    """Return milliseconds of each group that ran in `span_us`. `other`: kernels of no group."""
    groups: dict[str, list[DeviceEvent]] = {}
    for event in events:
        groups.setdefault(_group_of(event.name), []).append(event)
    parts = {name: covered_us(groups[name]) / 1e3 for name in (*GROUPS, "other") if name in groups}
    return {"whole": span_us / 1e3} | parts | {"idle": max(0.0, span_us - covered_us(events)) / 1e3}


def most_gaps(events: Sequence[DeviceEvent], span_us: float) -> Gaps:
    """Return where the device was idle for the most time: between which kernels or copies, milliseconds, and how often.

    `the host` stands for what ran before the first of them and behind the last one, in `span_us` microseconds.
    """
    times: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    ordered = sorted(events, key=lambda event: event.start_us)
    begin, last = ordered[0].start_us, ordered[0]
    end = begin
    for event in ordered:
        if event.start_us > end:
            times[last.name, event.name] += event.start_us - end  # type: ignore[assignment]
            counts[last.name, event.name] += 1
        if event.start_us + event.duration_us > end:
            end, last = event.start_us + event.duration_us, event
    times["the host", "the host"] = max(0.0, span_us - (end - begin))  # type: ignore[assignment]
    counts["the host", "the host"] = 1
    return [(*pair, us / 1e3, counts[pair]) for pair, us in times.most_common(MOST_GAPS)]


def most_kernels(events: Sequence[DeviceEvent]) -> Kernels:
    """Return the kernels with the most time: name, milliseconds, launches."""
    times: Counter[str] = Counter()
    for event in events:
        times[event.name] += event.duration_us  # type: ignore[assignment]
    counts = Counter(event.name for event in events)
    return [(name, us / 1e3, counts[name]) for name, us in times.most_common(MOST_KERNELS)]


def tabulate_groups(groups: dict[str, float], kernels: Sequence[tuple[str, float, int]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("where", overflow="ellipsis", no_wrap=True, max_width=70)
    for column in ("ms", "of it", "launches"):
        table.add_column(column, justify="right")
    for name, ms in groups.items():
        table.add_row(name, f"{ms:,.1f}", f"{ms / groups['whole']:.0%}", "")
    for name, ms, count in kernels:
        table.add_row(f"  {name}", f"{ms:,.1f}", f"{ms / groups['whole']:.0%}", f"{count:,}")
    return table


def tabulate_gaps(gaps: Gaps) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("idle behind", "and before"):
        table.add_column(column, overflow="ellipsis", no_wrap=True, max_width=50)
    for column in ("ms", "times"):
        table.add_column(column, justify="right")
    for before, behind, ms, count in gaps:
        table.add_row(before, behind, f"{ms:,.2f}", f"{count:,}")
    return table


def _group_of(name: str) -> str:
    return next((group for group, words in GROUPS.items() if any(word in name for word in words)), "other")
