"""Prefill jobs: packed prompts that go through the model layer by layer, in resumable units.

It refuses to know when units run, and what else does. Invariants: the hidden states of a job live from its first unit
to its last or to its drop; a unit reads only its own job's pages (or staging: a prompt that goes down to the host tier
is alone in its job, and the only one of its kind; one that takes documents' chunks is alone, too), so units of several
jobs and decode steps interleave freely, and where one layer's units begin need not be where another's do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gpu.fusion.chunk_job import ChunkJob
from gpu.fusion.documents import Documents
from gpu.fusion.eviction import Eviction
from gpu.fusion.fused_prompt import FusedPrompt
from gpu.fusion.rows import read_rows, store_rows
from gpu.host.deposit import Depositor
from gpu.methods.device_side import RingSide
from gpu.methods.prefill_side import PrefillSide
from gpu.model.decoder import Decoder, Pages
from gpu.pooling import Pooling
from gpu.prefill.attention import (
    Packing,
    has_flash,
    packed_prefill_attention,
    scattered_attention,
    windowed_attention,
)
from gpu.prefill.gathered import GatheredKv
from gpu.prefill.query import PrefillQuery
from gpu.prefill.scored_rows import cut_rows
from gpu.prefill.staging import StagedPrompt, Staging
from gpu.prefill.windows import Own, WindowedUnit, WindowPrefill
from gpu.sampling.logprobs import Logprobs, join_logprobs
from gpu.sampling.sampler import Drawing, Sampled, Sampler, gather_logprobs, to_pinned
from gpu.step import DENSE, LogitsUnit, PrefillJob, PrefillPrompt, PrefillUnit, TokenLogprob, Unit
from gpu.upload import upload
from transfer.chunks.format import ChunkKey
from transfer.tier import HostMemoryError, HostTier

LOOK_TOKENS = 2048  # of the layer in which a policy looks, projected at once
LOST_CHUNK_TOKENS = 2048  # of a chunk that is computed while its prompt waits, at once
POOLED_TOKENS = 2048  # normed at once for a mean
MOST_PACKED_TOKENS = 16_384  # of contexts attended to by one kernel; one of more is worth a launch of its own


@dataclass(slots=True)
class FinishedJob:
    """Next tokens of a job's prompts, in order; by slot, what those get that asked: prompt logprobs, and vectors of
    float32 (`gpu.pooling`).
    """

    drawing: Drawing
    prompt_logprobs: dict[int, Logprobs]
    pooled: dict[int, Tensor]

    @property
    def sampled(self) -> Sampled:
        return self.drawing.sampled

    def copy_to_host(self) -> None:
        """Start the copies to the host, on the current stream."""
        self.sampled.copy_to_host()
        self.prompt_logprobs = {slot: logprobs.copy_to_host() for slot, logprobs in self.prompt_logprobs.items()}
        self.pooled = {slot: to_pinned(vector) for slot, vector in self.pooled.items()}

    def prompt_logprobs_to_host(self) -> dict[int, list[TokenLogprob]]:
        """After the copies have run: `[slot][i]` belongs to prompt token `i + 1`."""
        return {slot: logprobs.to_list() for slot, logprobs in self.prompt_logprobs.items()}


@dataclass(frozen=True, slots=True)
class _Part:
    """What a unit has of one prompt: tokens `[begin, end)` of the job, the last of the prompt's first `context`."""

    prompt: PrefillPrompt
    begin: int
    end: int
    context: int


@dataclass(frozen=True, slots=True)
class _Packed:
    """Tokens `[begin, end)` of a job, whose prompts are attended to together: the same in every layer."""

    begin: int
    end: int
    packing: Packing
    rows: Tensor


@dataclass(slots=True)
class _Job:
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
    eviction: Eviction | None = None
    packed: _Packed | None = None
    windowed: tuple[slice, WindowedUnit] | None = None  # of the last unit in a layer with a window, and its tokens

    def num_of_tail(self, unit: PrefillUnit) -> int:
        """Tokens at the unit's end that stand behind all chunks."""
        assert self.fused is not None
        num_own = self.fused.num_tail_tokens - (self.offsets[-1] - unit.end)
        return min(unit.end - unit.begin, max(0, num_own))

    def narrow(self, ids: Tensor) -> None:
        """From now on only these tokens are computed: packed ids, ascending, int64, the last one among them."""
        self.token_ids, self.positions, self.slots = self.token_ids[ids], self.positions[ids], self.slots[ids]
        self.hidden = None if self.hidden is None else self.hidden[ids]
        self.offsets = [0, len(ids)]

    def parts(self, unit_begin: int, unit_end: int) -> list[_Part]:
        """Of a unit, prompt by prompt."""
        parts = []
        for prompt, prompt_begin, prompt_end in zip(self.job.prompts, self.offsets, self.offsets[1:], strict=False):
            begin, end = max(unit_begin, prompt_begin), min(unit_end, prompt_end)
            if begin < end:
                parts.append(_Part(prompt, begin, end, prompt.begin + end - prompt_begin))
        return parts


def ends_with(job: PrefillJob, unit: Unit, num_layers: int) -> bool:
    """Whether nothing of the job comes after."""
    if isinstance(unit, LogitsUnit):
        return unit.end == job.num_scored_tokens
    is_last = unit.layer == num_layers - 1 and unit.end == job.num_tokens_in(unit.layer)
    return is_last and job.num_scored_tokens == 0


class Prefill:
    """All prefill jobs under way; their prompts have no more than `max_hidden_tokens` tokens to compute together.

    sides: what attends to prompts, by what units name it, `DENSE` among them. reusing: what sees the prompts of slots
    that hold its rings. tier, depositor: where prompts with a `host` go, and how; or None and None. documents: where
    chunks come from, and go; or None.
    """

    def __init__(self, decoder: Decoder, sampler: Sampler, max_hidden_tokens: int, sides: Mapping[str, PrefillSide],
                 reusing: Sequence[RingSide], tier: HostTier | None,
                 depositor: Depositor | None, documents: Documents | None) -> None:  # fmt: skip
        self.max_hidden_tokens = max_hidden_tokens
        self._sides = sides
        self._reusing = reusing
        self.decoder = decoder
        self.sampler = sampler
        self.device = decoder.pool.device
        self.gathered = GatheredKv(decoder.pool, decoder.architecture.num_kv_heads, decoder.architecture.dim)
        self.staging = Staging(decoder.pool, tier, depositor) if tier is not None and depositor is not None else None
        pool = decoder.pool
        self._most_packed_tokens = min(MOST_PACKED_TOKENS, pool.max_pages * pool.page_tokens)
        self._documents = documents
        self.windows = WindowPrefill(pool, decoder.scale) if pool.windows.shape.layers else None
        self.watch: Callable[[PrefillQuery], None] | None = None
        """Sees what a prompt that is alone in its unit attends to, in each layer that attends to everything."""
        self._jobs: dict[int, _Job] = {}
        self._chunk_jobs: dict[int, tuple[PrefillJob, ChunkJob]] = {}
        self._failures: dict[int, str] = {}

    def add(self, job: PrefillJob) -> None:
        """Take in a job and its prompts' sampling options; a prompt that goes down gets its room on the host.

        Where the host refuses, the slot has failed (`take_failures`), and the job's units do nothing. Raises ValueError
        for a prompt that computes no token, for more hidden states than `max_hidden_tokens`, and for a prompt that goes
        down beside others, or while another one does.
        """
        under_way = sum(state.job.num_tokens for state in self._jobs.values())
        under_way += sum(state.num_tokens for _, state in self._chunk_jobs.values())
        if under_way + job.num_tokens > self.max_hidden_tokens:
            raise ValueError(
                f"prefill: job of {job.num_tokens} tokens beside {under_way} under way; have {self.max_hidden_tokens}"
            )
        if job.is_of_chunks:
            keys = [prompt.capture for prompt in job.prompts if prompt.capture is not None]
            state_of_chunks = self._chunk_job([prompt.token_ids for prompt in job.prompts], keys)
            self._chunk_jobs[job.job_id] = job, state_of_chunks
            return
        self._check_host(job)
        offsets = [0]
        for prompt in job.prompts:
            if prompt.num_computed_tokens <= 0:
                raise ValueError(f"prefill: slot {prompt.slot}: begin {prompt.begin} of {len(prompt.token_ids)} tokens")
            offsets.append(offsets[-1] + prompt.num_computed_tokens)
            self.sampler.assign(
                prompt.slot,
                prompt.sampling,
                prompt.token_ids[: prompt.num_prompt_tokens],
                prompt.token_ids[prompt.num_prompt_tokens :],
            )
        packed = np.empty((3, offsets[-1]), dtype=np.int64)
        for prompt, begin, end in zip(job.prompts, offsets, offsets[1:], strict=False):
            packed[0, begin:end] = prompt.token_ids[prompt.begin :]
            packed[1, begin:end] = np.arange(prompt.begin, len(prompt.token_ids))
            packed[2, begin:end] = prompt.slot
        token_ids, positions, slots = upload(packed, self.device).unbind(0)
        scored: dict[int, list[Logprobs]] = {prompt.slot: [] for prompt in job.prompts if prompt.is_scored}
        fused = self._fuse(job.prompts[0]) if job.fused is not None else None
        state = _Job(job, offsets, token_ids, positions, slots.to(torch.int32), None, None, False, scored, {}, fused)
        self._jobs[job.job_id] = state
        if fused is not None and fused.plan.num_evicted:
            state.eviction = fused.make_eviction()
        if fused is not None and not fused.looks:
            state.narrow(fused.choose_before())
        if self.staging is not None and job.prompts[0].host is not None:
            try:
                state.staged = StagedPrompt(self.staging, job.prompts[0])
            except HostMemoryError as error:
                self._fail(state, error)

    def drop(self, job_id: int) -> None:
        """Forget a job, finished or not, and free all that it holds; nothing happens if there is none."""
        self._chunk_jobs.pop(job_id, None)
        state = self._jobs.pop(job_id, None)
        if state is not None and state.fused is not None:
            state.fused.close()
        self.gathered.forget()

    def take_failures(self) -> dict[int, str]:
        """Slots that failed since the last call, and why: they get no token from their jobs."""
        failures, self._failures = self._failures, {}
        return failures

    @property
    def num_jobs(self) -> int:
        return len(self._jobs) + len(self._chunk_jobs)

    def is_loaded(self, job_id: int, layer: int) -> bool:
        """Whether a unit that begins this layer of the job waits for no disk, as far as is known."""
        state = self._jobs.get(job_id)
        return state is None or state.fused is None or state.fused.is_loaded(layer)

    def run(self, unit: Unit, draws: bool = True) -> FinishedJob | None:
        """Compute one unit; the one that ends the job also samples, if it `draws`."""
        if unit.job_id in self._chunk_jobs:
            self._compute_chunks(unit)
            return None
        state = self._jobs[unit.job_id]
        if not state.has_failed:
            try:
                if isinstance(unit, LogitsUnit):
                    self._score(state, unit)
                else:
                    self._compute(state, unit)
            except HostMemoryError as error:
                self._fail(state, error)
        if not ends_with(state.job, unit, self.decoder.architecture.num_layers):
            return None
        finished = None if state.has_failed else self._finish(state)
        if finished is not None and draws:
            finished.drawing.draw(self.sampler)
        self.drop(unit.job_id)
        return finished

    def _compute(self, state: _Job, unit: PrefillUnit) -> None:
        """Raises HostMemoryError where the host has no room for a layer, or cannot give the prefix's rows back."""
        if state.hidden is None:
            state.hidden = self.decoder.embed(state.token_ids)
        staged = state.staged
        place = staged.place(unit.layer) if staged is not None else None
        if staged is not None and place is not None and unit.begin == 0:
            staged.begin_layer(place)
        pages = staged.staging.pages(place) if staged is not None and place is not None else None
        if unit.begin == 0:
            self._begin_fused_layer(state, unit.layer, pages)
        chunk = slice(unit.begin, unit.end)
        if self.windows is not None and unit.layer in self.decoder.pool.windows.shape.layers:
            state.hidden[chunk] = self._compute_windowed(self.windows, state, unit.layer, chunk, state.hidden[chunk])
            return

        def attend(query: Tensor, pre_rope_query: Tensor) -> Tensor:
            if state.eviction is not None and (num_own := state.num_of_tail(unit)):
                state.eviction.note(query[len(query) - num_own :])
            if state.job.is_scattered(unit.layer):
                return self._attend_scattered(state, unit, query, pre_rope_query)
            return self._attend(state, unit, query, pre_rope_query)

        state.hidden[chunk] = self.decoder.layer(
            unit.layer, state.hidden[chunk], state.positions[chunk], state.slots[chunk], attend, pages
        )
        if staged is not None and place is not None and unit.end == state.offsets[-1]:
            staged.end_layer(place)
        if state.eviction is not None and unit.end == state.offsets[-1]:
            rows = self._whole(state, unit.layer)
            state.eviction.evict(unit.layer, state.job.prompts[0].slot, *rows, self.decoder.scale, self.decoder.pool)
            self.gathered.forget()

    def _compute_windowed(
        self, windows: WindowPrefill, state: _Job, layer: int, chunk: slice, hidden: Tensor
    ) -> Tensor:
        """A layer's hidden states of a chunk, where its windows are kept by themselves."""
        slots, window = state.slots[chunk], self.decoder.specs[layer].window_tokens
        assert window is not None, "prefill: a layer without a window has its rows in pages"
        if state.windowed is None or state.windowed[0] != chunk:
            parts = [
                Own(
                    part.prompt.slot, part.begin - chunk.start, part.end - chunk.start, part.context, part.prompt.branch
                )
                for part in state.parts(chunk.start, chunk.stop)
            ]
            state.windowed = chunk, WindowedUnit(self.decoder.pool, parts, state.positions[chunk], slots)
        unit = state.windowed[1]
        pages, cells = windows.pages(len(slots)), windows.cells(len(slots))
        hidden = self.decoder.layer(
            layer, hidden, state.positions[chunk], slots,
            lambda query, _: windows.attend(unit, layer, window, query), pages, cells,
        )  # fmt: skip
        windows.keep(unit, layer)
        return hidden

    def warm_up_chunks(self) -> None:
        """Compile what prompts with chunks need now, not in one: on numbers that mean nothing, of no slot."""
        if self._documents is None:
            return
        shape, pool = self._documents.shape, self.decoder.pool
        rows = torch.zeros(1, 2, shape.num_kv_heads, shape.dim, dtype=pool.dtype, device=self.device)
        read_rows(store_rows(rows[:, 0], shape), rows[:, 1], shape)
        at = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.decoder.place(0, rows, at, at, at.int() - 1, None)
        keys, values = (side.flatten(1, 2)[:, :1].zero_() for side in (self.gathered.keys, self.gathered.values))
        query = rows.new_zeros(1, self.decoder.architecture.num_heads, shape.dim)
        for window in {spec.window_tokens for spec in self.decoder.specs}:
            scattered_attention(query, keys, values, at, self.decoder.scale, window)

    def _compute_chunks(self, unit: Unit) -> None:
        job, state = self._chunk_jobs[unit.job_id]
        assert isinstance(unit, PrefillUnit), "prefill: nothing of a chunk is scored"
        state.compute(unit.layer, unit.begin, unit.end)
        if ends_with(job, unit, self.decoder.architecture.num_layers):
            state.finish()
            self.drop(unit.job_id)

    def _chunk_job(self, token_ids: list[np.ndarray], keys: list[ChunkKey]) -> ChunkJob:
        assert self._documents is not None, "prefill: chunks in a plan, but there is no library"
        return ChunkJob(token_ids, keys, self.decoder, self._documents, self._sides[DENSE].attend)

    def _fuse(self, prompt: PrefillPrompt) -> FusedPrompt:
        """A chunk that is lost is computed while the prompt waits."""
        assert self._documents is not None, "prefill: chunks in a plan, but there is no library"
        assert prompt.fused is not None
        chunks = prompt.fused.chunks

        def compute(number: int) -> list[np.ndarray]:
            chunk = chunks[number]
            job = self._chunk_job([prompt.token_ids[chunk.begin : chunk.end]], [chunk.key])
            job.compute_all(LOST_CHUNK_TOKENS)
            (layers,) = job.finish_now()
            return layers

        return FusedPrompt(prompt, self.decoder, self._documents, compute)

    def _begin_fused_layer(self, state: _Job, layer: int, pages: Pages | None) -> None:
        """Rows of chunks are placed; where the policy looks, it says which tokens go on."""
        fused, hidden = state.fused, state.hidden
        if fused is None or hidden is None:
            return
        fused.begin_layer(layer, pages)
        if fused.looks and layer == fused.plan.select_layer:

            def keys_of() -> Tensor:
                return self._whole(state, layer)[0]

            state.narrow(fused.look(hidden, state.positions, state.slots, pages, LOOK_TOKENS, keys_of))

    def _whole(self, state: _Job, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all of the one prompt's tokens, as they stand now."""
        self.gathered.forget()
        prompt = state.job.prompts[0]
        return self._keys_and_values(state, prompt, layer, len(prompt.token_ids))

    def _attend_scattered(self, state: _Job, unit: PrefillUnit, query: Tensor, pre_rope_query: Tensor) -> Tensor:
        """Dense attention of a unit of few tokens among the prompt's."""
        keys, values = self._whole(state, unit.layer)
        positions, window = state.positions[unit.begin : unit.end], self.decoder.specs[unit.layer].window_tokens
        num_tokens, scale = keys.shape[1], self.decoder.scale
        asked = PrefillQuery(
            unit.layer, query, pre_rope_query, keys, values, positions, None, num_tokens, scale, None
        )  # fmt: skip
        if self.watch is not None and window is None:
            self.watch(asked)
        if window is None:
            self._show_tail(state, unit, asked)
        return scattered_attention(query, keys, values, positions, scale, window).out

    def _show_tail(self, state: _Job, unit: PrefillUnit, asked: PrefillQuery) -> None:
        """To the methods that want a prompt's last queries in order: all tokens behind the last chunk are computed."""
        num_own, slot = state.num_of_tail(unit), state.job.prompts[0].slot
        if not num_own or not any(method.has_ring(slot) for method in self._reusing):
            return
        end, own = asked.num_prompt_tokens - (state.offsets[-1] - unit.end), slice(len(asked.query) - num_own, None)
        tail = replace(
            asked, query=asked.query[own], pre_rope_query=asked.pre_rope_query[own], keys=asked.keys[:, :end],
            values=asked.values[:, :end], positions=asked.positions[own], begin=end - num_own,
        )  # fmt: skip
        self._show(tail, slot)

    def _score(self, state: _Job, unit: LogitsUnit) -> None:
        """Logprobs of a unit's tokens, prompt by prompt."""
        assert state.hidden is not None
        first = 0
        for prompt, offset in zip(state.job.prompts, state.offsets, strict=False):
            begin, end = max(unit.begin - first, 0), min(unit.end - first, prompt.num_scored_tokens)
            first += prompt.num_scored_tokens
            if begin >= end:
                continue
            assert prompt.begin == 0, "prompt logprobs need every prompt token's hidden state; begin at 0"
            hidden = state.hidden[offset : offset + prompt.num_scored_tokens]
            token_ids = state.token_ids[offset + 1 : offset + 1 + prompt.num_scored_tokens]
            num_top = prompt.sampling.num_prompt_logprobs
            assert num_top is not None
            for rows in cut_rows(begin, end, prompt.num_scored_tokens):
                logits = self.decoder.logits(hidden[rows.computed])[rows.wanted]
                state.scored[prompt.slot].append(gather_logprobs(logits, token_ids[rows.told], num_top))

    def _attend(self, state: _Job, unit: PrefillUnit, query: Tensor, pre_rope_query: Tensor) -> Tensor:
        """Attention of a packed chunk: all prompts at once, or prompt by prompt; all `[tokens, heads, dim]`."""
        parts = state.parts(unit.begin, unit.end)
        window = self.decoder.specs[unit.layer].window_tokens
        is_packed = (unit.method == DENSE or window is not None) and len(parts) > 1 and has_flash(query)
        if is_packed and sum(part.context for part in parts) <= self._most_packed_tokens:
            packed = self._pack(state, unit, parts)
            keys, values = self.gathered.pack(unit.layer, packed.rows)
            out = packed_prefill_attention(query, keys, values, packed.packing, self.decoder.scale, window)
            for part in parts if window is None else ():
                if any(method.has_ring(part.prompt.slot) for method in self._reusing):
                    self._show(self._ask(state, unit, part, query, pre_rope_query), part.prompt.slot)
            return out
        attended = [self._attend_part(state, unit, part, query, pre_rope_query) for part in parts]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _show(self, query: PrefillQuery, slot: int) -> None:
        """To the methods that will reuse what queries like these read."""
        for method in self._reusing:
            if method.has_ring(slot):
                method.see_prompt(slot, query, self._sides[DENSE].attend)

    def _attend_part(
        self, state: _Job, unit: PrefillUnit, part: _Part, query: Tensor, pre_rope_query: Tensor
    ) -> Tensor:
        """Attention of one prompt's part by the unit's method; both queries are the unit's."""
        side, prompt = self._sides[unit.method], part.prompt
        num_prompt_tokens = len(prompt.token_ids)
        window = self.decoder.specs[unit.layer].window_tokens
        if window is not None:  # which methods have no part in
            keys, values = self._keys_and_values(state, prompt, unit.layer, part.context)
            own = slice(part.begin - unit.begin, part.end - unit.begin)
            return windowed_attention(query[own], keys, values, window, self.decoder.scale).out
        begin = part.context - (part.end - part.begin)
        keeps_state = unit.method != DENSE  # whose prompts may have begun packed with others
        if keeps_state and begin == prompt.begin:
            state.method_states[prompt.slot] = side.make_state(unit.layer, begin, num_prompt_tokens)
        asked = self._ask(state, unit, part, query, pre_rope_query)
        if self.watch is not None:
            self.watch(asked)
        attended = side.attend(replace(asked, state=state.method_states[prompt.slot] if keeps_state else None))
        self._show(asked, prompt.slot)
        if keeps_state and part.context == num_prompt_tokens:
            del state.method_states[prompt.slot]
        return attended.out

    def _ask(self, state: _Job, unit: PrefillUnit, part: _Part, query: Tensor, pre_rope_query: Tensor) -> PrefillQuery:
        """A prompt's part of a unit; both queries are the unit's."""
        keys, values = self._keys_and_values(state, part.prompt, unit.layer, part.context)
        own = slice(part.begin - unit.begin, part.end - unit.begin)
        return PrefillQuery(
            layer=unit.layer,
            query=query[own],
            pre_rope_query=pre_rope_query[own],
            keys=keys,
            values=values,
            positions=state.positions[part.begin : part.end],
            begin=part.context - (part.end - part.begin),
            num_prompt_tokens=len(part.prompt.token_ids),
            scale=self.decoder.scale,
            state=None,
        )

    def _pack(self, state: _Job, unit: PrefillUnit, parts: list[_Part]) -> _Packed:
        """What the last layer's unit had, if it was of the same tokens."""
        known = state.packed
        if known is not None and (known.begin, known.end) == (unit.begin, unit.end):
            return known
        begins = np.array([[0, 0], *((part.end - part.begin, part.context) for part in parts)], np.int32)
        most_queries, most_keys = begins.max(0).tolist()
        query_begins, key_begins = upload(begins.cumsum(0, dtype=np.int32).T.copy(), self.device).unbind(0)
        tokens = (
            [np.full(part.context, part.prompt.slot) for part in parts],
            [np.arange(part.context) for part in parts],
        )
        slots, positions = upload(np.stack([np.concatenate(one) for one in tokens]), self.device).unbind(0)
        packing = Packing(query_begins, key_begins, most_queries, most_keys)
        state.packed = _Packed(unit.begin, unit.end, packing, self.gathered.rows_of(slots, positions))
        return state.packed

    def _keys_and_values(self, state: _Job, prompt: PrefillPrompt, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """`[kv_heads, end, dim]` of a prompt's tokens `[0, end)`: staged, or gathered from pages."""
        place = state.staged.place(layer) if state.staged is not None else None
        if state.staged is None or place is None:
            return self.gathered.gather(state.job.job_id, prompt.slot, layer, end)
        keys, values = state.staged.staging.buffer(place)
        return keys[:, :end], values[:, :end]

    def _check_host(self, job: PrefillJob) -> None:
        going_down = [prompt.slot for prompt in job.prompts if prompt.host is not None]
        if not going_down:
            return
        if self.staging is None:
            raise ValueError(f"prefill: slot {going_down[0]} goes down to the host; this runner has no host tier")
        if len(job.prompts) > 1 or any(state.staged is not None for state in self._jobs.values()):
            raise ValueError(
                f"prefill: slot {going_down[0]} goes down to the host beside others; wanted alone in its job, and no "
                "other such job under way"
            )

    def _fail(self, state: _Job, error: HostMemoryError) -> None:
        state.has_failed, state.hidden, state.staged = True, None, None
        self._failures[state.job.prompts[0].slot] = str(error)

    def _finish(self, state: _Job) -> FinishedJob:
        prompts, hidden = state.job.prompts, state.hidden
        assert hidden is not None
        last_rows = upload(np.array(state.offsets[1:], dtype=np.int64) - 1, self.device)
        logits = self.decoder.logits(hidden.index_select(0, last_rows))
        scored = {slot: join_logprobs(pieces) for slot, pieces in state.scored.items()}
        drawing = Drawing(logits, [prompt.slot for prompt in prompts], [prompt.samples for prompt in prompts])
        return FinishedJob(drawing, scored, self._pool(state, hidden, logits))

    def _pool(self, state: _Job, hidden: Tensor, logits: Tensor) -> dict[int, Tensor]:
        """By slot, of prompts that ask: `hidden` is of all tokens of the job, `logits` of the prompts' last ones."""
        pooled = {}
        for row, prompt in enumerate(state.job.prompts):
            begin, end = state.offsets[row], state.offsets[row + 1]
            match prompt.pooling:
                case None:
                    continue
                case Pooling(kind="logits", token_ids=token_ids):
                    wanted = upload(np.array(token_ids, dtype=np.int64), self.device)
                    pooled[prompt.slot] = logits[row].index_select(0, wanted)
                case Pooling(kind="last"):
                    pooled[prompt.slot] = self.decoder.final_norm(hidden[end - 1 : end])[0].float()
                case _:
                    assert prompt.begin == 0, "the mean needs every prompt token's hidden state; begin at 0"
                    blocks = hidden[begin:end].split(POOLED_TOKENS)
                    sums = [self.decoder.final_norm(block).sum(0, dtype=torch.float32) for block in blocks]
                    pooled[prompt.slot] = torch.stack(sums).sum(0) / (end - begin)
        return pooled
