"""Plan the next engine step: which rows draw, which prefill units run, and which data moves meanwhile.

Plans may be made one step ahead of results. Draws in flight are counted. Freed pages may be handed out at once, since
the device works in plan order. Invariant: a row that draws has a page for its input token.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, repeat

import numpy as np

from gpu.batching.step_reads import StepReads
from gpu.model.architecture import Architecture
from gpu.profiles import Profile
from gpu.step import (
    DecodeGroup,
    Lane,
    PageEviction,
    PageWrite,
    PartId,
    PrefillJob,
    PrefillUnit,
    Reload,
    RingGrowth,
    SavedBlock,
    StepPlan,
    StepResult,
    Unit,
)
from scheduler.admission.admission import Admission
from scheduler.admission.intake import Intake
from scheduler.admission.roster import Roster
from scheduler.cache.page_pool import Memory
from scheduler.cache.ring_pool import Rings
from scheduler.constraints.constraints import Constraints, refuse_grammars
from scheduler.engine_config import SchedulerConfig
from scheduler.messages import Delta, ExpertStats, HostStats, Progress, Stats
from scheduler.prefill.cost_model import CostModel
from scheduler.prefill.document_chunks import Documents
from scheduler.prefill.job_in_progress import JobInProgress
from scheduler.prefill.prefill_queue import PrefillQueue
from scheduler.residence.disk_contexts import DiskSide
from scheduler.residence.residence import Residence
from scheduler.sequences.capacity import Capacity
from scheduler.sequences.lane_fences import Lanes, rows_of
from scheduler.sequences.sequence import Sequence, State
from scheduler.steps.drafts import Drafts
from scheduler.steps.drawing_rows import IsReady, KnownTokens, LateRows, Row, TokenGap
from scheduler.steps.grouping import Grouping, Load
from scheduler.steps.launched_plan import LaunchedPlan, OffloadedRun
from scheduler.steps.results import Results, make_failure, make_progress

NO_MEMORY = "KV pages: the host has no memory left for this request; try again later, or lower gpu.kv_cache_gib"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Device:
    """The device that steps are planned for.

    lanes: the lanes of the device.
    most_rows: of a step with forced or drafted tokens; None: `max_running`.
    reads: the bytes that decode steps read; None: of unpacked weights, and rows with two bytes a number.
    page_memory, window_memory: allocate pages and windows on demand; None: all are allocated.
    quiet_step_seconds: while no stream runs, a step has at least so many seconds of prefill units.
    """

    lanes: tuple[Lane, ...] = (Lane.DEVICE,)
    most_rows: int | None = None
    reads: StepReads | None = None
    page_memory: Memory | None = None
    window_memory: Memory | None = None
    quiet_step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Sources:
    """Optional parts of an engine. documents: stored document chunks; None: prompts are computed whole. constraints:
    masks of draws; None: the engine has no grammars. disk: contexts on disk; None: there are none.
    """

    documents: Documents | None = None
    constraints: Constraints | None = None
    disk: DiskSide | None = None


@dataclass(slots=True)
class _Outline:
    """A step that is being planned.

    stepping: the sequences of its lane.
    rows: sequences that may draw, each with its host read. taken: the rows that do draw.
    known, drafts: by row, the forced tokens and the drafted tokens behind the input token.
    unit_contexts: the prompt tokens up to the end of each unit.
    finished: jobs whose last unit is in this step.
    """

    lane: Lane
    stepping: list[Sequence]
    page_writes: list[PageWrite] = field(default_factory=list)
    ring_growth: list[RingGrowth] = field(default_factory=list)
    offloaded: list[OffloadedRun] = field(default_factory=list)
    new_jobs: list[PrefillJob] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    unit_contexts: list[int] = field(default_factory=list)
    finished: list[JobInProgress] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    taken: list[Row] = field(default_factory=list)
    known: list[list[int]] | None = None
    drafts: list[tuple[int, ...]] | None = None

    @property
    def masked_slots(self) -> tuple[int, ...]:
        drawing = chain((one for one, _ in self.taken), *(entry.sequences for entry in self.finished))
        return tuple(one.slot for one in drawing if one.constraint is not None)


class Scheduler:
    """Holds the state of all requests of an engine, and plans its steps.

    profiles: the profiles that requests may name. model_key: names the model in prefix hashes.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        architecture: Architecture,
        capacity: Capacity,
        model_key: bytes,
        profiles: Mapping[str, Profile],
        device: Device = Device(),
        sources: Sources = Sources(),
    ) -> None:
        documents, disk = sources.documents, sources.disk
        self._profiles = profiles
        self._num_layers = architecture.num_layers
        self._costs = CostModel(architecture)
        self._prefill = PrefillQueue(config.prefill, architecture.num_layers, self._costs)
        memories = device.page_memory, device.window_memory
        self.residence = Residence(capacity, config.prefix_cache, model_key, *memories, disk, config.session_seconds)
        self.pages = self.residence.pages
        self.prefixes = self.residence.prefixes
        sink_tokens = capacity.host.sink_tokens if capacity.host is not None else 0
        self.rings = Rings(capacity.num_rings, capacity.page_tokens, capacity.ring_pages, sink_tokens)
        self.constraints = sources.constraints or Constraints(architecture.vocab_size, refuse_grammars)
        self.documents = documents
        if documents is not None:
            self._prefill.is_loaded = documents.is_loaded
        if disk is not None:
            self._prefill.is_read = disk.is_read
        self._admission = Admission(
            config, capacity.max_hidden_tokens, self.residence, self._prefill, self.rings, documents
        )
        self._quiet_step_seconds = device.quiet_step_seconds
        self._lanes = Lanes(device.lanes)
        self.lanes = device.lanes
        self._reads = device.reads or StepReads(architecture, 2, False, "bfloat16", architecture.num_layers)
        self._grouping = Grouping(self._reads, self._costs.decode_seconds)
        self.roster = Roster(self.residence, self.rings, self._admission, self._prefill, self._lanes, documents)
        self._refused: list[Delta] = []
        self._launched: dict[Lane, deque[LaunchedPlan]] = {lane: deque() for lane in device.lanes}
        self._gap = TokenGap(config, self._costs)
        self.late = LateRows()
        self._results = Results(self.roster, self.residence, self.constraints, self._costs)
        self.intake = Intake(capacity, profiles, self.prefixes, self.constraints, documents)
        most_rows = config.max_running if device.most_rows is None else device.most_rows
        self.jumps = KnownTokens(config, most_rows, self._costs, self.residence, self.constraints)
        self.drafts = Drafts(most_rows, self.residence, self.rings, device.lanes)

    @property
    def prefill_methods(self) -> list[PartId]:
        """List the prefill methods of the served profiles, each once."""
        return list(dict.fromkeys(profile.prefill_method for profile in self._profiles.values()))

    def learn_units(self, units: list[PrefillUnit], contexts: list[int], seconds: float) -> None:
        """Learn the time of rehearsed units. contexts[i]: prompt tokens up to the end of unit i."""
        self._costs.learn_units(units, contexts, seconds)

    @property
    def has_changes(self) -> bool:
        """Return whether the device still has to free contexts or slots of requests that have left."""
        contexts = self.residence.contexts
        return bool(self.roster.released_slots or (contexts is not None and contexts.closed))

    # --- the next step ------------------------------------------------------------------------------------------------

    def schedule(self, is_ready: IsReady, lane: Lane = Lane.DEVICE) -> StepPlan:
        """Plan the next step of a lane. The plan is empty if nothing can be launched before a result or request comes.

        is_ready: whether the host could answer a read without a wait, given the plans launched so far. A plan that is
        not empty must be launched, and its result passed to `postprocess`, in the order of its lane.
        """
        outline = _Outline(lane, self._stepping_in(lane))
        if lane is Lane.HOST and not outline.stepping:
            return StepPlan(lane)
        saves = self._save(lane)
        outline.page_writes, outline.ring_growth = self.roster.grow(outline.stepping)
        due = [] if self.residence.offloads is None else self.residence.offloads.take_due(outline.stepping)
        outline.offloaded = [OffloadedRun.of(sequence) for sequence, _ in due]
        if lane is Lane.DEVICE:
            self._admit(outline)
        self._choose_work(outline, is_ready)
        reloads = self._reload(lane, is_ready)
        outline.known, writes = self.jumps.take(outline.taken, lane, len(self.roster.running))
        outline.drafts, more = self.drafts.take(outline.taken, outline.known, lane, len(self.roster.running))
        outline.page_writes += writes + more
        evictor = self.residence.evictor
        closed, reloaded, evicted = ([], [], []) if evictor is None else evictor.take_changes()
        plan = StepPlan(
            lane=lane,
            saves=tuple(saves),
            released_slots=tuple(self.roster.take_released()) if lane is Lane.DEVICE else (),  # it hands out slots
            closed_contexts=tuple(closed),
            offloads=tuple(offload for _, offload in due),
            finished_reloads=tuple(reloaded),
            evictions=tuple(evicted),
            reloads=tuple(reloads),
            page_writes=tuple(outline.page_writes),
            ring_writes=tuple(self.rings.take_writes()),
            ring_growth=tuple(outline.ring_growth),
            window_writes=tuple(self.residence.windows.take_writes()),
            new_jobs=tuple(outline.new_jobs),
            units=tuple(outline.units),
            decode=_group(outline.taken, outline.known, outline.drafts),
            masked_slots=outline.masked_slots,
            limits_prefill_blocks=bool(outline.units) and len(self.lanes) > 1 and bool(self._stepping_in(Lane.HOST)),
        )
        if plan.is_empty:
            return plan
        plan = replace(plan, is_fenced=self._fence(plan, outline.stepping))
        self.late.count(outline.rows, outline.taken)
        self._note_launch(plan, outline)
        return plan

    def _save(self, lane: Lane) -> list[SavedBlock]:
        """Return blocks to write to disk. Restart prompts whose blocks on disk turned out to be lost."""
        disk = self.residence.disk
        if disk.side is None or lane is not Lane.DEVICE:
            return []
        for job_id in disk.side.lost_jobs():
            self.roster.begin_anew(job_id)
        saves = disk.take_saves()
        if saves:
            self._lanes.give_back(Lane.DEVICE)  # this step reads pages that no sequence holds
        return saves

    def _admit(self, outline: _Outline) -> None:
        """Admit waiting requests. Fail a request that gets no memory although no other request holds any."""
        admitted = self._admission.admit(list(self.roster.holding()))
        refused = admitted.refused
        if refused is not None:
            log.warning("refused request=%s reason=%s", refused.request_id, NO_MEMORY)
            self._refused.append(make_failure(refused, NO_MEMORY, may_retry=True))
            self.roster.retire(refused)
        outline.new_jobs += [*admitted.jobs, *self._admission.compute_chunks()]
        outline.page_writes += admitted.page_writes

    def _choose_work(self, outline: _Outline, is_ready: IsReady) -> None:
        """Choose prefill units and the rows that draw.

        Rows wait for units only within the token gap. They also wait while a draft of their lane has no result yet.
        """
        still = set(self._stepping_in(outline.lane))  # `Roster.grow` may have preempted some
        waits = any(one.num_drafted for one in outline.stepping if one in still) or self.drafts.awaits(still)
        drawing = [one for one in outline.stepping if one in still and (one.wants_draw or one.num_drafted)]
        if outline.lane is Lane.DEVICE:
            entries = {entry.job.job_id: entry for entry in self._prefill.jobs}
            budget = None
            if drawing:
                budget = self._gap.seconds_left(self._num_prompts, self._prefill.seconds_each(), len(drawing))
            least = 0.0 if self.roster.running else self._quiet_step_seconds
            outline.units, outline.finished = self._prefill.next_units(budget, least)
            outline.unit_contexts = [entries[unit.job_id].context_of(unit) for unit in outline.units]
            if budget is not None and self._gap.decode_can_wait(outline.units, outline.unit_contexts, budget, waits):
                drawing = []
        if waits:
            drawing = []
        outline.rows = [(sequence, self.residence.host_read(sequence)) for sequence in drawing]
        is_busy = bool(outline.units or any(self._launched.values()))
        outline.taken = self.late.take_out(outline.rows, is_ready, is_busy)

    @property
    def _num_prompts(self) -> int:
        """Count the prompts that wait or prefill."""
        return len(self._admission.waiting) + sum(len(entry.sequences) for entry in self._prefill.jobs)

    def _reload(self, lane: Lane, is_ready: IsReady) -> list[Reload]:
        """Choose evicted pages to reload; only the lane whose rows read host memory does so."""
        evictor = self.residence.evictor
        is_theirs = lane is self._lanes.lane_of(reads_host=True, joins=False)
        if not is_theirs or evictor is None or not evictor.is_adaptive:
            return []
        is_quiet = not (self._admission.waiting or self._prefill.jobs)
        num_coming_pages = sum(map(self.residence.room.num_coming_pages, self.roster.running)) if is_quiet else 0
        reload = evictor.next_reload(is_quiet, num_coming_pages, is_ready)
        return [] if reload is None else [reload]

    def _note_launch(self, plan: StepPlan, outline: _Outline) -> None:
        """Remember what reading the plan's result needs: the sequences of its rows, and the numbers of their draws."""
        slots = {sequence.slot: sequence for sequence in self.roster.holding()}
        drawn = {sequence.slot: sequence for sequence, _ in outline.taken}
        for sequence in outline.stepping:
            sequence.lane = plan.lane if sequence.state is State.RUNNING else sequence.lane
        runs = outline.known or [[] for _ in outline.taken]
        drafts = outline.drafts or [() for _ in outline.taken]
        for (sequence, _), run, draft in zip(outline.taken, runs, drafts, strict=True):
            sequence.num_in_flight += 1 + len(run) + len(draft)
            sequence.num_drafted = len(draft)
            self.residence.windows.note_written(sequence, sequence.next_position)
        num_more = sum(map(len, runs)) + sum(map(len, drafts))
        num_rows = len(outline.taken) + num_more
        self.drafts.launch(plan.lane, outline.taken, num_rows, outline.drafts is not None, bool(plan.units))
        for entry in outline.finished:
            slots |= {sequence.slot: sequence for sequence in entry.sequences}
            outline.offloaded += [OffloadedRun.of(one) for one in entry.sequences if one.context is not None]
            drawn |= self.roster.start(entry)
        launched = LaunchedPlan(
            slots=slots,
            drawing=drawn,
            numbers={
                slot: one.num_drawn - 1 - one.num_drafted for slot, one in drawn.items() if one.constraint is not None
            },
            rows=rows_of(plan.lane, [host_read for group in plan.decode for host_read in group.host_reads or [None]]),
            load=self._load_of(plan),
            num_known=num_more,
            num_rows=num_rows,
            drafts={one.slot: draft for (one, _), draft in zip(outline.taken, drafts, strict=True) if draft},
            units=plan.units,
            unit_contexts=tuple(outline.unit_contexts),
            offloaded=tuple(outline.offloaded),
            fetches=bool(plan.reloads),
        )
        self._launched[plan.lane].append(launched)

    def take_refused(self) -> list[Delta]:
        """Return the failures, since the last call, of requests for which the host had no memory."""
        refused, self._refused = self._refused, []
        return refused

    def masks(
        self, lane: Lane = Lane.DEVICE, drafted: Callable[[], Mapping[int, list[int]]] = dict
    ) -> dict[int, np.ndarray] | None:
        """Return, by slot, the masks of the tokens that a lane's newest plan may draw, as `Runner.draw` takes them.

        None: some mask depends on a draw whose result has not arrived. drafted: returns, by slot, the tokens that the
        device drafted in that plan; it may wait for the device.
        """
        rows = self._launched[lane][-1].masked_rows(drafted)
        return None if rows is None else dict(zip(rows, self.constraints.fill(list(rows.values())), strict=True))

    def postprocess(self, result: StepResult, lane: Lane = Lane.DEVICE) -> list[Delta]:
        """Apply the result of a lane's oldest launched plan, and return the output of its requests, in any order."""
        launched = self._launched[lane].popleft()
        self.drafts.end(lane)
        drafted = self._results.end_drafts(result, launched)
        num_slots = launched.num_rows - launched.num_drafted
        self.drafts.tell(lane, drafted, num_slots, launched.num_rows)
        deltas = self._results.tell(result, launched)
        if result.decode_seconds and len(self.lanes) > 1:
            self._learn_grouping(launched, result, lane)
        return deltas

    def _learn_grouping(self, launched: LaunchedPlan, result: StepResult, lane: Lane) -> None:
        """Learn from a finished decode step which rows should step together."""
        beside = self._launched[Lane.HOST][0].load if lane is Lane.DEVICE and self._launched.get(Lane.HOST) else None
        if launched.load.num_host_rows:
            self._grouping.observe_host_rows(result.host_seconds, result.num_parts)
            if lane is Lane.HOST:
                self._grouping.weigh(launched.load, has_others=bool(self._stepping_in(Lane.DEVICE)))
        elif beside is None or not self._prefill.jobs:  # prefill units beside would slow both lanes down
            self._grouping.observe_alone(launched.load, beside)

    # --- lanes --------------------------------------------------------------------------------------------------------

    def _stepping_in(self, lane: Lane) -> list[Sequence]:
        """Return the running sequences whose next step would be in this lane now."""
        if len(self.lanes) == 1:
            return list(self.roster.running)
        reading_host = {sequence for sequence in self.roster.running if self.residence.host_read(sequence) is not None}
        joins = bool(reading_host) and self._grouping.is_joint
        return [one for one in self.roster.running if self._lanes.lane_of(one in reading_host, joins) is lane]

    def _load_of(self, plan: StepPlan) -> Load:
        """Return the plan's rows and the bytes that they read on the device; an empty load if there is one lane."""
        reading_host: list[int] = []
        others: list[int] = []
        for group in plan.decode if len(self.lanes) > 1 else ():
            for cell, host_read in zip(group.positions, group.host_reads or repeat(None), strict=False):
                (others if host_read is None else reading_host).append(self._reads.context(cell + 1, host_read))
        return Load(len(reading_host), len(others), sum(reading_host), sum(others))

    def _fence(self, plan: StepPlan, stepping: list[Sequence]) -> bool:
        """Return whether a plan waits for the other lane. stepping: the sequences whose rows it changes."""
        reads_nothing = any(group.host_reads is None for group in plan.decode)
        if (
            plan.finished_reloads
            or not self._are_of(plan.lane, plan.evictions)
            or any(offload.is_new_context for offload in plan.offloads)
            or any(write.source is not None for write in plan.ring_writes)  # its sequence may step in either lane
            or (plan.lane is Lane.HOST and plan.ring_writes)  # the other lane must first release these rings
            or any(write.source is not None for write in plan.window_writes)
            or (plan.lane is Lane.HOST and reads_nothing)  # such a step uses the other lane's buffers
        ):
            self._lanes.move()
        elif plan.evictions:
            self._lanes.give_back(plan.lane)
        is_other_busy = any(launched for other, launched in self._launched.items() if other is not plan.lane)
        comes = any(sequence.lane is not plan.lane for sequence in stepping)
        of_rings = plan.ring_writes or plan.ring_growth
        takes = bool(plan.page_writes or of_rings or plan.new_jobs or plan.reloads or plan.evictions)
        return self._lanes.fence(plan.lane, is_other_busy=is_other_busy, takes=takes, comes=comes)

    def _are_of(self, lane: Lane, evictions: tuple[PageEviction, ...]) -> bool:
        """Return whether all readers of the evicted pages step in this lane; a prefill never does."""
        slots = {place.slot for eviction in evictions for place in eviction.places}
        readers = [sequence for sequence in self.roster.holding() if sequence.slot in slots]
        return all(one.lane is lane and one.state is State.RUNNING for one in readers)

    # --- reports ------------------------------------------------------------------------------------------------------

    def progress(self) -> list[Progress]:
        """Report the progress of each running prefill."""
        return [report for entry in self._prefill.jobs for report in make_progress(entry)]

    def stats(
        self, steps: int, step_seconds: float, host: HostStats | None, methods: dict[str, list[int]],
        experts: ExpertStats | None,
    ) -> Stats:  # fmt: skip
        num_idle_pages = self.residence.room.num_idle_pages([])
        waiting, running = self._admission.waiting, list(self.roster.holding())
        return Stats(
            num_running=len(self.roster.running),
            num_prefilling=sum(len(entry.sequences) for entry in self._prefill.jobs),
            num_waiting=len(waiting),
            waiting_tokens=sum(one.num_tokens for one in waiting),
            waiting_uncached_tokens=sum(map(self.residence.num_uncached_tokens, waiting))
            + sum(entry.num_left_tokens for entry in self._prefill.jobs),
            running_adapters=_adapters_of(running),
            waiting_adapters=_adapters_of(waiting),
            pages_used=self.pages.num_held - num_idle_pages,
            pages_cached=self.pages.num_idle + num_idle_pages,
            pages_total=self.pages.num_pages,
            pages_committed=self.pages.num_committed,
            prefix_queries_tokens=self._admission.num_queried_tokens,
            prefix_hits_tokens=self._admission.num_cached_tokens,
            preemptions=self.roster.num_preemptions,
            recomputed_tokens=self._admission.num_recomputed_tokens,
            steps=steps,
            step_seconds=step_seconds,
            rings_free=sum(self.rings.num_free.values()),
            masks=self.constraints.stats(),
            drafts=self.drafts.stats(),
            host=host,
            methods=methods,
            experts=experts,
        )


def _adapters_of(sequences: Iterable[Sequence]) -> list[int]:
    """Return the sorted numbers of the adapters that these sequences use."""
    return sorted({one.request.adapter for one in sequences} - {0})


def _group(
    rows: list[Row], runs: list[list[int]] | None, drafts: list[tuple[int, ...]] | None
) -> tuple[DecodeGroup, ...]:
    """Put all rows into one group, whatever their profiles, so that the weights are read once; () without rows."""
    if not rows:
        return ()
    sequences, host_reads = zip(*rows, strict=True)
    return (
        DecodeGroup(
            slots=tuple(one.slot for one in sequences),
            positions=tuple(one.next_position for one in sequences),
            samples=tuple(one.num_drawn + len(run) for one, run in zip(sequences, runs or repeat(()), strict=False)),
            host_reads=host_reads if any(host_read is not None for host_read in host_reads) else None,
            runs=None if runs is None else tuple(map(tuple, runs)),
            drafts=None if drafts is None else tuple(drafts),
        ),
    )
