"""Queue unfinished requests, preempt them, and free what they hold when they leave.

Invariants: a page belongs to a sequence from admission until it is finished or preempted. A preempted sequence waits at
the front of the queue, with its tokens so far. If a sequence leaves its prefill job, the others keep their progress.
"""

import logging
import time
from collections.abc import Collection, Iterable, Iterator
from functools import partial

from gpu.step import Lane, PageWrite, RingGrowth
from scheduler.admission.admission import Admission
from scheduler.cache.ring_pool import Rings
from scheduler.messages import PREEMPTIONS
from scheduler.prefill.document_chunks import Documents
from scheduler.prefill.job_in_progress import JobInProgress
from scheduler.prefill.prefill_queue import PrefillQueue
from scheduler.residence.residence import Residence, Shortage
from scheduler.sequences.lane_fences import Lanes
from scheduler.sequences.offloaded_context import HostContext
from scheduler.sequences.sequence import Sequence, State

log = logging.getLogger(__name__)

_REMEDIES: dict[Shortage, str] = {
    "pages": "raise=gpu.kv_cache_gib",
    "host": "raise=host.memory_limit_gib",
    "index": "raise=index_tokens",
}


class Roster:
    """The unfinished sequences. running: those that decode, in the order in which their prefills ended. released_slots:
    those that sequences have left and no plan has reported to the runner yet.
    """

    def __init__(
        self,
        residence: Residence,
        rings: Rings,
        admission: Admission,
        prefill: PrefillQueue,
        lanes: Lanes,
        documents: Documents | None,
    ) -> None:
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._residence = residence
        self._rings = rings
        self._admission = admission
        self._prefill = prefill
        self._lanes = lanes
        self._documents = documents
        self.released_slots: list[int] = []
        self._unfinished: dict[str, Sequence] = {}

    def queue(self, sequences: Collection[Sequence]) -> None:
        """Queue all of these prepared sequences or none. Raises QueueFullError."""
        self._admission.queue(sequences)
        if self._documents is not None:
            for sequence in sequences:
                self._documents.hold(sequence)
        self._unfinished |= {sequence.request_id: sequence for sequence in sequences}

    def cancel(self, request_ids: list[str]) -> None:
        """Drop these requests and free their pages and slots; unknown ids are ignored.

        The context of a running request stays, idle, for prompts that begin with its tokens.
        """
        for request_id in request_ids:
            sequence = self._unfinished.get(request_id)
            if sequence is not None:
                self.retire(sequence)

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def holding(self) -> Iterator[Sequence]:
        """Iterate over the sequences that hold slots and pages."""
        yield from self.running
        for entry in self._prefill.jobs:
            yield from entry.sequences

    def take_released(self) -> list[int]:
        """Return the slots that sequences left since the last call."""
        released, self.released_slots = self.released_slots, []
        return released

    def start(self, entry: JobInProgress) -> dict[int, Sequence]:
        """Let the sequences of a finished prefill job decode; from now on their blocks can be shared."""
        for sequence in entry.sequences:
            self._residence.finish_prefill(sequence)
            sequence.state = State.RUNNING
            self._admission.count_found(sequence)
            sequence.num_in_flight += 1
            self.running.append(sequence)
        return {sequence.slot: sequence for sequence in entry.sequences}

    def grow(self, stepping: list[Sequence]) -> tuple[list[PageWrite], list[RingGrowth]]:
        """Allocate KV pages and ring pages for the next token of each sequence, by priority and then by arrival.

        If pages are short, short contexts are offloaded so that their pages can be evicted. If that does not help, the
        last sequences in this order are preempted.
        """
        may_all_grow, needs_page = self._residence.offloads is not None, self._residence.needs_page
        growing = [one for one in stepping if one.rings or may_all_grow or needs_page(one)]
        if not growing:  # as in most steps
            return [], []
        writes, rings = [], []
        spared = self._spared_contexts()
        for sequence in sorted(growing, key=_turn):
            while sequence.wants_draw:
                lacks_page = self._rings.lacks_page(sequence)
                shortage = "index" if lacks_page else self._residence.find_shortage(sequence, spared)
                if shortage is None:
                    break
                if shortage == "pages" and self._residence.offload_short(self.running):
                    continue
                self._preempt_for(sequence, shortage)
                spared = self._spared_contexts()
            if sequence.wants_draw:
                writes += self._residence.grow(sequence)
                rings += [(sequence, one) for one in self._rings.grow(sequence)]
        held = {sequence.slot for sequence in self.running}
        still = set(self.running)
        for sequence in stepping if not self.released_slots else ():  # the runner first hears of released rings
            if sequence in still:
                self._rings.take_late(sequence, self.running)
        return [write for write in writes if write.slot in held], [one for who, one in rings if who in still]

    def _preempt_for(self, taker: Sequence, shortage: Shortage) -> None:
        """Preempt the taker, or a sequence that holds what it lacks, and log why."""
        pages = self._residence.pages
        num_free, remedy = pages.num_available, _REMEDIES[shortage]
        if shortage == "pages" and pages.is_refused:
            remedy = "lower=gpu.kv_cache_gib"  # the host has no memory for pages that were planned
        others: Iterable[Sequence] = self.holding()
        if shortage == "host":
            others = [other for other in others if other.context is not None]
        elif shortage == "index":
            others = [other for other in others if _shares(other, taker)]
        candidates, for_priority = [taker, *others], taker.priority
        priority = max(map(_turn, candidates))[0]  # before its preemption may raise it
        victim = self.preempt_last(candidates)
        log.warning(
            "preempted request=%s priority=%g for=%s for_priority=%g short=%s context_tokens=%d pages_free=%d %s",
            victim.request_id,
            priority,
            taker.request_id,
            for_priority,
            shortage,
            victim.num_tokens,
            num_free,
            remedy,
        )

    def begin_anew(self, job_id: int) -> None:
        """Queue the prompts of a job again whose blocks on disk were lost, if the job still runs."""
        for entry in [entry for entry in self._prefill.jobs if entry.job.job_id == job_id]:
            for sequence in list(entry.sequences):
                self._admission.forget_start(sequence)
                log.warning(
                    "preempted request=%s priority=%g reason=disk_blocks_lost context_tokens=%d",
                    sequence.request_id,
                    sequence.priority,
                    sequence.num_tokens,
                )
                self.preempt_last([sequence])

    def preempt_last(self, candidates: Iterable[Sequence]) -> Sequence:
        """Preempt the candidate with the lowest priority, of these the latest arrival, and return it."""
        candidates = list(candidates)
        victim = max(candidates, key=_turn)
        victim.num_overtaken += any(one.request.arrival_s > victim.request.arrival_s for one in candidates)
        self.num_preemptions += 1
        victim.figures[PREEMPTIONS] = victim.figures.get(PREEMPTIONS, 0) + 1
        victim.preempted_s = time.monotonic()
        job = self._prefill.job_of(victim)
        done = victim.next_position - victim.num_drafted  # drafted tokens may be rejected
        victim.num_computed_tokens = done if job is None else job.num_done_tokens(victim)
        self._leave_slot(victim, goes_on=True)
        victim.state = State.WAITING
        if self._documents is not None:
            self._documents.hold(victim)
        self._admission.requeue(victim)
        return victim

    def retire(self, sequence: Sequence) -> None:
        """Finish a sequence in any state."""
        if sequence.state is State.WAITING:
            self._admission.waiting.remove(sequence)
            self._residence.prefixes.forget_live(sequence)
        else:
            self._leave_slot(sequence)
        sequence.state = State.FINISHED
        self.release_chunks(sequence)
        del self._unfinished[sequence.request_id]

    def release_chunks(self, sequence: Sequence) -> None:
        """Release the document chunks of a sequence that has read them or will not do so."""
        if self._documents is not None:
            self._documents.release(sequence)

    def retract(self, sequence: Sequence) -> None:
        """Withdraw a sequence's document chunks, which gave no finite logits."""
        if self._documents is not None:
            self._documents.retract(sequence)

    def _spared_contexts(self) -> list[HostContext]:
        """Return the idle contexts that a growing sequence may not drop: preempted sequences will start with them.

        A sequence that is alone on the device may drop all, or it would be preempted with nobody to run instead.
        """
        is_alone = len(self.running) <= 1 and not self._prefill.jobs
        return [] if is_alone else self._admission.awaited()

    def _leave_slot(self, sequence: Sequence, goes_on: bool = False) -> None:
        """Give back slot and pages. Others in the sequence's prefill job keep their progress. goes_on: it is preempted.

        The offloaded tokens of an unfinished prefill are not kept.
        """
        if sequence.state is State.PREFILLING:
            self._prefill.cut(sequence)
            self._residence.prefixes.stop(sequence)
        else:
            self.running.remove(sequence)
        is_kept = sequence.state is State.RUNNING and not sequence.has_failed
        num_final = self._residence.num_final_blocks(sequence) if is_kept else 0
        self._residence.leave(sequence, is_kept, goes_on)
        seconds_of = partial(self._prefill.prompt_seconds, method=sequence.profile.prefill_method)
        self._residence.disk.note_left(sequence, num_final, seconds_of)
        self._rings.give_back(sequence)
        self._lanes.give_back(sequence.lane)
        sequence.lane = Lane.DEVICE
        self.released_slots.append(sequence.slot)
        self._admission.free_slots.append(sequence.slot)
        sequence.slot = -1


def _turn(sequence: Sequence) -> tuple[float, float]:
    return sequence.priority, sequence.request.arrival_s


def _shares(other: Sequence, taker: Sequence) -> bool:
    """Return whether both have rings that share pages."""
    return any(held.pages and part in other.rings for part, held in taker.rings.items())
