"""Who waits, and who is let in: the queue, the slots, and the jobs of prompts that are admitted together.

It refuses to know what runs, beyond what those that hold pages may still need. Invariants: a request leaves the queue
with a slot and all that its prompt needs, or stays; one that does not fit is passed by others a bounded number of
times.
"""

import time
from collections import deque

from gpu.step import PageWrite, PrefillJob, PrefillPrompt
from scheduler.capacity import QueueFullError
from scheduler.config import SchedulerConfig
from scheduler.host_contexts import HostContext
from scheduler.prefill_queue import JobInProgress, PrefillQueue
from scheduler.residence import Residence, Start
from scheduler.sequence import Sequence, State

_MOST_BYPASSES = 64  # admissions that may pass a request which does not fit yet


class Admission:
    """`waiting`: in order, preempted ones in front; `free_slots`: the last one is taken first."""

    def __init__(
        self, config: SchedulerConfig, max_hidden_tokens: int, residence: Residence, prefill: PrefillQueue
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.free_slots = list(range(config.max_running - 1, -1, -1))
        self._config = config
        self._max_hidden_tokens = max_hidden_tokens
        self._residence = residence
        self._prefill = prefill
        self._next_job_id = 0

    def queue(self, sequences: list[Sequence]) -> None:
        """All of these or none. Raises QueueFullError."""
        if len(self.waiting) + len(sequences) > self._config.max_queue + len(self.free_slots):
            raise QueueFullError(
                f"queue: {len(self.waiting)} requests wait, asked {len(sequences)} more, room for "
                f"{self._config.max_queue}; try again later or raise scheduler.max_queue"
            )
        self.waiting.extend(sequences)

    def awaited(self) -> list[HostContext]:
        """Contexts that those left which gave way: they will begin with them."""
        return [sequence.left for sequence in self.waiting if sequence.left is not None]

    def admit(self, holding: list[Sequence]) -> tuple[list[PrefillJob], list[PageWrite]]:
        """Take from the queue, in order, what fits beside those that hold pages; what does not fit may be passed by
        what does, a bounded number of times. Short prompts admitted together share a job."""
        admitted: list[tuple[Sequence, Start]] = []
        num_hidden = self._prefill.num_hidden_tokens
        passed: list[Sequence] = []
        others = list(holding)
        awaited = self.awaited()
        for sequence in list(self.waiting):
            room = self._config.prefill.max_jobs - len(self._prefill.jobs)
            if not self.free_slots or self._num_jobs(admitted) >= room:
                break
            start, awaits = self._residence.find(sequence)
            if sequence.num_in_flight or awaits or (start.end and self._is_depositing(admitted)):
                continue
            num_new = len(sequence.tokens) - start.begin
            kept = [context for context in awaited if others and context is not sequence.left]
            has_room = num_hidden + num_new <= self._max_hidden_tokens
            if not has_room or not self._residence.take(sequence, start, others, kept):
                passed.append(sequence)
                if sequence.num_bypassed > _MOST_BYPASSES:
                    break
                continue
            for other in passed:
                other.num_bypassed += 1
            self.waiting.remove(sequence)
            self._enter(sequence, start.begin)
            admitted.append((sequence, start))
            others.append(sequence)
            num_hidden += num_new
        writes = [PageWrite(sequence.slot, 0, list(sequence.pages)) for sequence, _ in admitted]
        return [self._start_job(batch) for batch in self._pack(admitted)], writes

    def _pack(self, admitted: list[tuple[Sequence, Start]]) -> list[list[tuple[Sequence, Start]]]:
        """Prompts that share a job: in order, up to one chunk of tokens together; one that goes down is alone."""
        batches: list[list[tuple[Sequence, Start]]] = []
        room = 0
        for sequence, start in admitted:
            num_new = len(sequence.tokens) - start.begin
            if not start.end and num_new <= room:
                batches[-1].append((sequence, start))
                room -= num_new
            else:
                batches.append([(sequence, start)])
                room = 0 if start.end else self._config.prefill.chunk_tokens - num_new
        return batches

    def _num_jobs(self, admitted: list[tuple[Sequence, Start]]) -> int:
        return len(self._pack(admitted))

    def _is_depositing(self, admitted: list[tuple[Sequence, Start]]) -> bool:
        """Whether a prompt under way goes down: staging has room for one."""
        under_way = [prompt.host for entry in self._prefill.jobs for prompt in entry.job.prompts]
        return any(under_way) or any(start.end for _, start in admitted)

    def _start_job(self, batch: list[tuple[Sequence, Start]]) -> PrefillJob:
        prompts = [
            PrefillPrompt(
                slot=sequence.slot,
                token_ids=sequence.token_array(),
                begin=start.begin,
                num_prompt_tokens=sequence.num_prompt_tokens,
                sampling=sequence.request.sampling,
                profile=sequence.request.attention_profile,
                host=self._residence.host_prompt(sequence, start),
            )
            for sequence, start in batch
        ]
        job = PrefillJob(self._next_job_id, prompts)
        self._next_job_id += 1
        self._prefill.jobs.append(JobInProgress(job, [sequence for sequence, _ in batch]))
        return job

    def _enter(self, sequence: Sequence, begin: int) -> None:
        sequence.state = State.PREFILLING
        sequence.slot = self.free_slots.pop()
        sequence.num_bypassed = 0
        self._residence.prefixes.start(sequence, begin)
        if sequence.started_s is None:
            sequence.started_s = time.monotonic()
            sequence.num_cached_tokens = begin
            self._residence.prefixes.count(len(sequence.tokens), begin)
