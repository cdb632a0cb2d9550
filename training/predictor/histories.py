"""Capture block maxima of full attention over texts: histories of steps, each with the step that follows it.

AttentionPredictor, appendix B. A track is of a KV head, with the maximum over the query heads of its group, as the
network gets it in serving; or of a query head, as in the paper. Invariants: a target is the step right after its
history, over the blocks that were candidates then. Sink and recent blocks are in neither.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from evals.forward import ReferenceDecoder
from evals.methods.attention_method import PromptLayer
from evals.methods.key_attention import last_positions, prompt_weights
from gpu.predictor.history import block_maxima

Tracks = Literal["group", "head"]
"""The unit of a track: a KV head with its group of query heads, or a query head."""


@dataclass(frozen=True)
class Cut:
    """How histories are cut. block, sink, window: tokens. steps: rows. dense: layers from 0 on without prediction."""

    block: int
    sink: int
    window: int
    steps: int
    dense: int


@dataclass(frozen=True)
class Track:
    """One head over one text. maxima: `[steps + targets, blocks]` without the sink, for a group the maximum of its
    heads. mass: `[targets, blocks]`, each block's attention, for a group the mean of its heads, for the recovery rate.
    Both are on the decoder's device. widths: `[targets]`, number of candidates at each target, on the CPU.
    """

    maxima: Tensor
    widths: Tensor
    mass: Tensor


def capture(
    decoder: ReferenceDecoder, prompt: Sequence[int], cut: Cut, targets: int, of: Tracks, advance: Callable[[], None]
) -> list[Track]:
    """Return tracks of the layers that predict. The targets are the steps of the text's last `targets` queries.

    Raises ValueError for a text that leaves no candidates.
    """
    length = len(prompt)
    first_block = -(-cut.sink // cut.block)
    lengths_then = torch.arange(length - targets, length) + 1
    widths = (lengths_then - cut.window) // cut.block - first_block
    if length < cut.steps + targets or int(widths.min()) < 1:
        raise ValueError(
            f"predictor: a text of {length} tokens for {cut.steps} steps of history, {targets} targets, a sink of "
            f"{cut.sink} and a window of {cut.window}; give longer texts"
        )
    last = int(widths.max())
    tracks: list[Track] = []

    def look(layer: PromptLayer) -> None:
        if layer.layer >= cut.dense:
            weights = prompt_weights(layer, last_positions(layer, cut.steps + targets))[0]  # [heads, steps, tokens]
            columns = slice(first_block, first_block + last)
            maxima = block_maxima(weights, cut.block, 0.0)[..., columns]
            then = weights[:, cut.steps :]
            padded = torch.nn.functional.pad(then, (0, -length % cut.block))
            mass = padded.unflatten(-1, (-1, cut.block)).sum(-1)[..., columns]
            if of == "group":
                kv_heads = layer.keys.shape[1]
                maxima, mass = maxima.unflatten(0, (kv_heads, -1)).amax(1), mass.unflatten(0, (kv_heads, -1)).mean(1)
            tracks.extend(Track(one, widths, own) for one, own in zip(maxima, mass, strict=True))
        advance()

    tokens = torch.tensor([list(prompt)], device=decoder.device)
    decoder.prefill(tokens, torch.tensor([length], device=decoder.device), length, length, look)
    return tracks
