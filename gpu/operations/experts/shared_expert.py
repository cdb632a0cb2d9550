"""Add the shared expert's output, times the sigmoid of the token's own logit, to the output of the other experts.

Bytes moved per token: three rows of hidden states read, one written; the logit's row, from L2.
"""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, check_contiguous, runs_on_triton


def add_shared_reference(mixed: Tensor, made: Tensor, normed: Tensor, share: Tensor) -> Tensor:
    """Compute `add_shared` in plain torch."""
    shares = F.linear(normed, share).float().sigmoid_().to(made.dtype)
    return mixed.add_(made.mul(shares))


@triton.jit
def _add_shared_kernel(
    mixed, made, normed, share, normed_row, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    row = tl.load(normed + token * normed_row + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(share + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.sigmoid(tl.sum(row * weight, 0))
    own = tl.load(made + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(mixed + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(mixed + token * HIDDEN + column, (total + own * factor).to(mixed.dtype.element_ty), mask=inside)


def add_shared(mixed: Tensor, made: Tensor, normed: Tensor, share: Tensor) -> Tensor:
    """Add `made * sigmoid(normed @ share.T)` to `mixed` in place, and return it.

    mixed, made, normed: `[tokens, hidden]`, and share: `[1, hidden]`, of one dtype; mixed and made are contiguous.
    Raises ValueError for another shape, dtype or device.
    """
    tokens, hidden = mixed.shape
    for name, given, shape in (("made", made, (tokens, hidden)), ("normed", normed, (tokens, hidden)),
                               ("share", share, (1, hidden))):  # fmt: skip
        check("add_shared", name, given, shape, mixed.dtype, mixed.device)
    if not runs_on_triton(mixed) or not tokens:
        return add_shared_reference(mixed, made, normed, share)
    check_contiguous("add_shared", "mixed", mixed)
    check_contiguous("add_shared", "made", made)
    block = triton.next_power_of_2(hidden)
    _add_shared_kernel[(tokens,)](
        mixed, made, normed, share, normed.stride(0), HIDDEN=hidden, BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return mixed
