"""Hold a prefill job on the device: its packed tokens, what is kept between units, and which prompt owns which token.

Packed tokens are in the order of the prompts, and `offsets` say where each prompt begins. That holds also after a job
is narrowed to some of its tokens, or a prompt is cut out.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from gpu.attention.prefill_attention import Packing
from gpu.disk.prefix_load import PrefixLoad
from gpu.fusion.fused_prompt import FusedPrompt
from gpu.host.staging import StagedPrompt
from gpu.layers.decoder import Carried
from gpu.prefill.window_attention import WindowedUnit
from gpu.sampling.logprobs import Logprobs
from gpu.step import LogitsUnit, PrefillJob, PrefillPrompt, PrefillUnit, Unit
from gpu.upload import upload


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A unit's part of one prompt: tokens `[begin, end)` of the job, which end the prompt's first `context` tokens."""

    prompt: PrefillPrompt
    begin: int
    end: int
    context: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin

    @property
    def past(self) -> int:
        """Return the number of the prompt's tokens in front of the part."""
        return self.context - self.num_tokens


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The packing of a job's tokens `[begin, end)`, whose prompts are attended to in one launch; the same in every
    layer.
    """

    begin: int
    end: int
    packing: Packing
    rows: Tensor
    num_queries: int


@dataclass(slots=True)
class JobState:
    """A job on the device: token ids and positions (int64) and slots (int32), all `[tokens]`; offsets of
    its prompts.
    """

    job: PrefillJob
    offsets: list[int]
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    hidden: Tensor | None
    staged: StagedPrompt | None
    has_failed: bool
    scored: dict[int, list[Logprobs]]  # by slot: the logprobs computed so far, in order
    method_states: dict[int, object | None]  # by slot: the prefill method's state in the current layer
    fused: FusedPrompt | None
    load: PrefixLoad | None = None
    packed: PackedTokens | None = None
    windowed: tuple[slice, WindowedUnit] | None = None  # of the last unit in a layer with a window, and its tokens
    kept: dict[int, Tensor] = field(default_factory=dict)  # as `Carried.kept`, for all tokens of the job

    def put(self, chunk: slice, rows: Tensor) -> None:
        """Store a unit's new hidden states, `[tokens, hidden]`.

        Copies nothing if they are all of the job's, or already in place.
        """
        assert self.hidden is not None, "prefill: the job's tokens are embedded"
        if rows.shape == self.hidden.shape and rows.dtype == self.hidden.dtype:
            self.hidden = rows
        elif rows.data_ptr() != self.hidden[chunk].data_ptr():
            self.hidden[chunk] = rows

    def put_rows(self, rows: Tensor, hidden: Tensor) -> None:
        """Store the new hidden states `[rows, hidden]` of single tokens. rows: their packed indices, int64."""
        assert self.hidden is not None, "prefill: the job's tokens are embedded"
        self.hidden.index_copy_(0, rows, hidden)

    def num_of_tail(self, unit: PrefillUnit) -> int:
        """Return how many tokens at the unit's end come after all document chunks."""
        assert self.fused is not None
        num_own = self.fused.num_tail_tokens - (self.offsets[-1] - unit.end)
        return min(unit.end - unit.begin, max(0, num_own))

    def narrow(self, ids: Tensor) -> None:
        """Go on with these tokens only. ids: packed indices, int64, ascending, the last token among them."""
        self.token_ids, self.positions, self.slots = self.token_ids[ids], self.positions[ids], self.slots[ids]
        self.hidden = None if self.hidden is None else self.hidden[ids]
        self.kept = {layer: rows[ids] for layer, rows in self.kept.items()}
        self.offsets = [0, len(ids)]

    def cut(self, slot: int) -> None:
        """Remove the slot's prompt, one of several.

        The others keep their hidden states, in whichever layer they are.
        """
        prompts = self.job.prompts
        index = next(index for index, prompt in enumerate(prompts) if prompt.slot == slot)
        begin, end = self.offsets[index : index + 2]
        self.token_ids, self.positions, self.slots = (
            _without(tensor, begin, end) for tensor in (self.token_ids, self.positions, self.slots)
        )
        self.hidden = None if self.hidden is None else _without(self.hidden, begin, end)
        self.kept = {layer: _without(rows, begin, end) for layer, rows in self.kept.items()}
        self.offsets = [*self.offsets[: index + 1], *(offset - (end - begin) for offset in self.offsets[index + 2 :])]
        self.job = replace(self.job, prompts=[*prompts[:index], *prompts[index + 1 :]])
        self.scored.pop(slot, None)
        self.method_states.pop(slot, None)
        self.packed = self.windowed = None

    def keep(self, layer: int, chunk: slice, carried: Carried) -> None:
        """Store the layer's keys and values of a chunk if later layers share them."""
        if layer not in carried.kept:
            return
        rows = carried.kept[layer]
        if layer not in self.kept:
            self.kept[layer] = rows.new_empty(len(self.token_ids), rows.shape[1])
        self.kept[layer][chunk] = rows

    @property
    def is_read_at_ends(self) -> bool:
        """Return whether the job's results need only the final hidden state of each prompt's last token."""
        pools_all = any(prompt.pooling is not None and prompt.pooling.reads_all for prompt in self.job.prompts)
        return self.fused is None and self.job.num_scored_tokens == 0 and not pools_all

    def ends(self, unit_begin: int, unit_end: int) -> list[PromptPart]:
        """Return the last token of each prompt that ends in a unit, as a part of one token."""
        last = [part for part in self.parts(unit_begin, unit_end) if part.context == len(part.prompt.token_ids)]
        return [replace(part, begin=part.end - 1) for part in last]

    def parts(self, unit_begin: int, unit_end: int) -> list[PromptPart]:
        """Return the parts of a unit, prompt by prompt."""
        parts = []
        for prompt, prompt_begin, prompt_end in zip(self.job.prompts, self.offsets, self.offsets[1:], strict=False):
            begin, end = max(unit_begin, prompt_begin), min(unit_end, prompt_end)
            if begin < end:
                parts.append(PromptPart(prompt, begin, end, prompt.begin + end - prompt_begin))
        return parts


def pack_job(job: PrefillJob, device: torch.device) -> JobState:
    """Pack a job before its first unit. The caller prepares offloaded prompts and those with document chunks."""
    offsets = [0]
    for prompt in job.prompts:
        offsets.append(offsets[-1] + prompt.num_computed_tokens)
    packed = np.empty((3, offsets[-1]), dtype=np.int64)
    for prompt, begin, end in zip(job.prompts, offsets, offsets[1:], strict=False):
        packed[0, begin:end] = prompt.token_ids[prompt.begin :]
        packed[1, begin:end] = np.arange(prompt.begin, len(prompt.token_ids))
        packed[2, begin:end] = prompt.slot
    token_ids, positions, slots = upload(packed, device).unbind(0)
    scored: dict[int, list[Logprobs]] = {prompt.slot: [] for prompt in job.prompts if prompt.is_scored}
    return JobState(job, offsets, token_ids, positions, slots.to(torch.int32), None, None, False, scored, {}, None)


def _without(tensor: Tensor, begin: int, end: int) -> Tensor:
    return torch.cat([tensor[:begin], tensor[end:]])


def ends_with(job: PrefillJob, unit: Unit, num_layers: int) -> bool:
    """Return whether the unit is the job's last."""
    if isinstance(unit, LogitsUnit):
        return unit.end == job.num_scored_tokens
    is_last = unit.layer == num_layers - 1 and unit.end == job.num_tokens_in(unit.layer)
    return is_last and job.num_scored_tokens == 0
