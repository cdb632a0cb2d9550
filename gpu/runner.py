"""Carry out step plans on one device, in order, without waiting for it or for the CPU's answers.

Everything a plan asks for is launched on one stream, so a later plan may release a slot, reuse its pages or decode its
next token while an earlier step is still in flight. A sequence fails alone if its logits are not finite, if the host
has no memory for it, or if the CPU does not answer its decode step. It gets token -1.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from gpu.batching.capture import graph_seconds
from gpu.batching.halving import Halving, most_rows_of_parts
from gpu.batching.step_reads import StepReads
from gpu.decode.followers import Followers
from gpu.decode.groups import host_reads_of, slots_over, without_slots
from gpu.decode.link_reads import open_link
from gpu.decode.loop import LayerLoop
from gpu.decode.steps import Batch, DecodeSteps, HostReader, HostReadTimes, LaunchedStep
from gpu.decode.workspaces import open_workspaces
from gpu.disk.block_writer import BlockWriter
from gpu.disk.disk_copies import DiskCopies
from gpu.exchange.device_experts import ExpertExchange
from gpu.exchange.device_slots import SlotExchange
from gpu.fusion.chunk_copies import Documents
from gpu.host.footprint import slot_shape
from gpu.host.offloader import Offloader
from gpu.host.row_transfer import RowTransfer
from gpu.in_flight import Awaited, InFlight, Timer, is_decoded
from gpu.kv.commitment import Commitment
from gpu.kv.pool import KvPool, PoolShape
from gpu.lanes import LaneStreams, StepBuffers
from gpu.layers.adapters import Adapters
from gpu.layers.computed_experts import open_exchanges
from gpu.layers.decoder import Decoder
from gpu.layers.draft_head import DraftHead
from gpu.methods.counters import Counts
from gpu.methods.device_side import RingSide, Site, make_device_sides
from gpu.methods.prefill_side import make_prefill_sides
from gpu.model.architecture import Architecture
from gpu.operations.kv.kv_rows import stored_dtype
from gpu.prefill.dense import Dense
from gpu.prefill.jobs import Prefill, PromptStores
from gpu.prefill.outputs import FinishedJob
from gpu.rehearsal import Limits, Rehearsal
from gpu.runner_settings import RunnerSettings
from gpu.sampling.sampler import NO_MASKS, Drawing, Masks, Sampler
from gpu.step import (
    DENSE,
    Collected,
    DecodeGroup,
    FinishedReload,
    HostRead,
    Lane,
    Offload,
    PartId,
    StepPlan,
    StepResult,
    Unit,
)
from gpu.upload import upload
from gpu.weights.weights import Progress, Weights
from transfer.allocation import dtype_name
from transfer.copies import Streams
from transfer.exchange import ExchangeError
from transfer.expert_exchange import ExpertCounts
from transfer.host_tier import ContextLostError, ContextRead, HostMemoryError, HostTier


@dataclass(frozen=True, slots=True)
class ExpertMoves:
    """Counts of uses of experts in host memory since the start: fetched one by one, copied with their whole layer, or
    computed by the CPU. An expert counts once in each layer of a step or a prefill unit.
    """

    fetched: int
    copied: int
    computed: int


def _make_pool(architecture: Architecture, settings: RunnerSettings) -> KvPool:
    """Return the KV pages of a model; layers that are not offloaded are dense."""
    offloaded = range(architecture.num_layers) if settings.tier is None else settings.tier.shape.layers
    shape = PoolShape(
        settings.num_pages,
        [layer for layer in range(architecture.num_layers) if layer not in offloaded],
        settings.page_tokens,
        settings.max_running,
        settings.max_context_tokens,
        settings.dtype,
        settings.windows,
        settings.kv,
        settings.num_states,
        settings.state_dtype,
        settings.num_host_states,
    )
    return KvPool(architecture, shape, settings.device)


def _make_host_reader(
    served: Architecture, settings: RunnerSettings, tier: HostTier, reads: StepReads, times: HostReadTimes
) -> HostReader:
    """Return the reader that asks the tier for attention of decode steps, with an exchange for each part of a step."""
    excludes = any(part.method.excludes_blocks for part in settings.parts)
    slot = slot_shape(served, tier.shape.num_tables, dtype_name(settings.dtype), excludes, settings.checks_coverage)
    exchanges = [SlotExchange(rows, slot, settings.device) for rows in most_rows_of_parts(settings.max_running)]
    is_whole = settings.device.type == "cpu" or settings.ranks is not None
    always = 1 if is_whole else None  # the CPU computes both sides; or all ranks must cut steps alike
    return HostReader(tier, exchanges, Halving(reads, always), times)


class Runner:
    """One model on one device. Not thread-safe: one thread launches steps, and may collect them later.

    host_read_times: times summed over all steps with host reads.
    """

    def __init__(self, architecture: Architecture, weights: Weights, settings: RunnerSettings) -> None:
        device, dtype, tier, parts = settings.device, settings.dtype, settings.tier, settings.parts
        max_running, context = settings.max_running, settings.max_context_tokens
        self.architecture = architecture
        self._ranks = settings.ranks
        self._tell: Callable[[StepPlan | dict[int, np.ndarray] | Collected], None] = lambda message: None
        self._num_launched = 0
        served = replace(architecture, max_context_tokens=context)  # methods keep no more than the longest context
        kv = settings.kv or dtype_name(dtype)
        self.weights = weights
        self.device = device
        self.limits = Limits(settings.num_pages, settings.page_tokens, context, max_running, architecture.vocab_size)
        self.pool = _make_pool(architecture, settings)
        adapters = None
        if settings.adapters:
            adapters = Adapters(settings.adapters, architecture, max_running, dtype, device)
        decoder = Decoder(architecture, weights, self.pool, context, adapters, settings.ranks)
        self._delta = decoder.delta
        head = None if weights.draft is None else DraftHead(decoder, weights.draft)
        self._lanes = LaneStreams(device)
        self._sampler = Sampler(max_running, architecture.vocab_size, device)
        shape = None if tier is None else tier.shape
        site = Site(
            served, shape, settings.sink_tokens, max_running, dtype, stored_dtype(kv), device,
            settings.window_tokens,
            [(*own, self.pool.table_of(layer))
             for layer, own in enumerate(zip(self.pool.key_pages, self.pool.value_pages, strict=True))],
        )  # fmt: skip
        self._method_sides = make_device_sides(parts, site, settings.num_rings, settings.ring_pages)
        methods = tuple(self._method_sides.values())
        self._reusing = {name: side for name, side in self._method_sides.items() if isinstance(side, RingSide)}
        self._telling = [self._reusing[part.id] for part in parts if part.method.figures]
        encoders = [method.encode_keys for method in methods if method.makes_codes]
        assert len(encoders) <= 1, "runner: two methods make codes of keys, and the tier has one kind of table"
        encode_keys = encoders[0] if encoders else None
        row_transfer = None if tier is None else RowTransfer(tier.shape, encode_keys, device, Streams(device))
        self.dense = Dense()
        self._sides = make_prefill_sides(parts, site, self.dense)
        prefill_sides = {DENSE: self.dense, **self._sides}
        self._documents = None if settings.library is None else Documents(settings.library, device)
        copies = None if settings.disk is None else DiskCopies(self.pool, settings.disk, Streams(device))
        self._block_writer = None if copies is None else BlockWriter(copies, tier)
        stores = PromptStores(tier, row_transfer, self._documents, copies)
        reusing = tuple(self._reusing.values())
        self._prefill = Prefill(
            decoder, self._sampler, settings.max_hidden_tokens, prefill_sides, reusing, stores, head
        )
        self._last_tokens = torch.zeros(3 * max_running + 1, dtype=torch.int64, device=device)
        workspaces = open_workspaces(
            architecture, max_running, context, device, has_rings=bool(self._reusing), has_tier=tier is not None
        )
        self._failures: dict[int, str] = {}  # slots that cannot go on, until they are released
        self._last: InFlight | None = None
        self._buffers = StepBuffers()
        self._offloader: Offloader | None = None
        self.host_read_times = HostReadTimes()
        offloaded_layers = () if tier is None else tuple(tier.shape.layers)
        self.reads = StepReads(architecture, dtype.itemsize, weights.is_packed, kv, len(offloaded_layers))
        host_reader, link = None, None
        if tier is not None and row_transfer is not None:
            link = open_link(tier, settings.link_share, decoder.scale, dtype, device)
            assert self._prefill.staging is not None
            self._offloader = Offloader(tier, row_transfer, self.pool, self._prefill.gathered, self._prefill.staging)
            host_reader = _make_host_reader(served, settings, tier, self.reads, self.host_read_times)
        loop = LayerLoop(
            decoder,
            offloaded_layers,
            self._last_tokens,
            workspaces,
            methods,
            settings.checks_coverage,
            link,
            head,
        )
        self._staged = decoder.projections.staged
        experts: list[ExpertExchange] = []
        if settings.open_experts is not None:
            num_lanes = 2 if host_reader is not None and device.type == "cuda" else 1
            most = min(max_running, settings.computed_rows)
            experts = open_exchanges(weights, architecture, most, device, settings.open_experts, num_lanes)
        self._experts = experts
        self.decode_steps = DecodeSteps(
            loop, host_reader, self._lanes.stream(Lane.HOST), experts, settings.compile_settings, settings.turns
        )
        self._followers = Followers(
            self._step, self._sampler, self._last_tokens, [*self._reusing.values()], self.decode_steps.draft
        )

    @property
    def rehearsal(self) -> Rehearsal:
        """Return the rehearsal, which warms the runner up and times prompts. Use it while nothing is in flight."""
        tier = None if self._offloader is None else self._offloader.tier
        return Rehearsal(
            self.launch, self.limits, self.architecture, self.pool, self._prefill, self.dense, self._sides,
            [*self._reusing], tier, self.device.type == "cuda", self._ranks,
        )  # fmt: skip

    @property
    def ring_sides(self) -> dict[PartId, RingSide]:
        """Return the sides of methods with rings, by part."""
        return self._reusing

    @property
    def page_memory(self) -> Commitment | None:
        """Return how memory of KV pages is committed. None on a GPU: all is, since graphs hold the addresses."""
        return self.pool.commitment if self.device.type == "cpu" else None

    @property
    def window_memory(self) -> Commitment | None:
        """Return how memory of windows or states is committed, as `page_memory` does for pages."""
        held = self.pool.windows if self.pool.states is None else self.pool.states
        return held.commitment if self.device.type == "cpu" else None

    @property
    def num_prefill_jobs(self) -> int:
        return self._prefill.num_jobs

    @property
    def most_rows(self) -> int:
        """Return up to how many rows a decode step with runs may grow at little cost."""
        return self.decode_steps.most_rows

    def is_ready(self, host_read: HostRead) -> bool:
        """Return whether the host would answer a read at once, given the plans launched so far."""
        assert self._offloader is not None, "runner: a row reads the host, but there is no tier"
        return self._offloader.tier.is_ready(ContextRead(host_read.context_id, host_read.end - host_read.begin))

    def is_loaded(self, job_id: int, layer: int) -> bool:
        """Return whether a unit could begin this layer of the job without waiting for the disk."""
        return self._prefill.is_loaded(job_id, layer)

    def is_read(self, job_id: int, layer: int) -> bool:
        """Return whether a unit may begin this layer of a job whose prefix is loaded from disk."""
        return self._prefill.is_read(job_id, layer)

    def lost_jobs(self) -> list[int]:
        """Return the prefill jobs whose prefix turned out not to be on disk."""
        return self._prefill.lost_jobs()

    @property
    def num_savable(self) -> int:
        """Return how many blocks a plan may save to disk now."""
        return 0 if self._block_writer is None else self._block_writer.num_free

    @torch.inference_mode()
    def feed(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """Make known tokens the next input of slots, in place of the tokens that were drawn for them last."""
        with self._lanes.enter(Lane.DEVICE, is_fenced=False):
            places = upload(np.array([slots, token_ids], np.int64), self.device)
            self._last_tokens.index_copy_(0, places[0], places[1])

    def first_own_token(self, prefill_method: PartId) -> int | None:
        """Return where a method's first unit of its own begins; earlier tokens use dense prefill. None for DENSE."""
        side = self._sides.get(prefill_method)
        return None if side is None else side.first_own_token()

    def method_counts(self) -> dict[PartId, Counts]:
        """Return what methods counted in decode steps, by part. It does not wait for the device."""
        return {part: side.counts() for part, side in self._method_sides.items()}

    def request_figures(self, slots: Collection[int]) -> dict[int, dict[str, int]]:
        """Return what methods report about the requests in these slots, by slot. It does not wait for the device."""
        figures: dict[int, dict[str, int]] = {}
        for side in self._telling:
            for slot in slots:
                if slot in side.held:
                    figures.setdefault(slot, {}).update(side.figures_of(slot))
        return figures

    def expert_counts(self) -> ExpertMoves | None:
        """Return how experts in host memory were used; None if all are on the device. It does not wait."""
        if self._staged is None:
            return None
        computed = sum(counts.experts for counts in self.computed_counts())
        return ExpertMoves(self._staged.num_fetched, self._staged.num_copied, computed)

    def computed_counts(self) -> list[ExpertCounts]:
        """Return the counts of experts that the CPU computed, by lane."""
        return [one.worker.counts for one in self._experts]

    @torch.inference_mode()
    def capture(self, batch_sizes: Sequence[int], on_progress: Progress) -> None:
        """Choose tiles for decode steps' matrix products, and capture decode steps of all kinds as CUDA graphs. Does
        nothing on the CPU.
        """
        if self.device.type == "cuda":
            seconds = partial(graph_seconds, on=torch.cuda.Stream())
            self._prefill.decoder.projections.choose_tiles(batch_sizes, seconds)
            torch.cuda.empty_cache()  # what was timed is not in the plan
            self.decode_steps.capture(batch_sizes, on_progress)
            self._prefill.use_row_sizes(sorted({min(size, self.limits.max_running) for size in batch_sizes}))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlight:
        """Launch a step in its lane, in the plan's field order. On the CPU it has run when this returns.

        On CUDA another thread answers its host reads; only a step without a captured graph is launched layer by layer,
        each layer after the answers before it. A step with masked slots is launched without its draws. Call `draw` for
        it before anything else is launched in its lane, and before any plan that is fenced or releases slots.
        """
        self._num_launched += 1
        self._tell(plan)
        if plan.lane is Lane.HOST and self._offloader is not None:
            self._offloader.tier.leave_core(self._lanes.is_busy(Lane.DEVICE))
        with self._lanes.enter(plan.lane, plan.is_fenced):
            return self._launch(plan)

    @torch.inference_mode()
    def draw(self, step: InFlight, masks: Masks) -> None:
        """Draw for a step that was launched without draws, and may still run on CUDA. Slots without a mask draw from
        all tokens. The masks may be changed once this returns.
        """
        self._tell(dict(masks))
        with self._lanes.enter(step.lane, is_fenced=False):
            for drawing in step.drawings:
                self._draw(drawing, masks)
            step.end()

    def drafted(self, step: InFlight) -> dict[int, list[int]]:
        """Return the tokens that the device drafted for a step, by slot. Waits for all work launched in its lane."""
        with self._lanes.enter(step.lane, is_fenced=False):
            return step.drafted()

    def lead(self, tell: Callable[[StepPlan | dict[int, np.ndarray] | Collected], None]) -> None:
        """Lead the other ranks: from now on call `tell` with each launched plan, the masks of its draws, and the tokens
        of each collected step. The other ranks carry out the same plans and compare the tokens.
        """
        self._tell, self._num_launched = tell, 0

    def _tell_collected(self, number: int, result: StepResult) -> None:
        tokens = tuple((one.slot, one.token_id) for one in result.tokens if one.slot not in result.failures)
        self._tell(Collected(number, tokens))

    def _check_ranks(self) -> None:
        """Raise HostMemoryError if a slot of this rank has failed: the other ranks would wait for its sums forever."""
        if self._ranks is not None and self._failures:
            where = f"rank {self._ranks.rank} of {self._ranks.count}"
            raise HostMemoryError(f"gpu.devices: {where}: {next(iter(self._failures.values()))}")

    def _launch(self, plan: StepPlan) -> InFlight:
        self._check_ranks()
        self._buffers.check(plan)
        whole = Timer(self.device)
        whole.mark(0)
        if plan.saves:
            assert self._block_writer is not None, "runner: blocks to save in a plan, but there are no contexts on disk"
            self._block_writer.save(plan.saves)
        for slot in plan.released_slots:
            self._lanes.keep(self._sampler.release(slot))
            self._failures.pop(slot, None)
            for side in self._reusing.values():
                side.release(slot)
            self._prefill.cut(slot)
        if plan.closed_contexts or plan.offloads:
            assert self._offloader is not None, "runner: host contexts in a plan, but there is no tier"
            self._offloader.close(plan.closed_contexts)
        failures = self._launch_offloads(plan.offloads) | self._finish_reloads(plan.finished_reloads)
        for eviction in plan.evictions:
            self.pool.evict(eviction)
        for fetch in plan.reloads:
            assert self._offloader is not None
            self._offloader.fetch(fetch)
        self.pool.write_pages(plan.page_writes)
        self.pool.write_windows(plan.window_writes)
        for ring_write in plan.ring_writes:
            self._reusing[ring_write.part].assign(ring_write)
            if ring_write.is_for_drafts:
                self._reusing[ring_write.part].rest(ring_write.slot)
        for growth in plan.ring_growth:
            self._reusing[growth.part].grow(growth)
        for job in plan.new_jobs:
            self._prefill.add(job)
        draws = not plan.masked_slots
        assert draws or len(plan.decode) <= 1, "runner: masked slots, and a second group whose logits take the place"
        self.dense.limits_prefill_blocks = plan.limits_prefill_blocks
        finished, units = self._launch_units(plan.units, draws)
        failures |= self._prefill.take_failures()
        self._failures |= failures
        self._check_ranks()
        decoded, awaited, decode = self._launch_decode(plan.decode, plan.lane, draws)
        stepped = [slot for group in plan.decode for slot in group.slots]
        failures |= {slot: self._failures[slot] for slot in stepped if slot in self._failures}
        step = InFlight(
            plan.lane, finished, decoded, awaited, units, decode, whole, plan.released_slots, stepped, failures,
            self._failures, None if self._ranks is None else partial(self._tell_collected, self._num_launched),
        )  # fmt: skip
        if draws:
            step.end()
        if self._last is not None:
            self._last.behind = step
        self._last = step
        self._buffers.note(plan, partial(is_decoded, awaited, decode))
        return step

    def _draw(self, drawing: Drawing, masks: Masks = NO_MASKS) -> None:
        """Draw tokens, which are the next step's input."""
        sampled = drawing.draw(self._sampler, masks)
        slots = upload(np.array(sampled.slots, dtype=np.int64), self.device)
        self._last_tokens.index_copy_(0, slots, sampled.tokens)
        if sampled.accepted is not None and self._delta is not None:
            self._delta.commit(
                slots, upload(np.array(drawing.positions, dtype=np.int64), self.device), sampled.accepted
            )

    def shutdown(self) -> None:
        """End the threads that answer host reads, load document chunks and save blocks. Collect all steps first."""
        self.decode_steps.shutdown()
        if self._documents is not None:
            self._documents.shutdown()
        if self._block_writer is not None:
            self._block_writer.shutdown()

    def drop_graphs(self) -> None:
        """Free all captured graphs. Nothing may be in flight, and nothing may be launched afterwards."""
        self.decode_steps.drop_graphs()
        self._prefill.drop_graphs()

    def _launch_offloads(self, offloads: Sequence[Offload]) -> dict[int, str]:
        """Launch offloads. Return the slots that the host has no memory for, with the reason."""
        failures: dict[int, str] = {}
        for offload in offloads:
            if offload.slot in self._failures:
                continue
            assert self._offloader is not None
            try:
                self._offloader.offload(offload)
            except HostMemoryError as error:
                failures[offload.slot] = str(error)
        return failures

    def _finish_reloads(self, reloads: Sequence[FinishedReload]) -> dict[int, str]:
        """Launch the ends of reloads. Return the slots whose rows could not be reloaded, with the reason."""
        failures: dict[int, str] = {}
        for reload in reloads:
            assert self._offloader is not None
            try:
                self._offloader.finish_reload(reload)
            except HostMemoryError as error:
                failures |= {place.slot: str(error) for place in reload.places}
        return failures

    def _launch_units(self, units: Sequence[Unit], draws: bool) -> tuple[list[FinishedJob], Timer | None]:
        if not units:
            return [], None
        timer = Timer(self.device)
        timer.mark(0)
        finished = []
        for unit in units:
            job = self._prefill.run(unit, draws=False)
            if job is not None:
                finished.append(job)
                if draws:
                    self._draw(job.drawing)
        timer.mark(1)
        return finished, timer

    def _launch_decode(
        self, groups: Sequence[DecodeGroup], lane: Lane, draws: bool
    ) -> tuple[list[Drawing], list[Awaited], Timer | None]:
        if not groups:
            return [], [], None
        timer = Timer(self.device)
        timer.mark(0)
        decoded, awaited = [], []
        for group in groups:
            reads_host = any(host_read is not None for host_read in group.host_reads or ())
            while (going_on := without_slots(group, self._failures)).slots:
                try:
                    launched, drafted = self._decode(going_on, lane, reads_host)
                except ContextLostError as error:  # nothing is launched yet: the other slots begin without this one
                    self._failures |= slots_over(going_on, error)
                    self._check_ranks()
                    continue
                except ExchangeError as error:  # the group's keys and values of this token are invalid
                    self._failures |= dict.fromkeys(going_on.slots, str(error))
                    self._check_ranks()
                    break
                awaited += [Awaited(answers, going_on.slots) for answers in launched.answers]
                decoded.append(
                    Drawing(
                        launched.logits,
                        going_on.slots,
                        going_on.samples,
                        going_on.runs,
                        going_on.drafts,
                        drafted,
                        going_on.positions,
                    )
                )
                if draws:
                    self._draw(decoded[-1])
                break
        timer.mark(1)
        return decoded, awaited, timer

    def _decode(self, group: DecodeGroup, lane: Lane, reads_host: bool) -> tuple[LaunchedStep, torch.Tensor | None]:
        """Launch a decode group. Return the launched step, and the tokens that the device drafted for it, or None.

        reads_host: whether any row of the plan had a host read, even if its slot has failed since. It decides which
        buffers the step uses, and the other lane's step relies on that.

        Raises ContextLostError, and ExchangeError if the device sends no request for a step without a graph.
        """
        reads = host_reads_of(group)
        reuses = any(side.takes_part(group.slots, group.positions, reads) for side in self._reusing.values())
        batch = Batch(group.slots, group.positions, reads, reuses, has_host_reads=reads_host)
        if group.runs is None and group.drafts is None:
            return self._step(batch), None
        first = self.limits.max_running * (1 if lane is Lane.DEVICE else 2)  # each lane has input tokens of its own
        whole = self._followers.add_rows(batch, group, first)
        steps, drafted = self._followers.draft(batch, whole, group)
        steps.append(self._step(whole))
        return LaunchedStep(steps[-1].logits, tuple(one for step in steps for one in step.answers)), drafted

    def _step(self, batch: Batch) -> LaunchedStep:
        launched = self.decode_steps.run(batch)
        if self._staged is not None:
            self._staged.end_step()
        return launched
