"""The contract between the scheduler and the runner: plain dataclasses, without torch.

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

    Profiles with equal parts share what is kept by part: rings, prefill sides and learnt times. The values of settings
    are those that were given; names of settings in settings have dots. It survives JSON.
    """

    slot: str
    method: str
    settings: tuple[tuple[str, Setting | tuple[Setting, ...]], ...] = ()

    def __str__(self) -> str:
        given = ", ".join(f"{key} {value}" for key, value in self.settings)
        return f"{self.slot}: {self.method}" + (f" ({given})" if given else "")


DENSE = PartId("prefill", "dense")
"""Prefill of profiles that name no method for it: all of a query's past is attended to, exactly."""

FUSED = PartId("prefill", "fused")
"""Prefill of units of which most of the prompt is not computed: queries at any positions, dense."""

NO_SLOT = -1
"""Of a chunk that is computed alone: it has no sequence, takes no pages and draws nothing."""


class Frozen:
    """Turn lists that a plan or its part is made with into tuples, also lists in lists: nothing is added later."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:  # type: ignore[attr-defined]
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, _freeze(value))


def _freeze(values: list[Any]) -> tuple[Any, ...]:
    return tuple(_freeze(value) if isinstance(value, list) else value for value in values)


class Lane(Enum):
    """One of two streams of steps: those of one lane run in the order of their launches, those of two side by side.

    HOST: of rows that wait for the host's answers. DEVICE: of prefill units and of rows that need the device alone. A
    plan is in one lane as a whole; if there is only one lane, it is DEVICE. Steps with a host read in some row share
    one set of buffers, whatever their lane, and steps without any share another. If steps of one kind change lanes, the
    first in the new lane is fenced, or the last in the old one is over.
    """

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class PageWrite(Frozen):
    """Pages appended to a slot's page table: `page_ids` become its pages `first_page ..`."""

    slot: int
    first_page: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostPrompt:
    """The part of a prompt that goes to host memory: a context there holds tokens `[sink, end)` once prefill ends.

    sink: tokens that stay on the device in front, whole pages; end: the offloaded run's end, on a page border; between
    `end` and the prompt's end lies the window. Of the run, tokens `[evicted, end)` stay in pages of the device as
    well. Tokens `[sink, prompt.begin)` are offloaded already (`prompt.begin` is 0 or a page border above the sink),
    shared with `source_id` if that is not None.
    """

    context_id: int
    source_id: int | None
    sink: int
    evicted: int
    end: int
    reading: Reading


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """Tokens `[begin, end)` of a prompt are the chunk of that key: its keys and values were computed alone, and are
    kept before rotation.
    """

    begin: int
    end: int
    key: ChunkKey


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """How a prompt with chunks is computed (`gpu.fusion.fusion_plan`): all of its tokens below layer `select_layer`,
    and from there on what is in no chunk, its last token, and `num_chosen` others, which the policy chooses on the
    device.

    chunks: ascending, disjoint, behind the prompt's `begin`.
    select_layer: 0 for a policy that looks at nothing.
    seam_tokens: at the front of each chunk, chosen before all others.
    question_begin, question_end: the tokens whose attention says what matters.
    num_computed: from `select_layer` on.
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
    """What a ring begins with: another's entries of cells before `begin`, at the places of none of `[begin, end)`: the
    other sequence has written these otherwise, or the copy's prompt has them in front of what it will write.
    """

    ring: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class RingWrite:
    """A slot holds ring number `ring` of `part` (`ProfilePart`) until it is released; no other slot does.

    reading: of its context in host memory.
    source: the ring that it begins as a copy of; None: it is empty.
    pages: its first pages, of those that the part's rings share; None: they share none.
    num_shared: how many of these the source holds as well, with the same tokens.
    is_for_drafts: whether it is used only in steps that draft for the slot; steps that verify do not use it.
    epsilon: the error that is too large for the slot's request; None: as the part's settings have it.
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
    """A ring that is held has further pages, of those that its part's rings share."""

    part: PartId
    ring: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WindowWrite:
    """Window number `window` (`gpu.kv.windows`), or state (`gpu.kv.states`), has what `source` has, or anything:
    None. A slot holds it until it is released, and nobody else does; None: nobody, it is kept for who begins with the
    same tokens.
    """

    window: int
    source: int | None
    slot: int | None


@dataclass(frozen=True, slots=True)
class StateMove:
    """State number `state`, which nobody writes to, goes to a place in host memory; or what is there comes to it."""

    state: int
    place: int
    is_up: bool

    @property
    def source(self) -> int:
        return self.place


@dataclass(frozen=True, slots=True)
class WindowBranch:
    """Window number `window`, which nobody holds, gets what a prompt's own has behind its first `end` tokens. What
    stands in front of the prompt's first computed token it has already, by a window write.
    """

    window: int
    end: int


@dataclass(frozen=True, slots=True)
class DiskPrefix(Frozen):
    """The front of a prompt that comes from the disk: tokens `[begin, end)`, whole pages, into `page_ids`; those in
    front are in pages. names: of the blocks that have them, in order, from number `first_block` of the prompt on.
    end_name: of what is kept of the prefix's end (`gpu.disk.record_shapes`), where a model has layers without pages: it
    has the pages behind the last whole block, and what goes to window or state number `window`; "": nothing is.
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
    """Of a block, what is evicted: tokens `[begin, end)` of the run of `context_id`, from its page `first_page` on. It
    has dense pages, and its other layers' rows are in host memory.
    """

    context_id: int
    begin: int
    end: int
    first_page: int


@dataclass(frozen=True, slots=True)
class SavedBlock(Frozen):
    """A block whose pages, which hold what is final, are copied out for the disk. evicted: the part of it that has
    dense pages alone, if any. window: it is the end of a prefix, with pages of less than a block, and this window's or
    state's content; None: it is a block.
    """

    name: str
    page_ids: tuple[int, ...]
    evicted: EvictedPart | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillPrompt:
    """One sequence of a prefill job: tokens `[begin, len(token_ids))` are computed, `[0, begin)` are in its pages.

    `token_ids` is int32 `[context]`: the prompt, and after a preemption the output so far as well (`num_prompt_tokens`
    tells them apart). `samples` is the number of output tokens drawn before: the next draw is number `samples`.

    host: what of it is offloaded, or None. Its page table then has, for `[sink, released)`, pages of dense layers
        alone.
    pooling: what is told of it beside the draw, or None.
    fused: what it takes of chunks, or None; such a prompt is alone in its job.
    capture: it is a chunk, in NO_SLOT, whose keys and values are kept under that key; all prompts of its job are.
    branches: windows that it leaves, one at most, or states.
    disk: what of its front comes from the disk, up to `begin`; such a prompt is alone in its job.
    adapter: its number among the runner's, 0: none.
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
    """Prompts that go through the layers together, packed one after another into one row of hidden states; all of them
    by one prefill method."""

    job_id: int
    prompts: tuple[PrefillPrompt, ...]

    @property
    def num_tokens(self) -> int:
        """Return the tokens behind the prompts' begins, also those that no layer computes."""
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
        """Return (first layer, tokens that go through the layers from there on), ascending."""
        fused = self.fused
        if fused is None:
            return [(0, self.num_tokens)]
        all_tokens = [(0, self.num_tokens)] if fused.select_layer else []
        return [*all_tokens, (fused.select_layer, fused.num_computed)]

    def is_scattered(self, layer: int) -> bool:
        """Return whether the tokens that go through the layer may be any of the prompt's."""
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

    method: by which all of the job is attended to (`gpu.profiles.Profile.prefill_method`). The unit that ends the job
    also samples each prompt's next token: it ends the last layer, or, where prompts are scored, the last of them. Where
    all that was left of a job was cut out, that is a unit of no logprobs.
    """

    job_id: int
    layer: int
    begin: int
    end: int
    method: PartId = DENSE


@dataclass(frozen=True, slots=True)
class LogitsUnit:
    """Logprobs of scored tokens `[begin, end)` of a job, counted through its prompts: in order, after the layers."""

    job_id: int
    begin: int
    end: int


Unit = PrefillUnit | LogitsUnit


@dataclass(frozen=True, slots=True)
class Offload(Frozen):
    """Tokens `[begin, end)` of a running slot are written to its host context, whole pages of the window's old end.

    `page_ids` hold them, and go on to. `is_new_context`: it is opened by this (`begin` is then the sink's end).
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
    """Pages of a slot's page table from `first_page` on."""

    slot: int
    first_page: int


@dataclass(frozen=True, slots=True)
class PageEviction(Frozen):
    """Pages of tokens that the host has are evicted: the dense layers' rows are copied to `dense_page_ids`, which take
    the place of `page_ids` in the page tables of all that read them, at `places`.

    Dense pages may lie in pages that this eviction, or one before it, frees.
    """

    page_ids: tuple[int, ...]
    dense_page_ids: tuple[int, ...]
    places: tuple[TablePlace, ...]


@dataclass(frozen=True, slots=True)
class Reload(Frozen):
    """Rows of evicted tokens are reloaded beside the step: tokens `[begin, end)` of the run of `context_id`, whole
    pages, in the offloaded layers, to the resident pages `page_ids`, which nobody reads before a `FinishedReload`.
    """

    context_id: int
    begin: int
    end: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FinishedReload(Frozen):
    """The inverse of an eviction, after the reload to `page_ids`, which it awaits on the device. The dense layers' rows
    are copied there from `dense_page_ids`, whose place they take in the page tables of all that read them, at `places`.
    """

    page_ids: tuple[int, ...]
    dense_page_ids: tuple[int, ...]
    places: tuple[TablePlace, ...]


@dataclass(frozen=True, slots=True)
class HostRead:
    """What a row reads of its context in host memory: cells `[begin, end)`, in the offloaded layers. They are the range
    `[sink, evicted)` of docs/ARCHITECTURE.md, the first `end - begin` tokens of the run of `context_id` there; all
    other cells are on the device. reads_all: it attends to every one of these tokens, so the device may read a part of
    them over the link.
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
    `host_reads[i]`: what the row reads in host memory; None: nothing, or for the whole group, no row reads anything
    there. `runs[i]`: tokens that are known to follow the input token; None: no
    slot has any. Each is computed in a row of its own behind it, at the positions that follow, with the same
    host read; the draw is behind the last. Such a slot steps by no ring. `drafts[i]`: tokens that may follow the input
    token of a slot without a run; None: no slot has any. They have rows as a run has, and behind each of them another
    token is drawn, with the number that follows: 1 + n draws. The draws up to the first that differs from the draft
    are told, and the last of these is the slot's last token; what the rows behind it wrote means nothing. A draft of
    TO_DRAFT alone is drafted first, in steps of one token by the slot's ring: these write the same cells, which the
    rows of the draft write anew before any of them reads.
    """

    slots: tuple[int, ...]
    positions: tuple[int, ...]
    samples: tuple[int, ...]
    host_reads: tuple[HostRead | None, ...] | None = None
    runs: tuple[tuple[int, ...], ...] | None = None
    drafts: tuple[tuple[int, ...], ...] | None = None

    @property
    def followers(self) -> list[tuple[int, ...]]:
        """Return the tokens of each slot that have rows behind the input token's: a run, or a draft."""
        nothing = [()] * len(self.slots)
        return [(*run, *draft) for run, draft in zip(self.runs or nothing, self.drafts or nothing, strict=True)]

    @property
    def lengths(self) -> list[int]:
        """Return the rows of each slot."""
        return [1 + len(tokens) for tokens in self.followers]


@dataclass(frozen=True, slots=True)
class StepPlan(Frozen):
    """One engine step, carried out in field order.

    is_fenced: behind all that was launched before it in any lane.
    released_slots: their sequences have left; a prompt of one that is in a job under way is cut out of it, and the
        others go on: units to come count without its tokens. A job with no prompt left is dropped.
    masked_slots: those that draw in it from some tokens alone, which may not be known before the draws in flight are;
        with any, all of the step is drawn once masks are given for them (`gpu.runner.Runner.draw`).
    limits_prefill_blocks: rows that wait for the host step beside its units, whose attention blocks are to be short.
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
        """Return whether there is nothing to carry out."""
        return not any(getattr(self, name) for name in self.__dataclass_fields__ if name != "lane")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token, and the most likely alternatives `(token id, logprob)`, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Collected:
    """What one rank drew, for another to compare. number: of the step, the first that both launched is 1; tokens:
    `(slot, token_id)` in their order, without those of slots that failed.
    """

    number: int
    tokens: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A drawn token, or one of a run, which come before their slot's draw. `token_id` below 0: nothing could be drawn.

    NOT_FINITE: the model's logits were not, so what the slot's context holds is of no use to anybody. NOTHING_LEFT: the
    logits were fine, but the request's own options leave no token with a finite score.
    """

    slot: int
    token_id: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced. `prompt_logprobs[slot][i]` belongs to prompt token `i + 1`.

    unit_seconds: device time of all prefill units, for the scheduler's cost model; 0.0: there was none.
    decode_seconds: likewise of decode.
    host_seconds: the part of `decode_seconds` in which the CPU attended; 0.0: the step read nothing in host memory.
    num_parts: in how many half batches it did so.
    pooled: by slot, what a prompt's `pooling` asked for, float32.
    failures: by slot, why it could not go on (the host refused memory); its token is -1 from then on.
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
