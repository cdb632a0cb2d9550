"""Measure how fast a core multiplies a token by experts in host memory, for each storage format, with all cores busy.

The scheduler compares these rates with the link's to choose between computing and fetching experts. The kernels are
those of `cpu.experts`, with packed experts multiplied in integers, so rates include the cost of unpacking. Sizes are
those of Qwen3-30B-A3B. Experts are read in turn, and all of them are several times the last-level cache, so memory
bounds the rate. The best time counts: other programs can only slow a run.
"""

from collections.abc import Collection

import numba
import numpy as np
import torch
from torch import Tensor

from cpu.experts import HostExperts
from cpu.memory_rates import GIB, default_gib
from transfer.expert_exchange import ExpertRequests, ExpertSlot, LayerExperts, PackedRows, new_expert_slot
from transfer.machine_rates import STORED_AS, core_rate
from transfer.matrix_rows import nbytes_of
from transfer.simd.features import HAS_VECTORS
from transfer.simd.packed_rows import BITS

HIDDEN, INTERMEDIATE, PER_TOKEN = 2048, 768, 8
_REPEATS = 5  # measured passes over all host requests, after one that warms up


def measure_core_rates(
    threads: int, *, gib: float | None = None, stored: Collection[str] = STORED_AS
) -> dict[str, float]:
    """Return GFLOP/s for each of `threads` threads, two operations a number, by the names of `transfer.machine_rates`.
    Empty on a processor without the vectors that the kernels need.

    gib: size of the experts; None: `cpu.memory_rates.default_gib()`. Takes a few seconds, or a minute if kernels are
    compiled.
    """
    if not HAS_VECTORS:
        return {}
    threads = min(threads, int(numba.config.NUMBA_NUM_THREADS))
    num_bytes = int((default_gib() if gib is None else gib) * GIB)
    return {core_rate(name): _measure(name, threads, num_bytes) for name in stored}


def _measure(stored: str, threads: int, num_bytes: int) -> float:
    host_requests = max(1, num_bytes // (PER_TOKEN * _expert_bytes(stored)))
    worker, slot = _open(stored, host_requests * PER_TOKEN, threads)
    ids = torch.from_numpy(
        np.random.default_rng(0).permutation(host_requests * PER_TOKEN).reshape(host_requests, 1, PER_TOKEN)
    )
    best = float("inf")
    for turn in range(1 + _REPEATS):
        for taken in ids:
            slot.experts[:] = taken
            slot.advance(1)
            slot.flags[:] = slot.stamp
            answered = worker.answer([(ExpertRequests(np.array([[0, 1]])), slot)])
            if turn > 0:
                best = min(best, answered.attended_s)
    return 2 * PER_TOKEN * 3 * HIDDEN * INTERMEDIATE / best / threads / 1e9


def _expert_bytes(stored: str) -> int:
    return sum(nbytes_of(one) for one in _matrices(stored, 1))


def _open(stored: str, count: int, threads: int) -> tuple[HostExperts, ExpertSlot]:
    slot = new_expert_slot(1, HIDDEN, PER_TOKEN, torch.device("cpu"))
    slot.hidden.normal_()
    slot.shares.fill_(1 / PER_TOKEN)
    layer = LayerExperts(count, *_matrices(stored, count), in_integers=True)
    return HostExperts([layer], 1, PER_TOKEN, threads), slot


def _matrices(stored: str, count: int) -> tuple[Tensor | PackedRows, Tensor | PackedRows]:
    """Return matrices of experts with equal numbers: values do not change the time."""
    return (_rows(stored, count * 2 * INTERMEDIATE, HIDDEN), _rows(stored, count * HIDDEN, INTERMEDIATE))


def _rows(stored: str, rows: int, inner: int) -> Tensor | PackedRows:
    """Return packed rows: int4 as in GGUF's Q4_K and int8 as in its Q8_0, the usual formats with the most scales; fp4
    as in MXFP4.
    """
    if stored == "bf16":
        return torch.full((rows, inner), 0.01, dtype=torch.bfloat16)
    words = torch.full((rows, inner // (8 if BITS[stored] == 4 else 4)), 0x35353535, dtype=torch.int32)
    if stored == "fp4":
        return PackedRows(
            "fp4", inner, 32, 1, words, torch.full((rows, inner // 32), 120, dtype=torch.uint8), None, None
        )
    if stored == "int4":
        scales = torch.full((rows, inner // 32), 0x0101, dtype=torch.int16)
        runs = torch.full((rows, inner // 256), 0x20002000, dtype=torch.int32)  # two float16
        return PackedRows("int4", inner, 32, 1, words, scales, None, runs)
    if stored == "int8":
        scales = torch.full((rows, inner // 32), 0.01, dtype=torch.float16)
        return PackedRows("int8", inner, 32, 1, words, scales, None, None)
    assert stored == "fp8", "numbers of experts: bf16, int4, int8, fp8 or fp4"
    return PackedRows("fp8", inner, inner, 1, words, torch.full((rows, 1), 0.01), None, None)
