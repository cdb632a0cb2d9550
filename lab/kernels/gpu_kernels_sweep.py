"""Time the decode kernels on a GPU against their bytes floor, several configurations each: `python -m` this module.

Every configuration is compared with float64 before it is timed, and one that fails is not reported. Weights rotate
through copies larger than L2, and launches run in a CUDA graph, so a number is the kernel's own time in a decode step.
The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from gpu.operations.decode_attention import paged_decode_attention as paged
from gpu.operations.kv.rope_kv_write import rope_kv_write
from gpu.operations.linear import plain_linear as gemv
from gpu.operations.rms_norm import rms_norm, rms_norm_add
from gpu.operations.swiglu import swiglu
from transfer.merge import merge_outputs

COLD_BYTES = 256 * 2**20  # several times the L2 of an H200 (60 MB)
LAUNCHES_PER_GRAPH = 24
MAX_RELATIVE_ERROR = 1e-2  # bf16 rounds to 2^-9 relative; a lost block of a row is 0.2 and more
GEMV_SHAPES = {  # name: rows, inner, norms, gated, residual
    "qkv": (6144, 4096, True, False, False),
    "attention_out": (4096, 4096, False, False, True),
    "gate_up": (28_672, 4096, True, True, False),
    "down": (4096, 14_336, False, False, True),
    "vocabulary": (128_256, 4096, False, False, False),
}
GEMV_CONFIGS = [  # block_rows, block_inner, num_warps, num_stages, unroll
    (1, 1024, 2, 1, 4), (1, 2048, 4, 1, 2), (2, 512, 2, 1, 2), (2, 512, 2, 1, 4), (2, 1024, 4, 1, 1),
    (2, 1024, 4, 1, 2), (2, 1024, 4, 1, 4), (2, 2048, 8, 1, 2), (4, 512, 2, 1, 1), (4, 512, 2, 1, 2),
    (4, 1024, 4, 1, 1), (4, 1024, 4, 1, 2), (4, 1024, 4, 1, 4), (4, 1024, 4, 3, 1), (4, 2048, 8, 1, 1),
    (8, 512, 4, 1, 1), (8, 512, 4, 1, 2), (8, 1024, 8, 1, 2), (8, 512, 4, 4, 1),
]  # fmt: skip
PAGED_CONFIGS = [
    (32, 4, 2),
    (32, 4, 3),
    (32, 4, 4),
    (64, 4, 1),
    (64, 4, 2),
    (64, 4, 3),
    (64, 8, 2),
    (128, 4, 2),
    (128, 8, 2),
]


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    shape: str
    config: str
    us: float
    gb_per_s: float
    share_of_floor: float


def graph_us(calls: list[Callable[[], Any]], repeats: int) -> float:
    """Return median microseconds of one call, from a CUDA graph of LAUNCHES_PER_GRAPH calls or more, taken in turn."""
    launches = max(LAUNCHES_PER_GRAPH, len(calls))
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            calls[index % len(calls)]()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return sorted(times)[len(times) // 2]


def measured_bytes_per_s() -> float:
    """Return bandwidth of reading: the sum of a large buffer, the fastest of ten."""
    buffer = torch.ones(2**31 // 4, dtype=torch.float32, device="cuda")
    best = float("inf")
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        buffer.sum()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e-3)
    return buffer.nbytes / best


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def row_for(name: str, shape: str, config: str, us: float, moved_bytes: int, bytes_per_s: float) -> Row:
    row = Row(name, shape, config, us, moved_bytes / us * 1e-3, moved_bytes / bytes_per_s * 1e6 / us)
    print(
        f"{name:14} {shape:22} {config:34} {us:9.2f} us {row.gb_per_s:8.0f} GB/s  {row.share_of_floor:6.1%}", flush=True
    )
    return row


def gemv_rows(bytes_per_s: float, quick: bool) -> Iterator[Row]:
    """Time every GEMV configuration on every shape, and cuBLAS (with separate norm, SwiGLU and residual) as
    the peer.
    """
    for name, (rows, inner, norms, gated, adds) in GEMV_SHAPES.items():
        copies = max(1, -(-COLD_BYTES // (2 * rows * inner)))
        weights = [torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16) * inner**-0.5 for _ in range(copies)]
        x = torch.randn(1, inner, device="cuda", dtype=torch.bfloat16)
        gain = torch.rand(inner, device="cuda", dtype=torch.bfloat16) + 0.5
        out_rows = rows // 2 if gated else rows
        residual = torch.randn(1, out_rows, device="cuda", dtype=torch.bfloat16) if adds else None
        wide, shape = x.double(), f"[1, {inner}] x {rows}"
        if norms:
            wide = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain.double()
        wanted = torch.cat([wide @ part.double().T for part in weights[0].split(8192)], 1)
        if gated:
            wanted = F.silu(wanted[:, :out_rows]) * wanted[:, out_rows:]
        if residual is not None:
            wanted = wanted + residual.double()

        def run(weight: Tensor, x=x, gain=gain, norms=norms, residual=residual, gated=gated) -> Tensor:
            return gemv._launch(x, weight, gain if norms else None, 1e-5, residual, gated, x.dtype)

        def peer(weight: Tensor, x=x, gain=gain, norms=norms, residual=residual, gated=gated) -> Tensor:
            out = F.linear(rms_norm(x, gain, 1e-5) if norms else x, weight)
            out = swiglu(out) if gated else out
            return out if residual is None else out.add_(residual)

        assert relative_error(peer(weights[0]), wanted) < MAX_RELATIVE_ERROR
        for label, call in (("cuBLAS alone", lambda weight, x=x: F.linear(x, weight)), ("cuBLAS and the rest", peer)):
            us = graph_us([lambda weight=weight, call=call: call(weight) for weight in weights], 5)
            yield row_for(name, shape, label, us, weights[0].nbytes, bytes_per_s)
        key = gemv.shape_class(out_rows, inner, gated)
        kept = gemv.CONFIGS[key]
        for config in [kept] if quick else list(dict.fromkeys([kept, *GEMV_CONFIGS])):
            gemv.CONFIGS[key] = config
            error = relative_error(run(weights[0]), wanted)
            if not error < MAX_RELATIVE_ERROR:
                print(f"{name:14} {config} is wrong: relative error {error:.1e}, wanted below {MAX_RELATIVE_ERROR}")
                continue
            us = graph_us([lambda weight=weight: run(weight) for weight in weights], 5)
            yield row_for(name, shape, str(config), us, weights[0].nbytes, bytes_per_s)
        gemv.CONFIGS[key] = kept


def attention_rows(bytes_per_s: float, quick: bool) -> Iterator[Row]:
    """Time paged decode attention of 32 heads over 8 KV heads of 128, bf16, over shuffled pages of 16 tokens."""
    heads, kv_heads, dim, page_tokens = 32, 8, 128, 16
    for requests, context in product((1, 16), (512, 8192, 98_304)):
        pages = -(-context // page_tokens)
        copies = max(1, min(128, COLD_BYTES // (4 * requests * context * kv_heads * dim)))
        num_pages = requests * pages * copies
        key_pages = torch.randn(num_pages, kv_heads, page_tokens, dim, device="cuda", dtype=torch.bfloat16)
        value_pages = torch.randn_like(key_pages)
        tables = torch.randperm(num_pages, device="cuda").int().view(copies, requests, pages)
        slots = torch.arange(requests, dtype=torch.int32, device="cuda")
        lens = torch.full((requests,), context, dtype=torch.int32, device="cuda")
        query = torch.randn(requests, heads, dim, device="cuda", dtype=torch.bfloat16)
        workspace = paged.workspace_for(16, heads, kv_heads, dim, 131_072, "cuda")
        fixed = (slots, lens, dim**-0.5)

        def run(table: Tensor, query=query, pages=(key_pages, value_pages), fixed=fixed, workspace=workspace) -> Any:
            return paged.paged_decode_attention(query, *pages, table, *fixed, workspace).near

        order = tables[0, -1].long()
        key, value = (
            part[order].transpose(0, 1).reshape(kv_heads, -1, dim).double() for part in (key_pages, value_pages)
        )
        logits = query[-1].double().view(kv_heads, -1, dim) @ key.transpose(1, 2) * dim**-0.5
        wanted, wanted_lse = (logits.softmax(-1) @ value).view(heads, dim), logits.logsumexp(-1).view(heads)
        shape, moved = f"{requests} x {context}", 4 * requests * context * kv_heads * dim
        kept = paged.CONFIGS[2, dim]
        for config in [kept] if quick else list(dict.fromkeys([kept, *PAGED_CONFIGS])):
            paged.CONFIGS[2, dim] = config
            try:
                partial = run(tables[0])
            except triton.runtime.errors.OutOfResources as error:
                print(f"attention      {shape:22} {config} does not fit: {error}")
                continue
            errors = relative_error(partial.out[-1], wanted), relative_error(partial.lse[-1], wanted_lse)
            if not max(errors) < MAX_RELATIVE_ERROR:
                print(f"attention      {shape} {config} is wrong: relative errors {errors}")
                continue
            us = graph_us([lambda table=table: run(table) for table in tables], 5)
            yield row_for("attention", shape, str(config), us, moved, bytes_per_s)
        paged.CONFIGS[2, dim] = kept


def small_rows(tokens: int, bytes_per_s: float) -> Iterator[Row]:
    """Yield RMSNorm, RoPE with the KV write, and SwiGLU: at batch 1 their time is the launch."""
    x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
    gain, residual = torch.ones(4096, device="cuda", dtype=torch.bfloat16), torch.randn_like(x)
    wide = x.double()
    wanted = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert relative_error(rms_norm(x, gain, 1e-5), wanted) < MAX_RELATIVE_ERROR
    shape = f"{tokens} x 4096"
    yield row_for("rms_norm", shape, "", graph_us([lambda: rms_norm(x, gain, 1e-5)], 5), 2 * x.nbytes, bytes_per_s)
    us = graph_us([lambda: rms_norm_add(x, gain, 1e-5, residual)], 5)
    yield row_for("rms_norm_add", shape, "", us, 3 * x.nbytes, bytes_per_s)
    gate_up = torch.randn(tokens, 28_672, device="cuda", dtype=torch.bfloat16)
    gate, up = gate_up.double().chunk(2, 1)
    assert relative_error(swiglu(gate_up), F.silu(gate) * up) < MAX_RELATIVE_ERROR
    us = graph_us([lambda: swiglu(gate_up)], 5)
    yield row_for("swiglu", f"{tokens} x 28672", "", us, gate_up.nbytes * 3 // 2, bytes_per_s)
    qkv = torch.randn(tokens, 6144, device="cuda", dtype=torch.bfloat16)
    key_pages = torch.zeros(tokens // 16 + 1, 8, 16, 128, device="cuda", dtype=torch.bfloat16)
    value_pages = torch.zeros_like(key_pages)
    table = torch.arange(len(key_pages), device="cuda", dtype=torch.int32)[None]
    positions, slots = torch.arange(tokens, device="cuda"), torch.zeros(tokens, device="cuda", dtype=torch.int32)
    angles = torch.rand(tokens, 64, device="cuda")
    cos, sin = angles.cos(), angles.sin()

    def rope() -> Tensor:
        return rope_kv_write(qkv, cos, sin, positions, positions, slots, table, key_pages, value_pages, 32)

    low, high = qkv[:, :4096].double().view(tokens, 32, 2, 64).unbind(2)
    c, s = cos.double()[:, None], sin.double()[:, None]
    assert relative_error(rope(), torch.cat([low * c - high * s, high * c + low * s], -1)) < MAX_RELATIVE_ERROR
    yield row_for("rope_kv_write", f"{tokens} x 6144", "", graph_us([rope], 5), 2 * qkv.nbytes, bytes_per_s)
    out = torch.randn(tokens, 32, 128, device="cuda")
    lse = torch.randn(tokens, 32, device="cuda")
    us = graph_us([lambda: merge_outputs([out, out], [lse, lse])], 5)
    yield row_for("merge", f"{tokens} x 32 x 128", "", us, 3 * (out.nbytes + lse.nbytes), bytes_per_s)


def best_rows(rows: list[Row]) -> list[Row]:
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        held = best.get((row.name, row.shape))
        if not row.config.startswith("cuBLAS") and (held is None or row.us < held.us):
            best[row.name, row.shape] = row
    return list(best.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the configurations in use")
    parser.add_argument("--json", default=None, help="write the rows to this file as well")
    asked = parser.parse_args()
    torch.manual_seed(0)
    began = time.perf_counter()
    bytes_per_s = measured_bytes_per_s()
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(f"{machine}; reads at {bytes_per_s / 1e9:.0f} GB/s, the floor of every row below", flush=True)
    rows = list(gemv_rows(bytes_per_s, asked.quick))
    rows += attention_rows(bytes_per_s, asked.quick)
    for tokens in (1, 16, 4096):
        rows += small_rows(tokens, bytes_per_s)
    print(f"\nbest of each shape, after {time.perf_counter() - began:.0f} s")
    best = best_rows(rows)
    for row in best:
        print(f"{row.name:14} {row.shape:22} {row.config:34} {row.us:9.2f} us {row.share_of_floor:6.1%}")
    report = {"machine": machine, "bytes_per_s": bytes_per_s, "best": [asdict(row) for row in best]}
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump({**report, "rows": [asdict(row) for row in rows]}, file, indent=1)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
