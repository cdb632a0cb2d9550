"""Round matrices of a plain checkpoint to few bits as they are loaded.

Integers: each group of a row has a scale and, in some formats, a zero point. Several scales are tried, from the one
that covers the whole range downwards, and the one with the least squared error is kept: clipping an outlier may cost
less than coarser steps for all other numbers. FP8: each row has a scale that puts its largest number at the top of the
range. Numbers are rounded with the stored scale. Rows are independent, so a matrix is rounded in parts.
"""

import torch
from torch import Tensor

from gpu.model.matrix_format import BITS, MatrixFormat

SHRINKS = tuple(1.0 - 0.025 * step for step in range(17))  # of the range that a scale holds
FP8_MAX = 448.0
_LEAST = 1e-8  # of a scale: a group of zeros has one, too
NUMBERS_AT_ONCE = 2**23  # what is compared takes several times their memory
BYTES_A_NUMBER = 24  # at most, while it is rounded and packed; with what was read of it


def rows_at_once(inner: int) -> int:
    """Return how many rows of `inner` columns are rounded at once."""
    return max(1, NUMBERS_AT_ONCE // inner)


def round_rows(rows: Tensor, stored: MatrixFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round float `[rows, inner]` to numbers uint8 `[rows, inner]`, scales `[rows, groups]`, zeros uint8 or None."""
    rows = rows.float()
    if stored.kind == "fp8":
        scales = (rows.abs().amax(1, keepdim=True) / FP8_MAX).clamp_(min=_LEAST)
        return (rows / scales).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8), scales, None
    count, inner = rows.shape
    group = stored.group or inner
    num_groups = -(-inner // group)
    padded = torch.nn.functional.pad(rows, (0, num_groups * group - inner))
    inside = torch.arange(num_groups * group, device=rows.device).view(1, num_groups, group) < inner
    cut = padded.view(count, num_groups, group)
    top = 2 ** BITS[stored.kind] - 1
    low = cut.amin(2).clamp_(max=0.0) if stored.has_zeros else -cut.abs().amax(2)
    high = cut.amax(2).clamp_(min=0.0) if stored.has_zeros else cut.abs().amax(2)
    best_scale, best_zero, best = None, None, None
    for shrink in SHRINKS if stored.kind == "int4" else SHRINKS[:1]:
        steps = top if stored.has_zeros else top - 1  # without a zero point the shorter side sets the range
        scale = ((high - low) * (shrink / steps)).clamp_(min=_LEAST).to(torch.bfloat16).float()
        zero = (
            (-low * shrink / scale).round_().clamp_(0, top)
            if stored.has_zeros
            else torch.full_like(scale, top // 2 + 1)
        )
        number = (cut / scale[..., None] + zero[..., None]).round_().clamp_(0, top)
        error = ((number.sub_(zero[..., None]).mul_(scale[..., None]).sub_(cut)).square_() * inside).sum(2)
        if best is None:
            best_scale, best_zero, best = scale, zero, error
        else:
            is_better = error < best
            best_scale, best_zero = torch.where(is_better, scale, best_scale), torch.where(is_better, zero, best_zero)
            best = torch.where(is_better, error, best)
    number = (cut / best_scale[..., None] + best_zero[..., None]).round_().clamp_(0, top)
    numbers = number.to(torch.uint8).view(count, -1)[:, :inner].contiguous()
    return numbers, best_scale.to(torch.bfloat16), best_zero.to(torch.uint8) if stored.has_zeros else None
