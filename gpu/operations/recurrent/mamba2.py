"""Compute a Mamba-2 layer between its projections: convolution, time steps, the state space model, and a gated norm.

Dao, Gu: Transformers are SSMs (arXiv 2405.21060), equation 1 with a scalar decay per head. A token's projected x, B and
C go through a causal convolution of each channel by itself, its bias and a SiLU. With a head's time step `t =
softplus(dt + time_bias)`, its state S `[key_dim, value_dim]` becomes

    S = exp(-exp(decay_log) t) S + B (t x)^T          y = C^T S + skip x

In the terms of `delta_net`, C is a query, B a key and x a value; the heads of a group share C and B. In chunks, with
G_i the sum of the logarithms of decays up to token i of the chunk, and R = t x,

    y_i = exp(G_i) C_i^T S + sum_(j <= i) (C_i . B_j) exp(G_i - G_j) R_j + skip x_i
    S = exp(G_last) S + sum_j exp(G_last - G_j) B_j R_j^T

Outputs are multiplied by `silu(z)` and then normed, the heads of a group together. Everything is computed in float32,
or in float64 if the inputs are.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.recurrent.state_arrays import CHUNK_TOKENS


def state_space_reference(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs `[tokens, heads, value_dim]`, without skips, and the state after the last token, token by token.

    query (C), key (B): `[tokens, heads, key_dim]`. value (t x): `[tokens, heads, value_dim]`. decay: logarithms,
    `[tokens, heads]`. state: `[heads, key_dim, value_dim]`, not changed. All of one dtype.
    """
    outs = []
    for q, k, v, g in zip(query, key, value, decay, strict=True):
        state = state * g.exp()[:, None, None] + k[:, :, None] * v[:, None, :]
        outs.append(torch.einsum("hk,hkv->hv", q, state))
    return torch.stack(outs) if outs else torch.zeros_like(value), state


def chunked_state_space(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `state_space_reference` in chunks of CHUNK_TOKENS."""
    outs = []
    for first in range(0, len(value), CHUNK_TOKENS):
        q, k, v = (rows[first : first + CHUNK_TOKENS].transpose(0, 1) for rows in (query, key, value))
        summed = decay[first : first + CHUNK_TOKENS].T.cumsum(1)  # [heads, tokens]
        above = torch.ones(summed.shape[1], summed.shape[1], dtype=torch.bool, device=summed.device).triu(1)
        fading = (summed[:, :, None] - summed[:, None, :]).masked_fill_(above, -torch.inf).exp_()
        out = (q @ k.transpose(1, 2) * fading) @ v + (q * summed.exp()[..., None]) @ state
        last = summed[:, -1:]
        written = (k * (last - summed).exp()[..., None]).transpose(1, 2) @ v
        state = state * last.exp()[..., None] + written
        outs.append(out.transpose(0, 1))
    return torch.cat(outs) if outs else torch.zeros_like(value), state


def gated_norm_reference(made: Tensor, gates: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Compute `gated_norm` in plain torch."""
    wide = torch.promote_types(made.dtype, torch.float32)
    gated = (made.to(wide) * F.silu(gates.to(wide))).unflatten(1, (groups, -1))
    normed = gated * (gated.square().mean(2, keepdim=True) + eps).rsqrt()
    return (normed.flatten(1) * weight.to(wide)).to(gates.dtype)


@triton.jit
def _gated_norm_kernel(
    made, gates, weight, slots, out, made_row, gates_row, eps,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, HAS_SLOTS: tl.constexpr,
    GATES_LAST: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    column = group * WIDTH + at
    rows = tl.load(made + row * made_row + column, mask=inside, other=0.0).to(tl.float32)
    is_there = inside
    if HAS_SLOTS:
        is_there = inside & (at * 0 + tl.load(slots + row) >= 0)  # a block, as masks must be
    z = tl.load(gates + row * gates_row + column, mask=is_there, other=0.0).to(tl.float32)
    gate = z * tl.sigmoid(z)
    if GATES_LAST:
        normed = rows * tl.rsqrt(tl.sum(rows * rows, 0) / WIDTH + eps)
        normed *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) * gate
    else:
        gated = rows * gate
        normed = gated * tl.rsqrt(tl.sum(gated * gated, 0) / WIDTH + eps)
        normed *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * (WIDTH * GROUPS) + column, normed.to(out.dtype.element_ty), mask=inside)


def gated_norm(
    made: Tensor, gates: Tensor, weight: Tensor, groups: int, eps: float, slots: Tensor | None = None,
    out: Tensor | None = None, gates_last: bool = False,
) -> Tensor:  # fmt: skip
    """Norm `made * silu(gates)`, each of `groups` equal parts of a row by itself, and multiply it by `weight`.

    Returns `[rows, width]` in gates' dtype, in `out` if it is given. Needs a device with Triton. made: float32 `[rows,
    width]`. gates: `[rows, width]`. weight: `[width]`. slots: int32 `[rows]`, -1 in rows that become zeros whatever
    their gates are; None: all are in use. gates_last: gates, and a weight `[width / groups]`, multiply the normed rows,
    as in a delta net. Bytes moved: rows read and written once.
    """
    rows, width = gates.shape
    out = torch.empty(rows, width, dtype=gates.dtype, device=gates.device) if out is None else out
    block = triton.next_power_of_2(width // groups)
    _gated_norm_kernel[(rows, groups)](
        made, gates, weight, weight if slots is None else slots, out, made.stride(0), gates.stride(0), eps,
        WIDTH=width // groups, GROUPS=groups, BLOCK=block, HAS_SLOTS=slots is not None, GATES_LAST=gates_last,
        num_warps=max(1, min(16, block // 256)),
    )  # fmt: skip
    return out
