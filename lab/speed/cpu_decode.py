"""Time decode steps of a model on this CPU by part, beside their floor and llama.cpp's.

A matrix's products are timed one thread at a time, by that thread's own time, so that a machine which others use says
something, too; steps by the clock, the best of many. A floor is the bytes that are read over the rate of a stream with
as many threads, measured in the same run.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from bench.decode_loop import build_runner, decode
from cpu.memory_rates import measure_host_rates
from gpu.model.architecture import read_architecture
from gpu.operations.linear.numba_packed_linear import multiplies, packed_product
from gpu.operations.linear.packed_matrix import Packed
from gpu.weights.checkpoint import load_weights
from gpu.weights.weights import Weights

_PROMPT, _STEPS, _REPEATS = 32, 48, 15
_CPU, _DTYPE = torch.device("cpu"), torch.float32


def time_decode(model: Path, threads: int, sizes: list[int], llama_bench: Path | None) -> None:
    """Print the times of products, of steps of so many rows, and of llama.cpp's program if it is given, each a line,
    and all as a line of JSON. Raises ModelError, and CalledProcessError where that program fails.
    """
    architecture = read_architecture(model)
    weights = load_weights(model, architecture, _DTYPE, _CPU, lambda _: None)
    torch.set_num_threads(threads)
    rate, read = measure_host_rates(threads)["host_stream_gb_s"], sum(matrix.nbytes for matrix in weights.matrices)
    print(f"a step reads {read / 1e6:.1f} MB; at {rate:.1f} GB/s that is {read / rate / 1e6:.2f} ms")
    lines = list(_part_lines(weights)) if weights.is_packed else []
    runner = build_runner(architecture, weights, max(sizes), 512, _DTYPE, _CPU)
    for size in sizes:
        prompts = np.random.default_rng(0).integers(0, architecture.vocab_size, (size, _PROMPT)).astype(np.int32)
        times = [ms for _ in range(4) for ms in decode(runner, prompts, _STEPS).step_ms]
        best, median = min(times), float(np.median(times))
        print(f"step of {size}: best {best:.2f} ms, median {median:.2f}, {1e3 * size / best:.0f} tokens/s")
        lines.append({"what": f"step-{size}", "best_ms": best, "median_ms": median})
    runner.shutdown()
    if llama_bench is not None:
        lines.append(_llama_line(llama_bench, model, threads))
    print(json.dumps({"model": model.name, "threads": threads, "stream_gb_s": rate, "bytes": read, "rows": lines}))


def _part_lines(weights: Weights) -> Iterator[dict[str, object]]:
    """Time the products of all layers' matrices of a name, of one token and of four."""
    held: dict[str, list[Packed]] = {}
    named = [*(pair for layer in weights.layers for pair in layer.matrices.items()), ("logits", weights.logits)]
    for name, matrix in named:
        if isinstance(matrix, Packed) and multiplies(matrix):
            held.setdefault(name, []).append(matrix)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, matrices in held.items():
        num_bytes = sum(matrix.nbytes for matrix in matrices)
        for tokens in (1, 4):
            ms = _best_ms(matrices, torch.randn(tokens, matrices[0].inner))
            print(f"{name}, {tokens} tokens: {ms:.2f} ms of one thread, {num_bytes / ms / 1e6:.1f} GB/s")
            yield {"what": name, "tokens": tokens, "thread_ms": ms, "bytes": num_bytes}
    torch.set_num_threads(threads)


def _best_ms(matrices: list[Packed], x: torch.Tensor) -> float:
    best = float("inf")
    for _ in range(_REPEATS):
        began = time.thread_time()
        for matrix in matrices:
            packed_product(x, matrix)
        best = min(best, time.thread_time() - began)
    return 1e3 * best


def _llama_line(program: Path, model: Path, threads: int) -> dict[str, object]:
    command = [str(program), "-m", str(model), "-t", str(threads), "-p", "0", "-n", "32", "-r", "12", "-o", "json"]
    (row,) = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    rates = sorted(row["samples_ts"])
    best, median = 1e3 / rates[-1], 1e3 / float(np.median(rates))
    print(f"llama.cpp, step of 1: best run {best:.2f} ms, median {median:.2f}")
    return {"what": "llama.cpp step-1", "best_ms": best, "median_ms": median}
