"""Watch the lanes of an engine in a window: steps of each kind, their times, and what delayed them.

Invariant: the engine is left as it was found.
"""

import gc
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np

from bench.long_client import Client
from gpu.in_flight import InFlight
from gpu.step import Lane, StepPlan, StepResult
from scheduler.sequences.lane_fences import rows_of


@dataclass(slots=True)
class _Kind:
    """Steps of a kind: the device's milliseconds from begin to end, rows of each, and how many were fenced."""

    step_ms: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    fenced: int = 0


class LaneWatch:
    """A watch over the lanes of an engine. Use: `with LaneWatch(client) as watch: ..`, and then `watch.told()`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._kinds: dict[str, _Kind] = defaultdict(_Kind)
        self._kinds_of: dict[Lane, deque[str]] = {lane: deque() for lane in Lane}
        self._longest_ms: dict[str, float] = dict.fromkeys(("plan", "launch", "result", "collection"), 0.0)
        self._seconds = dict.fromkeys(self._longest_ms, 0.0)
        self._num_offloads = self._num_releases = self._num_units = 0
        self._collecting_s = 0.0
        self._before: dict[str, float] = {}
        self._differences: dict[str, float] = {}

    def __enter__(self) -> Self:
        engine = self._client.engine
        for lane, kinds in self._kinds_of.items():  # what was launched before belongs to no kind
            kinds.extend([""] * engine._num_in_flight(lane))
        self._before = self._read()
        runner, scheduler = engine._runner, engine.scheduler
        watched: list[tuple[Any, str, Callable[..., Any]]] = [
            (runner, "launch", partial(self._launch, runner.launch)),
            (scheduler, "schedule", partial(self._timed, "plan", scheduler.schedule)),
            (scheduler, "postprocess", partial(self._postprocess, scheduler.postprocess)),
        ]
        for thing, name, instead in watched:
            setattr(thing, name, instead)
        gc.callbacks.append(self._collect)
        return self

    def __exit__(self, *_: object) -> None:
        engine = self._client.engine
        gc.callbacks.remove(self._collect)
        for thing, name in ((engine._runner, "launch"), (engine.scheduler, "schedule"),
                            (engine.scheduler, "postprocess")):  # fmt: skip
            delattr(thing, name)  # the class's own is there again
        self._differences = {name: late - self._before[name] for name, late in self._read().items()}

    def told(self) -> dict[str, Any]:
        """Return `steps` by kind; of the window: asks of a step (two: it went in half batches), rows left out and
        offloads; what held the thread that launches; of a hop on average, that the host waits and attends.
        """
        one = self._differences
        asks, asking_steps = max(one["asks"], 1.0), max(one["asking_steps"], 1.0)
        return {
            "steps": {name: _tell(kind) for name, kind in sorted(self._kinds.items())},
            "parts": one["asks"] / asking_steps / max(self._num_layers, 1),
            "rows_left_out": one["rows_left_out"],
            "deposits": self._num_offloads,
            "releases": self._num_releases,
            "units": self._num_units,
            "tables_built": one["tables_built"],
            "rows_read": one["rows_read"],
            "pinned_gib": one["pinned_bytes"] / 2**30,
            "longest_ms": self._longest_ms,
            "seconds": self._seconds | {"whole": one["seconds"], "ready": one["ready_s"]},
            "hop_wait_us": 1e6 * one["wait_s"] / asks,
            "hop_attend_us": 1e6 * one["attend_s"] / asks,
        }

    @property
    def _num_layers(self) -> int:
        """That are asked for."""
        return len(self._client.engine.host_layers)

    def _read(self) -> dict[str, float]:
        engine = self._client.engine
        host, times = self._client.host_stats(), engine._runner.host_read_times
        pinned_bytes = 0 if engine._tier is None else engine._tier.stats().bytes_pinned
        return {
            "seconds": time.perf_counter(),
            "asks": times.requests,
            "asking_steps": times.steps,
            "ready_s": times.ready_s,
            "rows_left_out": engine.scheduler.num_rows_left_out,
            "tables_built": host.tables_built,
            "rows_read": host.rows_read,
            "pinned_bytes": pinned_bytes,
            "wait_s": host.wait_seconds,
            "attend_s": host.attend_seconds,
        }

    def _timed(self, name: str, call: Callable[..., Any], *given: object) -> Any:
        began = time.perf_counter()
        try:
            return call(*given)
        finally:
            self._note(name, time.perf_counter() - began)

    def _note(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds
        self._longest_ms[name] = max(self._longest_ms[name], 1e3 * seconds)

    def _launch(self, call: Callable[[StepPlan], InFlight], plan: StepPlan) -> InFlight:
        asks = [ask for group in plan.decode for ask in group.host_reads or [None] * len(group.slots)]
        kind = f"{rows_of(plan.lane, asks).name.lower()} rows" if asks else ""
        self._kinds_of[plan.lane].append(kind)
        if kind:
            self._kinds[kind].rows.append(len(asks))
            self._kinds[kind].fenced += plan.is_fenced
        self._num_offloads += len(plan.offloads)
        self._num_releases += len(plan.evictions)
        self._num_units += len(plan.units)
        launched: InFlight = self._timed("launch", call, plan)
        return launched

    def _postprocess(self, call: Callable[..., Any], result: StepResult, lane: Lane = Lane.DEVICE) -> Any:
        kind = self._kinds_of[lane].popleft()
        if kind:
            self._kinds[kind].step_ms.append(1e3 * result.decode_seconds)
        return self._timed("result", call, result, lane)

    def _collect(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_s = time.perf_counter()
        else:
            self._note("collection", time.perf_counter() - self._collecting_s)


def describe(lanes: dict[str, Any]) -> str:
    """Return what `LaneWatch.told` says, in words."""
    steps = [
        f"{one['steps']} steps of {one['rows']:.1f} {kind} {one['median_ms']:.1f} ms (most {one['most_ms']:.0f}, "
        f"{one['fenced']} fenced)"
        for kind, one in lanes["steps"].items()
    ]
    seconds = [f"{name} {taken:.2f}" for name, taken in lanes["seconds"].items() if name != "whole"]
    longest = [f"{name} {ms:.1f}" for name, ms in lanes["longest_ms"].items()]
    return (
        f"{', '.join(steps)}; {lanes['parts']:.2f} parts, {lanes['rows_left_out']:.0f} rows left out, "
        f"{lanes['deposits']} offloads, {lanes['releases']} releases, {lanes['pinned_gib']:.2f} GiB pinned; a hop: the "
        f"host waits {lanes['hop_wait_us']:.0f} us and attends {lanes['hop_attend_us']:.0f}; of "
        f"{lanes['seconds']['whole']:.2f} s {', '.join(seconds)}; longest, in ms: {', '.join(longest)}"
    )


def _tell(kind: _Kind) -> dict[str, float]:
    p10, median, p90 = np.quantile(kind.step_ms or [0.0], (0.1, 0.5, 0.9)).tolist()
    told = {"steps": len(kind.rows), "rows": float(np.mean(kind.rows or [0])), "fenced": kind.fenced}
    return told | {"median_ms": median, "p10_ms": p10, "p90_ms": p90, "most_ms": max(kind.step_ms, default=0.0)}
