"""Tiles of products with few bits, swept on a GPU: `python -m lab.kernels.packed_sweep`. `tiles_for` is what is served.

Each matrix of a layer, or an output matrix (`--matrices logits`), by kind and tokens: the time of what is served and of
the fastest tiles, beside the floor of bytes. Tiles are compiled by as many processes as there are cores, then timed one
after another in CUDA graphs over as many matrices as no cache holds. Tiles whose product is not that of the unpacked
numbers are not reported. The last line is JSON.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
import triton
from torch import Tensor

from gpu.model.gguf.kinds import format_of
from gpu.model.matrix_format import BITS, ROUNDED, MatrixFormat
from gpu.model.spec import Activation
from gpu.operations.linear import packed_tiles
from gpu.operations.linear.packed_linear import unpack
from gpu.operations.linear.packed_matrix import Packed
from gpu.operations.linear.packed_tiles import MOST_GATED, Tiles, is_halved, is_short, tiles_for
from gpu.operations.linear.word_layout import pack_words
from gpu.weights.weights import allocate_packed
from lab.kernels.gpu_kernels_sweep import graph_us, measured_bytes_per_s, relative_error

COLD_BYTES = 192 * 2**20
MAX_RELATIVE_ERROR = 1e-2
SHAPES = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate_up": (28_672, 4096),
    "down": (4096, 14_336),
    "logits": (128_256, 4096),
}
LAYER = "qkv,output,gate_up,down"
KINDS = ("int4", "fp8", "int8", "Q4_K", "Q6_K")
Case = tuple[str, str, int, Tiles]  # kind, matrix, tokens, tiles


def format_for(kind: str) -> MatrixFormat:
    stored = ROUNDED[kind].layers if kind in ROUNDED else format_of([kind])
    assert stored is not None, "KINDS have few bits"
    return stored


def candidates(kind: str, name: str, tokens: int) -> list[Tiles]:
    """Return what is served first."""
    rows, inner = SHAPES[name]
    activation = _activation(name, tokens)
    stored = format_for(kind)
    group = stored.group or inner
    forms = is_short(BITS[stored.kind], group), is_halved(group, inner, stored.run is not None)
    served = tiles_for(tokens, rows // 2 if activation else rows, inner, torch.bfloat16, *forms)
    found, at_once = [served], max(8, triton.next_power_of_2(tokens))
    if tokens <= 8:
        found += [Tiles(8, 16, splits, splits, stages, unroll)
                  for splits in (4, 8) for stages in (3, 4) for unroll in (1, 2)]  # fmt: skip
    elif tokens <= 16:
        found += [Tiles(16, 16, 4, 4, 3), Tiles(16, 16, 4, 4, 3, 2), Tiles(16, 16, 4, 4, 4), Tiles(16, 16, 8, 8, 3),
                  Tiles(16, 16, 8, 8, 3, 2), Tiles(16, 64, 1, 4, 4), Tiles(16, 64, 1, 4, 5),
                  Tiles(16, 128, 1, 8, 4)]  # fmt: skip
    else:
        found += [Tiles(min(32, at_once), 64, 1, 4, 4), Tiles(min(64, at_once), 64, 1, 4, 3),
                  Tiles(min(64, at_once), 64, 1, 4, 4), Tiles(min(64, at_once), 128, 1, 8, 3),
                  Tiles(min(64, at_once), 128, 1, 8, 4)]  # fmt: skip
    return list(dict.fromkeys(found))


def _activation(name: str, tokens: int) -> Activation | None:
    return "silu" if name == "gate_up" and tokens <= MOST_GATED else None


def draw(kind: str, rows: int, inner: int, device: torch.device) -> Packed:
    """Draw numbers of any bits, and scales about one: what they are decides nothing."""
    packed = allocate_packed(rows, inner, format_for(kind), torch.bfloat16, device, torch.bfloat16)
    numbers = torch.randint(0, 2**packed.bits, (rows, inner), dtype=torch.uint8, device=device)
    packed.words.copy_(pack_words(numbers & 0xBF if kind == "fp8" else numbers, packed.bits))  # no NaN
    if packed.runs is not None:
        packed.scales.random_(-(2**15), 2**15)
        packed.runs.copy_(
            torch.rand(*packed.runs.shape, 2, device=device).mul_(2.0**-10).half().view(torch.int32)[..., 0]
        )
        return packed
    packed.scales.uniform_(0.5, 1.5)
    if packed.zeros is not None:
        packed.zeros.random_(0, 2**packed.bits)
    return packed


def _run(packed: Packed, x: Tensor, name: str, tiles: Tiles) -> Tensor:
    """With these tiles."""
    served, packed_tiles.tiles_for = packed_tiles.tiles_for, lambda *_: tiles
    try:
        return packed_tiles.packed_tiles(x, packed, None, _activation(name, len(x)), torch.bfloat16)
    finally:
        packed_tiles.tiles_for = served


def _tokens(name: str, tokens: int, device: torch.device) -> Tensor:
    """Return attention's output is float32."""
    dtype = torch.float32 if name == "output" else torch.bfloat16
    return torch.randn(tokens, SHAPES[name][1], dtype=dtype, device=device)


def compile_cases(cases: list[Case]) -> int:
    """Compile into Triton's cache, by matrices of few rows, and return how many do not fit."""
    device, failed = torch.device("cuda"), 0
    for kind, name, tokens, tiles in cases:
        packed = draw(kind, 256, SHAPES[name][1], device)
        try:
            _run(packed, _tokens(name, tokens, device), name, tiles)
        except (triton.runtime.errors.OutOfResources, RuntimeError):
            failed += 1
    torch.cuda.synchronize()
    return failed


def sweep(kind: str, name: str, tokens: int, bytes_per_s: float, device: torch.device) -> Iterator[dict[str, Any]]:
    rows, inner = SHAPES[name]
    first = draw(kind, rows, inner, device)
    matrices = [first, *(draw(kind, rows, inner, device) for _ in range(COLD_BYTES // first.nbytes))]
    x = _tokens(name, tokens, device)
    wide = unpack(replace(first, dtype=torch.float32))
    product = x.float().bfloat16().float() @ wide.t() if tokens > MOST_GATED else x.float() @ wide.t()
    if _activation(name, tokens):
        gate, up = product.double().chunk(2, 1)
        product = torch.nn.functional.silu(gate) * up
    for tiles in candidates(kind, name, tokens):
        try:
            error = relative_error(_run(first, x, name, tiles), product)
        except (triton.runtime.errors.OutOfResources, RuntimeError):
            continue
        if not error < MAX_RELATIVE_ERROR:
            print(f"{kind} {name} {tokens} {tiles} is wrong: relative error {error:.1e}")
            continue
        us = graph_us([lambda packed=packed, tiles=tiles: _run(packed, x, name, tiles) for packed in matrices], 5)
        yield {"kind": kind, "matrix": name, "tokens": tokens, "tiles": asdict(tiles), "us": us,
               "floor_us": first.nbytes / bytes_per_s * 1e6}  # fmt: skip


def spell(tiles: dict[str, Any]) -> str:
    """Return tokens x rows, splits, warps, stages, and what is not the usual."""
    text = f"{tiles['tokens']}x{tiles['rows']} s{tiles['splits']} w{tiles['num_warps']} st{tiles['num_stages']}"
    return text + (f" u{tiles['unroll']}" if tiles["unroll"] != 1 else "")


def sweep_all(
    kind: str, matrices: list[str], tokens: int, bytes_per_s: float, device: torch.device
) -> list[dict[str, Any]]:
    """Return all rows of these matrices; prints the fastest."""
    rows, served_us, best_us, floor_us = [], 0.0, 0.0, 0.0
    for name in matrices:
        found = list(sweep(kind, name, tokens, bytes_per_s, device))
        if not found:
            continue
        served, ranked = found[0], sorted(found, key=lambda row: row["us"])
        rows += found
        served_us, best_us = served_us + served["us"], best_us + ranked[0]["us"]
        floor_us += served["floor_us"]
        best = "; ".join(f"{spell(row['tiles'])} {row['us']:.1f}" for row in ranked[:3])
        print(f"{kind:5} {tokens:3} {name:8} first {spell(served['tiles'])} {served['us']:6.1f} us, floor "
              f"{served['floor_us']:5.1f}; best {best}", flush=True)  # fmt: skip
    print(
        f"{kind:5} {tokens:3} all      first {served_us:.1f}, best {best_us:.1f}, floor {floor_us:.1f} us", flush=True
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="int4,fp8,Q4_K", help=f"of {', '.join(KINDS)}, with commas")
    parser.add_argument("--matrices", default=LAYER, help=f"of {', '.join(SHAPES)}, with commas")
    parser.add_argument("--batch", default="1,16,64", help="tokens, with commas")
    parser.add_argument("--seconds", type=float, default=120.0, help="no number of tokens is begun after so many")
    parser.add_argument("--json", default=None, help="write all rows to this file")
    asked = parser.parse_args()
    began, kinds, batches = time.perf_counter(), asked.kinds.split(","), [int(one) for one in asked.batch.split(",")]
    if not set(kinds) <= set(KINDS):
        parser.error(f"--kinds: got {asked.kinds}; wanted some of {', '.join(KINDS)}")
    matrices = asked.matrices.split(",")
    if not set(matrices) <= set(SHAPES):
        parser.error(f"--matrices: got {asked.matrices}; wanted some of {', '.join(SHAPES)}")
    workers = max(1, (os.cpu_count() or 2) - 2)
    pool = multiprocessing.get_context("fork").Pool(workers)  # before this process has a context
    device, rows = torch.device("cuda"), []
    torch.manual_seed(0)
    bytes_per_s = 0.0
    for tokens in batches:
        if time.perf_counter() - began > asked.seconds:
            print(f"{tokens} tokens: out of time")
            break
        cases = [(kind, name, tokens, tiles) for kind in kinds for name in matrices
                 for tiles in candidates(kind, name, tokens)]  # fmt: skip
        failed = sum(pool.map(compile_cases, [[case] for case in cases], chunksize=1))
        seconds = time.perf_counter() - began
        print(
            f"{len(cases)} tiles for {tokens} tokens compiled, {failed} do not fit, {seconds:.0f} s so far", flush=True
        )
        bytes_per_s = bytes_per_s or measured_bytes_per_s()
        for kind in kinds:
            rows += sweep_all(kind, matrices, tokens, bytes_per_s, device)
    pool.terminate()
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(rows, file)
    print(json.dumps({"device": torch.cuda.get_device_name(), "bytes_per_s": bytes_per_s, "rows": len(rows)}))


if __name__ == "__main__":
    main()
