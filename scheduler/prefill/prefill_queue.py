"""Prefill jobs under way, and which unit runs next.

The job of the highest priority with the least left for each of its prompts runs first, while the oldest gets its share.
So prompts wait least in the mean (least work by weight: Smith 1956, "Various optimizers for single-stage production"),
and those that share a job are not passed by each that comes alone. A job goes through the layers one by one; a unit is
as long as its time allows and ends at a prompt's end or at the method's alignment. Where prompts are scored, units of
logits come after the last layer. If a prompt is cut out of a job, the others go on; if nothing is left to compute, a
unit of no tokens ends the job. Invariant: of the estimated time, the oldest job gets `oldest_share`, less at most one
unit.
"""

from collections.abc import Callable

from gpu.step import PartId, PrefillUnit, Unit
from scheduler.engine_config import PrefillConfig
from scheduler.prefill.cost_model import CostModel
from scheduler.prefill.job_in_progress import JobInProgress
from scheduler.sequences.sequence import Sequence

LEAST_UNIT_TOKENS = 64
QUIET_STEP_SECONDS = 8e-3  # of units in one step on a GPU while no stream runs: an arrival waits for two such steps
MOST_SCORED_TOKENS = 512  # of a unit: the logits of one may take what several layers of it do


class PrefillQueue:
    """The prefill jobs under way. `jobs`: in order of arrival. `is_loaded`: whether a job could go on with a layer;
    `is_read`: of a job whose prompt's front comes from the disk, whether it may.
    """

    def __init__(self, config: PrefillConfig, num_layers: int, costs: CostModel) -> None:
        self._config = config
        self.num_layers = num_layers
        self._costs = costs
        self._owed_seconds = 0.0  # to the oldest job, by the shorter ones that passed it
        self._owed_to: JobInProgress | None = None
        self.is_loaded: Callable[[int, int], bool] = lambda job_id, layer: True
        self.is_read: Callable[[int, int], bool] = lambda job_id, layer: True
        self.jobs: list[JobInProgress] = []

    @property
    def num_hidden_tokens(self) -> int:
        return sum(entry.job.num_tokens for entry in self.jobs)

    def next_units(self, seconds: float | None, least_seconds: float = 0.0) -> tuple[list[Unit], list[JobInProgress]]:
        """Return units for one step, and the jobs that they complete (taken off the queue).

        `seconds` bounds their time if given (at least one small unit comes all the same). Without a bound a step takes
        one whole chunk, or as many whole layers of shorter jobs as are no more: an arrival never waits for more. Where
        a job is alone, the rest of a layer comes with a whole chunk of the next one. So an arrival may wait for two,
        but all layers are cut at the same places: what was planned, chosen or allocated for a unit serves all of them.
        `least_seconds`: without a bound, take further such chunks while the step's estimate stays within it and no job
        ends, since planning a step takes as long as a short unit.
        """
        finished = [entry for entry in self.jobs if not entry.remaining()]
        if finished:  # what was left of them was cut out
            for entry in finished:
                self.drop(entry)
            return [entry.take_unit(0) for entry in finished], finished
        units: list[Unit] = []
        spent = cost = self._take_chunk(seconds, units, finished)
        while seconds is None and units and not finished and spent + cost <= least_seconds:
            cost = self._take_chunk(seconds, units, finished)
            spent += cost
            if not cost:
                break  # what comes next is of another kind, or not there yet
        return units, finished

    def _take_chunk(self, seconds: float | None, units: list[Unit], finished: list[JobInProgress]) -> float:
        """Append a chunk's units to those of a step, of the same kind, and the jobs that they complete; return what
        they take, as estimated.
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
                break  # what fits of it would be a launch more
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
                self.drop(entry)
                finished.append(entry)
            left_tokens -= length
            if length < whole:
                break
        return spent

    def cut(self, sequence: Sequence) -> None:
        """Take a sequence's prompt out of its job; one of no other prompt is dropped."""
        entry = self.job_of(sequence)
        assert entry is not None, f"prefill: {sequence.request_id} is in no job"
        if len(entry.sequences) == 1:
            self.drop(entry)
        else:
            entry.cut(sequence)

    def job_of(self, sequence: Sequence) -> JobInProgress | None:
        """Return the job that computes the sequence's prompt, if one does."""
        return next((entry for entry in self.jobs if sequence in entry.sequences), None)

    def drop(self, entry: JobInProgress) -> None:
        self.jobs.remove(entry)

    def seconds_left(self, sequence: Sequence) -> float | None:
        """Return the seconds of work until the sequence's job is done, whatever comes between; None if it has none."""
        entry = self.job_of(sequence)
        return None if entry is None else self._seconds_left_of(entry)

    def seconds_each(self) -> float | None:
        """Return the seconds of work that are left for each prompt of the job whose turn it is; None: there is none
        that anybody waits for, or it is scored, and what its logits take is learnt from too few units to rely on.
        """
        eligible = [entry for entry in self._eligible_jobs(0.0, False) if not entry.is_background]
        entry = self._find_oldest() if self._is_oldest_due(eligible, 0.0) else min(eligible, key=_turn, default=None)
        if entry is None or entry.job.num_scored_tokens:
            return None
        return self._seconds_left_of(entry) / len(entry.job.prompts)

    def _seconds_left_of(self, entry: JobInProgress) -> float:
        prompts, method = entry.job.prompts, entry.method
        whole = sum(self.prompt_seconds(prompt.begin, len(prompt.token_ids), method) for prompt in prompts)
        whole += self._costs.logits_seconds(entry.job.num_scored_tokens)
        return whole * entry.share_left()

    def prompt_seconds(self, begin: int, end: int, method: PartId) -> float:
        """Return the seconds of work for a prompt's tokens `[begin, end)` in all layers."""
        return self.num_layers * self._costs.unit_seconds(end - begin, end, method)

    def prompt_work(self, num_tokens: int) -> float:
        """Return the operations of a prompt of so many tokens."""
        return self._costs.prompt_work(num_tokens)

    def _eligible_jobs(self, seconds: float | None, has_units: bool) -> list[JobInProgress]:
        """Return jobs that may have the next unit: those of the background only where there are no others; one whose
        next layer is on its way from the disk only where there is nothing else to do, and then it is waited for; a
        context's layer is not, since it may turn out to be lost.
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
        """Return the job that is owed its share: the first that somebody waits for. A new one is owed nothing yet."""
        oldest = next((entry for entry in self.jobs if not entry.is_background), self.jobs[0])
        if oldest is not self._owed_to:
            self._owed_to, self._owed_seconds = oldest, 0.0
        return oldest

    def _is_oldest_due(self, eligible: list[JobInProgress], seconds: float | None) -> bool:
        """Return whether the oldest job may have a unit now and what it is owed pays for it.

        This is asked once a chunk, and a chunk of shorter jobs owes it less than a chunk, so two whole units of it
        never come in a row while a shorter one waits.
        """
        if not eligible:
            return False
        oldest = self._find_oldest()
        if oldest not in eligible or self._owed_seconds <= 0:
            return False
        return self._owed_seconds >= self._next_unit(oldest, self._most_tokens(oldest, seconds), seconds)[1]

    def _most_tokens(self, entry: JobInProgress, seconds: float | None) -> int:
        """Return the most tokens of a step of units like the job's next."""
        most = self._config.chunk_tokens
        if seconds is None:
            return most
        return min(most, max(self._costs.familiar_tokens(entry.unit_method), LEAST_UNIT_TOKENS))

    def _next_unit(self, entry: JobInProgress, left_tokens: int, seconds: float | None) -> tuple[int, float]:
        """Return tokens of a job's next unit, and what it takes, as estimated."""
        length = min(left_tokens, entry.num_left)
        if entry.is_scoring:
            length = min(length, MOST_SCORED_TOKENS)
            if seconds is not None:
                familiar = max(self._costs.familiar_rows, LEAST_UNIT_TOKENS)
                length = self._costs.rows_within(seconds, min(length, familiar), LEAST_UNIT_TOKENS)
            return length, self._costs.logits_seconds(length)
        method = entry.unit_method
        begin = entry.longest - length if entry.is_scattered else entry.context_at(entry.begin + 1) - 1
        if seconds is not None:
            length = self._costs.tokens_within(seconds, begin, length, LEAST_UNIT_TOKENS, method)
        length = entry.aligned(length)
        return length, self._costs.unit_seconds(length, begin + length, method)

    def _charge(self, entry: JobInProgress, cost: float) -> None:
        if entry is self._find_oldest():
            self._owed_seconds = max(0.0, self._owed_seconds - cost)
        else:
            share = self._config.oldest_share
            self._owed_seconds += cost * share / (1.0 - share)


def _turn(entry: JobInProgress) -> tuple[float, float]:
    return entry.priority, entry.remaining_each()
