"""Choose the kernel that attends to a prefill chunk's past on this machine, by measurements when an engine starts.

The candidates are FlashAttention 2 and, if its wheel is installed, 3; efficient attention; and cuDNN: over pieces of
the past or, if there is hardly any past, in one causal square. A candidate that raises here, or whose result differs
from the reference by more than rounding, is rejected, and the log says so. Every plan that cuDNN may need later is made
here, in the thread that will use it, because cuDNN keeps plans per thread.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from gpu.attention.flash3 import has_flash3
from gpu.attention.prefill_attention import Whole, prefill_attention, prefill_attention_reference
from gpu.attention.prefill_query import Attended
from gpu.prefill.past_attention import (
    LEAST_QUERIES,
    LEAST_SQUARE,
    SQUARE_STEP,
    Kernel,
    attend_in_pieces,
    attend_in_square,
    cudnn_attention,
    padded_queries,
    square_size,
)
from gpu.prefill.prefill_arrays import PIECE_TOKENS

log = logging.getLogger(__name__)

MEASURED_PASTS = (PIECE_TOKENS, 4 * PIECE_TOKENS, 16 * PIECE_TOKENS)
CHECKED_ROWS = 8
ROUNDING = 2.0**-6  # of a query's largest output, and of its logsumexp: probabilities and outputs in bf16, 4 times over
REPEATS = 3

Attend = Callable[[Tensor, Tensor, Tensor, float], Attended]


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernels that attend to a prefill chunk's past on this machine.

    whole: the fastest kernel that takes any past in one launch.
    least_past: by padded number of queries, the shortest past from which cuDNN over pieces is faster; no entry: never.
    tflop_s: of each candidate, at the most queries and the longest past that were measured.
    out: the rejected candidates, with the reason.
    most_square: tokens of the largest square that cuDNN takes, 0: none.
    square_gain: how many times faster than `whole` cuDNN computes that square.
    """

    whole: Whole
    least_past: Mapping[int, int]
    tflop_s: Mapping[str, float]
    out: Mapping[str, str]
    most_square: int = 0
    square_gain: float = 0.0

    def is_square(self, num_queries: int, past: int) -> bool:
        """Return whether a prefill chunk is faster as a square, although a square computes the queries of the past,
        too.
        """
        size = square_size(past + num_queries)
        needed = num_queries * (num_queries + 2 * past)
        return LEAST_SQUARE <= size <= self.most_square and size * size < self.square_gain * needed

    def kernel(self, num_queries: int, past: int) -> Kernel:
        """Return the fastest kernel for so many queries after a past of so many tokens."""
        least = self.least_past.get(padded_queries(num_queries))
        return self.whole if least is None or past < least else "cudnn"

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


def choose_kernel(keys: Tensor, values: Tensor, num_heads: int, chunk_tokens: int) -> KernelChoice:
    """Measure the candidates, choose among them, and make cuDNN's plans. Takes seconds.

    For CUDA in half precision, where `has_flash`. keys, values: `[kv_heads, context, dim]`, strided as prefill's own
    buffers, which they may be: they are overwritten. num_heads: query heads. chunk_tokens: the most queries of a unit.
    """
    context, dim = keys.shape[1:]
    most = min(chunk_tokens, context)
    query = torch.randn(padded_queries(most), num_heads, dim, dtype=keys.dtype, device=keys.device)
    keys.normal_()
    values.normal_()
    scale = dim**-0.5
    wholes: list[Whole] = [name for name in get_args(Whole) if name != "flash3" or has_flash3(keys)]
    kernels: dict[str, Attend] = {name: _whole_kernel(name) for name in wholes}
    if most + PIECE_TOKENS <= context:
        kernels["cudnn"] = _in_pieces
    out = {}
    for name, attend in kernels.items():
        own = slice(0, min(context, most + PIECE_TOKENS))
        why = find_fault(attend, query[:most], keys[:, own], values[:, own], scale)
        if why is not None:
            out[name] = why
            log.warning("prefill_attention event=rejected candidate=%s reason=%r", name, why)
    left = [name for name in kernels if name not in out]
    if "cudnn" in left:
        _make_plans(query, keys, values, scale)
    most_square = min(square_size(most), context // SQUARE_STEP * SQUARE_STEP)

    def seconds(name: str, tokens: int, past: int) -> float:
        own = slice(0, past + tokens)
        return _time_call(lambda: kernels[name](query[:tokens], keys[:, own], values[:, own], scale))

    whole, least_past = decide(left, seconds, most, context)
    past = max((past for past in MEASURED_PASTS if past + most <= context), default=0)
    flops = 4.0 * num_heads * dim * most * (past + most / 2)
    tflop_s = {name: flops / seconds(name, most, past) / 1e12 for name in left}
    gain = 0.0
    if "cudnn" not in out and most_square >= LEAST_SQUARE:  # also where no past is as long as a piece
        gain = _square_gain(query[:most_square], keys[:, :most_square], values[:, :most_square], scale, whole)
    return KernelChoice(whole, least_past, tflop_s, out, most_square if gain else 0, gain)


def decide(
    candidates: Sequence[str], seconds: Callable[[str, int, int], float], most: int, context: int
) -> tuple[Whole, dict[int, int]]:
    """Return `whole` and `least_past` of a KernelChoice.

    seconds: the time of a candidate by its name, number of queries and tokens of past. most: queries of a unit.
    context: the most queries and past together. Raises RuntimeError if no candidate takes any past.
    """
    wholes: list[Whole] = [name for name in get_args(Whole) if name in candidates]
    if not wholes:
        raise RuntimeError("prefill: no attention kernel works on this device; the log has the error of each")
    pasts = [past for past in MEASURED_PASTS if past + most <= context]
    longest = pasts[-1] if pasts else context - most
    whole = min(wholes, key=lambda name: seconds(name, most, longest))
    least_past: dict[int, int] = {}
    for size in _padded_sizes(most) if "cudnn" in candidates else []:
        tokens = most if size >= most else size * 3 // 4  # a padded chunk is half full or more; the longest is full
        for past in reversed(pasts):
            if seconds("cudnn", tokens, past) >= seconds(whole, tokens, past):
                break
            least_past[size] = past
    return whole, least_past


def _padded_sizes(most: int) -> list[int]:
    """Return the padded numbers of queries that chunks of up to `most` queries have."""
    return [LEAST_QUERIES << place for place in range((padded_queries(most) // LEAST_QUERIES).bit_length())]


def _make_plans(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
    """Make cuDNN's plans for every number of queries and every length of piece that can occur."""
    for size in _padded_sizes(len(query)):
        for piece in range((keys.shape[1] // PIECE_TOKENS).bit_length()):
            own = slice(0, PIECE_TOKENS << piece)
            cudnn_attention(query[:size], keys[:, own], values[:, own], False, scale)
        if size <= keys.shape[1]:
            cudnn_attention(query[:size], keys[:, :size], values[:, :size], True, scale)


def _square_gain(query: Tensor, keys: Tensor, values: Tensor, scale: float, whole: Whole) -> float:
    """Make cuDNN's plan of each square size.

    Return how many times faster than `whole` the largest is; 0 if it is wrong.
    """
    why = find_fault(attend_in_square, query, keys, values, scale)
    if why is not None:
        log.warning("prefill_attention event=rejected candidate=square reason=%r", why)
        return 0.0
    for size in range(LEAST_SQUARE, len(query) + 1, SQUARE_STEP):
        attend_in_square(query[:size], keys[:, :size], values[:, :size], scale)
    square = _time_call(lambda: attend_in_square(query, keys, values, scale))
    return _time_call(lambda: prefill_attention(query, keys, values, scale, whole)) / square


def _in_pieces(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
    return attend_in_pieces(query, keys, values, scale, "flash", "cudnn", None)


def _whole_kernel(name: Whole) -> Attend:
    return lambda query, keys, values, scale: prefill_attention(query, keys, values, scale, name)


def find_fault(attend: Attend, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> str | None:
    """Return what is wrong with a kernel's attention for the last queries of a context, or None."""
    try:
        got = attend(query, keys, values, scale)
        if keys.is_cuda:
            torch.cuda.synchronize(keys.device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return str(error).strip().splitlines()[0][:200]
    begin = keys.shape[1] - len(query)
    for row in torch.linspace(0, len(query) - 1, CHECKED_ROWS).long().tolist():
        seen = slice(0, begin + row + 1)
        wanted = prefill_attention_reference(
            query[row : row + 1].float(), keys[:, seen].float(), values[:, seen].float(), scale
        )
        off = (got.out[row].float() - wanted.out[0]).abs().max() / wanted.out.abs().max()
        lse_off = (got.partial_lse[row] - wanted.lse[0]).abs().max()
        if not (off <= ROUNDING and lse_off <= ROUNDING):  # NaN is neither
            return (
                f"query {row} is off by {float(off):.2g} of its largest output, its logsumexp by {float(lse_off):.2g}"
            )
    return None


def _time_call(call: Callable[[], object]) -> float:
    """Return the seconds of a call, its launches included: the best of REPEATS calls after one that is not timed."""
    best = float("inf")
    for repeat in range(REPEATS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if repeat:
            best = min(best, time.perf_counter() - began)
    return best
