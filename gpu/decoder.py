"""The layers of a Llama-family decoder, as functions over tensors.

It refuses to know requests, batching and sampling: attention is handed in. Invariant: each hidden state depends on its
own row and on what attention returns for that row, so padding rows and packed neighbours change nothing.
"""

from collections.abc import Callable

from torch import Tensor

from gpu.architecture import Architecture
from gpu.kernels.cpu_attention import applies, rope_kv_write_cpu
from gpu.kernels.rope_kv_write import rope_kv_write
from gpu.kv_pool import KvPool
from gpu.projections import Projections
from gpu.rope import rope_tables
from gpu.weights import Weights
from transfer.partial import Partial

# (query, pre_rope_query), both [tokens, heads, dim], to the partial over what the caller covers.
Attend = Callable[[Tensor, Tensor], Partial]


class Decoder:
    """Weights, RoPE tables and the KV pool that the layers write to."""

    def __init__(self, architecture: Architecture, weights: Weights, pool: KvPool, max_context_tokens: int) -> None:
        self.architecture = architecture
        self.weights = weights
        self.pool = pool
        self.projections = Projections(weights, architecture.rms_norm_eps)
        self.scale = architecture.dim**-0.5
        self.cos, self.sin = rope_tables(architecture, max_context_tokens, pool.device)
        self._rope_kv_write = rope_kv_write_cpu if applies(pool.key_pages[0]) else rope_kv_write
        self.query_columns = architecture.num_heads * architecture.dim

    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states `[tokens, hidden]` of token ids, int64 `[tokens]`."""
        return self.weights.embedding.index_select(0, token_ids)

    def layer(self, index: int, hidden: Tensor, positions: Tensor, slots: Tensor, attend: Attend) -> Tensor:
        """One layer: hidden `[tokens, hidden]` -> new `[tokens, hidden]`; keys and values go to the slots' pages.

        positions: int64 `[tokens]`; slots: int32 `[tokens]`, -1 in padding rows. The KV that `attend` sees has these
        tokens.
        """
        qkv = self.projections.qkv(index, hidden)
        query = self._rope_kv_write(
            qkv, self.cos, self.sin, positions, slots, self.pool.page_table,
            self.pool.key_pages[index], self.pool.value_pages[index], self.architecture.num_heads,
        )  # fmt: skip
        pre_rope_query = qkv[:, : self.query_columns].view(query.shape)
        attended = attend(query, pre_rope_query).out.view(-1, self.query_columns)
        return self.projections.mlp(index, self.projections.output(index, attended, hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits, float32 `[tokens, vocab]`, of the last layer's `[tokens, hidden]`."""
        return self.projections.logits(hidden)
