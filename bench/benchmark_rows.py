"""Measure, print and write benchmark rows: a time next to its floor and its peer.

Invariants: a number's floor is printed before the number is measured. A result that failed its correctness gate is
never reported. The last line on stdout is the rows as JSON.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from bench.gate_error import GateError


class Row(BaseModel):
    """One row of a benchmark. ms: the median. floor: describes which bytes or FLOPs over which rate give `floor_ms`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    shape: str
    device: str
    ms: float
    p10: float
    p90: float
    floor: str
    floor_ms: float | None
    peer: str | None
    peer_ms: float | None
    rates: dict[str, float] = Field(description="the machine's measured rates")
    extras: dict[str, Any] = {}
    config: dict[str, Any] = Field(description="what was measured, resolved")

    @property
    def times_floor(self) -> float | None:
        return self.ms / self.floor_ms if self.floor_ms else None

    @property
    def times_faster(self) -> float | None:
        """Return how many times faster than the peer."""
        return self.peer_ms / self.ms if self.peer_ms else None


@dataclass(frozen=True, slots=True)
class Timing:
    ms: float
    p10: float
    p90: float


def summarise(milliseconds: Sequence[float]) -> Timing:
    """Return median and percentiles of one or more times."""
    p10, median, p90 = np.percentile(np.asarray(milliseconds, np.float64), [10, 50, 90])
    return Timing(float(median), float(p10), float(p90))


def measure(call: Callable[[], object], device: torch.device, num_warmups: int, num_repeats: int) -> Timing:
    """Time `call` in milliseconds: between CUDA events on its device, or by the host's clock.

    On CUDA the calls are launched back to back, so if a launch takes longer than the call, launches are timed.
    """
    for _ in range(num_warmups):
        call()
    if device.type != "cuda":
        times = []
        for _ in range(num_repeats):
            began = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - began))
        return summarise(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_repeats + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return summarise([begin.elapsed_time(end) for begin, end in pairwise(events)])


def require(is_right: bool, what: str) -> None:
    """Raise GateError unless the result is right. what: the statement that must hold."""
    if not is_right:
        raise GateError(f"no number without a right result: {what}")


def announce(console: Console, name: str, floor: str, floor_ms: float) -> None:
    """Print a floor before its measurement."""
    console.print(f"{name}: at best [bold]{floor_ms:.3f} ms[/] ({floor})", highlight=False)


class Stages:
    """Prints the stages of a benchmark, with the seconds since it began."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.perf_counter()
        self._stage = ""

    def begin(self, stage: str) -> None:
        """Print a stage, unless it is the current one."""
        if stage != self._stage:
            self._stage = stage
            self._print(stage)

    def tell(self, row: Row, more: str = "") -> None:
        """Print a row as soon as it is measured, and `more` about it."""
        beside = "" if row.times_faster is None else f", {row.times_faster:.2f} times as fast as {row.peer}"
        self._print(f"{row.name}, {row.shape}: {row.ms:.3f} ms{beside}{f'; {more}' if more else ''}")

    def _print(self, text: str) -> None:
        self._console.print(f"{time.perf_counter() - self._began:6.1f} s  {text}", highlight=False)


def report(rows: Sequence[Row], json_path: Path | None, console: Console) -> None:
    """Print a table, write the rows to `json_path`, and print the same JSON as stdout's last line."""
    console.print(_tabulate(rows))
    listed = [row.model_dump(mode="json") for row in rows]
    if json_path is not None:
        json_path.write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(listed), flush=True)


def _tabulate(rows: Sequence[Row]) -> Table:
    devices = sorted({row.device for row in rows})
    table = Table(title=" and ".join(devices) or "nothing measured", title_justify="left", box=None, pad_edge=False)
    table.add_column("what", overflow="fold", min_width=16)
    for column in ("ms", "p10-p90", "floor", "x floor", "peer", "x faster"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        spread = f"{row.p10:.2f}-{row.p90:.2f}"
        numbers = (row.floor_ms, row.times_floor, row.peer_ms, row.times_faster)
        texts = ["-" if number is None else f"{number:.2f}" for number in numbers]
        table.add_row(f"{row.name}, {row.shape}", f"{row.ms:.2f}", spread, *texts)
    for peer in sorted({row.peer for row in rows if row.peer}):
        table.caption = f"{table.caption}; {peer}" if table.caption else f"peer: {peer}"
    return table
