"""The whole contract between the scheduler and the runner: plain dataclasses, no torch.

The scheduler names sequences by **slot**: an index below `max_running` that a sequence holds from admission until it is
finished or preempted. Per-slot state (page table, last token, sampler) lives on the device, so a plan carries only what
changed. All ranges are half-open, all positions 0-based.
"""

from dataclasses import dataclass, field

import numpy as np

from gpu.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Pages appended to a slot's page table: `page_ids` become its pages `first_page ..`."""

    slot: int
    first_page: int
    page_ids: list[int]


@dataclass(frozen=True, slots=True)
class PrefillPrompt:
    """One sequence of a prefill job: tokens `[begin, len(token_ids))` are computed, `[0, begin)` are in its pages.

    `token_ids` is int32 `[context]`: the prompt, and after a preemption the output so far as well (`num_prompt_tokens`
    tells them apart). `samples` is the number of output tokens drawn before: the next draw is number `samples`.
    """

    slot: int
    token_ids: np.ndarray
    begin: int
    num_prompt_tokens: int
    sampling: SamplingParams
    profile: str

    @property
    def num_computed_tokens(self) -> int:
        return len(self.token_ids) - self.begin

    @property
    def samples(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """Prompts that go through the layers together, packed one after another into one row of hidden states."""

    job_id: int
    prompts: list[PrefillPrompt]

    @property
    def num_tokens(self) -> int:
        return sum(prompt.num_computed_tokens for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class PrefillUnit:
    """One layer over packed tokens `[begin, end)` of a job. Units of a job come layer by layer, in token order.

    The unit that ends the last layer also samples each prompt's next token.
    """

    job_id: int
    layer: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of one attention profile that decode one token each.

    The input token of a slot is the one last sampled for it (on the device), at position `positions[i]`; its key and
    value are written there, so the context afterwards is `positions[i] + 1` tokens. `samples[i]` numbers the draw.
    """

    profile: str
    slots: list[int]
    positions: list[int]
    samples: list[int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step, carried out in field order."""

    released_slots: list[int] = field(default_factory=list)
    dropped_jobs: list[int] = field(default_factory=list)
    page_writes: list[PageWrite] = field(default_factory=list)
    new_jobs: list[PrefillJob] = field(default_factory=list)
    units: list[PrefillUnit] = field(default_factory=list)
    decode: list[DecodeGroup] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.released_slots or self.dropped_jobs or self.units or self.decode)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token, and the most likely alternatives `(token id, logprob)`, best first."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A drawn token. `token_id` -1: the logits of this slot were not finite, and nothing could be drawn."""

    slot: int
    token_id: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced. `prompt_logprobs[slot][i]` belongs to prompt token `i + 1`.

    `unit_seconds` (device time of all units) and `decode_seconds` feed the scheduler's cost model; 0.0 if none ran.
    """

    tokens: list[SampledToken]
    prompt_logprobs: dict[int, list[TokenLogprob]]
    unit_seconds: float
    decode_seconds: float
