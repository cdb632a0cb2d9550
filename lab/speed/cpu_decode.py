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
from gpu.model.humming_formats import multiplied
from gpu.operations.linear.numba_packed_linear import multiplies, packed_product
from gpu.operations.linear.packed_matrix import Packed
from gpu.weights.checkpoint import load_weights
from gpu.weights.weights import Weights

_STEPS, _REPEATS = 48, 15
_SHORT = 1024  # tokens; longer contexts are computed once
_CPU, _DTYPE = torch.device("cpu"), torch.float32


def time_decode(
    model: Path, threads: int, sizes: list[int], prompt: int, products: str, llama: Path | None
) -> None:  # fmt: skip
    """Print the times of products, of steps of so many rows, and of llama.cpp's program if it is given, each a line,
    and all as a line of JSON. Raises ModelError, and CalledProcessError where that program fails.
    """
    architecture = multiplied(read_architecture(model), products, "products")
    weights = load_weights(model, architecture, _DTYPE, _CPU, lambda _: None)
    torch.set_num_threads(threads)
    rate, read = measure_host_rates(threads)["host_stream_gb_s"], sum(matrix.nbytes for matrix in weights.matrices)
    print(f"a step reads {read / 1e6:.1f} MB; at {rate:.1f} GB/s that is {read / rate / 1e6:.2f} ms")
    lines = list(_part_lines(weights)) if weights.is_packed else []
    runner = build_runner(architecture, weights, max(sizes), prompt + 2 * _STEPS, _DTYPE, _CPU)
    for size in sizes:
        prompts = np.random.default_rng(0).integers(0, architecture.vocab_size, (size, prompt)).astype(np.int32)
        times = [ms for _ in range(4 if prompt <= _SHORT else 1) for ms in decode(runner, prompts, _STEPS).step_ms]
        best, median = min(times), float(np.median(times))
        print(f"step of {size}: best {best:.2f} ms, median {median:.2f}, {1e3 * size / best:.0f} tokens/s")
        lines.append({"what": f"step-{size}", "best_ms": best, "median_ms": median})
    runner.shutdown()
    if llama is not None:
        lines += _llama_lines(llama, model, threads, sizes, prompt)
    found = {"model": model.name, "threads": threads, "prompt": prompt, "products": products, "stream_gb_s": rate}
    print(json.dumps(found | {"bytes": read, "rows": lines}))


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


def _llama_lines(
    program: Path, model: Path, threads: int, sizes: list[int], prompt: int
) -> Iterator[dict[str, object]]:  # fmt: skip
    """Run llama.cpp's steps of as many streams, each of its own prompt, and yield their mean."""
    context, streams = max(sizes) * (prompt + _STEPS), ",".join(map(str, sizes))
    command = [str(program), "-m", str(model), "-t", str(threads), "-tb", str(threads), "-c", str(context), "-npp",
               str(prompt), "-ntg", str(_STEPS), "-npl", streams, "--output-format", "jsonl"]  # fmt: skip
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for row in (json.loads(line) for line in printed.splitlines() if line.startswith("{")):
        ms = 1e3 * row["t_tg"] / row["tg"]
        print(f"llama.cpp, step of {row['pl']}: mean {ms:.2f} ms, {row['speed_tg']:.0f} tokens/s")
        yield {"what": f"llama.cpp step-{row['pl']}", "mean_ms": ms}
