"""Times writing and reading rows of 8 bits with their own scale, beside a copy of bf16 rows: `fused-rows`.

It refuses to know files. The shape is the keys of a layer of Llama 3.1 8B. What comes back is compared
with what was fused before anything is timed. Floor: bf16 rows read or written once, and rows of 8 bits once.
"""

import torch
from rich.console import Console

from bench.rates import device_name, measure_device_rates
from bench.rows import Row, announce, measure, require
from gpu.operations.kv.fused_rows import TAIL_BYTES, fuse_rows, widen_rows

KV_HEADS, DIM = 8, 128
HALF_STEP = 0.51  # of a row's scale
BFLOAT16 = 2**-8
WARMUPS, REPEATS = 5, 20


def fused_row_rows(tokens: int, device: torch.device, console: Console) -> list[Row]:
    """A row for writing and one for reading bf16 rows `[tokens, kv_heads, dim]`. Raises GateError."""
    rates = measure_device_rates(device) if device.type == "cuda" else {}
    rows = torch.randn(tokens, KV_HEADS, DIM, device=device).bfloat16()
    fused = torch.empty(tokens, KV_HEADS, DIM + TAIL_BYTES, dtype=torch.uint8, device=device)
    back = torch.full_like(rows, float("nan"))
    fuse_rows(rows, fused)
    widen_rows(fused, back)
    scale = fused.view(torch.float32)[..., -2:-1]
    within = (back.float() - rows.float()).abs() <= HALF_STEP * scale + BFLOAT16 * rows.float().abs()
    require(bool(within.all()), f"rows come back within {HALF_STEP} of a step")
    floor, floor_ms = "none: rates are of a CUDA device", None
    if rates:
        num_bytes = rows.nbytes + fused.nbytes
        floor = f"{num_bytes / 1e6:.1f} MB, read and written, at {rates['device_copy_gb_s']:.0f} GB/s"
        floor_ms = num_bytes / rates["device_copy_gb_s"] / 1e6
        announce(console, "fused rows", floor, floor_ms)
    peer = measure(lambda: back.copy_(rows), device, WARMUPS, REPEATS)
    timings = {
        "rows fused": measure(lambda: fuse_rows(rows, fused), device, WARMUPS, REPEATS),
        "rows widened": measure(lambda: widen_rows(fused, back), device, WARMUPS, REPEATS),
    }
    return [
        Row(
            name=name, shape=f"{tokens:,} x {KV_HEADS} x {DIM}", device=device_name(device), ms=timing.ms,
            p10=timing.p10, p90=timing.p90, floor=floor, floor_ms=floor_ms, peer="a copy of the bf16 rows",
            peer_ms=peer.ms, rates=rates, config={"tokens": tokens},
        )
        for name, timing in timings.items()
    ]  # fmt: skip
