"""Compute document chunks alone, packed one behind another: each begins at position 0, and none attends to another.

A3, section 2.2 (precomputation). They have no slot and no pages: a buffer holds one layer's keys and values while the
layer is computed. Invariants: the stored rows of a chunk depend on its tokens alone; keys are stored before rotation,
after projection, bias and key norm.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gpu.attention.prefill_attention import windowed_attention
from gpu.attention.prefill_query import Attended, PrefillQuery, joined
from gpu.fusion.chunk_copies import Documents
from gpu.fusion.chunk_rows import store_rows
from gpu.fusion.fusion_arrays import computed_rows
from gpu.layers.decoder import Decoder, Target
from gpu.upload import upload
from transfer.allocation import allocate_empty
from transfer.chunks.chunk_format import ChunkKey

DenseAttend = Callable[[PrefillQuery], Attended]


class ChunkJob:
    """A prefill job of document chunks. token_ids: int32, of each chunk. keys: the keys under which they are stored."""

    def __init__(
        self, token_ids: list[np.ndarray], keys: list[ChunkKey], decoder: Decoder, documents: Documents,
        attend: DenseAttend,
    ) -> None:  # fmt: skip
        self._decoder, self._documents, self._attend_to = decoder, documents, attend
        self._keys = keys
        self._kept = [documents.layers_for(len(ids)) for ids in token_ids]
        self._refused: dict[int, str] = {}  # by number: why it cannot be kept
        self._begins = np.cumsum([0, *map(len, token_ids)]).tolist()
        device = decoder.pool.device
        packed = np.stack([np.concatenate(token_ids), np.concatenate([np.arange(len(ids)) for ids in token_ids])])
        ids, self._positions = upload(packed.astype(np.int64), device).unbind(0)
        self._cells = torch.arange(self.num_tokens, device=device)
        self._slots = torch.zeros(self.num_tokens, dtype=torch.int32, device=device)
        self._hidden = decoder.embed(ids)
        pool = decoder.pool
        keys = computed_rows(pool.num_kv_heads, pool.dim, self.num_tokens, self._hidden.dtype.itemsize)
        self._rows = [allocate_empty(keys, device) for _ in range(2)]
        table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        self._pages = self._rows[0][None], self._rows[1][None], table

    @property
    def num_tokens(self) -> int:
        return self._begins[-1]

    def compute(self, layer: int, begin: int, end: int) -> None:
        """Compute one layer over packed tokens `[begin, end)`, after all tokens before them in that layer."""
        own = slice(begin, end)
        parts = list(self._parts(begin, end))

        def attend(query: Tensor, pre_rope_query: Tensor) -> Attended:
            return joined(
                [
                    self._attend(layer, number, first, last, query[first - begin : last - begin])
                    for number, first, last in parts
                ]
            )

        def see(rows: Tensor) -> None:
            for number, first, last in parts:
                self._keep(layer, number, first, last, rows[first - begin : last - begin])

        self._hidden[own] = self._decoder.layer(
            layer, self._hidden[own], self._positions[own], self._slots[own], attend,
            Target(self._pages, self._cells[own], see),
        )  # fmt: skip

    def compute_all(self, chunk_tokens: int) -> None:
        """Compute all layers, `chunk_tokens` tokens at a time."""
        for layer in range(self._decoder.architecture.num_layers):
            for begin in range(0, self.num_tokens, chunk_tokens):
                self.compute(layer, begin, min(begin + chunk_tokens, self.num_tokens))

    def finish(self) -> None:
        """Give the chunks to the library after the last layer, or tell it why a chunk is refused."""
        for number, (key, layers) in enumerate(zip(self._keys, self._kept, strict=True)):
            if number in self._refused:
                self._documents.library.refuse(key, self._refused[number])
            else:
                self._documents.keep(key, layers)

    def finish_now(self) -> list[list[np.ndarray]]:
        """Give the chunks to the library and return the layers of each. Waits for the device. Raises ValueError for one
        that cannot be kept.
        """
        for reason in self._refused.values():
            raise ValueError(reason)
        return [self._documents.keep_now(key, layers) for key, layers in zip(self._keys, self._kept, strict=True)]

    def _parts(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """Return (chunk number, begin, end) of each chunk with packed tokens in `[begin, end)`."""
        bounds = enumerate(zip(self._begins, self._begins[1:], strict=False))
        parts = [(number, max(begin, first), min(end, last)) for number, (first, last) in bounds]
        return [part for part in parts if part[1] < part[2]]

    def _attend(self, layer: int, number: int, begin: int, end: int, query: Tensor) -> Attended:
        """Attend with packed tokens `[begin, end)` of a chunk to the chunk, causally."""
        chunk = self._begins[number]
        keys, values = (rows[:, chunk:end] for rows in self._rows)
        window = self._decoder.specs[layer].window_tokens
        if window is not None:
            return windowed_attention(query, keys, values, window, self._decoder.scale)
        positions, num_tokens = self._positions[begin:end], self._begins[number + 1] - chunk
        prefill_query = PrefillQuery(
            layer, query, query, keys, values, positions, begin - chunk, num_tokens, self._decoder.scale, None
        )
        return self._attend_to(prefill_query)

    def _keep(self, layer: int, number: int, begin: int, end: int, rows: Tensor) -> None:
        """Copy rows `[tokens, 2, kv_heads, dim]` to host memory in their stored format."""
        own = slice(begin - self._begins[number], end - self._begins[number])
        try:
            for part in range(2):
                stored = store_rows(rows[:, part], self._documents.shape)
                self._documents.copy_to_host(stored, self._kept[number][layer, part, own])
        except ValueError as error:  # int8 rows that are not finite
            self._refused[number] = str(error)
