"""Prefill a prompt that takes keys and values of document chunks from the library, layer by layer.

A3, section 2.2: position recovery (eq. 2) rotates keys to their positions in this prompt when a layer is loaded;
attention recovery (eq. 3 to 5) chooses tokens in one layer and computes them from there on. Layer l + 1 is copied to
the device while layer l computes. Invariants: before the first unit of a layer, the rows of all chunk tokens that are
not computed in it are in their places; a chunk that turns out to be lost is computed at once, so that no prompt fails
for lack of a chunk.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu.fusion.chunk_copies import Documents
from gpu.fusion.chunk_rows import read_rows
from gpu.fusion.fusion_arrays import staged_chunks
from gpu.fusion.fusion_plan import chooses_tokens, kept_spans
from gpu.fusion.token_choice import choose, draw_scores, floors, question_scores
from gpu.layers.decoder import Decoder, Pages
from gpu.step import PrefillPrompt
from gpu.upload import upload
from transfer.allocation import allocate_empty
from transfer.chunks.chunk_format import ChunkError
from transfer.chunks.chunk_library import ChunkSource
from transfer.copies import Event
from transfer.host_pages import Pages as HostPages

LAYERS_AHEAD = 4  # layers that are read from the disk before they are needed
PLACED_TOKENS = 4096  # tokens that are rotated at once
_NONE = np.empty(0, np.uint8)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Chunk:
    """A chunk of the prompt. Its rows are `[row, row + count)` of all chunks' rows. layers: of a lost chunk,
    computed.
    """

    number: int
    row: int
    count: int
    source: ChunkSource | None
    layers: Sequence[HostPages] | None = None


class FusedPrompt:
    """A prompt that is made of stored chunks. compute: returns the layers of a lost chunk, uint8 `[layer_bytes]` each;
    it waits for the device.
    """

    def __init__(
        self, prompt: PrefillPrompt, decoder: Decoder, documents: Documents, compute: Callable[[int], list[HostPages]]
    ) -> None:
        plan = prompt.fused
        assert plan is not None, "fusion: a prompt without chunks"
        self.plan, self.begin, self.num_tokens = plan, prompt.begin, len(prompt.token_ids)
        self._token_ids = prompt.token_ids
        self.chooses = chooses_tokens(plan.policy)
        self._decoder, self._documents, self._compute = decoder, documents, compute
        self._spans = kept_spans(plan.chunks, self.num_tokens)
        counts = [end - begin for begin, end in self._spans]
        rows = np.cumsum([0, *counts])
        self._chunks = [
            _Chunk(number, int(rows[number]), count, documents.library.open(chunk.key))
            for number, (chunk, count) in enumerate(zip(plan.chunks, counts, strict=True))
        ]
        self._num_rows = int(rows[-1])
        at = np.concatenate([np.arange(begin, end) for begin, end in self._spans])
        device = decoder.pool.device
        self._positions = upload(at, device)
        self._slots = torch.full((self._num_rows,), prompt.slot, dtype=torch.int32, device=device)
        self.is_narrow = False
        shape = documents.shape
        self._width = shape.num_kv_heads * shape.row_bytes
        self._first_layer = self._find_first_layer()
        self._reads: dict[int, list[tuple[_Chunk, Future[HostPages] | None]]] = {}
        self._copied: dict[int, Event] = {}
        num_read = self._num_rows if self._first_layer < shape.num_layers else 0
        self._buffers = allocate_empty(staged_chunks(shape, num_read), device)
        for layer in range(self._first_layer, self._first_layer + LAYERS_AHEAD):
            self._read(layer)

    @property
    def num_tail_tokens(self) -> int:
        """Return how many tokens follow the last chunk; they are computed in every layer."""
        return self.num_tokens - max(self.begin, self._spans[-1][1])

    # --- which tokens are computed ------------------------------------------------------------------------------------

    def choose_none(self) -> Tensor:
        """Return the tokens to compute under a policy that chooses none: int64, ascending, counted from `begin`."""
        return self._choose(torch.zeros(self.num_tokens, device=self._decoder.pool.device))

    def look(
        self, hidden: Tensor, positions: Tensor, slots: Tensor, pages: Pages | None, chunk_tokens: int,
        keys_of: Callable[[], Tensor],
    ) -> Tensor:  # fmt: skip
        """Choose the tokens to compute from this layer on, and return them as `choose_none` does. Keys and values of
        all tokens of this layer are computed and stay (eq. 4).

        hidden: the layer's input, `[tokens, hidden]`, of positions from `begin` on; keys_of: gathers the layer's keys
        `[kv_heads, context, dim]`.
        """
        layer = self.plan.select_layer
        for first in range(0, len(hidden), chunk_tokens):
            own = slice(first, first + chunk_tokens)
            self._decoder.enter(layer, hidden[own], positions[own], positions[own], slots[own], pages)
        if self.plan.policy == "random":
            return self._choose(upload(draw_scores(self._token_ids), hidden.device))
        asked = slice(self.plan.question_begin - self.begin, self.plan.question_end - self.begin)
        query, _ = self._decoder.enter(layer, hidden[asked], positions[asked], positions[asked], slots[asked], pages)
        scores = question_scores(query, keys_of(), self.plan.question_begin, self._decoder.scale)
        return self._choose(scores)

    def _choose(self, scores: Tensor) -> Tensor:
        """Choose by the scores of the prompt's tokens."""
        self.is_narrow = True
        least = upload(floors(self.num_tokens, self._spans, self.plan.seam_tokens)[self.begin :], scores.device)
        return choose(scores[self.begin :], least, self.plan.num_computed)

    # --- what is not --------------------------------------------------------------------------------------------------

    def is_loaded(self, layer: int) -> bool:
        """Return whether the layer could begin without waiting for the disk. False before its reads begin."""
        if layer < self._first_layer or layer >= self._documents.shape.num_layers or layer in self._copied:
            return True
        reads = self._reads.get(layer)
        return reads is not None and all(read is None or read.done() for _, read in reads)

    def begin_layer(self, layer: int, pages: Pages | None) -> None:
        """Copy rows of chunks to the device before the layer's first unit, and to their places in `pages` if the layer
        computes only some tokens.
        """
        if layer >= self._first_layer:
            self._copy(layer)
            self._documents.streams.wait_for(self._copied.pop(layer))
            if not (self.chooses and layer == self.plan.select_layer):  # that layer computes all tokens
                self._place(layer, pages)
        self._read(max(layer, self._first_layer) + LAYERS_AHEAD)
        if layer + 1 >= self._first_layer and self.is_loaded(layer + 1):
            self._copy(layer + 1)

    def close(self) -> None:
        """Release what it holds; nothing of it runs any more."""
        releases = [chunk.source.release for chunk in self._chunks if chunk.source is not None]
        self._documents.release([*releases, self._chunks.clear])  # layers of those that were lost stay so long, too

    def _find_first_layer(self) -> int:
        """Return the first layer that needs rows of chunks."""
        if self.plan.num_chosen == self._num_rows:
            return self._documents.shape.num_layers
        return self.plan.select_layer + 1 if self.chooses else 0

    def _read(self, layer: int) -> None:
        """Begin to read a layer of all chunks that are not lost."""
        if layer >= self._documents.shape.num_layers or layer in self._reads:
            return
        reads: list[tuple[_Chunk, Future[HostPages] | None]] = []
        for chunk in self._chunks:
            if chunk.source is None:
                chunk.layers = chunk.layers or self._compute(chunk.number)
            if chunk.layers is not None:
                reads.append((chunk, None))
                continue
            assert chunk.source is not None
            num_bytes = self._documents.shape.layer_bytes(chunk.source.key.num_tokens)
            out = _NONE if chunk.source.is_in_memory else np.empty(num_bytes, np.uint8)
            reads.append((chunk, chunk.source.layer(layer, out)))
        self._reads[layer] = reads

    def _copy(self, layer: int) -> None:
        """Start the copies of a layer to the device; waits for the disk."""
        if layer in self._copied or layer >= self._documents.shape.num_layers:
            return
        self._read(layer)
        streams, buffer = self._documents.streams, self._buffers[layer % 2]
        with streams.aside(streams.up):
            for chunk, read in self._reads.pop(layer):
                host = torch.from_numpy(self._layer_of(chunk, read, layer)).view(2, -1, self._width)
                for part in range(2):  # of both at once torch makes a copy on the device first
                    own = buffer[part, chunk.row : chunk.row + chunk.count]
                    own.copy_(host[part, : chunk.count], non_blocking=True)
            self._copied[layer] = streams.record()
        streams.keep((self._buffers,), streams.up)

    def _layer_of(self, chunk: _Chunk, read: Future[HostPages] | None, layer: int) -> HostPages:
        if chunk.layers is None:
            assert read is not None, "fusion: a layer that nobody reads"
            try:
                return read.result()
            except ChunkError as error:
                log.warning("chunk_lost layer=%d reason=%s", layer, error)
                chunk.layers = self._compute(chunk.number)
        return chunk.layers[layer]

    def _place(self, layer: int, pages: Pages | None) -> None:
        for begin in range(0, self._num_rows, PLACED_TOKENS):
            own = slice(begin, min(begin + PLACED_TOKENS, self._num_rows))
            rows = self._rows(layer, own.start, own.stop)
            self._decoder.place(layer, rows, self._positions[own], self._slots[own], pages)

    def _rows(self, layer: int, begin: int, end: int) -> Tensor:
        """Return rows of the layer on the device, `[rows, 2, kv_heads, dim]`."""
        shape, pool = self._documents.shape, self._decoder.pool
        rows = torch.empty((end - begin, 2, shape.num_kv_heads, shape.dim), dtype=pool.dtype, device=pool.device)
        for part in range(2):
            read_rows(self._buffers[layer % 2, part, begin:end], rows[:, part], shape)
        return rows
