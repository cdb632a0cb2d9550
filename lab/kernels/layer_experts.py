"""Run `python -m lab kernel layer-experts`: the experts of one layer computed by the CPU, in integers and in floats.

Experts are random and of few bits, together several times the last-level cache; the rows of a request take some at
random. The floor is the bytes of the taken experts over the rate of a stream from this host's memory, measured in the
same run with as many threads. The gate: integers give the results of floats within rounding. It needs neither a model
file nor a GPU.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from rich.console import Console

from bench.benchmark_rows import Row, announce, require, summarise
from bench.rates import device_name
from cpu.experts import HostExperts
from cpu.memory_rates import measure_host_rates
from transfer.expert_exchange import ExpertRequests, ExpertSlot, LayerExperts, PackedRows, new_expert_slot
from transfer.host_pages import advise_huge_pages
from transfer.model_constants import ExpertActivation
from transfer.simd.packed_rows import unit_columns

CPU = torch.device("cpu")
SETS = 4  # sets of a layer's experts, used in turn, so that no cache holds an expert when it is read again
REPEATS = 24  # timed requests
MOST_OFF = 1e-3  # error that rounding may cause, relative to the largest number


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of experts: their sizes, how many there are and each token takes. name: the format of `PackedRows`."""

    name: str
    shape: str
    hidden: int
    intermediate: int
    num_experts: int
    per_token: int
    activation: ExpertActivation = "silu"


KINDS = (
    Kind("MXFP4", "gpt-oss-20b", 2880, 2880, 32, 4, "clamped_swiglu"),
    Kind("Q4_K", "qwen3-30b-a3b", 2048, 768, 128, 8),
    Kind("int4", "qwen3-30b-a3b", 2048, 768, 128, 8),
)


@dataclass(frozen=True, slots=True)
class LayerBenchmark:
    batches: tuple[int, ...]
    threads: int


def layer_rows(benchmark: LayerBenchmark, console: Console, kinds: tuple[Kind, ...] = KINDS) -> list[Row]:
    """Return a row for each kind, number of rows and path. Raises GateError."""
    rates = measure_host_rates(benchmark.threads)
    gb_s = rates["host_stream_gb_s"]
    console.print(f"{benchmark.threads} threads read a stream at {gb_s:.1f} GB/s", highlight=False)
    return [row for kind in kinds for row in _rows_of(kind, benchmark, rates, console)]


def _rows_of(kind: Kind, benchmark: LayerBenchmark, rates: dict[str, float], console: Console) -> Iterator[Row]:
    count, most = SETS * kind.num_experts, max(benchmark.batches)
    began = time.perf_counter()
    layer = LayerExperts(
        count, _draw(kind.name, count * 2 * kind.intermediate, kind.hidden),
        _draw(kind.name, count * kind.hidden, kind.intermediate), activation=kind.activation,
    )  # fmt: skip
    workers = {
        path: HostExperts([replace(layer, in_integers=path == "integers")], most, kind.per_token, benchmark.threads)
        for path in ("floats", "integers")
    }
    slot = new_expert_slot(most, kind.hidden, kind.per_token, CPU)
    console.print(f"{kind.name}: {layer.num_bytes / 1e9:.2f} GB drawn and kernels ready in "
                  f"{time.perf_counter() - began:.1f} s", highlight=False)  # fmt: skip
    off = _check(kind, workers, slot, most)
    for rows in benchmark.batches:
        for path, worker in workers.items():
            measured = [_time(kind, worker, slot, rows, turn) for turn in range(REPEATS + 1)][1:]
            read = float(np.median([num_bytes for _, num_bytes in measured]))
            gb_s, floor_ms = rates["host_stream_gb_s"], read / rates["host_stream_gb_s"] / 1e6
            floor = f"{read / 1e6:.1f} MB over {gb_s:.1f} GB/s"
            announce(console, f"{kind.name} in {path}, {rows}", floor, floor_ms)
            timing, reached = (
                summarise([ms for ms, _ in measured]),
                [num_bytes / ms / 1e6 for ms, num_bytes in measured],
            )
            extras = {"gb_s": float(np.median(reached)), "best_gb_s": max(reached), "integers_off": off}
            extras["share"] = extras["gb_s"] / gb_s
            console.print(f"  {timing.ms:.3f} ms, {extras['gb_s']:.1f} GB/s, {100 * extras['share']:.0f} %; at best "
                          f"{100 * max(reached) / gb_s:.0f} %", highlight=False)  # fmt: skip
            yield Row(
                name=f"{kind.name} in {path}", shape=f"{kind.shape}, {rows}", device=device_name(CPU), **asdict(timing),
                floor=floor, floor_ms=floor_ms, peer=None, peer_ms=None, rates=rates, extras=extras,
                config=asdict(benchmark) | {"kind": kind.name, "torch": torch.__version__},
            )  # fmt: skip


def _time(kind: Kind, worker: HostExperts, slot: ExpertSlot, rows: int, turn: int) -> tuple[float, int]:
    """Return the milliseconds of a request, and the bytes of experts that it read."""
    _ask(kind, slot, rows, turn)
    before = worker.counts.bytes_read
    answered = worker.answer([(ExpertRequests(np.array([[0, rows]])), slot)])
    return 1e3 * answered.attended_s, worker.counts.bytes_read - before


def _ask(kind: Kind, slot: ExpertSlot, rows: int, turn: int) -> None:
    draw, first = np.random.default_rng(turn), turn % SETS * kind.num_experts
    taken = [first + draw.permutation(kind.num_experts)[: kind.per_token] for _ in range(rows)]
    slot.experts[:rows] = torch.from_numpy(np.array(taken, np.int32))
    slot.advance(rows)
    slot.flags[:rows] = slot.stamp


def _check(kind: Kind, workers: dict[str, HostExperts], slot: ExpertSlot, rows: int) -> float:
    """Return the error of integers against floats over the largest number. Raises GateError if it is too large."""
    slot.hidden.normal_(generator=torch.Generator().manual_seed(0))
    slot.shares.fill_(1 / kind.per_token)
    made = {}
    for path, worker in workers.items():
        _ask(kind, slot, rows, 0)
        worker.answer([(ExpertRequests(np.array([[0, rows]])), slot)])
        made[path] = slot.out[:rows].double()
    off = float((made["integers"] - made["floats"]).abs().max() / made["floats"].abs().max())
    require(0 < off < MOST_OFF, f"{kind.name}: integers are {off:.2g} off floats")
    return off


def _draw(name: str, rows: int, inner: int) -> PackedRows:
    """Return random packed rows, whose numbers are about 0.05."""
    groups = -(-inner // (128 if name == "int4" else 32))
    number = "fp4" if name == "MXFP4" else "int4"
    units = -(-inner // unit_columns(number))
    words = _huge(rows, units * 16)
    words.view(torch.int64).random_(generator=torch.Generator().manual_seed(rows))
    if name == "MXFP4":
        scales = torch.randint(119, 123, (rows, groups), dtype=torch.uint8)
        return PackedRows("fp4", inner, 32, 1, words, scales, None, None)
    if name == "Q4_K":
        scales = (torch.randint(20, 60, (rows, groups)) + 256 * torch.randint(20, 60, (rows, groups))).to(torch.int16)
        runs = torch.tensor([0.0002, 0.0016], dtype=torch.float16).view(torch.int32).expand(rows, inner // 256)
        return PackedRows("int4", inner, 32, 1, words, scales, None, runs.contiguous())
    zeros = torch.randint(6, 10, (rows, groups), dtype=torch.uint8)
    scales = torch.full((rows, groups), 0.01, dtype=torch.bfloat16)
    return PackedRows("int4", inner, 128, 1, words, scales, zeros, None)


def _huge(rows: int, columns: int) -> torch.Tensor:
    """Return int32 in huge pages, the kind of memory that pinned experts are in."""
    made = torch.empty(rows, columns, dtype=torch.int32)
    advise_huge_pages(made.data_ptr(), made.nbytes)
    return made
