"""Run the cases of all operations: check a case's result, time it beside its peer, and make a row with its floor.

A new operation is a function from `Asked` to cases, and a line in `bench.op.op_command.OPERATIONS`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from rich.console import Console

from bench.benchmark_rows import Row, announce, measure
from bench.rates import device_name, measure_device_rates
from cpu.memory_rates import measure_host_rates
from gpu.model.architecture import named_shape
from gpu.model.spec import Architecture

COLD_BYTES = 512 * 2**20  # several times the cache of any card
WARMUPS, REPEATS = 2, 10
SEED = 1

Call = Callable[[], object]
Rate = Literal[
    "device_stream_gb_s", "device_copy_gb_s", "host_to_device_gb_s", "host_stream_gb_s", "host_random_rows_gb_s"
]


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of the command line. batches: rows of a step. tokens: of a context or prompt. kinds: formats of
    weights or of keys and values; empty: all that the operation has. own: options of one operation alone, by name.
    """

    shape_name: str
    batches: tuple[int, ...]
    tokens: int
    kinds: tuple[str, ...]
    threads: int
    device: torch.device
    own: Mapping[str, str] = field(default_factory=dict)

    @property
    def shape(self) -> Architecture:
        return named_shape(self.shape_name)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def stream(self) -> Rate:
        return "device_stream_gb_s" if self.device.type == "cuda" else "host_stream_gb_s"

    def choose(self, known: tuple[str, ...]) -> tuple[str, ...]:
        """Return the kinds that are asked for, or all known ones. Raises ValueError for an unknown kind."""
        if unknown := set(self.kinds) - set(known):
            raise ValueError(f"--kinds: got {', '.join(sorted(unknown))}; wanted some of {', '.join(known)}")
        return self.kinds or known


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes that must move at a measured rate, and floating-point operations. The larger time is the floor."""

    num_bytes: float
    rate: Rate
    flops: float = 0.0

    def floor(self, rates: Mapping[str, float]) -> tuple[str, float | None]:
        """Return the floor in words and in milliseconds; None if the rate was not measured on this machine."""
        if self.rate not in rates:
            return f"none: {self.rate} is not measured here", None
        bytes_ms = self.num_bytes / rates[self.rate] / 1e6
        tflop_s = rates.get("bf16_matmul_tflop_s") or rates.get("host_matmul_tflop_s")
        flops_ms = self.flops / tflop_s / 1e9 if tflop_s else 0.0
        if flops_ms > bytes_ms:
            return f"{self.flops / 1e12:.3g} TFLOP at {tflop_s:.3g} TFLOP/s", flops_ms
        return f"{self.num_bytes / 1e6:.1f} MB at {rates[self.rate]:.0f} GB/s", bytes_ms


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time.

    run and peer: repeat it `times` and `peer_times` times, over more memory than any cache holds. check: raises
    GateError if the result is wrong. as_graph: on CUDA the calls are captured and replayed.
    """

    name: str
    shape: str
    work: Work
    check: Call
    run: Call
    times: float = 1
    peer_name: str | None = None
    peer: Call | None = None
    peer_times: float = 1
    as_graph: bool = True
    config: dict[str, Any] = field(default_factory=dict)


def time_cases(cases: Iterator[Case], asked: Asked, console: Console) -> list[Row]:
    """Check and time each case. Raises GateError if a result is wrong."""
    rates = measure_device_rates(asked.device)
    if asked.device.type != "cuda":
        rates |= measure_host_rates(asked.threads, gib=0.25)
    return [_time_case(case, asked, rates, console) for case in cases]


def _time_case(case: Case, asked: Asked, rates: dict[str, float], console: Console) -> Row:
    case.check()
    floor, floor_ms = case.work.floor(rates)
    if floor_ms is not None:
        announce(console, f"{case.name}, {case.shape}", floor, floor_ms)
    timing = measure(_launchable(case.run, case, asked), asked.device, WARMUPS, REPEATS)
    peer_ms = None
    if case.peer is not None:
        peer_ms = measure(_launchable(case.peer, case, asked), asked.device, WARMUPS, REPEATS).ms / case.peer_times
    return Row(
        name=case.name, shape=case.shape, device=device_name(asked.device), ms=timing.ms / case.times,
        p10=timing.p10 / case.times, p90=timing.p90 / case.times, floor=floor, floor_ms=floor_ms, peer=case.peer_name,
        peer_ms=peer_ms, rates=rates, config=case.config,
    )  # fmt: skip


def _launchable(call: Call, case: Case, asked: Asked) -> Call:
    return capture(call) if case.as_graph and asked.device.type == "cuda" else call


def capture(call: Call) -> Call:
    """Capture a call as a CUDA graph, and return its replay, which is not slowed by the host's launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of what is wanted, in float64."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())
