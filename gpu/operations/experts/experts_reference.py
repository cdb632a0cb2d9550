"""Compute a mixture of experts in plain torch, reading only the chosen experts: as the reference, and on the CPU.

On the CPU packed rows are multiplied as they are stored (`numba_packed_linear`), except with float64 tokens. A token's
result is a sum over its experts in the order of their weights, so it depends on no other token.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.model.spec import Activation, Experts, first_rows
from gpu.operations.experts.far_experts import leaves_out
from gpu.operations.experts.mixture_matrices import ExpertMatrices
from gpu.operations.linear.numba_packed_linear import multiplies, packed_product
from gpu.operations.linear.packed_matrix import Packed, Stored, unpack_reference
from gpu.operations.swiglu import swiglu_reference


def fold_choice_reference(logits: Tensor, experts: Experts, correction: Tensor | None) -> Tensor:
    """Convert logits of a sigmoid router, or of one that chooses among groups, to those of a softmax router.

    The result has the logarithms of the weights for experts that a token chooses, and -inf for all others. DeepSeek-V3,
    arXiv 2412.19437, eq. (13) to (16), and DeepSeek-V2, arXiv 2405.04434, section 2.2.2. logits: float32 `[tokens,
    experts]`. correction: `[experts]`, used only for the choice; None: there is none.
    """
    weights = F.logsigmoid(logits) if experts.is_sigmoid else torch.log_softmax(logits, 1)
    wanted = weights.exp() if correction is None else weights.exp() + correction
    if experts.groups > 1:
        by_group = wanted.unflatten(1, (experts.groups, -1))
        best = by_group.topk(experts.group_best, -1).values.sum(-1).topk(experts.groups_taken, 1).indices
        left = torch.ones(by_group.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, best, value=False)
        wanted = by_group.masked_fill(left[..., None], float("-inf")).flatten(1)
    taken = wanted.topk(experts.per_token, 1).indices
    return torch.full_like(logits, float("-inf")).scatter_(1, taken, weights.gather(1, taken))


def route_reference(
    normed: Tensor, router: Tensor, experts: Experts, bias: Tensor | None = None, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return each token's experts: ids int64 and weights float32 (float64 for such tokens), both `[tokens, per_token]`.

    The largest weight comes first, and of equal ones the lower expert. normed: `[tokens, hidden]`, after the layer's
    norm. router: `[experts, hidden]`. bias: `[experts]`. Logits are never rounded.
    """
    wide = torch.float64 if normed.dtype == torch.float64 else torch.float32
    logits = F.linear(normed.to(wide), router.to(wide), None if bias is None else bias.to(wide))
    return choose_reference(
        fold_choice_reference(logits, experts, correction) if experts.is_folded else logits, experts
    )


def choose_reference(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Return the experts of logits `[tokens, experts]`, as `route_reference` does."""
    weights = logits.exp() if experts.keeps_weights else torch.softmax(logits, 1)
    shares, ids = weights.sort(dim=1, descending=True, stable=True)
    shares, ids = shares[:, : experts.per_token], ids[:, : experts.per_token]
    return ids, shares / shares.sum(1, keepdim=True) if experts.is_normalised else shares


def experts_reference(
    normed: Tensor, ids: Tensor, weights: Tensor, matrices: ExpertMatrices, experts: Experts, activation: Activation
) -> Tensor:
    """Return the weighted sum of the experts' outputs for tokens `[tokens, hidden]`, in their dtype.

    If some experts are left out, the dtype is as wide as the weights'. ids, weights: from `route_reference`.
    """
    (tokens, hidden), width, far = normed.shape, first_rows(activation, experts.intermediate), matrices.far
    made = normed.new_zeros(tokens, experts.per_token, normed.shape[1])
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        own, number = (matrices.gate_up, matrices.down), expert
        if far is not None:
            found = far.find(expert, own)
            if found is None:
                continue
            own, number = found
        product = _product(normed[token], own[0], width * number, width, matrices.gate_up_bias, expert)
        product = swiglu_reference(product, activation)  # one name: both are freed before the next expert
        made[token, place] = _product(product, own[1], hidden * number, hidden, matrices.down_bias, expert)
    wide = torch.promote_types(weights.dtype, normed.dtype)
    if matrices.gains is not None:
        weights = weights * matrices.gains[ids].to(weights.dtype)
    total = (made.to(wide) * weights[:, :, None]).sum(1)
    return total if leaves_out(far) else total.to(normed.dtype)


def _product(x: Tensor, stored: Stored, begin: int, count: int, bias: Tensor | None, expert: int) -> Tensor:
    """Return x times an expert's rows `[begin, begin + count)`, plus its part of a bias, `[tokens, count]`.

    Packed rows are multiplied as they are stored where the CPU can, else widened.
    """
    own = None if bias is None else bias[expert * count : (expert + 1) * count]
    if isinstance(stored, Packed) and x.dtype != torch.float64 and stored.order is None and multiplies(stored):
        assert begin % stored.row_block == count % stored.row_block == 0, "an expert's rows are whole blocks"
        made = packed_product(x.float().contiguous(), stored.take_rows(begin, begin + count))
        return (made if own is None else made.add_(own)).to(x.dtype)
    return F.linear(x, rows_of(stored, begin, count, x.dtype), own)


def rows_of(stored: Stored, begin: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return rows `[begin, begin + count)` of a matrix, which must be whole blocks of rows; widened if they
    are packed.
    """
    end = begin + count
    if isinstance(stored, Tensor):
        return stored[begin:end].to(dtype)
    assert begin % stored.row_block == end % stored.row_block == 0, "an expert's rows are whole blocks"
    first, last = begin // stored.row_block, end // stored.row_block
    cut = replace(
        stored, words=stored.words[begin:end], scales=stored.scales[first:last],
        zeros=None if stored.zeros is None else stored.zeros[first:last],
        runs=None if stored.runs is None else stored.runs[begin:end],
    )  # fmt: skip
    return unpack_reference(cut, torch.float32).to(dtype)
