"""Time attention of several queries over one read of rows in host memory: this project's kernel, and torch's for bf16.

Rows are random: two layers of an 8B model that are read in turn, so that no cache holds them. Each way is compared with
float64. torch's flash attention runs over chunks of tokens, whose partials are merged in float32. It uses tiles (AMX)
through oneDNN if the processor has them.
"""

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from cpu.cpu_tier import compiled_for
from cpu.host_attention import HostAttention
from cpu.memory_rates import measure_host_rates
from cpu.pieces import EXACT, new_pieces
from cpu.tile_products import Products, best_products
from transfer.host_memory import SEGMENT_TOKENS
from transfer.tier_shape import TierShape

WIDTHS = (1, 2, 4, 8, 16)
HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 128, 32
_TURNS = 2  # layers that are read in turn
_SECONDS = 0.25  # least time for each width and way
_CHUNKS = (2, 8)  # chunks per 65,536 tokens
_SPREAD = 3.0  # standard deviation of logits
_SEED = 7
_CODE_SCALE = 1 / 40
RowKind = Literal["bfloat16", "int8"]


def processor_flags() -> str:
    """Return the processor's model, and its flags for tiles and 16-bit floats."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    named = {name.strip(): value.strip() for name, value in found.items()}
    flags = [flag for flag in named.get("flags", "").split() if flag.startswith(("amx", "avx512_bf16", "avx512_fp16"))]
    return f"{named.get('model name')}, model {named.get('model')}, stepping {named.get('stepping')}: {' '.join(flags)}"


class Rows:
    """Keys and values of one layer, bf16 or int8 with a scale, in segments as the host tier has them."""

    def __init__(self, num_tokens: int, kind: RowKind) -> None:
        self.num_tokens, self.kind = num_tokens, kind
        self.scale = 1.0 if kind == "bfloat16" else _CODE_SCALE
        sizes = [min(SEGMENT_TOKENS, num_tokens - begin) for begin in range(0, num_tokens, SEGMENT_TOKENS)]
        self.segments = [tuple(_random((KV_HEADS, size, DIM), kind) for _ in range(2)) for size in sizes]
        self._scales = [np.full(shape, self.scale, np.float32) for shape in ((KV_HEADS,), (KV_HEADS, DIM))]
        table = new_pieces(len(sizes))
        table["run_begin"] = SEGMENT_TOKENS * np.arange(len(sizes))
        for piece, arrays in zip(table, self.segments, strict=True):
            piece["mode"], piece["end"], piece["tokens"] = EXACT, arrays[0].shape[1], arrays[0].shape[1]
            for name, rows in zip(("key", "value"), arrays, strict=True):
                piece[f"{name}s"] = rows.data_ptr()
                strides = rows.element_size() * rows.stride(0), rows.element_size() * rows.stride(1)
                piece[f"{name}_head_bytes"], piece[f"{name}_row_bytes"] = strides
            piece["key_scale"], piece["value_scale"] = (scale.ctypes.data for scale in self._scales)
        self._table = table

    @property
    def num_bytes(self) -> int:
        return (4 if self.kind == "bfloat16" else 2) * KV_HEADS * self.num_tokens * DIM

    def table(self, num_queries: int) -> np.ndarray:
        table = self._table.copy()
        table["followers"] = num_queries - 1
        return table


def _random(shape: tuple[int, ...], kind: RowKind) -> torch.Tensor:
    rows = torch.empty(shape, dtype=torch.bfloat16).normal_()
    return rows if kind == "bfloat16" else (rows / _CODE_SCALE).round().clamp(-127, 127).to(torch.int8)


Way = Callable[[Rows, torch.Tensor], tuple[np.ndarray, ...]]


def oracle(rows: Rows, queries: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return out and lse in float64; queries: bf16 `[n, heads, dim]`."""
    group, scale = HEADS // KV_HEADS, DIM**-0.5
    out, lse = np.empty((len(queries), HEADS, DIM)), np.empty((len(queries), HEADS))
    for head in range(KV_HEADS):
        keys, values = (torch.cat([segment[part][head] for segment in rows.segments]).double() for part in (0, 1))
        own = slice(head * group, head * group + group)
        logits = scale * queries[:, own].double() @ (rows.scale * keys).T
        out[:, own] = torch.softmax(logits, -1) @ (rows.scale * values)
        lse[:, own] = torch.logsumexp(logits, -1)
    return out, lse


def attend_by_kernel(kernel: HostAttention, threads: int, rows: Rows, queries: torch.Tensor) -> tuple[np.ndarray, ...]:
    got = kernel.attend(rows.table(len(queries)), queries.view(torch.uint16).numpy(), None, threads)
    return got.out, got.lse


def attend_by_torch(num_chunks: int, rows: Rows, queries: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Return the merged partials of `num_chunks` chunks per 65,536 tokens."""
    group, outs, lses = HEADS // KV_HEADS, [], []
    own = queries.view(len(queries), KV_HEADS, group, DIM).transpose(0, 1).reshape(1, KV_HEADS, -1, DIM)
    for keys, values in rows.segments:
        count = max(1, num_chunks * keys.shape[1] // SEGMENT_TOKENS)
        parts = [one.view(KV_HEADS, count, -1, DIM).transpose(0, 1) for one in (keys, values)]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(own.expand(count, -1, -1, -1), *parts)
        outs.append(out.float())
        lses.append(lse.float())
    out, lse = torch.cat(outs), torch.cat(lses)
    total = torch.logsumexp(lse, 0)
    out = (out * torch.exp(lse - total).unsqueeze(-1)).sum(0)
    places = (KV_HEADS, len(queries), group)
    merged = (out.view(*places, DIM).transpose(0, 1), total.view(*places).transpose(0, 1))
    return merged[0].reshape(-1, HEADS, DIM).numpy(), merged[1].reshape(-1, HEADS).numpy()


def _best_ms(call: Callable[[int], object]) -> float:
    best, spent, turn = math.inf, 0.0, 0
    while spent < _SECONDS or turn < 4:
        began = time.perf_counter()
        call(turn % _TURNS)
        took = time.perf_counter() - began
        best, spent, turn = min(best, took) if turn else best, spent + took, turn + 1
    return 1e3 * best


def measure(num_tokens: int, threads: int, kind: RowKind) -> None:
    """Print milliseconds of all layers of an 8B model by width and way, the floors, and the largest errors."""
    torch.set_num_threads(threads)
    torch.manual_seed(_SEED)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    print(processor_flags())
    print("torch:", torch.backends.cpu.get_cpu_capability(), "tiles:", torch.cpu._is_amx_tile_supported(), flush=True)
    layers = [Rows(num_tokens, kind) for _ in range(_TURNS)]
    queries = (_SPREAD * torch.randn(max(WIDTHS), HEADS, DIM)).bfloat16()
    shape = TierShape((0,), HEADS, KV_HEADS, DIM, kind, 1, 0)
    ways: dict[str, Way] = {}
    for products in dict.fromkeys((Products.VECTORS, best_products())):
        kernel = HostAttention(compiled_for(shape, torch.bfloat16), threads, products=products)
        ways[f"this project's, {products.name.lower()}"] = partial(attend_by_kernel, kernel, threads)
    for count in _CHUNKS if kind == "bfloat16" else ():
        ways[f"torch, {count} chunks of 65,536"] = partial(attend_by_torch, count)
    wanted, total = oracle(layers[0], queries[:4])
    names = " | ".join(f"V({width})" for width in WIDTHS)
    print(f"\n| ms, {LAYERS} layers of {num_tokens:,} tokens in {kind}, {threads} threads | {names} | out | lse |")
    print("|---|" + "---|" * (len(WIDTHS) + 2))
    for name, way in ways.items():
        took = [LAYERS * _best_ms(lambda turn: way(layers[turn], queries[:width])) for width in WIDTHS]  # noqa: B023
        out, lse = way(layers[0], queries[:4])
        errors = f"{np.abs(out - wanted).max():.1e} of {np.abs(wanted).max():.2f} | {np.abs(lse - total).max():.1e}"
        print(f"| {name} | " + " | ".join(f"{ms:.1f}" for ms in took) + f" | {errors} |", flush=True)
    gb_s = measure_host_rates(threads, gib=1.0)["host_stream_gb_s"]
    print(f"| floor of bytes, {gb_s:.0f} GB/s |" + f" {LAYERS * layers[0].num_bytes / gb_s / 1e6:.1f} |" * len(WIDTHS))
    flops = 4e-12 * LAYERS * num_tokens * HEADS * DIM
    for dtype in (torch.float32, torch.bfloat16):
        tflop_s = _matmul_rate(dtype)
        cells = " | ".join(f"{1e3 * width * flops / tflop_s:.1f}" for width in WIDTHS)
        print(f"| floor of {str(dtype).removeprefix('torch.')} products, {tflop_s:.2f} TFLOP/s | {cells} |")


def _matmul_rate(dtype: torch.dtype) -> float:
    """Return the TFLOP/s of products of 4,096 by 1,024 by 4,096."""
    first, second = torch.randn(4096, 1024, dtype=dtype), torch.randn(1024, 4096, dtype=dtype)
    return 2e-9 * first.numel() * 4096 / _best_ms(lambda _: first @ second)
