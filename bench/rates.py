"""Measure the machine's rates, which every floor divides by: `tandem bench rates`, or this module with `--json`.

A device's stream rate is the best that a sum over several GiB reaches, in torch or in a Triton kernel of a few lines.
Each byte is read once, and nothing is written back.
"""

import argparse
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import torch
import triton
import triton.language as tl
from rich.console import Console

from bench.benchmark_rows import Row, Timing, measure, report
from cpu.expert_rates import measure_core_rates
from cpu.memory_rates import GIB, default_gib, measure_host_rates
from transfer.machine import count_physical_cores, probe_machine

_WARMUPS = 3
_REPEATS = 20
_MATMUL = 8192
_HOST_MATMUL = 1024
_HOST_GLIMPSE = 256  # size of small products, which show whether a dtype is far slower
_FAR_BEHIND = 4
_HOST_DTYPES = (torch.float32, torch.bfloat16)
_STREAM_CONFIGS = ((4096, 4), (8192, 8), (16_384, 8))  # elements of a block, warps
_PROGRAMS_PER_SM = 8
HOST_KEYS = ("host_stream", "host_random", "host_matmul", "core_")
UNITS = {"_tflop_s": "1 TFLOP", "_gflop_s": "1 GFLOP", "_gb_s": "1 GB"}


@triton.jit
def _sum_kernel(values, partial_sums, elements, programs, BLOCK: tl.constexpr):
    """Sum int32 values, one sum a program, over every `programs`-th block. The sums may wrap: they only make the
    program read.
    """
    program = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for begin in range(program * BLOCK, elements, programs * BLOCK):
        total += tl.load(values + begin + offsets, mask=begin + offsets < elements, other=0)
    tl.store(partial_sums + program, tl.sum(total))


def sum_stream(values: torch.Tensor, partial_sums: torch.Tensor, block: int, num_warps: int) -> None:
    """Read int32 `values` `[elements]` once. partial_sums: int32 `[programs]`, gets the sum that each program read."""
    programs = len(partial_sums)
    _sum_kernel[(programs,)](values, partial_sums, values.numel(), programs, BLOCK=block, num_warps=num_warps)


def measure_device_rates(device: torch.device) -> dict[str, float]:
    """Return the median rates of a device.

    For a CUDA device: `device_stream_gb_s` (read), `device_copy_gb_s` (read and written bytes together),
    `host_to_device_gb_s` and `device_to_host_gb_s` (pinned), in 1e9 bytes a second, and `bf16_matmul_tflop_s`. This
    needs up to 5 GiB free on the device for a few seconds. For the CPU, whose memory `measure_host_rates` measures:
    `host_matmul_tflop_s`, in the better of float32 and bfloat16.
    """
    if device.type != "cuda":
        return {"host_matmul_tflop_s": measure_host_matmul(_HOST_DTYPES)}
    memory = _measure_memory(device)  # its buffers are free again before the next ones are made
    matmul = {"bf16_matmul_tflop_s": _matmul_rate(device)}
    torch.cuda.empty_cache()  # a model may want all of the memory next
    return memory | matmul


def measure_host_matmul(dtypes: Collection[torch.dtype]) -> float:
    """Return TFLOP/s of a product of square matrices on torch's threads, in the fastest of `dtypes`.

    A processor without instructions for a type takes a hundred times as long, seconds for a product. So small products
    first show which types are worth measuring.
    """
    glimpses = {dtype: _host_matmul_rate(dtype, _HOST_GLIMPSE) for dtype in dtypes}
    least = max(glimpses.values()) / _FAR_BEHIND
    return max(_host_matmul_rate(dtype, _HOST_MATMUL) for dtype, rate in glimpses.items() if rate > least)


def _host_matmul_rate(dtype: torch.dtype, size: int) -> float:
    matrix = torch.randn(size, size).to(dtype)
    return _multiply_rate(matrix, torch.empty_like(matrix))


def _measure_memory(device: torch.device) -> dict[str, float]:
    free_bytes, _ = torch.cuda.mem_get_info(device)
    num_bytes = min(4 * GIB, free_bytes // 4) // 4096 * 4096
    buffer = torch.ones(num_bytes // 4, dtype=torch.int32, device=device)
    first, second = buffer.chunk(2)
    pinned = torch.ones(min(GIB, num_bytes // 2) // 4, dtype=torch.int32, pin_memory=True)
    there = buffer[: len(pinned)]
    return {
        "device_stream_gb_s": _stream_rate(buffer, device),
        "device_copy_gb_s": _rate(num_bytes, _time(lambda: first.copy_(second), device)),
        "host_to_device_gb_s": _rate(pinned.nbytes, _time(lambda: there.copy_(pinned, non_blocking=True), device)),
        "device_to_host_gb_s": _rate(pinned.nbytes, _time(lambda: pinned.copy_(there, non_blocking=True), device)),
    }


def _matmul_rate(device: torch.device) -> float:
    matrix = torch.randn((_MATMUL, _MATMUL), device=device).bfloat16()
    return _multiply_rate(matrix, torch.empty_like(matrix))


def _multiply_rate(matrix: torch.Tensor, out: torch.Tensor) -> float:
    return 2 * len(matrix) ** 3 / _time(lambda: torch.mm(matrix, matrix, out=out), matrix.device).ms / 1e9


def _stream_rate(buffer: torch.Tensor, device: torch.device) -> float:
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    partial_sums = torch.empty(num_sms * _PROGRAMS_PER_SM, dtype=torch.int32, device=device)
    times = [_time(lambda: torch.sum(buffer.view(torch.float32)), device).ms]
    for block, num_warps in _STREAM_CONFIGS:

        def read(block: int = block, num_warps: int = num_warps) -> None:
            sum_stream(buffer, partial_sums, block, num_warps)

        times.append(_time(read, device).ms)
        assert int(partial_sums.sum()) == len(buffer), "the sum of a buffer of ones is its length"
    return buffer.nbytes / min(times) / 1e6


def _time(call: Callable[[], object], device: torch.device) -> Timing:
    return measure(call, device, _WARMUPS, _REPEATS)


def _rate(num_bytes: int, timing: Timing) -> float:
    return num_bytes / timing.ms / 1e6


def device_name(device: torch.device) -> str:
    """Return the name of the card or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else probe_machine().cpu


def make_rows(rates: dict[str, float], num_bytes: int, names: dict[str, str]) -> list[Row]:
    """Return a row for each rate, with the time that one of its units takes. A rate has no floor and no peer."""
    rows = []
    for key, rate in rates.items():
        ms = 1e3 / rate
        row = Row(
            name=key, shape=next(unit for end, unit in UNITS.items() if key.endswith(end)), ms=ms, p10=ms, p90=ms,
            device=names["host" if key.startswith(HOST_KEYS) else "device"], floor="none: floors divide by this rate",
            floor_ms=None, peer=None, peer_ms=None, rates=rates, config={"host_buffer_bytes": num_bytes},
        )  # fmt: skip
        rows.append(row)
    return rows


def rates(threads: int | None, json_path: Path | None, console: Console) -> None:
    """Measure the rates of host and device, and report them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = threads or count_physical_cores()
    torch.set_num_threads(threads)
    gib = default_gib()
    console.print(f"reading {gib:.1f} GiB with {threads} threads", highlight=False)
    measured = measure_host_rates(threads, gib=gib) | measure_core_rates(threads, gib=gib)
    measured |= measure_device_rates(device)
    names = {"host": f"{device_name(torch.device('cpu'))}, {threads} threads", "device": device_name(device)}
    report(make_rows(measured, int(gib * GIB), names), json_path, console)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure the machine's rates; the last line is JSON.")
    parser.add_argument("--json", nargs="?", type=Path, default=None, metavar="FILE", help="write the rows there too")
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    rates(arguments.threads, arguments.json, Console(file=sys.stderr))
