"""Apply RMSNorm to each query and key head before its rotation, and to values, in place, in plain torch.

On a GPU `rope_kv_write` does this.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.operations.arguments import check
from gpu.operations.rms_norm import rms_norm_reference


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of query and key heads.

    query, key: weights `[dim]`, both of the rows' dtype or both float32. norms_values: value heads are normed as well,
    without weights.
    """

    query: Tensor
    key: Tensor
    eps: float
    norms_values: bool = False

    def check(self, op: str, qkv: Tensor, dim: int) -> None:
        """Raise ValueError unless the norms fit heads of `dim` elements, and qkv's dtype and device."""
        dtype = torch.float32 if self.query.dtype == torch.float32 else qkv.dtype
        check(op, "query_norm", self.query, (dim,), dtype, qkv.device)
        check(op, "key_norm", self.key, (dim,), dtype, qkv.device)


def head_norm(qkv: Tensor, norms: HeadNorms, num_heads: int, kv_heads: int) -> None:
    """Normalise the query and key heads of each token in place, and its value heads if `norms_values` is set.

    qkv: `[tokens, (heads + 2 * kv_heads) * dim]`. Raises ValueError for another shape, dtype or device.
    """
    op, width, dim = "head_norm", qkv.shape[1], len(norms.query)
    if width != (num_heads + 2 * kv_heads) * dim:
        raise ValueError(f"{op}: qkv is {width} wide; wanted ({num_heads} + 2 * {kv_heads}) heads of {dim}")
    norms.check(op, qkv, dim)
    heads = qkv.view(len(qkv), -1, dim)
    query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + kv_heads]
    query.copy_(rms_norm_reference(query, norms.query, norms.eps))
    key.copy_(rms_norm_reference(key, norms.key, norms.eps))
    if norms.norms_values:
        value = heads[:, num_heads + kv_heads :]
        value.copy_(rms_norm_reference(value, torch.ones(dim, dtype=torch.float32, device=qkv.device), norms.eps))
