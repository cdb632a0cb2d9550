"""Decides what the next engine step does, and turns what a step produced into what requests are told.

Knows requests, slots and time; what holds their keys and values is `scheduler.residence`'s business. Plans may be made
one step ahead of results: a sequence's draws in flight are counted, and what is freed now may be handed out at once,
since the device works in plan order.
Invariants: a page belongs to a sequence from admission until it is finished or preempted; a request that was accepted
gets exactly one final delta unless it is cancelled.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np

from gpu.model.architecture import Architecture
from gpu.profiles import Profile
from gpu.step import (
    NOT_FINITE,
    DecodeGroup,
    Deposit,
    Fetch,
    Lane,
    PageWrite,
    PrefillJob,
    PrefillUnit,
    SampledToken,
    StepPlan,
    StepResult,
    TokenLogprob,
    Unit,
)
from scheduler.admission import Admission
from scheduler.capacity import Capacity
from scheduler.config import SchedulerConfig
from scheduler.constraints import Constraints, refuse_grammars
from scheduler.cost_model import CostModel
from scheduler.documents import Documents
from scheduler.host_context import HostContext
from scheduler.lanes import Lanes
from scheduler.late_rows import IsReady, LateRows, Row
from scheduler.messages import Delta, EngineRequest, ExpertStats, FetchStats, HostStats, Progress, ReuseStats, Stats
from scheduler.prefill_queue import JobInProgress, PrefillQueue
from scheduler.reports import finish_reason, join_deltas, make_delta, make_end, make_failure, make_progress
from scheduler.residence import Residence
from scheduler.rings import Rings
from scheduler.sequence import Sequence, State

log = logging.getLogger(__name__)

_LEAST_PREFILL_SHARE = 0.1  # of the token gap target, however long decode takes


@dataclass(slots=True)
class _Launched:
    """A plan whose result is not in yet: who was in which slot, who drew and as which number of theirs, how many rows
    are of known tokens, where its units ended, what went down, and whether rows came up.
    """

    slots: dict[int, Sequence]
    drawing: dict[int, Sequence]
    numbers: dict[int, int]
    num_known: int
    units: list[Unit]
    unit_contexts: list[int]
    runs: list["_Run"]
    fetches: bool


@dataclass(frozen=True, slots=True)
class _Run:
    """The first blocks of a context are down once the plan is carried out."""

    sequence: Sequence
    context: HostContext
    num_blocks: int


@dataclass(slots=True)
class _Changes:
    """What happened to slots and jobs since the last plan, for the runner to hear of first."""

    released_slots: list[int] = field(default_factory=list)
    dropped_jobs: list[int] = field(default_factory=list)


class Scheduler:
    """`profiles`: the attention profiles that requests may name; `model_key` names the model; `lanes`: the device's.
    `documents`: their chunks, or None: prompts are computed whole. `constraints`: what draws are held to; None: no
    grammars. `most_rows`: of a decode step in which tokens come that need no draw; None: `max_running`. `jumps`:
    whether there are such steps; from one to the next it may change.
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
    ) -> None:
        self._config = config
        self.jumps = config.jump_forward
        self._most_rows = config.max_running if most_rows is None else most_rows
        self._capacity = capacity
        self._profiles = profiles
        self._num_layers = architecture.num_layers
        self._costs = CostModel(architecture)
        self._prefill = PrefillQueue(config.prefill, architecture.num_layers, self._costs)
        self.residence = Residence(capacity, config.prefix_cache, model_key, profiles)
        self.pages = self.residence.pages
        self.prefixes = self.residence.prefixes
        self._sequences: dict[str, Sequence] = {}  # not finished
        self.rings = Rings(capacity.num_rings, profiles, capacity.page_tokens)
        self.constraints = constraints or Constraints(architecture.vocab_size, refuse_grammars)
        self.documents = documents
        if documents is not None:
            self._prefill.is_loaded = documents.is_loaded
        self._admission = Admission(
            config, capacity.max_hidden_tokens, self.residence, self._prefill, self.rings, documents
        )  # fmt: skip
        self._running: list[Sequence] = []
        self._lanes = Lanes(lanes)
        self._launched: dict[Lane, deque[_Launched]] = {lane: deque() for lane in self._lanes.all}
        self._changes = _Changes()
        self._seconds_since_decode = 0.0  # of prefill units, as estimated
        self._late = LateRows()
        self.num_preemptions = 0

    @property
    def prefill_methods(self) -> list[str]:
        """Those of the profiles that are served, each once."""
        return list(dict.fromkeys(profile.prefill_method for profile in self._profiles.values()))

    def learn_units(self, units: list[PrefillUnit], contexts: list[int], seconds: float) -> None:
        """What units took that no request asked for; `contexts[i]` is where unit i ended in its prompt."""
        self._costs.observe_units(units, contexts, seconds)

    # --- requests in --------------------------------------------------------------------------------------------------

    def prepare(self, requests: list[EngineRequest], rest: Callable[[], None]) -> list[Sequence]:
        """What `queue` takes: each prompt is unpacked and hashed once, for all requests that share it.

        Any thread may ask, while others plan. `rest` is called every tenth of a millisecond or so. Raises TooLargeError
        for a request that can never fit, and GrammarError for one whose grammar cannot be compiled.
        """
        for request in requests:
            self._capacity.check(request, self._profiles[request.attention_profile])
            if self.documents is not None:
                self.documents.check(request, self._profiles[request.attention_profile])
        known: dict[tuple[int, str, str], tuple[np.ndarray, list[bytes]]] = {}
        sequences = []
        for request in requests:
            profile, salt = request.attention_profile, request.cache_salt
            shared = known.get((id(request.prompt), profile, salt))
            if shared is None:
                prompt = np.frombuffer(request.prompt, np.int32)
                hashes = self.prefixes.hash_prompt(prompt, profile, salt, rest)
                shared = known[id(request.prompt), profile, salt] = prompt, hashes
            sequences.append(Sequence(request, shared[0], list(shared[1])))
        for sequence, constraint in zip(sequences, self.constraints.prepare(requests, rest), strict=True):
            sequence.constraint = constraint
        if self.documents is not None:
            for sequence in sequences:
                self.documents.name_chunks(sequence)
        return sequences

    def queue(self, sequences: list[Sequence]) -> None:
        """All of these or none. Raises QueueFullError."""
        self._admission.queue(sequences)
        if self.documents is not None:
            for sequence in sequences:
                self.documents.hold(sequence)
        self._sequences |= {sequence.request_id: sequence for sequence in sequences}

    def cancel(self, request_ids: list[str]) -> None:
        """Forget these requests: pages and slots are free at once, and so is what a prefill has brought to the host.

        The context of one that runs stays, idle, for those that begin with its tokens. Unknown ids are ignored.
        """
        for request_id in request_ids:
            sequence = self._sequences.get(request_id)
            if sequence is not None:
                self._retire(sequence)

    @property
    def num_rows_left_out(self) -> int:
        """Of decode steps, since the host could not have answered for them without a wait."""
        return self._late.num_left_out

    @property
    def num_unfinished(self) -> int:
        return len(self._sequences)

    @property
    def has_changes(self) -> bool:
        """Whether the device holds what nobody needs: jobs, contexts, slots."""
        contexts = self.residence.contexts
        changes = self._changes.released_slots or self._changes.dropped_jobs
        return bool(changes) or (contexts is not None and contexts.has_closed)

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
        writes = self._grow_running(stepping)
        deposits, runs = self._deposit(stepping)
        new_jobs, new_writes = self._admit(lane)
        still = set(self._stepping_in(lane))
        drawing = [sequence for sequence in stepping if sequence in still and sequence.wants_draw]
        entries = {entry.job.job_id: entry for entry in self._prefill.jobs}
        has_budget = bool(drawing) and lane is Lane.DEVICE
        budget = self._prefill_seconds() - self._seconds_since_decode if has_budget else None
        units, finished = self._prefill.next_units(budget) if lane is Lane.DEVICE else ([], [])
        contexts = [entries[unit.job_id].context_of(unit) for unit in units]
        if budget is not None and self._decode_can_wait(units, contexts, budget):
            drawing = []
        rows = [(sequence, self.residence.ask(sequence)) for sequence in drawing]
        taken = self._late.take_out(rows, is_ready, is_busy=bool(units or any(self._launched.values())))
        drawing = [sequence for sequence, _ in taken]
        fetches = self._grow_back(lane, is_ready)
        known, known_writes = self._take_known(taken, lane)
        changes = self._take_changes(lane)
        restores, releases = self.residence.take_restores(), self.residence.take_releases()
        page_writes = writes + new_writes + known_writes
        plan = StepPlan(
            lane=lane,
            released_slots=changes.released_slots,
            dropped_jobs=changes.dropped_jobs,
            closed_contexts=self.residence.take_closed(),
            deposits=deposits,
            restores=restores,
            releases=releases,
            fetches=fetches,
            page_writes=page_writes,
            ring_writes=self.rings.take_writes(),
            window_writes=self.residence.windows.take_writes(),
            new_jobs=new_jobs,
            units=units,
            decode=_group(taken, known),
            gives_way=bool(units) and self._waits_beside(),
        )
        if plan.is_empty:
            return plan
        plan = replace(plan, is_fenced=self._fence(plan, stepping))
        self._late.count(rows, taken)
        slots = {sequence.slot: sequence for sequence in self._holding()}
        drawn = {sequence.slot: sequence for sequence in drawing}
        for sequence in stepping:
            sequence.lane = lane if sequence.state is State.RUNNING else sequence.lane
        for sequence in drawing:
            sequence.num_in_flight += 1
        for sequence, run in zip(drawing, known or (), strict=False):
            sequence.num_in_flight += len(run)
        for entry in finished:
            slots |= {sequence.slot: sequence for sequence in entry.sequences}
            runs += [_run(sequence) for sequence in entry.sequences if sequence.context is not None]
            drawn |= self._start_running(entry)
        plan.masked_slots.extend(slot for slot, sequence in drawn.items() if sequence.constraint is not None)
        num_known = sum(map(len, known or ()))
        numbers = {slot: one.num_drawn - 1 for slot, one in drawn.items() if one.constraint is not None}
        self._launched[lane].append(_Launched(slots, drawn, numbers, num_known, units, contexts, runs, bool(fetches)))
        return plan

    def masks(self, lane: Lane = Lane.DEVICE) -> dict[int, np.ndarray] | None:
        """What slots of a lane's newest launched plan may draw, by slot, as `Runner.draw` takes it. None: a row's mask
        depends on a draw whose result is not in.
        """
        launched = self._launched[lane][-1]
        slots, rows = [], []
        for slot, one in launched.drawing.items():
            if one.constraint is None or one.state is State.FINISHED:
                continue
            number = launched.numbers[slot]
            if one.constraint.needs_output and len(one.output) + one.constraint.num_taken < number:
                return None
            slots.append(slot)
            rows.append((one.constraint, number, one.output))
        return dict(zip(slots, self.constraints.fill(rows), strict=True))

    def postprocess(self, result: StepResult, lane: Lane = Lane.DEVICE) -> list[Delta]:
        """What the result of a lane's oldest launched plan means for its requests, in no particular order."""
        launched = self._launched[lane].popleft()
        if launched.fetches:
            self.residence.end_fetches()
        self._costs.observe_units(launched.units, launched.unit_contexts, result.unit_seconds)
        self._costs.observe_decode(lane, result.decode_seconds, launched.num_known)
        deltas = []
        for slot, why in result.failures.items():
            failed = launched.slots[slot]
            failed.has_failed = True
            if failed.state is not State.FINISHED:
                log.warning("failed request=%s reason=%s", failed.request_id, why)
                deltas.append(make_failure(failed, why))
                self._retire(failed)
        for token in result.tokens:
            sequence = launched.drawing.get(token.slot)
            if sequence is None:  # it failed before its first draw
                continue
            sequence.num_in_flight -= 1
            if sequence.state is not State.FINISHED:
                slot = token.slot
                self._consume(sequence, token)
                told = self._append(sequence, token, result.prompt_logprobs.get(slot), result.pooled.get(slot))
                is_more = bool(deltas) and deltas[-1].request_id == sequence.request_id
                deltas += join_deltas(deltas.pop(), told) if is_more else told
        for run in launched.runs:
            self.residence.publish_run(run.sequence, run.context, run.num_blocks)
        return deltas

    # --- running and leaving ------------------------------------------------------------------------------------------

    def _start_running(self, entry: JobInProgress) -> dict[int, Sequence]:
        """A job's last unit is planned: its blocks can be shared, and its prompts' first draws are in flight."""
        for sequence in entry.sequences:
            self.prefixes.stop(sequence)
            self.residence.finish_prefill(sequence)
            self.residence.publish(sequence, sequence.num_tokens)
            self.residence.windows.keep_prompt(sequence)
            sequence.state = State.RUNNING
            sequence.num_in_flight += 1
            self._running.append(sequence)
        return {sequence.slot: sequence for sequence in entry.sequences}

    def _grow_running(self, stepping: list[Sequence]) -> list[PageWrite]:
        """What the next token of each of these needs, by priority and then the oldest first. If there is not enough,
        short ones are written to the host and give up pages; after that the last in this order give way.
        """
        writes = []
        spared = self._spared_contexts()
        for sequence in sorted(stepping, key=_turn):
            while sequence.wants_draw and (short := self.residence.reserve(sequence, spared)) is not None:
                if short == "pages" and self.residence.write_down(self._running):
                    continue
                others = [other for other in self._holding() if short == "pages" or other.context is not None]
                self._preempt_youngest([sequence, *others])
                spared = self._spared_contexts()
            if sequence.wants_draw:
                writes += self.residence.grow(sequence)
        held = {sequence.slot for sequence in self._running}
        return [write for write in writes if write.slot in held]

    def _spared_contexts(self) -> list[HostContext]:
        """Idle contexts that give no pages to one that grows: others gave way and will begin with them.

        Where it has the device to itself it gets them, or it would give way to nobody.
        """
        is_alone = len(self._running) <= 1 and not self._prefill.jobs
        return [] if is_alone else self._admission.awaited()

    def _deposit(self, stepping: list[Sequence]) -> tuple[list[Deposit], list[_Run]]:
        """Old tokens of those of these that stayed go down, and short ones that were written down to make room."""
        written_down = self.residence.take_written_down()
        deposits = [deposit for _, deposit in written_down]
        runs = [_run(sequence) for sequence, _ in written_down]
        for sequence in stepping:
            due = self.residence.deposit(sequence) if sequence.wants_draw else None
            if due is not None:
                deposits.append(due)
                runs.append(_run(sequence))
        return deposits, runs

    def _holding(self) -> Iterator[Sequence]:
        """Those that hold slots and pages."""
        yield from self._running
        for entry in self._prefill.jobs:
            yield from entry.sequences

    def _preempt_youngest(self, candidates: Iterable[Sequence]) -> None:
        candidates = list(candidates)
        victim = max(candidates, key=_turn)
        victim.num_overtaken += any(_arrival(one) > _arrival(victim) for one in candidates)
        log.warning("preempted request=%s context_tokens=%d", victim.request_id, victim.num_tokens)
        self.num_preemptions += 1
        if victim.state is State.PREFILLING:
            self._drop_job(victim)
        else:
            self._running.remove(victim)
            self._requeue(victim)

    def _drop_job(self, member: Sequence) -> None:
        """Take the job that `member` is in off the device; all its sequences wait again, in front."""
        entry = next(entry for entry in self._prefill.jobs if member in entry.sequences)
        self._prefill.drop(entry)
        self._changes.dropped_jobs.append(entry.job.job_id)
        for sequence in reversed(entry.sequences):
            self.prefixes.stop(sequence)
            self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        sequence.state = State.WAITING
        if self.documents is not None:
            self.documents.hold(sequence)
        self._admission.requeue(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        """Give back slot and pages. What a prefill has brought to the host is of no use before it ends."""
        is_kept = sequence.state is State.RUNNING and not sequence.has_failed
        self.residence.windows.give_back(sequence, is_kept)
        self.residence.leave(sequence, is_kept)
        self.rings.give_back(sequence)
        self._lanes.give_back(sequence.lane)
        sequence.lane = Lane.DEVICE
        self._changes.released_slots.append(sequence.slot)
        self._admission.free_slots.append(sequence.slot)
        sequence.slot = -1

    def _retire(self, sequence: Sequence) -> None:
        """It is done with, whatever it was doing."""
        if sequence.state is State.PREFILLING:
            self._drop_job(sequence)
        if sequence.state is State.RUNNING:
            self._running.remove(sequence)
            self._vacate(sequence)
        else:
            self._admission.waiting.remove(sequence)
        self._finish(sequence)

    def _let_go(self, sequences: Iterable[Sequence]) -> None:
        """Of documents' chunks: they are read, or will not be."""
        if self.documents is not None:
            for sequence in sequences:
                self.documents.let_go(sequence)

    def _finish(self, sequence: Sequence) -> None:
        sequence.state = State.FINISHED
        self._let_go([sequence])
        del self._sequences[sequence.request_id]

    # --- results ------------------------------------------------------------------------------------------------------

    def _consume(self, sequence: Sequence, token: SampledToken) -> None:
        """Tell its constraint what it has next."""
        if sequence.constraint is not None and token.token_id >= 0 and sequence.request.max_tokens:
            self.constraints.consume([(sequence.constraint, token.token_id)])

    def _append(
        self,
        sequence: Sequence,
        token: SampledToken,
        prompt_logprobs: list[TokenLogprob] | None,
        pooled: np.ndarray | None,
    ) -> list[Delta]:
        if sequence.state is State.RUNNING:  # its prompt is done
            self._let_go([sequence])
            self.residence.give_back_evicted(sequence)
        constraint = sequence.constraint
        if constraint is not None and constraint.error:
            self._retire(sequence)
            return [make_failure(sequence, f"grammar: the answer cannot go on ({constraint.error})")]
        reason = finish_reason(sequence, token.token_id)
        delta = make_delta(sequence, token, prompt_logprobs, pooled, reason)
        sequence.output += delta.token_ids
        if reason is None and constraint is not None and constraint.is_over:
            self._retire(sequence)
            return [delta, make_end(sequence)]
        if reason is None:
            if sequence.state is State.WAITING:  # it gave way while this draw was in flight
                self.residence.await_room(sequence)
            else:
                self.residence.publish(sequence, sequence.num_tokens - 1)
            return [delta]
        if token.token_id == NOT_FINITE:
            sequence.has_failed = True
            self.residence.retract(sequence)
        self._retire(sequence)
        return [delta]

    # --- the shape of a step ------------------------------------------------------------------------------------------

    def _stepping_in(self, lane: Lane) -> list[Sequence]:
        """Those that run and step in this lane next, as things stand."""
        if len(self._lanes.all) == 1:
            return list(self._running)
        asking = {sequence for sequence in self._running if self.residence.ask(sequence) is not None}
        joins = bool(asking) and self._lanes.joins(self._costs.decode_seconds)
        return [one for one in self._running if self._lanes.lane_of(one in asking, joins) is lane]

    def _waits_beside(self) -> bool:
        """Whether rows that wait for the host step in a lane of their own."""
        return len(self._lanes.all) > 1 and bool(self._stepping_in(Lane.HOST))

    def _admit(self, lane: Lane) -> tuple[list[PrefillJob], list[PageWrite]]:
        if lane is not Lane.DEVICE:
            return [], []
        jobs, writes = self._admission.admit(list(self._holding()))
        return jobs + self._admission.compute_chunks(), writes

    def _take_changes(self, lane: Lane) -> _Changes:
        """For the lane to hear of first that hands out slots."""
        if lane is not Lane.DEVICE:
            return _Changes()
        changes, self._changes = self._changes, _Changes()
        return changes

    def _grow_back(self, lane: Lane, is_ready: IsReady) -> list[Fetch]:
        """What comes back up to the device beside this step; it is those that ask whose tokens may."""
        if lane is not self._lanes.all[0]:
            return []
        is_quiet = not (self._admission.waiting or self._prefill.jobs)
        return self.residence.grow_back(self._running, is_quiet, is_ready)

    def _take_known(self, rows: list[Row], lane: Lane) -> tuple[list[list[int]] | None, list[PageWrite]]:
        """Tokens that are known to follow the input tokens of these rows, as far as the step has room for them, and
        their pages; None: there are none. Who holds a ring looks at it with each token.
        """
        if not self.jumps or all(sequence.constraint is None for sequence, _ in rows):
            return None, []
        cells = sum(sequence.next_cell + 1 for sequence, _ in rows)
        left_rows, left_cells = self._costs.room_for_runs(
            lane, len(rows), cells, self._config.token_gap_target_ms / 1e3
        )
        left_rows = min(left_rows, self._most_rows - len(rows))
        runs: list[list[int]] = []
        writes: list[PageWrite] = []
        for sequence, _ in rows:
            run: list[int] = []
            constraint, context = sequence.constraint, sequence.next_cell + 1
            if constraint is not None and constraint.matcher is not None and sequence.ring is None:
                most = min(left_rows, left_cells // context, sequence.request.max_tokens - sequence.num_drawn - 1)
                most = self.residence.most_ahead(sequence, most, len(self._running))
                run = self.constraints.take_run(constraint, sequence.num_drawn, sequence.output, most)
                writes += self.residence.grow_ahead(sequence, len(run)) if run else []
                left_rows -= len(run)
                left_cells -= len(run) * context
            runs.append(run)
        return runs if any(runs) else None, writes

    def _fence(self, plan: StepPlan, stepping: list[Sequence]) -> bool:
        """Whether a plan that is launched waits for the other lane; `stepping`: whose rows it changes."""
        asks_nothing = any(group.asks is None for group in plan.decode)
        if (
            plan.releases
            or plan.restores
            or any(deposit.opens for deposit in plan.deposits)
            or any(write.source is not None for write in plan.ring_writes)  # whose sequence may step in either lane
            or any(write.source is not None for write in plan.window_writes)
            or (plan.lane is Lane.HOST and asks_nothing)  # such a step has the other lane's buffers
        ):
            self._lanes.move()
        is_other_busy = any(launched for other, launched in self._launched.items() if other is not plan.lane)
        comes = any(sequence.lane is not plan.lane for sequence in stepping)
        takes = bool(plan.page_writes or plan.new_jobs or plan.fetches)
        return self._lanes.fence(plan.lane, is_other_busy=is_other_busy, takes=takes, comes=comes)

    def _prefill_seconds(self) -> float:
        """Between two decode steps: prefill's share of the time, within the token gap target."""
        target, share = self._config.token_gap_target_ms / 1e3, self._config.prefill.share
        decode = self._costs.decode_seconds[Lane.DEVICE]
        return max(min(target - decode, decode * share / (1.0 - share)), _LEAST_PREFILL_SHARE * target)

    def _decode_can_wait(self, units: list[Unit], contexts: list[int], budget: float) -> bool:
        """Whether another step of units like these fits before the next decode step must come, as far as is known.

        A step has no more than one whole unit, so that a request that arrives never waits for more than two.
        """
        seconds = sum(self._costs.seconds_of(unit, context) for unit, context in zip(units, contexts, strict=True))
        waits = bool(units) and self._costs.knows(units[0]) and 2 * seconds <= budget
        self._seconds_since_decode = self._seconds_since_decode + seconds if waits else 0.0
        return waits

    # --- what others may know -----------------------------------------------------------------------------------------

    def progress(self) -> list[Progress]:
        """How far each prefill under way is."""
        return [report for entry in self._prefill.jobs for report in make_progress(entry, self._num_layers)]

    def stats(
        self, steps: int, step_seconds: float, host: HostStats | None, reuse: ReuseStats | None,
        fetch: FetchStats | None, experts: ExpertStats | None,
    ) -> Stats:  # fmt: skip
        num_idle_pages = self.residence.num_idle_pages([])
        return Stats(
            num_running=len(self._running),
            num_prefilling=sum(len(entry.sequences) for entry in self._prefill.jobs),
            num_waiting=len(self._admission.waiting),
            pages_used=self.pages.num_held - num_idle_pages,
            pages_cached=self.pages.num_idle + num_idle_pages,
            pages_total=self.pages.num_pages,
            prefix_queries_tokens=self.prefixes.queries_tokens,
            prefix_hits_tokens=self.prefixes.hits_tokens,
            preemptions=self.num_preemptions,
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


def _run(sequence: Sequence) -> _Run:
    assert sequence.context is not None
    return _Run(sequence, sequence.context, sequence.context.num_blocks)


def _arrival(sequence: Sequence) -> float:
    return sequence.request.arrival_s


def _turn(sequence: Sequence) -> tuple[float, float]:
    return sequence.priority, _arrival(sequence)
