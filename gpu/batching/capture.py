"""Capture work of the device as a CUDA graph, after a warm-up on a stream of its own.

The warm-up compiles kernels and lets libraries allocate their workspaces.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

WARMUP_RUNS = 2
TIMED_RUNS = 8

Result = TypeVar("Result")


def capture(
    work: Callable[[], Result], pool: tuple[int, int] | None, on: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Return the graph of `work`, and the result of `work` when it was captured, which replays overwrite.

    pool: memory shared by graphs that never run at the same time; None: its own. on: the stream whose priority its
    kernels have; None: any.
    """
    stream = on or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_RUNS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    return record(work, pool, on)


def record(
    work: Callable[[], Result], pool: tuple[int, int] | None, on: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Return the graph of `work` as `capture` does, without a warm-up: its kernels must be compiled."""
    graph = torch.cuda.CUDAGraph()
    with _nothing_collected(), torch.cuda.graph(graph, pool=pool, stream=on):
        result = work()
    return graph, result


def graph_seconds(work: Callable[[], object], on: torch.cuda.Stream | None = None) -> float:
    """Return the seconds that a captured graph of `work` takes on the device, the least of TIMED_RUNS runs. on: as in
    `capture`; use one stream for many timings, because cuBLAS keeps a workspace for each stream.
    """
    graph, _ = capture(work, None, on)
    took = []
    for _ in range(TIMED_RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end))
    return 1e-3 * min(took)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Suspend Python's garbage collection: destroying a graph while another is captured would end the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
