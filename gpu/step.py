"""Define the contract between the scheduler and the runner: plain dataclasses, without torch.

The scheduler names sequences by **slot**: an index below `max_running` that a sequence holds from admission until it is
finished or preempted. Per-slot state (page table, last token, sampler) lives on the device, so a plan carries only what
changed. All ranges are half-open, all positions 0-based.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from gpu.pooling import Pooling
from gpu.sampling_params import SamplingParams
from transfer.chunks.chunk_format import ChunkKey
from transfer.reading import Reading

NOT_FINITE = -1
NOTHING_LEFT = -2

TO_DRAFT = -4
"""In a draft, in place of a token that the device drafts itself, by the slot's ring (`RingWrite.is_for_drafts`)."""


Setting = bool | int | float | str


@dataclass(frozen=True, slots=True)
class PartId:
    """Identity of a part of a profile: the slot, the method that fills it, and the method's settings by name.

    Profiles with equal parts share their rings, prefill sides and learnt times. The values of settings are those that
    were given; a nested setting's name has dots. A PartId can be written to JSON and read back.
    """

    slot: str
    method: str
    settings: tuple[tuple[str, Setting | tuple[Setting, ...]], ...] = ()

    def __str__(self) -> str:
        given = ", ".join(f"{key} {value}" for key, value in self.settings)
        return f"{self.slot}: {self.method}" + (f" ({given})" if given else "")


DENSE = PartId("prefill", "dense")
"""The prefill method of profiles that name none: each query attends to its whole past, exactly."""

FUSED = PartId("prefill", "fused")
"""The prefill method of units that skip most of the prompt: dense attention of queries at any positions."""

NO_SLOT = -1
"""The slot of a document chunk that is computed alone: it has no sequence, takes no pages and draws no token."""


class Frozen:
    """Base of plans and their parts: turns lists that a field is given into tuples, also nested ones."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:  # type: ignore[attr-defined]
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, _freeze(value))


def _freeze(values: list[Any]) -> tuple[Any, ...]:
    return tuple(_freeze(value) if isinstance(value, list) else value for value in values)


class Lane(Enum):
    """One of two streams of steps. Steps of one lane run in launch order; steps of different lanes run side by side.

    HOST: rows that wait for the host's answers. DEVICE: prefill units, and rows that need the device alone. A plan is
    in one lane as a whole; if there is only one lane, it is DEVICE. All steps with a host read share one set of
    buffers, whatever their lane, and all other steps share another. When steps of one kind change lanes, either the
    first step in the new lane is fenced, or the last one in the old lane has ended.
    """

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class PageWrite(Frozen):
    """Pages appended to a slot's page table: `page_ids` become its entries from `first_page` on."""

    slot: int
    first_page: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostPrompt:
    """The part of a prompt that goes to host memory: a context there holds tokens `[sink, end)` once prefill ends.

    sink: first tokens that stay on the device, in whole pages. end: the end of the offloaded run, on a page border; the
    window lies between `end` and the prompt's end. Tokens `[evicted, end)` of the run stay in device pages as well.
    Tokens `[sink, prompt.begin)` are offloaded already (`prompt.begin` is 0 or a page border above the sink), and are
    shared with the context `source_id` if that is not None.
    """

    context_id: int
    source_id: int | None
    sink: int
    evicted: int
    end: int
    reading: Reading


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """The place of a stored document chunk in a prompt: tokens `[begin, end)` are the chunk `key`. Its keys and values
    were computed without the rest of the prompt, and are stored before rotation.
    """

    begin: int
    end: int
    key: ChunkKey


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """How a prompt with document chunks is computed (`gpu.fusion.fusion_plan`).

    Layers below `select_layer` compute all of its tokens. From there on the layers compute the tokens in no chunk, the
    last token, and `num_chosen` others, which the policy chooses on the device.

    chunks: ascending, disjoint, behind the prompt's `begin`.
    select_layer: 0 for a policy that needs no layer's output to choose.
    seam_tokens: the first tokens of each chunk, chosen before all others.
    question_begin, question_end: the tokens whose attention weighs the others.
    num_computed: tokens computed from `select_layer` on.
    """

    policy: str
    chunks: tuple[PlacedChunk, ...]
    select_layer: int
    seam_tokens: int
    num_chosen: int
    num_computed: int
    question_begin: int
    question_end: int


@dataclass(frozen=True, slots=True)
class RingCopy:
    """What a new ring copies from ring number `ring`: the entries of cells before `begin`.

    Places that cells `[begin, end)` map to are left out: the other sequence has overwritten them, or the new one's
    prompt will.
    """

    ring: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class RingWrite:
    """Assigns ring number `ring` of `part` (`ProfilePart`) to a slot, and to no other, until the slot is released.

    reading: how the slot's context in host memory is read.
    source: the ring that this one begins as a copy of; None: it begins empty.
    pages: its first pages, from those that the part's rings share; None: the part's rings have no shared pages.
    num_shared: how many of `pages` the source holds as well, with the same tokens.
    is_for_drafts: whether only steps that draft for the slot use it; steps that verify do not.
    epsilon: the largest error that the slot's request allows; None: the one in the part's settings.
    """

    slot: int
    part: PartId
    ring: int
    reading: Reading
    source: RingCopy | None = None
    pages: tuple[int, ...] | None = None
    num_shared: int = 0
    is_for_drafts: bool = False
    epsilon: float | None = None


@dataclass(frozen=True, slots=True)
class RingGrowth:
    """Further pages for a ring that a slot holds, from those that its part's rings share."""

    part: PartId
    ring: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WindowWrite:
    """Sets the content and the holder of window, or state, number `window` (`gpu.kv.windows`, `gpu.kv.states`).

    source: the window whose content is copied; None: the content does not matter.
    slot: the slot that alone holds it until the slot is released; None: it is kept for prompts with the same prefix.
    """

    window: int
    source: int | None
    slot: int | None


@dataclass(frozen=True, slots=True)
class StateMove:
    """A copy of state number `state`, which no sequence writes, to `place` in host memory, or back where `is_up`."""

    state: int
    place: int
    is_up: bool

    @property
    def source(self) -> int:
        return self.place


@dataclass(frozen=True, slots=True)
class WindowBranch:
    """A snapshot of a prompt's window: window number `window`, which no slot holds, gets what the prompt's window has
    after its first `end` tokens. A window write has filled in what precedes the prompt's first computed token.
    """

    window: int
    end: int


@dataclass(frozen=True, slots=True)
class DiskPrefix(Frozen):
    """A prefix of a prompt that is loaded from disk: tokens `[begin, end)`, whole pages, into `page_ids`. Tokens before
    `begin` are in pages already.

    names: the block records with these tokens, in order, from the prompt's block number `first_block` on.
    end_name: the record of the prefix's end (`gpu.disk.record_shapes`), for a model with layers without pages. It has
        the pages behind the last whole block, and the content of window or state number `window`. "": there is none.
    """

    names: tuple[str, ...]
    first_block: int
    begin: int
    end: int
    page_ids: tuple[int, ...]
    end_name: str = ""
    window: int = 0


@dataclass(frozen=True, slots=True)
class EvictedPart:
    """The evicted part of a block: tokens `[begin, end)` of the run of `context_id`, from the block's page `first_page`
    on. Dense layers have pages of it; the other layers' rows are in host memory.
    """

    context_id: int
    begin: int
    end: int
    first_page: int


@dataclass(frozen=True, slots=True)
class SavedBlock(Frozen):
    """A record to write to disk: pages whose content no longer changes are copied out under `name`.

    evicted: the part of which the device has dense pages alone, or None.
    window: None for a block. Otherwise the record is the end of a prefix: pages of less than a block, and the content
        of this window or state.
    """

    name: str
    page_ids: tuple[int, ...]
    evicted: EvictedPart | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillPrompt:
    """One sequence of a prefill job: tokens `[begin, len(token_ids))` are computed, `[0, begin)` are in its pages.

    `token_ids` is int32 `[context]`: the prompt, followed after a preemption by the output so far
    (`num_prompt_tokens` is the border). `samples` output tokens were drawn before: the next draw is number `samples`.

    host: what of it is offloaded, or None. For `[sink, evicted)` its page table has pages of dense layers alone.
    pooling: what is returned of it beside the draw, or None.
    fused: how it uses document chunks, or None; such a prompt is alone in its job.
    capture: the key under which its keys and values are stored: it is a document chunk, in NO_SLOT, as are all prompts
        of its job. None: it is not.
    branches: snapshots that it leaves: one window at most, or states.
    disk: the prefix, up to `begin`, that is loaded from disk; such a prompt is alone in its job.
    adapter: its number among the runner's adapters; 0: none.
    """

    slot: int
    token_ids: np.ndarray
    begin: int
    num_prompt_tokens: int
    sampling: SamplingParams
    profile: str
    host: HostPrompt | None = None
    fused: FusionPlan | None = None
    capture: ChunkKey | None = None
    pooling: Pooling | None = None
    branches: tuple[WindowBranch, ...] = ()
    disk: DiskPrefix | None = None
    adapter: int = 0

    @property
    def num_computed_tokens(self) -> int:
        return len(self.token_ids) - self.begin

    @property
    def samples(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_scored(self) -> bool:
        """Return whether this prefill reports prompt logprobs; a resumed one did so the first time."""
        return self.sampling.num_prompt_logprobs is not None and self.samples == 0

    @property
    def num_scored_tokens(self) -> int:
        """Return how many of prompt tokens `[1, num_prompt_tokens)` are scored."""
        return self.num_prompt_tokens - 1 if self.is_scored else 0


@dataclass(frozen=True, slots=True)
class PrefillJob(Frozen):
    """Prompts that go through the layers together, packed one after another. They share one prefill method."""

    job_id: int
    prompts: tuple[PrefillPrompt, ...]

    @property
    def num_tokens(self) -> int:
        """Return how many tokens follow the prompts' `begin`, including those that fusion does not compute."""
        return sum(prompt.num_computed_tokens for prompt in self.prompts)

    @property
    def fused(self) -> FusionPlan | None:
        return self.prompts[0].fused

    @property
    def is_of_chunks(self) -> bool:
        """Return whether its prompts are document chunks that are computed alone."""
        return self.prompts[0].capture is not None

    @property
    def stages(self) -> list[tuple[int, int]]:
        """Return pairs (first layer, tokens computed in the layers from there on), ascending."""
        fused = self.fused
        if fused is None:
            return [(0, self.num_tokens)]
        all_tokens = [(0, self.num_tokens)] if fused.select_layer else []
        return [*all_tokens, (fused.select_layer, fused.num_computed)]

    def is_scattered(self, layer: int) -> bool:
        """Return whether the tokens that the layer computes need not be neighbours in the prompt."""
        return self.fused is not None and layer >= self.fused.select_layer

    def num_tokens_in(self, layer: int) -> int:
        return next(tokens for first, tokens in reversed(self.stages) if layer >= first)

    @property
    def num_scored_tokens(self) -> int:
        return sum(prompt.num_scored_tokens for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class PrefillUnit:
    """One layer over packed tokens `[begin, end)` of a job, of those that go through that layer. Units of a job come
    layer by layer, in token order.

    method: the prefill method of the whole job (`gpu.profiles.Profile.prefill_method`).

    The last unit of a job also draws each prompt's next token. That is the one that ends the last layer, or, where
    prompts are scored, the last LogitsUnit. If all that was left of a job was cut out, it is an empty LogitsUnit.
    """

    job_id: int
    layer: int
    begin: int
    end: int
    method: PartId = DENSE


@dataclass(frozen=True, slots=True)
class LogitsUnit:
    """Logprobs of a job's scored tokens `[begin, end)`, counted across its prompts. They follow the layers in order."""

    job_id: int
    begin: int
    end: int


Unit = PrefillUnit | LogitsUnit


@dataclass(frozen=True, slots=True)
class Offload(Frozen):
    """Offloads tokens `[begin, end)` of a running slot to its host context: whole pages, the oldest of the window.

    `page_ids` hold these tokens and stay theirs. `is_new_context`: this opens the context; `begin` is the sink's end.
    """

    slot: int
    context_id: int
    begin: int
    end: int
    page_ids: tuple[int, ...]
    is_new_context: bool
    reading: Reading


@dataclass(frozen=True, slots=True)
class TablePlace:
    """A place in a slot's page table: the entries from `first_page` on."""

    slot: int
    first_page: int


@dataclass(frozen=True, slots=True)
class PageEviction(Frozen):
    """Evicts pages whose tokens are in host memory. The dense layers' rows are copied to `dense_page_ids`, which take
    the place of `page_ids` at `places`, in the page table of each slot that reads them.

    Dense pages may lie in pages that this eviction, or an earlier one, frees.
    """

    page_ids: tuple[int, ...]
    dense_page_ids: tuple[int, ...]
    places: tuple[TablePlace, ...]


@dataclass(frozen=True, slots=True)
class Reload(Frozen):
    """Reloads evicted tokens beside the step: `[begin, end)` of the run of `context_id`, whole pages, offloaded layers
    only. They are copied to the resident pages `page_ids`, which no step reads before a `FinishedReload`.
    """

    context_id: int
    begin: int
    end: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FinishedReload(Frozen):
    """Ends a reload: the inverse of an eviction. The device waits for the reload to `page_ids`, then copies the dense
    layers' rows there from `dense_page_ids`. `page_ids` replace them at `places`, in each slot's page table.
    """

    page_ids: tuple[int, ...]
    dense_page_ids: tuple[int, ...]
    places: tuple[TablePlace, ...]


@dataclass(frozen=True, slots=True)
class HostRead:
    """What a row reads of its context in host memory: cells `[begin, end)`, in the offloaded layers.

    This is the range `[sink, evicted)` of docs/ARCHITECTURE.md: the first `end - begin` tokens of the run of
    `context_id`. All other cells are on the device. reads_all: the row attends to every one of these tokens, so the
    device may read some of them over the link.
    """

    context_id: int
    begin: int
    end: int
    reads_all: bool = False


@dataclass(frozen=True, slots=True)
class DecodeGroup(Frozen):
    """Sequences that decode one token each, in one step, whatever their profiles.

    The input token of a slot is the one last sampled for it (on the device), at position `positions[i]`; its key and
    value are written to the cell of that number, the last of its context. `samples[i]` numbers the draw.

    host_reads[i]: what the row reads in host memory, or None. None for the whole group: no row reads there.
    runs[i]: tokens known to follow the input token; None: no slot has any. Each has a row of its own, at the positions
        that follow, with the same host read. One token is drawn, after the last. Such a slot steps without its ring.
    drafts[i]: tokens that may follow the input token of a slot without a run; None: no slot has any. They have rows as
        a run has, and one token is drawn after each row, with consecutive numbers: 1 + n draws. The result has the
        draws up to the first that differs from the draft, which is the slot's last token. What later rows wrote is
        void. A draft of nothing but TO_DRAFT is first drafted by the slot's ring, in steps of one token. These write
        the same cells as the draft's rows, which overwrite them before they read any.
    """

    slots: tuple[int, ...]
    positions: tuple[int, ...]
    samples: tuple[int, ...]
    host_reads: tuple[HostRead | None, ...] | None = None
    runs: tuple[tuple[int, ...], ...] | None = None
    drafts: tuple[tuple[int, ...], ...] | None = None

    @property
    def followers(self) -> list[tuple[int, ...]]:
        """Return for each slot the tokens that have rows behind the input token's: its run, or its draft."""
        nothing = [()] * len(self.slots)
        return [(*run, *draft) for run, draft in zip(self.runs or nothing, self.drafts or nothing, strict=True)]

    @property
    def lengths(self) -> list[int]:
        """Return how many rows each slot has."""
        return [1 + len(tokens) for tokens in self.followers]


@dataclass(frozen=True, slots=True)
class StepPlan(Frozen):
    """One engine step, carried out in field order.

    is_fenced: the step begins after everything that was launched before it, in both lanes.
    released_slots: slots whose sequences have ended. A prompt of such a slot is cut out of its running job: later units
        count without its tokens. A job with no prompt left is dropped.
    masked_slots: slots that may draw only some tokens, which may depend on draws still in flight. If there are any,
        the whole step is drawn later, once their masks are given (`gpu.runner.Runner.draw`).
    limits_prefill_blocks: keep the units' attention blocks short, because rows that wait for the host run beside them.
    """

    lane: Lane = Lane.DEVICE
    is_fenced: bool = False
    saves: tuple[SavedBlock, ...] = ()
    released_slots: tuple[int, ...] = ()
    closed_contexts: tuple[int, ...] = ()
    offloads: tuple[Offload, ...] = ()
    finished_reloads: tuple[FinishedReload, ...] = ()
    evictions: tuple[PageEviction, ...] = ()
    reloads: tuple[Reload, ...] = ()
    page_writes: tuple[PageWrite, ...] = ()
    ring_writes: tuple[RingWrite, ...] = ()
    ring_growth: tuple[RingGrowth, ...] = ()
    window_writes: tuple[WindowWrite | StateMove, ...] = ()
    new_jobs: tuple[PrefillJob, ...] = ()
    units: tuple[Unit, ...] = ()
    decode: tuple[DecodeGroup, ...] = ()
    masked_slots: tuple[int, ...] = ()
    limits_prefill_blocks: bool = False

    @property
    def is_empty(self) -> bool:
        """Return whether the plan has nothing to carry out."""
        return not any(getattr(self, name) for name in self.__dataclass_fields__ if name != "lane")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token, and the most likely alternatives `(token id, logprob)`, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Collected:
    """The tokens that one rank drew in a step, for another rank to compare. number: of the step, from 1 for the first
    that both launched. tokens: `(slot, token_id)` in order, without slots that failed.
    """

    number: int
    tokens: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A drawn token, or a token of a run; these precede their slot's draw. `token_id` below 0: nothing could be drawn.

    NOT_FINITE: the model's logits were not finite, so the slot's context is useless. NOTHING_LEFT: the logits were
    fine, but the request's own options leave no token with a finite score.
    """

    slot: int
    token_id: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced. `prompt_logprobs[slot][i]` belongs to prompt token `i + 1`.

    unit_seconds: device time of all prefill units, for the scheduler's cost model; 0.0: there were none.
    decode_seconds: device time of decode; 0.0: there was none.
    host_seconds: the part of `decode_seconds` in which the CPU attended; 0.0: the step read nothing in host memory.
    num_parts: into how many parts the batch was split for the CPU's attention.
    pooled: by slot, what a prompt's `pooling` asked for, float32.
    failures: by slot, why its sequence cannot continue (the host refused memory); its token is -1 from then on.
    figures: by slot, what methods report about its request so far.
    """

    tokens: tuple[SampledToken, ...]
    prompt_logprobs: Mapping[int, tuple[TokenLogprob, ...]]
    unit_seconds: float
    decode_seconds: float
    failures: Mapping[int, str] = field(default_factory=dict)
    pooled: Mapping[int, np.ndarray] = field(default_factory=dict)
    host_seconds: float = 0.0
    num_parts: int = 0
    figures: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
