"""Draft with the head that comes with a checkpoint (`gpu.model.draft_head_shape`), as the last layer of a decoder.

The head's row of a cell is computed from the token there and from the normed hidden state of the token in front. So all
that it reads of a context is known as soon as the context is, and a page depends only on its own tokens and those in
front. The first cell has no token in front: its row is computed from a hidden state of zeros, and is not attended to.
After a cached prefix, the hidden state in front of the first computed token is no longer known: its row is computed
from zeros as well, and is attended to. Normed hidden states are kept by slot and cell. Those of refused tokens are
overwritten when their rows are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu.attention.step_rows import StepRows
from gpu.layers.decoder import Carried, Decoder
from gpu.model.draft_head_shape import RECENT, head_arrays
from gpu.operations.rms_norm import rms_norm
from gpu.weights.matrix import as_matrix
from gpu.weights.weights import DraftWeights
from transfer.allocation import allocate_all

_TOKENS_AT_ONCE = 512  # tokens of a prompt that are computed at once


class DraftHead:
    """The draft head over a decoder's weights and pages.

    layer: its number. recent, guessed: normed hidden states of each slot's last cells, `[(slots + 1) * RECENT,
    hidden]`: those of the model, and the head's own for drafted tokens.
    """

    def __init__(self, decoder: Decoder, weights: DraftWeights) -> None:
        self.layer = decoder.architecture.main_layers
        self._decoder = decoder
        self._weights = weights
        self._mix = as_matrix(weights.mix)
        self._eps = decoder.architecture.rms_norm_eps
        self._slots = decoder.pool.max_slots
        arrays = head_arrays(decoder.architecture, self._slots, weights.mix.dtype.itemsize)
        made = allocate_all(arrays, decoder.pool.device)
        self.recent, self.guessed = (made[name].zero_() for name in ("recent", "guessed"))

    def join(self, token_ids: Tensor, before: Tensor) -> Tensor:
        """Return the head layer's input, `[tokens, hidden]`. before: normed hidden states of the tokens in front."""
        embedded = rms_norm(self._decoder.embed(token_ids), self._weights.embedding_norm, self._eps)
        return self._mix.linear(torch.cat([embedded, rms_norm(before, self._weights.hidden_norm, self._eps)], 1))

    def write(self, token_ids: Tensor, before: Tensor, positions: Tensor, cells: Tensor, slots: Tensor) -> None:
        """Write the head's rows of tokens whose hidden states in front are known."""
        carried = Carried(None, self.layer, {})
        self._decoder.enter(self.layer, self.join(token_ids, before), positions, cells, slots, None, carried=carried)

    def follow(self, rows: StepRows, token_ids: Tensor, normed: Tensor) -> None:
        """Store a step's normed hidden states, and write the head's rows of its tokens."""
        self.recent.index_copy_(0, self._places(rows, 0), normed)
        self.write(token_ids, self._before(rows), rows.positions, rows.positions, rows.slots)

    def fill(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, slots: Tensor, offsets: Sequence[int]) -> None:
        """Write the head's rows of prompts that have passed the last layer, and store their last hidden states.

        hidden: of all their computed tokens, packed. token_ids, positions: int64; positions are cells. slots: int32.
        offsets: where each prompt begins, and the end.
        """
        for begin in range(0, len(hidden), _TOKENS_AT_ONCE):
            end = min(begin + _TOKENS_AT_ONCE, len(hidden))
            before = hidden.new_zeros(end - begin, hidden.shape[1])
            first = max(begin, 1)
            before[first - begin :] = self._decoder.projections.final_norm(hidden[first - 1 : end - 1])
            for offset in offsets:
                if begin <= offset < end:
                    before[offset - begin] = 0
            chunk = slice(begin, end)
            self.write(token_ids[chunk], before, positions[chunk], positions[chunk], slots[chunk])
        for last in (offset - 1 for offset in offsets[1:]):
            place = slots[last : last + 1].long() * RECENT + positions[last : last + 1] % RECENT
            self.recent.index_copy_(0, place, self._decoder.projections.final_norm(hidden[last : last + 1]))

    def enter(self, rows: StepRows, token_ids: Tensor) -> tuple[Tensor, Tensor, Carried]:
        """Begin to draft after each row's token. Return the residual input, the query, and what is carried.

        A row that is `drafted` continues from the head's own hidden state, any other row from the model's.
        """
        own = self.guessed.index_select(0, self._places(rows, 1))
        joined = self.join(token_ids, torch.where(rows.drafted[:, None] > 0, own, self._before(rows)))
        carried = Carried(None, self.layer, {})
        query, _ = self._decoder.enter(
            self.layer, joined, rows.positions, rows.positions, rows.slots, None, carried=carried
        )
        return joined, query, carried

    def bounds(self, rows: StepRows, num_heads: int) -> Tensor:
        """Return bounds of attention to all cells except the first, int32 `[3, rows, heads]`."""
        first = rows.context_lens.clamp_max(1)
        return torch.stack([torch.zeros_like(first), first, first]).unsqueeze(-1).expand(3, rows.num_rows, num_heads)

    def end(self, rows: StepRows, hidden: Tensor) -> Tensor:
        """Store the norm of the layer's output, and return its logits, float32 `[rows, vocab]`."""
        normed = rms_norm(hidden, self._weights.norm, self._eps)
        self.guessed.index_copy_(0, self._places(rows, 0), normed)
        return self._decoder.projections.logits_of(normed)

    def _before(self, rows: StepRows) -> Tensor:
        return self.recent.index_select(0, self._places(rows, 1))

    def _places(self, rows: StepRows, back: int) -> Tensor:
        """Return the indices of the rows' hidden states, or of those `back` cells earlier.

        Padding rows have the last slot's.
        """
        slots = rows.slots.long().remainder(self._slots + 1)
        return slots * RECENT + (rows.positions - back).remainder(RECENT)
