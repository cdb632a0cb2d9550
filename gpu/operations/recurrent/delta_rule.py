"""Compute the gated delta rule, token by token and in chunks, in plain torch.

Yang, Kautz, Hatamizadeh: Gated Delta Networks (arXiv 2412.06464), equation 10. A head has a state S `[key_dim,
value_dim]`. A token with key k, value v, query q, a decay g <= 0 and a share b in (0, 1) makes of it

    S = exp(g) S
    S = S + b k (v - k^T S)^T
    o = q^T S

and o is the head's output. In chunks of C tokens (section 3.3): with G_i the sum of g up to token i of the chunk, and
A the strictly lower triangle of `b_i (k_i . k_j) exp(G_i - G_j)`,

    (I + A) U = diag(b) V         (I + A) W = diag(b exp(G)) K        R = U - W S
    o_i = exp(G_i) q_i^T S + sum_(j <= i) (q_i . k_j) exp(G_i - G_j) R_j
    S = exp(G_C) S + sum_j exp(G_C - G_j) k_j R_j^T

so products of matrices take the place of steps. Both compute in float32, and in float64 if their inputs are.
"""

import torch
from torch import Tensor

from gpu.operations.recurrent.state_arrays import CHUNK_TOKENS


def delta_rule_reference(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, share: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs `[tokens, heads, value_dim]` and the state after the last token, token by token.

    query, key: `[tokens, heads, key_dim]`. value: `[tokens, heads, value_dim]`. decay (g), share (b): `[tokens,
    heads]`. state: `[heads, key_dim, value_dim]`, not changed. All of one dtype.
    """
    outs = []
    for q, k, v, g, b in zip(query, key, value, decay, share, strict=True):
        state = state * g.exp()[:, None, None]
        seen = torch.einsum("hk,hkv->hv", k, state)
        state = state + k[:, :, None] * (b[:, None] * (v - seen))[:, None, :]
        outs.append(torch.einsum("hk,hkv->hv", q, state))
    return torch.stack(outs) if outs else torch.zeros_like(value), state


def chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, share: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `delta_rule_reference` in chunks of CHUNK_TOKENS."""
    num_tokens = len(share)
    padding = -num_tokens % CHUNK_TOKENS

    def chunks(rows: Tensor) -> Tensor:
        """Return `[heads, chunks, tokens, ..]`, padded with tokens that write nothing and keep the state."""
        padded = torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])]) if padding else rows
        return padded.unflatten(0, (-1, CHUNK_TOKENS)).movedim(2, 0).contiguous()

    query, key, value, decay, share = (chunks(rows) for rows in (query, key, value, decay, share))
    summed = decay.cumsum(2)  # [heads, chunks, tokens]
    above = torch.ones(CHUNK_TOKENS, CHUNK_TOKENS, dtype=torch.bool, device=key.device).triu(1)
    fading = (summed[..., :, None] - summed[..., None, :]).masked_fill_(above, -torch.inf).exp_()
    attended = (query @ key.transpose(2, 3)).mul_(fading)
    system = (key @ key.transpose(2, 3)).mul_(fading).mul_(share[..., None])  # its diagonal is taken to be 1
    right = torch.cat([value * share[..., None], key * (share * summed.exp())[..., None]], 3)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, read = solved.split([value.shape[3], key.shape[3]], 3)
    query = query * summed.exp()[..., None]
    last = summed[..., -1:]
    key = (key * (last - summed).exp()[..., None]).transpose(2, 3)
    kept, out = last.exp()[..., None], torch.empty_like(value)
    for chunk in range(value.shape[1]):
        rows = torch.baddbmm(written[:, chunk], read[:, chunk], state, alpha=-1)
        out[:, chunk] = torch.baddbmm(attended[:, chunk] @ rows, query[:, chunk], state)
        state = torch.baddbmm(state * kept[:, chunk], key[:, chunk], rows)
    return out.flatten(1, 2)[:, :num_tokens].transpose(0, 1), state
