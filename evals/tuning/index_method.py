"""Attend by an index of keys and values in few bits, in plain torch over full KV, as `gpu.methods.indexed` does.

The index has the whole blocks of tokens between sink and window. The budget's number of tokens, those with the most of
a KV head's softmax, are read exactly; all others are estimated. The engine finds these tokens by a histogram, and
takes up to 3.5 % fewer.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from evals.methods.attention_method import DecodeMethod, PromptLayer, Step, StepResult
from evals.methods.key_attention import score_keys, step_logits, valid_positions, weigh_values
from gpu.methods.indexed import BLOCK_TOKENS
from gpu.methods.indexed.codes import (
    decode_reference,
    encode_keys_reference,
    encode_values_reference,
    find_centre_reference,
    make_rotation,
)
from gpu.methods.indexed.settings import IndexedSettings

LEAST_TOKENS = 16
ROW_NUMBER_BYTES = 2  # of a number in full keys and values, which the index is compared with


@dataclass(slots=True)
class LayerIndex:
    """The index of a layer, decoded.

    keys, values: float32 `[requests, kv_heads, capacity, dim]`, for tokens from the sink up to `ends`, one end for each
    request. centre: of keys, `[requests, kv_heads, 1, dim]`.
    """

    keys: Tensor
    values: Tensor
    centre: Tensor
    rotation: Tensor
    ends: list[int]


class Index(DecodeMethod):
    """Attend by an index of keys and values in few bits."""

    name: ClassVar[str] = "indexed"
    paper: ClassVar[str] = ""
    key_bits: int = 4
    value_bits: int = 2
    budget_share: float = Field(IndexedSettings().budget_share, gt=0, le=1)
    sink: int = Field(4, ge=0)
    window: int = Field(64, ge=1)

    def served(self) -> IndexedSettings:
        """Return the settings of the served method, with the smallest `least_tokens`: short texts are tuned for long
        ones. Raises ValidationError for bits that it does not have.
        """
        given = {name: getattr(self, name) for name in ("key_bits", "value_bits", "budget_share")}
        return IndexedSettings.model_validate(given | {"least_tokens": LEAST_TOKENS})

    def begin(self, prompt: PromptLayer) -> LayerIndex:
        valid = valid_positions(prompt.lengths, prompt.capacity)[..., None]
        keys = prompt.keys.float().masked_fill(~valid, 0.0)
        centre = keys.sum(2, keepdim=True) / prompt.lengths[:, None, None, None]
        index = LayerIndex(
            torch.zeros_like(keys), torch.zeros_like(keys), centre, make_rotation(keys.shape[-1], keys.device),
            [self.sink] * len(prompt.lengths),
        )  # fmt: skip
        self._extend(index, prompt.keys, prompt.values, prompt.lengths)
        return index

    def step(self, step: Step, state: Any) -> StepResult:
        self._extend(state, step.keys, step.values, step.lengths)
        served, count = self.served(), step.longest
        ends = torch.tensor(state.ends, device=step.lengths.device)
        position = torch.arange(count, device=step.lengths.device)
        in_index = ((position >= self.sink) & (position < ends[:, None]))[:, None]  # [requests, 1, n]
        exact = step_logits(step)
        estimated = score_keys(step.query.float(), state.keys[:, :, :count]) * step.query.shape[-1] ** -0.5
        logits = torch.where(in_index, estimated, exact)
        shares = (logits - logits.logsumexp(-1, keepdim=True)).exp()
        scores = shares.unflatten(1, (-1, step.group)).sum(2).masked_fill(~in_index, -1.0)  # [requests, kv_heads, n]
        numbers = [end - self.sink for end in state.ends]
        budgets = torch.tensor([min(served.count_chosen(one), one) for one in numbers], device=ends.device)
        best = scores.topk(int(budgets.max()), dim=-1).indices
        is_within = torch.arange(best.shape[-1], device=best.device) < budgets[:, None, None]
        is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, is_within.expand_as(best))
        is_rest = (in_index & ~is_chosen).repeat_interleave(step.group, 1)
        logits = torch.where(is_rest, estimated, exact)
        lse = logits.logsumexp(-1)
        weights = (logits - lse[..., None]).exp()
        valid = valid_positions(step.lengths, count)
        out = weigh_values(weights.masked_fill(is_rest, 0.0), step.values, valid)
        out += weigh_values(weights.masked_fill(~is_rest, 0.0), state.values[:, :, :count], valid)
        dim, offloaded = step.query.shape[-1], torch.tensor(numbers, device=ends.device)
        read = (step.lengths - offloaded + budgets).float()[:, None]
        rows_of_index = offloaded.float()[:, None] * index_bytes(served, dim) / (2 * dim * ROW_NUMBER_BYTES)
        heads, kv_heads = step.query.shape[1], step.keys.shape[1]
        return StepResult(out, lse, read.expand(-1, heads), (read + rows_of_index).expand(-1, kv_heads))

    def _extend(self, index: LayerIndex, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
        """Index the whole blocks that have left the windows of requests."""
        for row, length in enumerate(lengths.tolist()):
            begin = index.ends[row]
            blocks = max(0, length - self.window - begin) // BLOCK_TOKENS
            if not blocks:
                continue
            own = slice(begin, begin + blocks * BLOCK_TOKENS)
            rotated = (keys[row, :, own].float() - index.centre[row]) @ index.rotation
            rounded = decode_reference(*encode_keys_reference(rotated, self.key_bits), self.key_bits)
            index.keys[row, :, own] = rounded @ index.rotation.T + index.centre[row]
            rotated = (values[row, :, own].float() @ index.rotation).unflatten(1, (blocks, BLOCK_TOKENS))
            centres = find_centre_reference(rotated).float()[..., None, :]
            codes = encode_values_reference(rotated - centres, self.value_bits)
            rounded = (decode_reference(*codes, self.value_bits) + centres).flatten(1, 2)
            index.values[row, :, own] = rounded @ index.rotation.T
            index.ends[row] = own.stop


def index_bytes(settings: IndexedSettings, dim: int) -> float:
    """Return the index's bytes of a token and KV head, with its part of the centre of a block's values."""
    return settings.token_bytes(dim) + 2 * dim / BLOCK_TOKENS
