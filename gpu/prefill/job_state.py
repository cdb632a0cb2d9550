"""A prefill job on the device: its packed tokens, what is kept of them between units, and which prompt owns which.

Packed tokens stand in the prompts' order, and `offsets` say where each begins, also once a job is narrowed to some of
its tokens, or a prompt is cut out.
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
    """What a unit has of one prompt: tokens `[begin, end)` of the job, the last of the prompt's first `context`."""

    prompt: PrefillPrompt
    begin: int
    end: int
    context: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin

    @property
    def past(self) -> int:
        """Return the prompt's tokens in front of the part."""
        return self.context - self.num_tokens


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Tokens `[begin, end)` of a job, whose prompts are attended to together: the same in every layer."""

    begin: int
    end: int
    packing: Packing
    rows: Tensor


@dataclass(slots=True)
class JobState:
    """A job on the device: packed token ids, positions (int64) and slots (int32), all `[tokens]`; prompts' offsets."""

    job: PrefillJob
    offsets: list[int]
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    hidden: Tensor | None
    staged: StagedPrompt | None
    has_failed: bool
    scored: dict[int, list[Logprobs]]  # by slot: pieces so far, in order
    method_states: dict[int, object | None]  # by slot: what the prefill method keeps of the layer
    fused: FusedPrompt | None
    load: PrefixLoad | None = None
    packed: PackedTokens | None = None
    windowed: tuple[slice, WindowedUnit] | None = None  # of the last unit in a layer with a window, and its tokens
    kept: dict[int, Tensor] = field(default_factory=dict)  # of `Carried`, of all tokens of the job

    def put(self, chunk: slice, rows: Tensor) -> None:
        """Take a unit's new hidden states, `[tokens, hidden]`; those of all tokens, or in their place, are not
        copied.
        """
        assert self.hidden is not None, "prefill: a unit of a job whose tokens are not embedded"
        if rows.shape == self.hidden.shape and rows.dtype == self.hidden.dtype:
            self.hidden = rows
        elif rows.data_ptr() != self.hidden[chunk].data_ptr():
            self.hidden[chunk] = rows

    def num_of_tail(self, unit: PrefillUnit) -> int:
        """Return how many tokens at the unit's end stand behind all chunks."""
        assert self.fused is not None
        num_own = self.fused.num_tail_tokens - (self.offsets[-1] - unit.end)
        return min(unit.end - unit.begin, max(0, num_own))

    def narrow(self, ids: Tensor) -> None:
        """Compute from now on only these tokens: packed ids, ascending, int64, the last one among them."""
        self.token_ids, self.positions, self.slots = self.token_ids[ids], self.positions[ids], self.slots[ids]
        self.hidden = None if self.hidden is None else self.hidden[ids]
        self.kept = {layer: rows[ids] for layer, rows in self.kept.items()}
        self.offsets = [0, len(ids)]

    def cut(self, slot: int) -> None:
        """Take the slot's prompt out, one of several; hidden states of the others stay, in whichever layer they are."""
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
        """Keep a chunk's keys and values of a layer, if later layers have them, too."""
        if layer not in carried.kept:
            return
        rows = carried.kept[layer]
        if layer not in self.kept:
            self.kept[layer] = rows.new_empty(len(self.token_ids), rows.shape[1])
        self.kept[layer][chunk] = rows

    def parts(self, unit_begin: int, unit_end: int) -> list[PromptPart]:
        """Return the parts of a unit, prompt by prompt."""
        parts = []
        for prompt, prompt_begin, prompt_end in zip(self.job.prompts, self.offsets, self.offsets[1:], strict=False):
            begin, end = max(unit_begin, prompt_begin), min(unit_end, prompt_end)
            if begin < end:
                parts.append(PromptPart(prompt, begin, end, prompt.begin + end - prompt_begin))
        return parts


def pack_job(job: PrefillJob, device: torch.device) -> JobState:
    """Pack a job before its first unit; the caller prepares offloaded prompts and those with chunks."""
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
    """Return whether a unit is the job's last."""
    if isinstance(unit, LogitsUnit):
        return unit.end == job.num_scored_tokens
    is_last = unit.layer == num_layers - 1 and unit.end == job.num_tokens_in(unit.layer)
    return is_last and job.num_scored_tokens == 0
