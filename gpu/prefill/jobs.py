"""Run prefill jobs: packed prompts that go through the model layer by layer, in units that can be interleaved.

A job's hidden states live until its last unit or until the job is dropped; those of one prompt until it is cut out of
the job. A unit reads only its own job's pages or staging, so units of several jobs and decode steps interleave freely,
and each layer may be cut into units at different places. An offloaded prompt is alone in its job, and so is a job of
document chunks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu.attention.prefill_attention import scattered_attention
from gpu.attention.prefill_query import Attended
from gpu.disk.disk_copies import DiskCopies
from gpu.disk.prefix_load import PrefixLoad
from gpu.fusion.chunk_copies import Documents
from gpu.fusion.chunk_job import ChunkJob
from gpu.fusion.chunk_rows import read_rows, store_rows
from gpu.fusion.fused_prompt import FusedPrompt
from gpu.host.gathered import GatheredKv
from gpu.host.row_transfer import RowTransfer
from gpu.host.staging import StagedPrompt, Staging
from gpu.layers.decoder import Attend, Carried, Decoder, Pages, Target
from gpu.layers.delta_layers import StatePart
from gpu.layers.draft_head import DraftHead
from gpu.methods.device_side import RingSide
from gpu.methods.prefill_side import PrefillSide
from gpu.prefill.job_state import JobState, PromptPart, ends_with, pack_job
from gpu.prefill.layer_graphs import LayerGraphs
from gpu.prefill.outputs import FinishedJob, finish_job, score_tokens
from gpu.prefill.row_sizes import pad_indices, pad_rows
from gpu.prefill.unit_attention import UnitAttention
from gpu.prefill.window_attention import UnitPart, WindowedUnit, WindowPrefill
from gpu.sampling.sampler import Sampler
from gpu.step import DENSE, LogitsUnit, PrefillJob, PrefillPrompt, PrefillUnit, Unit
from gpu.upload import upload
from transfer.chunks.chunk_format import ChunkKey
from transfer.host_tier import HostMemoryError, HostTier

LOOK_TOKENS = 2048  # projected at once, in the layer in which a fusion policy chooses tokens
LOST_CHUNK_TOKENS = 2048  # computed at once, of a lost document chunk for which a prompt waits


@dataclass(frozen=True, slots=True)
class PromptStores:
    """Where prompts load KV from and store it to, other than pages.

    tier, row_transfer: the host tier for offloaded prompts and the copies to it; both None without one. documents:
    stored document chunks, or None. disk: contexts on disk, from which the fronts of prompts are loaded, or None.
    """

    tier: HostTier | None = None
    row_transfer: RowTransfer | None = None
    documents: Documents | None = None
    disk: DiskCopies | None = None


class Prefill:
    """Holds all prefill jobs under way. Together they have at most `max_hidden_tokens` tokens to compute.

    sides: prefill methods by the name that units use, `DENSE` among them. reusing: methods that observe the prompts of
    slots that hold one of their rings. stores: where prompts load from and store to. head: the draft head, which is fed
    with the final hidden states; or None.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampler: Sampler,
        max_hidden_tokens: int,
        sides: Mapping[str, PrefillSide],
        reusing: Sequence[RingSide],
        stores: PromptStores,
        head: DraftHead | None = None,
    ) -> None:
        self.max_hidden_tokens = max_hidden_tokens
        self.decoder = decoder
        self.sampler = sampler
        self.device = decoder.pool.device
        self.gathered = GatheredKv(decoder.pool, decoder.architecture.num_kv_heads, decoder.architecture.dim)
        tier, row_transfer = stores.tier, stores.row_transfer
        self.staging = (
            Staging(decoder.pool, tier, row_transfer) if tier is not None and row_transfer is not None else None
        )
        pool = decoder.pool
        self._documents = stores.documents
        self._disk = stores.disk
        self._head = head
        self.windows = WindowPrefill(pool, decoder.scale) if pool.windows.shape.layers else None
        self.attention = UnitAttention(decoder, self.gathered, sides, reusing)
        self._graphs = LayerGraphs(decoder)
        self._jobs: dict[int, JobState] = {}
        self._chunk_jobs: dict[int, tuple[PrefillJob, ChunkJob]] = {}
        self._failures: dict[int, str] = {}
        self._row_sizes: tuple[int, ...] = ()

    def use_row_sizes(self, sizes: Sequence[int]) -> None:
        """Pad the last tokens of prompts to these numbers of rows from now on. They are those of captured decode steps.

        Compiles the product that takes attention's output in another dtype than decode steps do.
        """
        self._row_sizes = tuple(sizes)
        last = self.decoder.architecture.main_layers - 1
        if self.decoder.specs[last].recurrent is None and self.decoder.specs[last].has_mixer:
            self.decoder.warm_up_output(last, sizes)

    def drop_graphs(self) -> None:
        """Free all captured layers."""
        self._graphs.drop()

    def add(self, job: PrefillJob) -> None:
        """Add a job: assign its prompts' sampling options, and reserve host memory for an offloaded prompt.

        If host memory is refused, the slot fails (`take_failures`) and the job's units do nothing. Raises ValueError
        for a prompt that has no token to compute, for more hidden states than `max_hidden_tokens`, and for an offloaded
        prompt that is not alone in its job or comes while another one is under way.
        """
        under_way = sum(state.job.num_tokens for state in self._jobs.values())
        under_way += sum(state.num_tokens for _, state in self._chunk_jobs.values())
        if under_way + job.num_tokens > self.max_hidden_tokens:
            raise ValueError(
                f"prefill: a job of {job.num_tokens} tokens beside {under_way} under way; wanted at most "
                f"{self.max_hidden_tokens} together"
            )
        if job.is_of_chunks:
            keys = [prompt.capture for prompt in job.prompts if prompt.capture is not None]
            state_of_chunks = self._chunk_job([prompt.token_ids for prompt in job.prompts], keys)
            self._chunk_jobs[job.job_id] = job, state_of_chunks
            return
        self._check_host(job)
        for prompt in job.prompts:
            if prompt.num_computed_tokens <= 0:
                raise ValueError(
                    f"prefill: slot {prompt.slot}: begin is {prompt.begin}; wanted less than {len(prompt.token_ids)}"
                )
            if self.decoder.adapters is not None:
                self.decoder.adapters.assign(prompt.slot, prompt.adapter)
            self.sampler.assign(
                prompt.slot,
                prompt.sampling,
                prompt.token_ids[: prompt.num_prompt_tokens],
                prompt.token_ids[prompt.num_prompt_tokens :],
            )
        state = pack_job(job, self.device)
        fused = state.fused = self._fuse(job.prompts[0]) if job.fused is not None else None
        self._jobs[job.job_id] = state
        if fused is not None and not fused.chooses:
            state.narrow(fused.choose_none())
        if self.staging is not None and job.prompts[0].host is not None:
            try:
                state.staged = StagedPrompt(self.staging, job.prompts[0])
            except HostMemoryError as error:
                self._fail(state, error)
        if job.prompts[0].disk is not None and not state.has_failed:
            assert self._disk is not None, "prefill: a prompt's front is on disk, but no disk is set up"
            state.load = PrefixLoad(self._disk, job.prompts[0].disk, state.staged)

    def drop(self, job_id: int) -> None:
        """Drop a job, finished or not, and free all that it holds. Does nothing if there is no such job."""
        self._chunk_jobs.pop(job_id, None)
        state = self._jobs.pop(job_id, None)
        if state is not None and state.fused is not None:
            state.fused.close()
        if state is not None and state.load is not None:
            state.load.close()
        self.gathered.forget()

    def cut(self, slot: int) -> None:
        """Remove a slot's prompt from the job that computes it, if there is one; the job's other prompts go on."""
        for job_id, state in self._jobs.items():
            if any(prompt.slot == slot for prompt in state.job.prompts):
                if len(state.job.prompts) == 1:
                    self.drop(job_id)
                else:
                    state.cut(slot)
                    self.gathered.forget()
                return

    def take_failures(self) -> dict[int, str]:
        """Return the slots that failed since the last call, with the reason. Their jobs draw no token for them."""
        failures, self._failures = self._failures, {}
        return failures

    @property
    def num_jobs(self) -> int:
        return len(self._jobs) + len(self._chunk_jobs)

    def is_loaded(self, job_id: int, layer: int) -> bool:
        """Return whether a unit that begins this layer waits for no document chunk from disk, as far as is known."""
        state = self._jobs.get(job_id)
        return state is None or state.fused is None or state.fused.is_loaded(layer)

    def is_read(self, job_id: int, layer: int) -> bool:
        """Return whether a unit may begin this layer of a job whose prompt has its front on disk."""
        state = self._jobs.get(job_id)
        return state is not None and (state.has_failed or (state.load is not None and state.load.is_loaded(layer)))

    def lost_jobs(self) -> list[int]:
        """Return the jobs under way whose fronts turned out to be missing on disk. No unit of them can be computed."""
        return [job_id for job_id, state in self._jobs.items() if state.load is not None and state.load.is_lost]

    def run(self, unit: Unit, draws: bool = True) -> FinishedJob | None:
        """Compute one unit.

        The unit that ends the job also draws the first tokens if `draws` is set, and returns the result.
        """
        if unit.job_id in self._chunk_jobs:
            self._compute_chunks(unit)
            return None
        state = self._jobs[unit.job_id]
        if not state.has_failed:
            try:
                if isinstance(unit, LogitsUnit):
                    score_tokens(self.decoder, state, unit)
                else:
                    self._compute(state, unit)
            except HostMemoryError as error:
                self._fail(state, error)
        if not ends_with(state.job, unit, self.decoder.architecture.main_layers):
            return None
        if self._head is not None and state.hidden is not None:
            self._head.fill(state.hidden, state.token_ids, state.positions, state.slots, state.offsets)
        finished = None if state.has_failed else finish_job(self.decoder, state, self._row_sizes)
        if finished is not None and draws:
            finished.drawing.draw(self.sampler)
        self.drop(unit.job_id)
        return finished

    def _compute(self, state: JobState, unit: PrefillUnit) -> None:
        """Compute a unit. Raises HostMemoryError if host memory has no room, or cannot return rows."""
        if state.hidden is None:
            state.hidden = self.decoder.embed(state.token_ids)
        staged = state.staged
        place = staged.place(unit.layer) if staged is not None else None
        if staged is not None and place is not None and unit.begin == 0:
            staged.begin_layer(place)
        if state.load is not None and unit.begin == 0:
            state.load.begin_layer(unit.layer)
        pages = staged.staging.pages(place) if staged is not None and place is not None else None
        if unit.begin == 0:
            self._begin_fused_layer(state, unit.layer, pages)
        chunk = slice(unit.begin, unit.end)
        kept = {layer: rows[chunk] for layer, rows in state.kept.items()}
        carried = self.decoder.carry_to(unit.layer, state.token_ids[chunk], state.positions[chunk], kept)
        if not self.decoder.specs[unit.layer].has_mixer:
            state.put(chunk, self.decoder.mlp(unit.layer, state.hidden[chunk], state.slots[chunk], None, carried))
            return
        if self.decoder.specs[unit.layer].recurrent is not None:
            state.put(chunk, self._compute_recurrent(state, unit.layer, chunk, carried))
            return
        if self.windows is not None and unit.layer in self.decoder.pool.windows.shape.layers:
            computed = self._compute_windowed(self.windows, state, unit.layer, chunk, carried)
            state.put(chunk, computed)
            state.keep(unit.layer, chunk, carried)
            return
        self._compute_attending(state, unit, pages, carried)
        state.keep(unit.layer, chunk, carried)
        if staged is not None and place is not None and unit.end == state.offsets[-1]:
            staged.end_layer(place)
            if state.load is not None:
                state.load.end_layer(unit.layer)

    def _compute_attending(self, state: JobState, unit: PrefillUnit, pages: Pages | None, carried: Carried) -> None:
        """Compute a unit of a layer whose rows are in pages or staging.

        The last layer writes the keys and values of all tokens. If only the results of the prompts' last tokens are
        read, it computes attention and everything after it for these tokens alone.
        """
        assert state.hidden is not None, "prefill: the job's tokens are embedded"
        chunk, ends = slice(unit.begin, unit.end), self._ends(state, unit, pages)
        parts = state.parts(unit.begin, unit.end) if ends is None else ends

        def attend(query: Tensor, pre_rope_query: Tensor) -> Attended:
            return self.attention.attend(state, unit, parts, query, pre_rope_query)

        if ends is None:
            state.put(chunk, self._layer(state, unit.layer, chunk, attend, pages, None, carried))
            return
        count = len(ends)
        wanted = upload(pad_indices([part.begin for part in ends], self._row_sizes), self.device)

        def attend_padded(query: Tensor, pre_rope_query: Tensor) -> Attended:
            made = attend(query[:count], pre_rope_query[:count])
            lse = None if made.lse is None else pad_rows(made.lse, len(wanted))
            return Attended(pad_rows(made.out, len(wanted)), lse)

        hidden, positions, slots = state.hidden[chunk], state.positions[chunk], state.slots[chunk]
        rows = self.decoder.layer(
            unit.layer, hidden, positions, slots, attend_padded, Target(pages), carried, wanted - unit.begin
        )  # fmt: skip
        state.put_rows(wanted[:count], rows[:count])

    def _ends(self, state: JobState, unit: PrefillUnit, pages: Pages | None) -> list[PromptPart] | None:
        """Return the last token of each prompt that ends in the unit, if the layer's results are read for these tokens
        alone.

        Return None if the results of other tokens are read, or if a captured layer computes the unit.
        """
        is_last = unit.layer == self.decoder.architecture.main_layers - 1
        if not is_last or unit.method != DENSE or self._head is not None or not state.is_read_at_ends:
            return None
        if self._graphs.covers(unit.layer, unit.end - unit.begin, pages):
            return None
        is_seen = any(self.attention.sees(prompt.slot) for prompt in state.job.prompts)
        return None if is_seen else state.ends(unit.begin, unit.end)

    def _compute_recurrent(self, state: JobState, layer: int, chunk: slice, carried: Carried) -> Tensor:
        """Return the hidden states of a prefill chunk after a recurrent layer."""
        delta = self.decoder.delta
        assert delta is not None, "prefill: a recurrent layer has states"
        assert state.hidden is not None, "prefill: the job's tokens are embedded"
        parts = [
            StatePart(
                delta.states.numbers[part.prompt.slot], part.begin - chunk.start, part.end - chunk.start, part.past,
                part.prompt.branches,
            )
            for part in state.parts(chunk.start, chunk.stop)
        ]  # fmt: skip
        hidden, slots = state.hidden[chunk], state.slots[chunk]
        if state.fused is None and self._graphs.covers(layer, len(slots), None):
            return self._graphs.run_recurrent(layer, hidden, slots, parts)
        made = delta.prefill(layer, hidden, parts)
        return self.decoder.leave(layer, hidden, made, None, slots, carried=carried)

    def _compute_windowed(
        self, windows: WindowPrefill, state: JobState, layer: int, chunk: slice, carried: Carried
    ) -> Tensor:
        """Return the hidden states of a prefill chunk after a layer whose window is stored outside of pages."""
        assert state.hidden is not None, "prefill: the job's tokens are embedded"
        slots, window = state.slots[chunk], self.decoder.specs[layer].window_tokens
        assert window is not None, "prefill: a layer whose rows are not in pages has a window"
        if state.windowed is None or state.windowed[0] != chunk:
            parts = [
                UnitPart(
                    part.prompt.slot,
                    part.begin - chunk.start,
                    part.end - chunk.start,
                    part.context,
                    part.prompt.branches[0] if part.prompt.branches else None,
                )
                for part in state.parts(chunk.start, chunk.stop)
            ]
            state.windowed = chunk, WindowedUnit(self.decoder.pool, parts, state.positions[chunk], slots)
        unit = state.windowed[1]
        pages, cells = windows.pages(len(slots)), windows.cells(len(slots))
        hidden = self._layer(
            state, layer, chunk, lambda query, _: windows.attend(unit, layer, window, query), pages, cells, carried
        )
        windows.keep(unit, layer)
        return hidden

    def _layer(self, state: JobState, layer: int, chunk: slice, attend: Attend, pages: Pages | None,
               cells: Tensor | None, carried: Carried) -> Tensor:  # fmt: skip
        """Return the hidden states of a prefill chunk after a layer, by a CUDA graph if one covers it, else eagerly."""
        assert state.hidden is not None, "prefill: the job's tokens are embedded"
        hidden, positions, slots = state.hidden[chunk], state.positions[chunk], state.slots[chunk]
        if state.fused is None and self._graphs.covers(layer, len(slots), pages):
            return self._graphs.run(layer, hidden, positions, slots, attend, cells)
        return self.decoder.layer(layer, hidden, positions, slots, attend, Target(pages, cells), carried)

    def capture(self, sizes: Sequence[int], seconds: Callable[[int], float]) -> None:
        """Capture layers for units of up to these numbers of tokens as CUDA graphs, where graphs are faster.

        seconds: returns the time that a prompt of so many tokens takes.
        """
        windows, windowed = self.windows, self.decoder.pool.windows.shape.layers

        def pages_of(layer: int) -> Pages | None:
            return windows.pages(max(sizes)) if windows is not None and layer in windowed else None

        self._graphs.capture(sizes, pages_of, seconds)

    def warm_up_chunks(self) -> None:
        """Compile the kernels for prompts with document chunks, so that no prompt waits for them.

        Runs on zeros, for no slot.
        """
        if self._documents is None:
            return
        shape, pool = self._documents.shape, self.decoder.pool
        rows = torch.zeros(1, 2, shape.num_kv_heads, shape.dim, dtype=pool.dtype, device=self.device)
        read_rows(store_rows(rows[:, 0], shape), rows[:, 1], shape)
        at = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.decoder.place(0, rows, at, at.int() - 1, None)
        keys, values = (side.flatten(1, 2)[:, :1].zero_() for side in (self.gathered.keys, self.gathered.values))
        query = rows.new_zeros(1, self.decoder.architecture.num_heads, shape.dim)
        for window in {spec.window_tokens for spec in self.decoder.specs}:
            scattered_attention(query, keys, values, at, self.decoder.scale, window)

    def _compute_chunks(self, unit: Unit) -> None:
        """Compute a unit of a job of document chunks, and store the chunks after the last one."""
        job, state = self._chunk_jobs[unit.job_id]
        assert isinstance(unit, PrefillUnit), "prefill: document chunks are not scored"
        state.compute(unit.layer, unit.begin, unit.end)
        if ends_with(job, unit, self.decoder.architecture.main_layers):
            state.finish()
            self.drop(unit.job_id)

    def _chunk_job(self, token_ids: list[np.ndarray], keys: list[ChunkKey]) -> ChunkJob:
        assert self._documents is not None, "prefill: the plan has document chunks, but there is no library"
        return ChunkJob(token_ids, keys, self.decoder, self._documents, self.attention.sides[DENSE].attend)

    def _fuse(self, prompt: PrefillPrompt) -> FusedPrompt:
        """Begin a prompt of stored document chunks. A chunk that was lost is computed while the prompt waits."""
        assert self._documents is not None, "prefill: the plan has document chunks, but there is no library"
        assert prompt.fused is not None
        chunks = prompt.fused.chunks

        def compute(number: int) -> list[np.ndarray]:
            chunk = chunks[number]
            job = self._chunk_job([prompt.token_ids[chunk.begin : chunk.end]], [chunk.key])
            job.compute_all(LOST_CHUNK_TOKENS)
            (layers,) = job.finish_now()
            return layers

        return FusedPrompt(prompt, self.decoder, self._documents, compute)

    def _begin_fused_layer(self, state: JobState, layer: int, pages: Pages | None) -> None:
        """Write the rows of stored chunks to the layer.

        In the selection layer, keep only the tokens that are computed again.
        """
        fused, hidden = state.fused, state.hidden
        if fused is None or hidden is None:
            return
        fused.begin_layer(layer, pages)
        if fused.chooses and layer == fused.plan.select_layer:

            def keys_of() -> Tensor:
                return self.attention.whole(state, layer)[0]

            state.narrow(fused.look(hidden, state.positions, state.slots, pages, LOOK_TOKENS, keys_of))

    def _check_host(self, job: PrefillJob) -> None:
        """Raise ValueError if an offloaded prompt of the job is not alone, or has no host tier to go to."""
        offloaded = [prompt.slot for prompt in job.prompts if prompt.host is not None]
        if not offloaded:
            return
        if self.staging is None:
            raise ValueError(f"prefill: slot {offloaded[0]} is to be offloaded; this runner has no host tier")
        if len(job.prompts) > 1 or any(state.staged is not None for state in self._jobs.values()):
            raise ValueError(
                f"prefill: slot {offloaded[0]} is to be offloaded beside others; wanted alone in its job, and no "
                "other such job under way"
            )

    def _fail(self, state: JobState, error: HostMemoryError) -> None:
        """Mark a job as failed, and free its hidden states and staging."""
        state.has_failed, state.hidden, state.staged = True, None, None
        self._failures[state.job.prompts[0].slot] = str(error)
