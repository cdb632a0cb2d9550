"""Measure from which position on MOMO's prefill is faster than dense prefill on this machine.

Keys and queries are random: the cost does not depend on which keys are chosen.
"""

import time
from collections.abc import Callable, Sequence

import torch

from evals.score_rows import Row
from gpu.attention.prefill_query import PrefillQuery
from gpu.methods.momo.query_blocks import Momo
from gpu.methods.momo.settings import MomoSettings
from gpu.model.architecture import Architecture
from gpu.prefill.dense import Dense

REPEATS = 5


def measure_depths(
    shape: Architecture, settings: MomoSettings, depths: Sequence[int], unit_tokens: int, device: torch.device,
    advance: Callable[[], None],
) -> list[Row]:  # fmt: skip
    """Return a row for each depth, with the milliseconds of a unit of `unit_tokens` queries behind `depth` keys:
    `dense_ms` and `momo_ms`.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    longest = max(depths) + unit_tokens
    query = torch.randn(unit_tokens, shape.num_heads, shape.dim, device=device, dtype=dtype)
    keys, values = (torch.randn(shape.num_kv_heads, longest, shape.dim, device=device, dtype=dtype) for _ in range(2))
    dense = Dense()
    dense.choose(keys, values, shape.num_heads, unit_tokens)
    sparse = settings.model_copy(update={"dense_until_tokens": 0, "dense_layers": 0})
    sides = {"dense_ms": dense, "momo_ms": Momo(sparse, dense)}
    rows = []
    for depth in depths:
        end = depth + unit_tokens
        unit = PrefillQuery(
            0, query, query, keys[:, :end], values[:, :end], torch.arange(depth, end, device=device), depth,
            end + settings.query_block, shape.dim**-0.5, None,
        )  # fmt: skip
        rows.append({"depth": depth} | {
            name: time_ms(lambda side=side, unit=unit: side.attend(unit), device) for name, side in sides.items()
        })  # fmt: skip
        advance()
    return rows


def time_ms(call: Callable[[], object], device: torch.device) -> float:
    """Return the median of REPEATS timed calls, after one that is not counted."""
    times = []
    for _ in range(REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times[1:])[REPEATS // 2]


def choose_dense_until(rows: Sequence[Row]) -> int | None:
    """Return the least depth from which on MOMO was faster at every depth; None if it was not at the deepest."""
    faster: int | None = None
    for row in sorted(rows, key=lambda row: -row["depth"]):
        if row["momo_ms"] >= row["dense_ms"]:
            break
        faster = row["depth"]
    return faster
