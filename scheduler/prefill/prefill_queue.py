"""Hold the running prefill jobs, and choose the next unit.

Of the jobs with the highest priority, the one with the least work left for each of its prompts runs first, while the
oldest gets its share. So prompts have the shortest mean wait (least work by weight: Smith 1956, "Various optimizers for
single-stage production"), and a shared job is not overtaken by every single prompt. A job goes through the layers one
by one. A unit is as long as its time allows, and ends at a prompt's end or at the method's alignment. If prompts are
scored, units of logits follow the last layer. If a prompt is cut out of a job, the others go on. If nothing is left to
compute, a unit of no tokens ends the job. Invariant: the oldest job gets `oldest_share` of the estimated time, less at
most one unit.
"""

from collections.abc import Callable

from gpu.step import PartId, PrefillUnit, Unit
from scheduler.engine_config import PrefillConfig
from scheduler.prefill.cost_model import CostModel
from scheduler.prefill.job_in_progress import JobInProgress
from scheduler.sequences.sequence import Sequence

LEAST_UNIT_TOKENS = 64
QUIET_STEP_SECONDS = 8e-3  # prefill in one step on a GPU while no stream runs; an arrival may wait for two such steps
MOST_SCORED_TOKENS = 512  # in a unit: a token's logits may take as long as several of its layers


class PrefillQueue:
    """The running prefill jobs. jobs: in order of arrival. is_loaded(job, layer): whether the document chunks of a
    layer are in memory. is_read(job, layer): the same for a prompt whose first blocks are read from disk.
    """

    def __init__(self, config: PrefillConfig, num_layers: int, costs: CostModel) -> None:
        self._config = config
        self.num_layers = num_layers
        self.costs = costs
        self._owed_seconds = 0.0  # to the oldest job, by jobs that overtook it
        self._owed_to: JobInProgress | None = None
        self.is_loaded: Callable[[int, int], bool] = lambda job_id, layer: True
        self.is_read: Callable[[int, int], bool] = lambda job_id, layer: True
        self.jobs: list[JobInProgress] = []

    @property
    def num_hidden_tokens(self) -> int:
        return sum(entry.job.num_tokens for entry in self.jobs)

    def next_units(self, seconds: float | None, least_seconds: float = 0.0) -> tuple[list[Unit], list[JobInProgress]]:
        """Return units for one step, and the jobs that they complete (taken off the queue).

        seconds: bounds the units' time; at least one small unit is returned in any case. None: a step takes one whole
        prefill chunk, or as many whole layers of shorter jobs as have no more tokens. So an arrival never waits for
        more. If there is only one job, the rest of a layer comes with a whole chunk of the next layer. Then an arrival
        may wait for two chunks, but all layers are cut at the same tokens: what is planned, chosen or allocated for a
        unit serves all layers.

        least_seconds: without a bound, take further chunks while the estimated time stays within this and no job ends,
        since planning a step takes as long as a short unit.
        """
        finished = [entry for entry in self.jobs if not entry.remaining()]
        if finished:  # the prompts that were left have been cut out
            for entry in finished:
                self.jobs.remove(entry)
            return [entry.take_unit(0) for entry in finished], finished
        units: list[Unit] = []
        spent = cost = self._take_chunk(seconds, units, finished)
        while seconds is None and units and not finished and spent + cost <= least_seconds:
            cost = self._take_chunk(seconds, units, finished)
            spent += cost
            if not cost:
                break  # the next unit is of another kind, or not loaded yet
        return units, finished

    def _take_chunk(self, seconds: float | None, units: list[Unit], finished: list[JobInProgress]) -> float:
        """Append one chunk of units, of the step's kind, and the jobs that they complete; return the estimated
        seconds.
        """
        spent, left_tokens, is_first = 0.0, self._config.chunk_tokens, True
        kind = units[0].method if units and isinstance(units[0], PrefillUnit) else None  # or None for logits
        while left_tokens > 0 and (eligible := self._eligible_jobs(seconds, bool(units))):
            entry = min(eligible, key=_turn)
            if is_first:
                if self._is_oldest_due(eligible, seconds):
                    entry = self._find_oldest()
                left_tokens = self._most_tokens(entry, seconds)
                is_first = False
            entry_kind = None if entry.is_scoring else entry.unit_method
            if units and entry_kind != kind:
                break
            kind, rest = entry_kind, entry.num_left
            is_alone = seconds is None and len(self.jobs) == 1
            most = self._config.chunk_tokens if is_alone else left_tokens
            if units and entry.begin == 0 and left_tokens < rest <= self._config.chunk_tokens:
                break  # the part that fits would cost a launch of its own
            whole = min(most, rest)
            length, cost = self._next_unit(entry, most, seconds)
            if units and length > most:
                break
            if seconds is not None:
                if units and cost > seconds:
                    break
                seconds -= cost
            units.append(entry.take_unit(length))
            self._charge(entry, cost)
            spent += cost
            if entry.remaining() == 0:
                self.jobs.remove(entry)
                finished.append(entry)
            left_tokens -= length
            if length < whole:
                break
        return spent

    def cut(self, sequence: Sequence) -> None:
        """Take a sequence's prompt out of its job, and drop a job that has no other prompt."""
        entry = self.job_of(sequence)
        assert entry is not None, f"prefill: {sequence.request_id} is in no job"
        if len(entry.sequences) == 1:
            self.jobs.remove(entry)
        else:
            entry.cut(sequence)

    def job_of(self, sequence: Sequence) -> JobInProgress | None:
        """Return the job that computes the sequence's prompt, if one does."""
        return next((entry for entry in self.jobs if sequence in entry.sequences), None)

    def seconds_left(self, sequence: Sequence) -> float | None:
        """Return the seconds of work left of the sequence's job; None if it has none."""
        entry = self.job_of(sequence)
        return None if entry is None else self._seconds_left_of(entry)

    def seconds_each(self) -> float | None:
        """Return the seconds of work left for each prompt of the next job, or None.

        None: no request waits for a job, or the job is scored: too few units of logits run for a reliable estimate.
        """
        eligible = [entry for entry in self._eligible_jobs(0.0, False) if not entry.is_background]
        entry = self._find_oldest() if self._is_oldest_due(eligible, 0.0) else min(eligible, key=_turn, default=None)
        if entry is None or entry.job.num_scored_tokens:
            return None
        return self._seconds_left_of(entry) / len(entry.job.prompts)

    def _seconds_left_of(self, entry: JobInProgress) -> float:
        prompts, method = entry.job.prompts, entry.method
        whole = sum(self.prompt_seconds(prompt.begin, len(prompt.token_ids), method) for prompt in prompts)
        whole += self.costs.logits_seconds(entry.job.num_scored_tokens)
        return whole * entry.share_left()

    def prompt_seconds(self, begin: int, end: int, method: PartId) -> float:
        """Return the seconds of work for a prompt's tokens `[begin, end)` in all layers."""
        return self.num_layers * self.costs.unit_seconds(end - begin, end, method)

    def _eligible_jobs(self, seconds: float | None, has_units: bool) -> list[JobInProgress]:
        """Return the jobs that may have the next unit.

        Background jobs count only if there are no others. A job whose next layer is still being read from disk counts
        only if nothing else is to do; the device waits then. It does not wait for a context's blocks, which may turn
        out to be lost.
        """
        jobs = [entry for entry in self.jobs if not entry.is_background] or self.jobs
        loaded = [entry for entry in jobs if entry.begin or self._is_loaded(entry)]
        if loaded or has_units or seconds is not None:
            return loaded
        return [entry for entry in jobs if not entry.is_from_disk]

    def _is_loaded(self, entry: JobInProgress) -> bool:
        is_loaded = self.is_read if entry.is_from_disk else self.is_loaded
        return entry.is_scoring or is_loaded(entry.job.job_id, entry.layer)

    def _find_oldest(self) -> JobInProgress:
        """Return the job that is owed the share: the oldest for which a request waits. A new one is owed
        nothing yet.
        """
        oldest = next((entry for entry in self.jobs if not entry.is_background), self.jobs[0])
        if oldest is not self._owed_to:
            self._owed_to, self._owed_seconds = oldest, 0.0
        return oldest

    def _is_oldest_due(self, eligible: list[JobInProgress], seconds: float | None) -> bool:
        """Return whether the oldest job may have a unit now, and is owed at least the time of one.

        This is checked once for each chunk. A chunk of shorter jobs adds less than its own time to what is owed. So the
        oldest never gets two whole units in a row while a shorter job waits.
        """
        if not eligible:
            return False
        oldest = self._find_oldest()
        if oldest not in eligible or self._owed_seconds <= 0:
            return False
        return self._owed_seconds >= self._next_unit(oldest, self._most_tokens(oldest, seconds), seconds)[1]

    def _most_tokens(self, entry: JobInProgress, seconds: float | None) -> int:
        """Return the most tokens of a step with units like the job's next one."""
        most = self._config.chunk_tokens
        if seconds is None:
            return most
        return min(most, max(self.costs.familiar_tokens(entry.unit_method), LEAST_UNIT_TOKENS))

    def _next_unit(self, entry: JobInProgress, left_tokens: int, seconds: float | None) -> tuple[int, float]:
        """Return the tokens of a job's next unit, and its estimated seconds."""
        length = min(left_tokens, entry.num_left)
        if entry.is_scoring:
            length = min(length, MOST_SCORED_TOKENS)
            if seconds is not None:
                familiar = max(self.costs.familiar_rows, LEAST_UNIT_TOKENS)
                length = self.costs.rows_within(seconds, min(length, familiar), LEAST_UNIT_TOKENS)
            return length, self.costs.logits_seconds(length)
        method = entry.unit_method
        begin = entry.longest - length if entry.is_scattered else entry.context_at(entry.begin + 1) - 1
        if seconds is not None:
            length = self.costs.tokens_within(seconds, begin, length, LEAST_UNIT_TOKENS, method)
        length = entry.aligned(length)
        return length, self.costs.unit_seconds(length, begin + length, method)

    def _charge(self, entry: JobInProgress, cost: float) -> None:
        if entry is self._find_oldest():
            self._owed_seconds = max(0.0, self._owed_seconds - cost)
        else:
            share = self._config.oldest_share
            self._owed_seconds += cost * share / (1.0 - share)


def _turn(entry: JobInProgress) -> tuple[float, float]:
    return entry.priority, entry.remaining() / len(entry.job.prompts)
