"""Time decode steps of a model on this CPU by part, against their floor and llama.cpp's.

A matrix's products are timed on one thread, by that thread's CPU time, so that the numbers mean something on a shared
machine. Steps and a prompt are timed by the clock, the best of many. A step has two floors: the bytes of weights and
rows that it reads, over the rate of a stream with as many threads; and its operations, over the rate of integer
products whose tile stays in the cache. Both rates are measured in the same run.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numba
import numpy as np
import torch

from bench.decode_loop import build_runner, decode, prefill_ms
from cpu.memory_rates import measure_host_rates
from gpu.model.architecture import read_architecture
from gpu.model.humming_formats import multiplied
from gpu.operations.linear.numba_packed_linear import multiplies, packed_product
from gpu.operations.linear.packed_matrix import Packed
from gpu.page_layout import KvFormat, row_bytes
from gpu.weights.checkpoint import load_weights
from gpu.weights.weights import Weights
from transfer.model_constants import TILE
from transfer.simd.packed_rows import packed_kind
from transfer.simd.row_tiles import tile_products

_STEPS, _REPEATS = 48, 15
_CHUNK = 512  # tokens of a prefill chunk
_SHORT = 1024  # longer contexts, in tokens, are computed once
_CPU, _DTYPE = torch.device("cpu"), torch.float32


def time_decode(
    model: Path, threads: int, sizes: list[int], prompt: int, products: str, kv: KvFormat, llama: Path | None
) -> None:  # fmt: skip
    """Print the times of products, of a prompt, of steps of `sizes` rows after it, and of llama.cpp's program if given.

    Each is a line, and all follow as a line of JSON. Raises ModelError, and CalledProcessError if the program fails.
    """
    architecture = multiplied(read_architecture(model), products, "products")
    weights = load_weights(model, architecture, _DTYPE, _CPU, lambda _: None)
    torch.set_num_threads(threads)
    rate, read = measure_host_rates(threads)["host_stream_gb_s"], sum(matrix.nbytes for matrix in weights.matrices)
    rows = 2 * architecture.num_layers * architecture.num_kv_heads * row_bytes(kv, architecture.dim)
    numbers = architecture.num_weights
    gops = threads * measure_integer_rate()
    print(f"a step reads {read / 1e6:.1f} MB of weights and {rows} bytes a token of context, at {rate:.1f} GB/s")
    print(f"and computes {2 * numbers / 1e9:.2f} billion operations a row, at {gops:.0f} a second")
    lines = list(_part_lines(weights)) if weights.is_packed else []
    runner = build_runner(architecture, weights, max(sizes), prompt + 2 * _STEPS, _DTYPE, _CPU, kv=kv)
    ids = np.random.default_rng(0).integers(0, architecture.vocab_size, prompt).astype(np.int32)
    ms = min(prefill_ms(runner, ids, _CHUNK) for _ in range(4 if prompt <= _SHORT else 1))
    print(f"prompt of {prompt}: best {ms:.1f} ms, {1e3 * prompt / ms:.0f} tokens/s")
    lines.append({"what": f"prompt-{prompt}", "best_ms": ms})
    for size in sizes:
        prompts = np.random.default_rng(0).integers(0, architecture.vocab_size, (size, prompt)).astype(np.int32)
        times = [ms for _ in range(4 if prompt <= _SHORT else 1) for ms in decode(runner, prompts, _STEPS).step_ms]
        best, median = min(times), float(np.median(times))
        floors = {"bytes": (read + size * prompt * rows) / rate / 1e6, "operations": 2e-6 * numbers * size / gops}
        print(f"step of {size}: best {best:.2f} ms, median {median:.2f}, {1e3 * size / best:.0f} tokens/s; floors "
              f"{floors['bytes']:.2f} of bytes, {floors['operations']:.2f} of operations")  # fmt: skip
        lines.append({"what": f"step-{size}", "best_ms": best, "median_ms": median, "floors_ms": floors})
    runner.shutdown()
    if llama is not None:
        lines += _llama_lines(llama, model, threads, sizes, prompt)
    found = {"model": model.name, "threads": threads, "prompt": prompt, "products": products, "kv": kv}
    rates = {"stream_gb_s": rate, "integer_gop_s": gops}
    print(json.dumps(found | rates | {"bytes": read, "rows": lines}))


def measure_integer_rate() -> float:
    """Return the billions of operations a second of one thread: products of eight tokens by a tile of 4 bits that stays
    in the first cache. A number and a token count two operations.
    """
    columns, tokens, times = 512, 8, 400
    words, gains = np.zeros(TILE * columns // 8, np.int32), np.zeros((2, columns // 32, TILE), np.float32)
    x, out = np.zeros((tokens, columns), np.float32), np.zeros((tokens, TILE), np.float32)
    at = [array.ctypes.data for array in (words, gains[0], gains[1], x, out)]
    best = float("inf")
    for _ in range(_REPEATS + 1):  # the first one compiles
        began = time.thread_time()
        _multiply_often(packed_kind("int4", 4), *at[:4], columns, at[4], times)
        best = min(best, time.thread_time() - began)
    return 2 * TILE * columns * tokens * times / best / 1e9


_tile_products = tile_products(8)


@numba.njit(nogil=True)
def _multiply_often(kind, words, gains, offsets, x, columns, out, times):  # type: ignore[no-untyped-def]
    for _ in range(times):
        _tile_products(kind, words, gains, offsets, x, columns, columns, out, TILE, 0)


def _part_lines(weights: Weights) -> Iterator[dict[str, object]]:
    """Time the products of all layers' matrices by name, for one token and for four."""
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
    """Run llama.cpp's prompt, and its steps of `sizes` streams with a prompt each; yield the mean times."""
    context, streams = max(sizes) * (prompt + _STEPS), ",".join(map(str, sizes))
    command = [str(program), "-m", str(model), "-t", str(threads), "-tb", str(threads), "-c", str(context), "-npp",
               str(prompt), "-ntg", str(_STEPS), "-npl", streams, "--output-format", "jsonl"]  # fmt: skip
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for row in (json.loads(line) for line in printed.splitlines() if line.startswith("{")):
        ms = 1e3 * row["t_tg"] / row["tg"]
        print(f"llama.cpp, step of {row['pl']}: mean {ms:.2f} ms, {row['speed_tg']:.0f} tokens/s")
        yield {"what": f"llama.cpp step-{row['pl']}", "mean_ms": ms}
        if row["pl"] == 1:
            print(f"llama.cpp, prompt of {prompt}: {1e3 * row['t_pp']:.1f} ms, {row['speed_pp']:.0f} tokens/s")
            yield {"what": f"llama.cpp prompt-{prompt}", "mean_ms": 1e3 * row["t_pp"]}
