"""Choose what a fused prompt keeps of a finished layer: the text around its chunks, and what the question attends to.

A3's extension, section 2.2: SnapKV's choice, a KV head at a time. Invariants: the first cells hold the text in front of
the chunks, untouched, for others share its pages; behind it, in order, what is chosen and all that stands behind the
last chunk. Keys are rotated already: cells need not be positions.
"""

import torch
from torch import Tensor

from gpu.fusion.token_choice import kept_scores
from gpu.kv.pool import KvPool


class Eviction:
    """The eviction of one prompt's tokens: `[front, tail)` are candidates, `num_evicted` of which go; the question is
    tokens `[tail, question_end)`.
    """

    def __init__(self, front: int, tail: int, question_end: int, num_tokens: int, num_evicted: int) -> None:
        self._front, self._tail, self._num_tokens = front, tail, num_tokens
        self._num_kept = tail - front - num_evicted
        self._num_question_tokens = question_end - tail
        self._queries: list[Tensor] = []

    def note(self, queries: Tensor) -> None:
        """Keep the rotated queries `[tokens, heads, dim]` of tokens behind the last chunk, as units compute them, in
        order.
        """
        self._queries.append(queries)

    def evict(self, layer: int, slot: int, keys: Tensor, values: Tensor, scale: float, pool: KvPool) -> None:
        """Move up what stays of a layer that is done. keys, values: copies, `[kv_heads, num_tokens, dim]`."""
        device = keys.device
        question = torch.cat(self._queries)[: self._num_question_tokens]
        self._queries.clear()
        scores = kept_scores(question, keys, self._tail, scale)[:, self._front : self._tail]
        chosen = scores.topk(self._num_kept, dim=1, sorted=False).indices.sort(1).values + self._front
        tail = torch.arange(self._tail, self._num_tokens, device=device).expand(len(chosen), -1)
        kept = torch.cat([chosen, tail], 1)  # [kv_heads, tokens]
        cells = torch.arange(self._front, self._front + kept.shape[1], device=device)
        page_ids = pool.page_table[slot, cells // pool.page_tokens].long()
        kept_rows = kept[..., None].expand(-1, -1, keys.shape[2])
        pool.write(layer, page_ids, cells % pool.page_tokens, keys.gather(1, kept_rows), values.gather(1, kept_rows))
