"""Plan the next engine step: which rows draw, which prefill units run, and what moves beside them.

Plans may be made one step ahead of results: draws in flight are counted, and what is freed may be handed out at once,
since the device works in plan order. Invariant: a row that draws has a page for the token that it feeds.
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import repeat

import numpy as np

from gpu.batching.step_reads import StepReads
from gpu.model.architecture import Architecture
from gpu.profiles import Profile
from gpu.step import (
    DecodeGroup,
    Lane,
    Offload,
    PageEviction,
    PageWrite,
    PrefillJob,
    PrefillUnit,
    Reload,
    StepPlan,
    StepResult,
)
from scheduler.admission.admission import Admission
from scheduler.admission.intake import Intake
from scheduler.admission.roster import Roster
from scheduler.cache.page_pool import Memory
from scheduler.cache.ring_pool import Rings
from scheduler.constraints.constraints import Constraints, refuse_grammars
from scheduler.engine_config import SchedulerConfig
from scheduler.messages import Delta, ExpertStats, FetchStats, HostStats, Progress, ReuseStats, Stats
from scheduler.prefill.cost_model import CostModel
from scheduler.prefill.document_chunks import Documents
from scheduler.prefill.prefill_queue import JobInProgress, PrefillQueue
from scheduler.residence.residence import Residence
from scheduler.sequences.capacity import Capacity
from scheduler.sequences.lane_fences import Lanes, rows_of
from scheduler.sequences.sequence import Sequence, State
from scheduler.steps.grouping import Grouping, Load
from scheduler.steps.known_tokens import Jumps
from scheduler.steps.late_rows import IsReady, LateRows, Row
from scheduler.steps.launched_plan import DepositedRun, LaunchedPlan, deposited_run
from scheduler.steps.reports import make_failure, make_progress
from scheduler.steps.results import Results
from scheduler.steps.token_gap import TokenGap

NO_MEMORY = "KV pages: the host has no memory left for this request; try again later, or lower gpu.kv_cache_gib"

log = logging.getLogger(__name__)


class Scheduler:
    """`profiles`: the attention profiles that requests may name; `model_key` names the model; `lanes`: the device's.
    `documents`: their chunks, or None: prompts are computed whole. `constraints`: what draws are held to; None: no
    grammars. `most_rows`: of a decode step in which tokens come that need no draw; None: `max_running`. `reads`: of
    decode steps on the device; None: of plain weights and rows of two bytes. `page_memory`, `window_memory`: how KV
    pages and windows come to be there; None: all are.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        architecture: Architecture,
        capacity: Capacity,
        model_key: bytes,
        profiles: Mapping[str, Profile],
        lanes: Iterable[Lane] = (Lane.DEVICE,),
        documents: Documents | None = None,
        constraints: Constraints | None = None,
        most_rows: int | None = None,
        reads: StepReads | None = None,
        page_memory: Memory | None = None,
        window_memory: Memory | None = None,
    ) -> None:
        self._config = config
        self._profiles = profiles
        self._num_layers = architecture.num_layers
        self._costs = CostModel(architecture)
        self._prefill = PrefillQueue(config.prefill, architecture.num_layers, self._costs)
        self.residence = Residence(capacity, config.prefix_cache, model_key, profiles, page_memory, window_memory)
        self.pages = self.residence.pages
        self.prefixes = self.residence.prefixes
        self.rings = Rings(capacity.num_rings, profiles, capacity.page_tokens)
        self.constraints = constraints or Constraints(architecture.vocab_size, refuse_grammars)
        self.documents = documents
        if documents is not None:
            self._prefill.is_loaded = documents.is_loaded
        self._admission = Admission(
            config, capacity.max_hidden_tokens, self.residence, self._prefill, self.rings, documents
        )  # fmt: skip
        self._lanes = Lanes(lanes)
        self._reads = reads or StepReads(architecture, 2, False, "bfloat16", architecture.num_layers)
        self._grouping = Grouping(self._reads, self._costs.decode_seconds)
        self.roster = Roster(self.residence, self.rings, self._admission, self._prefill, self._lanes, documents)
        self._refused: list[Delta] = []
        self._launched: dict[Lane, deque[LaunchedPlan]] = {lane: deque() for lane in self._lanes.all}
        self._gap = TokenGap(config, self._costs)
        self._late = LateRows()
        self._results = Results(self.roster, self.residence, self.constraints, self._costs)
        self.intake = Intake(capacity, profiles, self.prefixes, self.constraints, documents)
        most_rows = config.max_running if most_rows is None else most_rows
        self.jumps = Jumps(config, most_rows, self._costs, self.residence, self.constraints)

    @property
    def prefill_methods(self) -> list[str]:
        """Those of the profiles that are served, each once."""
        return list(dict.fromkeys(profile.prefill_method for profile in self._profiles.values()))

    def learn_units(self, units: list[PrefillUnit], contexts: list[int], seconds: float) -> None:
        """What units took that no request asked for; `contexts[i]` is where unit i ended in its prompt."""
        self._costs.observe_units(units, contexts, seconds)

    @property
    def num_rows_left_out(self) -> int:
        """Of decode steps, since the host could not have answered for them without a wait."""
        return self._late.num_left_out

    @property
    def has_changes(self) -> bool:
        """Whether the device holds what nobody needs: contexts, and slots with their prompts."""
        contexts = self.residence.contexts
        return self.roster.has_released or (contexts is not None and contexts.has_closed)

    # --- the next step ------------------------------------------------------------------------------------------------

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return self._lanes.all

    def schedule(self, is_ready: IsReady, lane: Lane = Lane.DEVICE) -> StepPlan:
        """The next step of a lane; empty when there is nothing to launch until a result or a request comes in.
        `is_ready`: whether what is asked of the host would be answered without a wait, as far as plans have been
        launched.

        A plan that is not empty must be launched, and its result given to `postprocess`, a lane's in order.
        """
        stepping = self._stepping_in(lane)
        if lane is Lane.HOST and not stepping:
            return StepPlan(lane)
        writes = self.roster.grow(stepping)
        deposits, runs = self._deposit(stepping)
        new_jobs, new_writes = self._admit(lane)
        still = set(self._stepping_in(lane))
        drawing = [sequence for sequence in stepping if sequence in still and sequence.wants_draw]
        entries = {entry.job.job_id: entry for entry in self._prefill.jobs}
        has_budget = bool(drawing) and lane is Lane.DEVICE
        budget = self._gap.seconds_left() if has_budget else None
        units, finished = self._prefill.next_units(budget) if lane is Lane.DEVICE else ([], [])
        contexts = [entries[unit.job_id].context_of(unit) for unit in units]
        if budget is not None and self._gap.decode_can_wait(units, contexts, budget):
            drawing = []
        rows = [(sequence, self.residence.ask(sequence)) for sequence in drawing]
        taken = self._late.take_out(rows, is_ready, is_busy=bool(units or any(self._launched.values())))
        drawing = [sequence for sequence, _ in taken]
        fetches = self._grow_back(lane, is_ready)
        known, known_writes = self.jumps.take(taken, lane, len(self.roster.running))
        released = self.roster.take_released() if lane is Lane.DEVICE else []  # for the lane that hands out slots
        restores, releases = self.residence.take_restores(), self.residence.take_releases()
        page_writes = writes + new_writes + known_writes
        all_drawing = [*drawing, *(one for entry in finished for one in entry.sequences)]
        plan = StepPlan(
            lane=lane,
            released_slots=released,
            closed_contexts=self.residence.take_closed(),
            offloads=deposits,
            finished_reloads=restores,
            evictions=releases,
            reloads=fetches,
            page_writes=page_writes,
            ring_writes=self.rings.take_writes(),
            window_writes=self.residence.windows.take_writes(),
            new_jobs=new_jobs,
            units=units,
            decode=_group(taken, known),
            masked_slots=[one.slot for one in all_drawing if one.constraint is not None],
            gives_way=bool(units) and self._waits_beside(),
        )
        if plan.is_empty:
            return plan
        plan = replace(plan, is_fenced=self._fence(plan, stepping))
        self._late.count(rows, taken)
        self._note_launch(plan, stepping, drawing, known, contexts, runs, finished)
        return plan

    def _note_launch(
        self,
        plan: StepPlan,
        stepping: list[Sequence],
        drawing: list[Sequence],
        known: list[list[int]] | None,
        contexts: list[int],
        runs: list[DepositedRun],
        finished: list[JobInProgress],
    ) -> None:
        """Whom the plan's result will be for, and as which of their draws; `known`: by those who draw, tokens that come
        with their rows; `finished`: jobs whose last units are planned.
        """
        slots = {sequence.slot: sequence for sequence in self.roster.holding()}
        drawn = {sequence.slot: sequence for sequence in drawing}
        for sequence in stepping:
            sequence.lane = plan.lane if sequence.state is State.RUNNING else sequence.lane
        for sequence in drawing:
            sequence.num_in_flight += 1
        for sequence, run in zip(drawing, known or (), strict=False):
            sequence.num_in_flight += len(run)
        for entry in finished:
            slots |= {sequence.slot: sequence for sequence in entry.sequences}
            runs += [deposited_run(sequence) for sequence in entry.sequences if sequence.context is not None]
            drawn |= self.roster.start(entry)
        num_known = sum(map(len, known or ()))
        rows = rows_of(plan.lane, [ask for group in plan.decode for ask in group.asks or [None]])
        load = self._load_of(plan)
        numbers = {slot: one.num_drawn - 1 for slot, one in drawn.items() if one.constraint is not None}
        fetches = bool(plan.reloads)
        launched = LaunchedPlan(slots, drawn, numbers, rows, load, num_known, plan.units, contexts, runs, fetches)
        self._launched[plan.lane].append(launched)

    def take_refused(self) -> list[Delta]:
        """What those are told, since the last call, whom the host refused memory for while nobody else had any."""
        refused, self._refused = self._refused, []
        return refused

    def masks(self, lane: Lane = Lane.DEVICE) -> dict[int, np.ndarray] | None:
        """What slots of a lane's newest launched plan may draw, by slot, as `Runner.draw` takes it. None: a row's mask
        depends on a draw whose result is not in.
        """
        rows = self._launched[lane][-1].masked_rows()
        return None if rows is None else dict(zip(rows, self.constraints.fill(list(rows.values())), strict=True))

    def postprocess(self, result: StepResult, lane: Lane = Lane.DEVICE) -> list[Delta]:
        """What the result of a lane's oldest launched plan means for its requests, in no particular order."""
        launched = self._launched[lane].popleft()
        deltas = self._results.tell(result, launched)
        if result.decode_seconds and len(self._lanes.all) > 1:
            self._learn_grouping(launched, result, lane)
        return deltas

    def _learn_grouping(self, launched: LaunchedPlan, result: StepResult, lane: Lane) -> None:
        """A decode step is over: what it says of who should step with whom."""
        beside = self._launched[Lane.HOST][0].load if lane is Lane.DEVICE and self._launched.get(Lane.HOST) else None
        if launched.load.num_asking:
            self._grouping.observe_asking(result.host_seconds, result.num_parts)
            if lane is Lane.HOST:
                self._grouping.weigh(launched.load, has_others=bool(self._stepping_in(Lane.DEVICE)))
        elif beside is None or not self._prefill.jobs:  # units beside leave less of the device to both
            self._grouping.observe_alone(launched.load, beside)

    def _deposit(self, stepping: list[Sequence]) -> tuple[list[Offload], list[DepositedRun]]:
        """Old tokens of those of these that stayed go down, and short ones that were written down to make room."""
        written_down = self.residence.take_written_down()
        deposits = [deposit for _, deposit in written_down]
        runs = [deposited_run(sequence) for sequence, _ in written_down]
        for sequence in stepping:
            due = self.residence.deposit(sequence) if sequence.wants_draw else None
            if due is not None:
                deposits.append(due)
                runs.append(deposited_run(sequence))
        return deposits, runs

    # --- the shape of a step ------------------------------------------------------------------------------------------

    def _stepping_in(self, lane: Lane) -> list[Sequence]:
        """Those that run and step in this lane next, as things stand."""
        if len(self._lanes.all) == 1:
            return list(self.roster.running)
        asking = {sequence for sequence in self.roster.running if self.residence.ask(sequence) is not None}
        joins = bool(asking) and self._grouping.is_joint
        return [one for one in self.roster.running if self._lanes.lane_of(one in asking, joins) is lane]

    def _load_of(self, plan: StepPlan) -> Load:
        """Of the rows that draw in it, and what they read on the device; of nothing where there is one lane."""
        asking: list[int] = []
        others: list[int] = []
        for group in plan.decode:
            cells = group.positions if group.cells is None else group.cells
            for cell, ask in zip(cells, group.asks or repeat(None), strict=False) if len(self._lanes.all) > 1 else ():
                (others if ask is None else asking).append(self._reads.context(cell + 1, ask))
        return Load(len(asking), len(others), sum(asking), sum(others))

    def _waits_beside(self) -> bool:
        """Whether rows that wait for the host step in a lane of their own."""
        return len(self._lanes.all) > 1 and bool(self._stepping_in(Lane.HOST))

    def _admit(self, lane: Lane) -> tuple[list[PrefillJob], list[PageWrite]]:
        if lane is not Lane.DEVICE:
            return [], []
        jobs, writes = self._admission.admit(list(self.roster.holding()))
        refused = self._admission.take_refused()
        if refused is not None:
            log.warning("refused request=%s reason=%s", refused.request_id, NO_MEMORY)
            self._refused.append(make_failure(refused, NO_MEMORY, may_retry=True))
            self.roster.retire(refused)
        return jobs + self._admission.compute_chunks(), writes

    def _grow_back(self, lane: Lane, is_ready: IsReady) -> list[Reload]:
        """What comes back up to the device beside this step; it is those that ask whose tokens may."""
        if lane is not self._lanes.lane_of(asks=True, joins=False):
            return []
        is_quiet = not (self._admission.waiting or self._prefill.jobs)
        return self.residence.grow_back(self.roster.running, is_quiet, is_ready)

    def _fence(self, plan: StepPlan, stepping: list[Sequence]) -> bool:
        """Whether a plan that is launched waits for the other lane; `stepping`: whose rows it changes."""
        asks_nothing = any(group.asks is None for group in plan.decode)
        if (
            plan.finished_reloads
            or not self._are_of(plan.lane, plan.evictions)
            or any(deposit.opens for deposit in plan.offloads)
            or any(write.source is not None for write in plan.ring_writes)  # whose sequence may step in either lane
            or any(write.source is not None for write in plan.window_writes)
            or (plan.lane is Lane.HOST and asks_nothing)  # such a step has the other lane's buffers
        ):
            self._lanes.move()
        elif plan.evictions:
            self._lanes.give_back(plan.lane)
        is_other_busy = any(launched for other, launched in self._launched.items() if other is not plan.lane)
        comes = any(sequence.lane is not plan.lane for sequence in stepping)
        takes = bool(plan.page_writes or plan.new_jobs or plan.reloads or plan.evictions)
        return self._lanes.fence(plan.lane, is_other_busy=is_other_busy, takes=takes, comes=comes)

    def _are_of(self, lane: Lane, releases: Many[PageEviction]) -> bool:
        """Whether nothing that reads what is released steps in the other lane, a prefill included."""
        slots = {place.slot for release in releases for place in release.places}
        readers = [sequence for sequence in self.roster.holding() if sequence.slot in slots]
        return all(one.lane is lane and one.state is State.RUNNING for one in readers)

    # --- what others may know -----------------------------------------------------------------------------------------

    def progress(self) -> list[Progress]:
        """How far each prefill under way is."""
        return [report for entry in self._prefill.jobs for report in make_progress(entry, self._num_layers)]

    def stats(
        self, steps: int, step_seconds: float, host: HostStats | None, reuse: ReuseStats | None,
        fetch: FetchStats | None, experts: ExpertStats | None,
    ) -> Stats:  # fmt: skip
        num_idle_pages = self.residence.room.num_idle_pages([])
        return Stats(
            num_running=len(self.roster.running),
            num_prefilling=sum(len(entry.sequences) for entry in self._prefill.jobs),
            num_waiting=len(self._admission.waiting),
            pages_used=self.pages.num_held - num_idle_pages,
            pages_cached=self.pages.num_idle + num_idle_pages,
            pages_total=self.pages.num_pages,
            pages_committed=self.pages.num_committed,
            prefix_queries_tokens=self.prefixes.queries_tokens,
            prefix_hits_tokens=self.prefixes.hits_tokens,
            preemptions=self.roster.num_preemptions,
            steps=steps,
            step_seconds=step_seconds,
            rings_free=sum(self.rings.num_free.values()),
            masks=self.constraints.stats(),
            host=host,
            reuse=reuse,
            fetch=fetch,
            experts=experts,
        )


def _group(rows: list[Row], runs: list[list[int]] | None) -> list[DecodeGroup]:
    """All in one group, so that they read the weights once, whatever their profiles and wherever their KV lies."""
    if not rows:
        return []
    asks = [ask for _, ask in rows]
    return [
        DecodeGroup(
            [sequence.slot for sequence, _ in rows],
            [sequence.next_position for sequence, _ in rows],
            [sequence.num_drawn + len(run) for (sequence, _), run in zip(rows, runs or repeat(()), strict=False)],
            asks if any(ask is not None for ask in asks) else None,
            [sequence.next_cell for sequence, _ in rows] if any(sequence.num_evicted for sequence, _ in rows) else None,
            runs,
        )
    ]
