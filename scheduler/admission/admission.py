"""Queue waiting requests, and admit them in rounds.

Invariants: a request leaves the queue only with a slot and all that its prompt needs. A request that does not fit, or
waits for another to compute its prefix, is overtaken a bounded number of times. The cost of examining a request does
not grow with its prompt.
"""

import logging
import time
from collections import deque
from collections.abc import Collection
from functools import partial

from gpu.step import PageWrite, PrefillJob, PrefillPrompt
from scheduler.admission.admission_round import Admitted, Round
from scheduler.cache.ring_pool import Rings
from scheduler.engine_config import SchedulerConfig
from scheduler.messages import COMPUTED_AGAIN, PREEMPTED_AGAIN, cached_figure, passed_figure
from scheduler.prefill.document_chunks import Documents
from scheduler.prefill.job_in_progress import JobInProgress
from scheduler.prefill.prefill_queue import PrefillQueue
from scheduler.residence.offloaded_prompts import Start
from scheduler.residence.residence import Residence
from scheduler.sequences.capacity import QueueFullError
from scheduler.sequences.offloaded_context import HostContext
from scheduler.sequences.sequence import Sequence, State

log = logging.getLogger(__name__)

_MOST_BYPASSES = 64  # admissions that may overtake a request which does not fit yet
_MOST_TRIED_OFFLOADED = 4  # offloaded prompts tried in a round: if the host has no room for these, more will not fit


class Admission:
    """The queue of waiting requests, and the decision which of them are admitted.

    waiting: requests by priority and then by arrival, preempted ones first. A request that lower priorities have
        overtaken too often is not overtaken again.
    free_slots: the last one is taken first.
    num_queried_tokens: tokens of all prefilled prompts since the engine started.
    num_cached_tokens: those of them that the prefix cache had.
    num_recomputed_tokens: tokens that preempted sequences computed again.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        max_hidden_tokens: int,
        residence: Residence,
        prefill: PrefillQueue,
        rings: Rings,
        documents: Documents | None,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.free_slots = list(range(config.max_running - 1, -1, -1))
        self.num_queried_tokens = 0
        self.num_cached_tokens = 0
        self.num_recomputed_tokens = 0
        self._config = config
        self._max_hidden_tokens = max_hidden_tokens
        self._residence = residence
        self._prefill = prefill
        self._rings = rings
        self._documents = documents
        self._next_job_id = 0

    def queue(self, sequences: Collection[Sequence]) -> None:
        """Queue all of these sequences or none; each overtakes waiting ones of lower priority.

        Raises QueueFullError.
        """
        if len(self.waiting) + len(sequences) > self._config.max_queue + len(self.free_slots):
            raise QueueFullError(
                f"queue: {len(self.waiting)} requests wait, asked {len(sequences)} more, room for "
                f"{self._config.max_queue}; try again later or raise scheduler.max_queue"
            )
        for sequence in sequences:
            self._residence.await_room(sequence)
            place = len(self.waiting)
            while place and sequence.goes_before(self.waiting[place - 1]):
                place -= 1
                self.waiting[place].num_overtaken += 1
            self.waiting.insert(place, sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Put a preempted sequence at the front of the queue, behind those of higher priority."""
        self._residence.await_room(sequence)
        place = 0
        while place < len(self.waiting) and self.waiting[place].goes_before(sequence):
            place += 1
        self.waiting.insert(place, sequence)

    def awaited(self) -> list[HostContext]:
        """Return the contexts that preempted sequences left and will start with again."""
        return [sequence.left_context for sequence in self.waiting if sequence.left_context is not None]

    def admit(self, holding: list[Sequence]) -> Admitted:
        """Admit, in order, the sequences that fit beside those that hold pages, and start their prefill jobs.

        A sequence that does not fit may be overtaken a bounded number of times. Short prompts share a job.
        """
        most_jobs = self._config.prefill.max_jobs - len(self._prefill.jobs)
        if not self.waiting or not self.free_slots or most_jobs <= 0:
            return Admitted()
        if self._documents is not None and self._documents.is_due:
            return Admitted()  # document chunks take the free job, or the next one
        this = self._begin_round(holding)
        prefixes = self._residence.prefixes
        passed: list[tuple[Sequence, int]] = []
        for sequence in list(self.waiting):
            if sequence.num_in_flight or (sequence.run_end and this.is_offloading):
                continue
            if self._documents is not None and not self._documents.is_ready(sequence):  # its chunks are computed first
                passed.append((sequence, this.num_admitted))
                if sequence.num_bypassed > _MOST_BYPASSES:
                    break  # else others would take the job that computes its chunks
                continue
            if self._rings.lacks(sequence, holding):
                continue  # a leaving sequence frees its ring, so letting others pass delays nobody
            if self._residence.windows.lacks():
                self._refuse(sequence, this)
                break  # every request needs a window, and a leaving sequence frees its own
            start, is_waiting = None, False
            self._residence.pages.is_refused = False
            if sequence.run_end:
                start = self._try_offloaded(sequence, this, holding)
            else:
                other = prefixes.look(sequence)
                is_waiting = other is not None and self._is_worth_waiting(sequence, other, this)
                num_pages = sequence.num_pages - sequence.num_known_blocks
                if not is_waiting and (num_pages < this.fewest_refused or sequence.left_context is not None):
                    start = self._try(sequence, this, holding)
            if start is not None:
                self._enter(sequence, start, this, holding)
                if not self.free_slots or len(this.batches) >= most_jobs:
                    break
                continue
            if self._residence.pages.is_refused:
                self._refuse(sequence, this)
            passed.append((sequence, this.num_admitted))
            if not is_waiting and sequence.num_bypassed > _MOST_BYPASSES:
                break
        for sequence, num_before in passed:
            sequence.num_bypassed += this.num_admitted - num_before
        writes = (PageWrite(sequence.slot, 0, tuple(sequence.pages)) for batch in this.batches for sequence, _ in batch)
        jobs = tuple(self._start_job(batch) for batch in this.batches)
        return Admitted(jobs, tuple(writes), None if this.batches else this.refused)

    def _refuse(self, sequence: Sequence, this: Round) -> None:
        """Note the first sequence that gets no memory from the host while no other request could free any."""
        if not this.has_others and not self._prefill.jobs and this.refused is None:
            this.refused = sequence

    def compute_chunks(self) -> list[PrefillJob]:
        """Start a job of document chunks that the first waiting requests need, or that are to be stored.

        Chunks are stored when nothing else is to be done, or when many requests have overtaken them.
        """
        if self._documents is None:
            return []
        self._documents.look()
        if len(self._prefill.jobs) >= self._config.prefill.max_jobs:
            return []
        room = self._max_hidden_tokens - self._prefill.num_hidden_tokens
        is_idle = not (self.waiting or self._prefill.jobs)
        entry = self._documents.next_job(self._next_job_id, self.waiting, room, is_idle)
        if entry is None:
            return []
        self._next_job_id += 1
        self._prefill.jobs.append(entry)
        return [entry.job]

    def _begin_round(self, holding: list[Sequence]) -> Round:
        return Round(
            chunk_tokens=self._config.prefill.chunk_tokens,
            num_hidden=self._prefill.num_hidden_tokens,
            num_coming_pages=sum(map(self._residence.room.num_coming_pages, holding)),
            is_offloading=any(prompt.host for entry in self._prefill.jobs for prompt in entry.job.prompts),
            kept=self.awaited(),
            has_others=bool(holding),
        )

    def _is_worth_waiting(self, sequence: Sequence, other: Sequence, this: Round) -> bool:
        """Return whether waiting for another prefill, which computes shared blocks, saves more time than it costs.

        Computing the shared blocks once saves their time twice: for this request, and for the other one, which this
        shorter one would overtake. The wait costs the time left of the other prefill.
        """
        prefixes, page_tokens = self._residence.prefixes, self._residence.page_tokens
        method = sequence.profile.prefill_method  # also the other request's, since they share KV
        left = this.seconds_left.get(other)
        if left is None:
            left = self._prefill.seconds_left(other)
            if left is None:  # it is admitted in this round
                left = self._prefill.prompt_seconds(other.num_published * page_tokens, other.num_tokens, method)
            this.seconds_left[other] = left
        num_shared = prefixes.count_shared(sequence, other)
        begin, end = sequence.num_known_blocks * page_tokens, num_shared * page_tokens
        return 2 * self._prefill.prompt_seconds(begin, end, method) > left

    def _try(self, sequence: Sequence, this: Round, holding: list[Sequence]) -> Start | None:
        """Give a sequence what its prompt needs, if there is room; None: there is none. `look` was called before.

        Numbers are checked before any page is held: the prompt needs all pages that no sequence holds already.
        `Residence.take` checks again, since idle contexts have fewer pages to free once the prefix is held.
        """
        begin = self._residence.prefixes.begin_of(sequence)
        start = Start(begin, 0, None, 0 if sequence.finds_live else self._find_on_disk(sequence, begin))
        if this.num_hidden + sequence.num_tokens - start.first_computed > self._max_hidden_tokens:
            return None
        if self._rings.lacks(sequence, holding, begin=start.first_computed):
            return None
        num_pages = sequence.num_pages - self._residence.prefixes.count_held(sequence)
        if num_pages >= this.fewest_refused and sequence.left_context is None:
            return None  # a preempted sequence may take the pages of the context that it left
        kept = self._kept(sequence, this)
        if not self._residence.room.could_free_pages(num_pages + this.num_coming_pages, kept):
            if sequence.left_context is None:
                this.fewest_refused = num_pages
            return None
        return start if self._residence.take(sequence, start, this.num_coming_pages, kept) else None

    def _find_on_disk(self, sequence: Sequence, begin: int, is_read_whole: bool = False) -> int:
        """Return the end of what a prompt reads from disk beyond its known tokens; 0: nothing."""
        seconds_of = partial(self._prefill.prompt_seconds, method=sequence.profile.prefill_method)
        return self._residence.disk.find(sequence, begin, seconds_of, is_read_whole)

    def _try_offloaded(self, sequence: Sequence, this: Round, holding: list[Sequence]) -> Start | None:
        """Give a prompt that is offloaded in part what it needs, if there is room; None: there is none."""
        prompts = self._residence.prompts
        assert prompts is not None, "admission: a prompt is offloaded where there is host memory"
        start = prompts.find(sequence)
        disk_end = self._find_on_disk(sequence, start.begin, is_read_whole=True)
        if disk_end:  # an offloaded run is filled from one source only
            start = Start(0, start.end, None, disk_end)
        this.num_tried_offloaded += 1
        if (
            this.num_tried_offloaded > _MOST_TRIED_OFFLOADED
            or this.num_hidden + sequence.num_tokens - start.first_computed > self._max_hidden_tokens
            or self._rings.lacks(sequence, holding, begin=start.first_computed)
        ):
            return None
        kept = self._kept(sequence, this)
        return start if prompts.take(sequence, start, this.num_coming_pages, kept) else None

    def _kept(self, sequence: Sequence, this: Round) -> list[HostContext]:
        """Return the idle contexts that must not be dropped for this sequence."""
        return [context for context in this.kept if context is not sequence.left_context] if this.has_others else []

    def _enter(self, sequence: Sequence, start: Start, this: Round, holding: list[Sequence]) -> None:
        self.waiting.remove(sequence)
        sequence.state = State.PREFILLING
        sequence.slot = self.free_slots.pop()
        sequence.num_bypassed = 0
        self._rings.take(sequence, start.first_computed, holding)
        self._residence.conversations.enter(sequence, self._prefill.costs.prompt_work)
        self._residence.start_prefill(sequence, start)
        if sequence.started_s is None:
            sequence.started_s = time.monotonic()
            sequence.num_cached_tokens = start.first_computed
            for place, number in self._residence.cached_from(start).items():
                sequence.figures[cached_figure(place)] = number
            sequence.figures |= {passed_figure(why): number for why, number in sequence.passed_over.items()}
            again = self._residence.num_computed_again(sequence, start)
            sequence.figures.pop(COMPUTED_AGAIN, None)  # from an earlier start that failed
            sequence.figures |= {COMPUTED_AGAIN: again} if again else {}
        else:
            self._note_resumed(sequence, start.first_computed)
        this.add(sequence, start)
        this.num_hidden += sequence.num_tokens - start.first_computed
        this.num_coming_pages += self._residence.room.num_coming_pages(sequence)
        this.is_offloading |= start.end > 0
        this.num_admitted += 1
        this.has_others = True
        if self._documents is not None:
            self._documents.count_begun()

    def forget_start(self, sequence: Sequence) -> None:
        """Forget the start of a sequence whose prefill must restart because its blocks on disk were lost."""
        if sequence.started_s is not None and not sequence.has_reported:
            sequence.started_s = None

    def count_found(self, sequence: Sequence) -> None:
        """Count a prompt once, when its prefill is planned to its end.

        Only then is it certain that its cached tokens could be read, also those on disk.
        """
        if not sequence.is_counted:
            sequence.is_counted = True
            self.num_queried_tokens += sequence.num_tokens
            self.num_cached_tokens += sequence.num_cached_tokens

    def _note_resumed(self, sequence: Sequence, num_found: int) -> None:
        """Count and log the tokens that a preempted sequence computes again. num_found: the tokens that it found."""
        num_recomputed = max(0, sequence.num_computed_tokens - num_found)
        self.num_recomputed_tokens += num_recomputed
        sequence.figures[PREEMPTED_AGAIN] = sequence.figures.get(PREEMPTED_AGAIN, 0) + num_recomputed
        log.info(
            "resumed request=%s waited_s=%.3f found_tokens=%d of=%d computed_again=%d",
            sequence.request_id,
            time.monotonic() - sequence.preempted_s,
            num_found,
            sequence.num_tokens,
            num_recomputed,
        )

    def _start_job(self, batch: list[tuple[Sequence, Start]]) -> PrefillJob:
        offloaded = self._residence.prompts
        prompts = [
            PrefillPrompt(
                slot=sequence.slot,
                token_ids=sequence.tokens_from(0),
                begin=start.first_computed,
                num_prompt_tokens=sequence.num_prompt_tokens,
                sampling=sequence.request.sampling,
                profile=sequence.profile.name,
                host=None if offloaded is None else offloaded.host_prompt(sequence, start),
                pooling=sequence.request.pooling,
                branches=sequence.branches,
                fused=None if self._documents is None else self._documents.plan(sequence, start.begin),
                disk=self._residence.disk.prefix(sequence, start.begin, start.disk_end),
                adapter=sequence.request.adapter,
            )
            for sequence, start in batch
        ]
        job = PrefillJob(self._next_job_id, tuple(prompts))
        self._next_job_id += 1
        profile = batch[0][0].profile
        self._prefill.jobs.append(
            JobInProgress(
                job,
                [sequence for sequence, _ in batch],
                profile.prefill_method,
                profile.align_tokens,
                self._prefill.num_layers,
            )
        )
        return job
