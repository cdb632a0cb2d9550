"""AttentionPredictor: attend to the blocks that a small network expects to matter, from the attention of past steps.

Paper: section 4.2 and Algorithm 1. Sink and recent tokens are always read. Of the blocks between them the best are read
that the budget has room for; they are chosen before the step's query is known. The other blocks are dropped, as in the
paper, or sampled (`rest=sampled`, MagicPIG) by hash tables, without the keys that were read. Invariant: the history has
the exact attention of blocks that were read, and for other blocks 0 or the last known value. It has all blocks only at
the prompt's end and in steps that calibrate. Samples never enter it.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field

from evals.methods.attention_method import BudgetSetting, DecodeMethod, MethodError, PromptLayer, Step, StepResult
from evals.methods.blocks import num_blocks
from evals.methods.budget import Budget
from evals.methods.key_attention import (
    attend_chosen,
    choose_best,
    last_positions,
    prompt_weights,
    read_together,
    rows_apart,
    step_logits,
)
from gpu.predictor.history import STORED, History, attended_maxima, block_maxima, new_history, restore
from gpu.predictor.network import load_network
from gpu.predictor.predict import PackedNetwork, pack, predict_blocks
from lab.methods.sampled import Offloaded, Sampled, merge

SPARE_ROWS = 1  # of a history: scores are always computed in full here, so no more are needed


@dataclass(slots=True)
class Seen:
    """The state of a decode.

    history: of one layer, requests * heads. step: decode steps so far. network: packed for the device. offloads: the
    sampled rest, or None. chosen: blocks behind the sink that the last step read, int64 `[requests, heads, most]`, -1:
    none. scores: of the last prediction, `[requests, heads, blocks]`.
    """

    history: History
    step: int
    network: PackedNetwork
    offloads: Offloaded | None
    chosen: torch.Tensor | None = None
    scores: torch.Tensor | None = None


class Predicted(DecodeMethod):
    """The reference of predicted blocks.

    group: a KV head's score is the maximum over its query heads, after the network or before it; or each query head
    reads for itself (apart). every: steps between two predictions; their blocks stay meanwhile. calibrate: every so
    many steps the history gets the attention of all blocks. rotate: in each step one block in so many is calibrated, in
    turn; 0: none. unread: what the history gets for blocks that were not read: zero or the last value. rest=sampled:
    what is not read is sampled by each head, and these reads come on top of the budget.
    """

    name: ClassVar[str] = "predicted"
    paper: ClassVar[str] = "AttentionPredictor"
    budget: BudgetSetting = Budget(0.05, None)
    weights: str = Field("", description="predictor: .safetensors, or the authors' .pth")
    block: int = Field(16, ge=1)
    history: int = Field(64, ge=5, description="steps (the paper's H)")
    every: int = Field(1, ge=1)
    calibrate: int = Field(5, ge=1, description="steps (the paper's M); 1: always")
    rotate: int = Field(0, ge=0)
    unread: Literal["zero", "last"] = "zero"
    sink: int = Field(64, ge=0)
    window: int = Field(64, ge=1)
    group: Literal["after", "before", "apart"] = "before"
    stored: Literal["float32", "bfloat16", "uint8"] = "uint8"
    rest: Literal["dropped", "sampled"] = "dropped"
    bits_per_table: int = Field(10, description="of hash tables, where the rest is sampled")
    num_tables: int = Field(150, description="likewise")
    seed: int = Field(0, description="of their projections")
    dense_layers: str = Field("0-1", description="layers read in full; the paper keeps the first two")

    @property
    def sampled(self) -> Sampled:
        """Return the method that samples the rest."""
        return Sampled(
            bits_per_table=self.bits_per_table, num_tables=self.num_tables, sink=self.sink, window=self.window,
            seed=self.seed,
        )  # fmt: skip

    def begin(self, prompt: PromptLayer) -> Seen:
        def maxima() -> torch.Tensor:
            weights = prompt_weights(prompt, last_positions(prompt, self.history))
            return block_maxima(weights, self.block, 0.0).flatten(0, 1)  # [requests * heads, steps, blocks]

        rows = prompt.once(("block_maxima", self.history, self.block), maxima)
        device, blocks = rows.device, num_blocks(prompt.capacity, self.block)
        history = new_history(1, rows.shape[0], self.history, SPARE_ROWS, blocks, STORED[self.stored], device)
        for row in rows.unbind(1):
            history.advance()
            history.put(0, row)
        offloads = self.sampled.begin(prompt) if self.rest == "sampled" else None
        return Seen(history, 0, read_network(self.weights, device), offloads)

    def step(self, step: Step, state: Seen) -> StepResult:
        sink_blocks = num_blocks(self.sink, self.block)
        cut = ((step.lengths - self.window) // self.block).clamp(min=sink_blocks)  # the first block of the recent ones
        local = (step.lengths - cut * self.block).clamp(min=0)
        counts = (self.budget.of(step.lengths) - sink_blocks * self.block - local) // self.block
        most = num_blocks(self.budget.most(step.longest), self.block)
        scores = self._score(step, state, sink_blocks, cut - sink_blocks)
        state.scores = scores
        blocks, chosen = choose_best(scores, counts.clamp(min=0), max(most, 1))
        state.chosen = blocks.masked_fill(~chosen, -1)
        index, chosen = self._spread(step, blocks + sink_blocks, chosen, sink_blocks, cut)
        result = attend_chosen(step, index, chosen)
        self._note(step, state, result.lse, index, chosen)
        if self.group != "apart":
            result = read_together(result, step.group)
        if state.offloads is None:
            return result
        read = torch.zeros(*step.query.shape[:2], step.longest + 1, device=index.device)  # one more for unused entries
        read.scatter_(2, index.masked_fill(~chosen, step.longest), 1.0)
        rest = self.sampled.attend_offloaded(step, state.offloads, read[..., : step.longest] > 0)
        out, lse = merge(result.out, result.lse, rest.out, rest.lse)
        rows = result.rows_read + rows_apart(rest.rows_read, step.keys.shape[1])
        return StepResult(out, lse, result.keys_scored + rest.keys_scored, rows)

    def _score(self, step: Step, state: Seen, sink_blocks: int, widths: torch.Tensor) -> torch.Tensor:
        """Return scores `[requests, heads, blocks]` of the blocks behind the sink, -inf beyond `widths [requests]`."""
        requests, heads = step.query.shape[:2]
        end = max(num_blocks(step.longest, self.block), sink_blocks + 1)
        if state.scores is not None and state.step % self.every:
            grown = end - sink_blocks - state.scores.shape[2]
            return torch.nn.functional.pad(state.scores, (0, grown), value=-torch.inf)
        ring = state.history.ring[0, :, :, sink_blocks:end]
        if self.group == "before":
            ring = ring.unflatten(0, (-1, step.group)).amax(1)
        rows = ring.shape[0]
        oldest = torch.full((rows,), state.history.oldest, dtype=torch.int32, device=ring.device)
        each = widths.int().repeat_interleave(rows // requests)
        stale = torch.zeros_like(oldest)
        scores = torch.empty(rows, ring.shape[2], device=ring.device)
        predict_blocks(ring, oldest, each, stale, scores, state.network, SPARE_ROWS)
        scores = scores.view(requests, rows // requests, -1)
        if self.group == "after":
            scores = scores.unflatten(1, (-1, step.group)).amax(2)
        return scores.repeat_interleave(heads // scores.shape[1], 1)

    def _spread(
        self, step: Step, blocks: torch.Tensor, chosen: torch.Tensor, sink_blocks: int, cut: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions `[requests, heads, m]` of sink, chosen blocks and recent tokens, and which are read."""
        requests, heads = step.query.shape[:2]
        device, end = blocks.device, step.lengths[:, None]
        sink = torch.arange(sink_blocks * self.block, device=device).expand(requests, -1)
        recent = cut[:, None] * self.block + torch.arange(self.window + self.block, device=device)
        ends = torch.cat([sink, recent], 1)
        middle = (blocks[..., None] * self.block + torch.arange(self.block, device=device)).flatten(2)
        index = torch.cat([ends[:, None].expand(-1, heads, -1), middle], 2)
        reads = torch.cat([(ends < end)[:, None].expand(-1, heads, -1), chosen.repeat_interleave(self.block, 2)], 2)
        return index, reads

    def _note(self, step: Step, state: Seen, lse: torch.Tensor, index: torch.Tensor, chosen: torch.Tensor) -> None:
        """Add the step to the history: the blocks that were read, or all blocks in a step that calibrates."""
        state.step += 1
        logits = step_logits(step)
        maxima = block_maxima(logits, self.block, -torch.inf)  # [requests, heads, blocks]
        if state.step % self.calibrate:
            is_read = torch.zeros_like(maxima, dtype=torch.bool)
            place = (index // self.block).clamp(max=maxima.shape[2] - 1)
            is_read = is_read.float().scatter_add_(2, place, chosen.float()) > 0
            if self.rotate:
                turn = torch.arange(maxima.shape[2], device=maxima.device) % self.rotate
                is_read |= turn == state.step % self.rotate
            maxima = maxima.masked_fill(~is_read, -torch.inf)
        else:
            lse = logits.logsumexp(-1)
        attended = attended_maxima(maxima, lse).clamp(max=1).flatten(0, 1)
        if self.unread == "last":
            last = restore(state.history.ring[0, :, state.history.newest, : maxima.shape[2]], torch.float32)
            attended = torch.where(maxima.flatten(0, 1) > -torch.inf, attended, last)
        state.history.advance()
        state.history.put(0, attended)


@cache
def read_network(weights: str, device: torch.device) -> PackedNetwork:
    """Load a network from a file and pack it: bf16 on a GPU, float32 elsewhere. Raises MethodError without a file."""
    if not weights:
        raise MethodError("method predicted: no weights; give weights=FILE, made by `tandem train predictor`")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return pack(load_network(Path(weights)), dtype, device)
