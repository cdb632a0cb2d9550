"""Hold the histories and the fetched blocks of one part of a profile, and the addresses of its other blocks.

A **place** is a KV head of a ring: ring * kv_heads + kv_head. Blocks have BLOCK_TOKENS tokens, and are counted from the
first token of the offloaded run. Invariants: a slot of a place holds the restored keys and values of the block that
`ids` names, no block is in two slots, and `bits` are those of `ids`.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from gpu.methods.predicted import ring_arrays
from gpu.methods.predicted.settings import PredictedSettings
from gpu.model.architecture import Architecture
from gpu.operations.kv.kv_rows import width_of
from transfer.allocation import allocate_all
from transfer.tier_shape import BLOCK_TOKENS

EMPTY = -1


@dataclass(frozen=True, slots=True)
class Blocks:
    """The fetched blocks of one layer, in slots, or of all layers, with one axis in front.

    history: uint8 `[places, rows, blocks]` (`gpu.predictor.history`); cell m has row m % rows.
    scores: float32 `[places, blocks]`, of the last prediction.
    ids: int32 `[places, slots]`, the block in each slot, or EMPTY.
    bits: int32 `[places, words]`, one bit for each block in a slot.
    keys, values: `[places * slots, 1, BLOCK_TOKENS, dim]`, stored as in pages.
    lies: int64 `[rings, COLUMNS, pieces]`, `transfer.places` of each ring's run; unused pieces at the end are empty.
    """

    history: Tensor
    scores: Tensor
    ids: Tensor
    bits: Tensor
    keys: Tensor
    values: Tensor
    lies: Tensor

    def layer(self, place: int) -> "Blocks":
        return Blocks(*(getattr(self, each.name)[place] for each in fields(Blocks)))


def new_blocks(
    settings: PredictedSettings, shape: Architecture, layers: int, rings: int, stored: torch.dtype, device: torch.device
) -> Blocks:
    """Return the arrays for so many layers and rings, with no block in a slot."""
    rows = (layers, rings * shape.num_kv_heads * settings.num_slots, 1, BLOCK_TOKENS, width_of(stored, shape.dim))
    blocks = Blocks(
        **allocate_all(ring_arrays(settings, shape, layers, rings), device),
        keys=torch.zeros(rows, dtype=stored, device=device),
        values=torch.zeros(rows, dtype=stored, device=device),
    )
    blocks.scores.fill_(-torch.inf)
    blocks.ids.fill_(EMPTY)
    return blocks
