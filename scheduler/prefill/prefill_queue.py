"""Prefill jobs under way, and which unit runs next.

The job of the highest priority with the least left runs first, while the oldest gets its share. A job goes through the
layers one by one; a unit is as long as its time allows and ends at a prompt's end or at the method's alignment. Where
prompts are scored, units of logits come after the last layer. If a prompt is cut out of a job, the others go on; if
nothing is left to compute, a unit of no tokens ends the job. Invariants: units of a job come in order and each token
once; of the estimated time, the oldest job gets `oldest_share`, less at most one unit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from gpu.step import FUSED, LogitsUnit, PartId, PrefillJob, PrefillUnit, Unit
from scheduler.engine_config import PrefillConfig
from scheduler.prefill.cost_model import CostModel
from scheduler.sequences.sequence import Sequence

LEAST_UNIT_TOKENS = 64
MOST_SCORED_TOKENS = 512  # of a unit: the logits of one may take what several layers of it do


@dataclass(eq=False, slots=True)
class JobInProgress:
    """The progress of a prefill job: the next unit begins at token `begin` of `layer`, after the last one at that
    scored token.

    method: of all its prompts, and units of it end at multiples of `align_tokens` in a prompt, or where one ends.
    is_background: it runs where no other job could.
    """

    job: PrefillJob
    sequences: list[Sequence]
    method: PartId
    align_tokens: int
    num_layers: int
    layer: int = 0
    begin: int = 0
    is_background: bool = False

    @property
    def priority(self) -> float:
        """Return the least of its sequences' priorities; chunks have that of requests that say none."""
        return min((sequence.priority for sequence in self.sequences), default=0)

    @property
    def is_scattered(self) -> bool:
        """Tell whether its next unit is of tokens that may be any of its prompt's."""
        return self.job.is_scattered(self.layer)

    @property
    def is_scoring(self) -> bool:
        """Tell whether all layers are done, and its next unit is of logits."""
        return self.layer == self.num_layers

    @property
    def unit_method(self) -> PartId:
        """Return the method by which its next unit is attended to, and learnt."""
        return FUSED if self.is_scattered else self.method

    @property
    def num_left(self) -> int:
        """Count the tokens of the layer, or the scored tokens, from where the job stands."""
        job = self.job
        return (job.num_scored_tokens if self.is_scoring else job.num_tokens_in(self.layer)) - self.begin

    def remaining(self) -> int:
        """Count the token-layers still to do; the logits of a scored token count as one."""
        return self._token_layers(self.layer) + self.job.num_scored_tokens - self.begin

    def share_left(self) -> float:
        """Return the share of the job's work that is still to do, in [0, 1]."""
        return self.remaining() / (self._token_layers(0) + self.job.num_scored_tokens)

    def num_done_tokens(self, sequence: Sequence) -> int:
        """Count the tokens of a sequence that were found or are computed; all layers of one token are one."""
        prompt = self.job.prompts[self.sequences.index(sequence)]
        return prompt.begin + int((1.0 - self.share_left()) * prompt.num_computed_tokens)

    def _token_layers(self, first: int) -> int:
        """Count the token-layers of layers from `first` on."""
        stages = pairwise([*self.job.stages, (self.num_layers, 0)])
        return sum(tokens * max(0, end - max(begin, first)) for (begin, tokens), (end, _) in stages)

    def take_unit(self, length: int) -> Unit:
        """Return the next unit, of so many tokens of the layer or scored tokens, and advance behind it."""
        job_id, begin, end = self.job.job_id, self.begin, self.begin + length
        unit: Unit
        if self.is_scoring:
            unit = LogitsUnit(job_id, begin, end)
        else:
            unit = PrefillUnit(job_id, self.layer, begin, end, self.unit_method)
        self._stand_at(end)
        return unit

    def _stand_at(self, token: int) -> None:
        """Stand at that token of the layer, or at the front of the next layer if the layer ends there."""
        self.begin = token
        if not self.is_scoring and self.begin == self.job.num_tokens_in(self.layer):
            self.layer, self.begin = self.layer + 1, 0

    def cut(self, sequence: Sequence) -> None:
        """Take one of several prompts out: the job stands where it stood, without that one's tokens."""
        index = self.sequences.index(sequence)
        prompts = self.job.prompts
        counts = [prompt.num_scored_tokens if self.is_scoring else prompt.num_computed_tokens for prompt in prompts]
        self.begin -= min(counts[index], max(0, self.begin - sum(counts[:index])))
        self.job = replace(self.job, prompts=(*prompts[:index], *prompts[index + 1 :]))
        del self.sequences[index]
        self._stand_at(self.begin)

    def context_of(self, unit: Unit) -> int:
        """Return where a unit ends in its prompt; logits have no context."""
        if isinstance(unit, LogitsUnit):
            return 0
        return self.longest if self.job.is_scattered(unit.layer) else self.context_at(unit.end)

    @property
    def longest(self) -> int:
        """Return the length of its first prompt, which is its only one where tokens are scattered."""
        return len(self.job.prompts[0].token_ids)

    def context_at(self, token: int) -> int:
        """Return the position in its prompt of packed token `token - 1`, plus one: the context that token
        attends to.
        """
        for prompt in self.job.prompts:
            if token <= prompt.num_computed_tokens:
                return prompt.begin + token
            token -= prompt.num_computed_tokens
        raise AssertionError("prefill: the token is past the end of the job")

    def aligned(self, length: int) -> int:
        """Return tokens of the longest unit that may come next, of no more than `length`; of the shortest, if it is
        longer.
        """
        if self.is_scattered:
            return length
        end = self.begin + length
        last = 0
        for prompt in self.job.prompts:
            first, last = last, last + prompt.num_computed_tokens
            if first < end < last:
                down = end - (prompt.begin + end - first) % self.align_tokens
                return (down if down > self.begin else min(down + self.align_tokens, last)) - self.begin
        return length


class PrefillQueue:
    def __init__(self, config: PrefillConfig, num_layers: int, costs: CostModel) -> None:
        self._config = config
        self.num_layers = num_layers
        self._costs = costs
        self._owed_seconds = 0.0  # to the oldest job, by the shorter ones that passed it
        self.is_loaded: Callable[[int, int], bool] = lambda job_id, layer: True  # whether it could go on with a layer
        self.jobs: list[JobInProgress] = []  # in order of arrival

    @property
    def num_hidden_tokens(self) -> int:
        return sum(entry.job.num_tokens for entry in self.jobs)

    def next_units(self, seconds: float | None) -> tuple[list[Unit], list[JobInProgress]]:
        """Return units for one step, and the jobs that they complete (taken off the queue).

        `seconds` bounds their time if given (at least one small unit comes all the same). Without a bound a step takes
        one whole chunk, or as many whole layers of shorter jobs as are no more: an arrival never waits for more.
        """
        finished = [entry for entry in self.jobs if not entry.remaining()]
        if finished:  # what was left of them was cut out
            for entry in finished:
                self.drop(entry)
            return [entry.take_unit(0) for entry in finished], finished
        units: list[Unit] = []
        left_tokens = self._config.chunk_tokens
        kind: PartId | None = None  # of the step's units: their method, or None for logits
        while left_tokens > 0 and (eligible := self._eligible_jobs(seconds, bool(units))):
            entry = min(eligible, key=lambda one: (one.priority, one.remaining()))
            if not units:
                if self.jobs[0] in eligible and self._is_oldest_due(seconds):
                    entry = self.jobs[0]
                left_tokens = self._most_tokens(entry, seconds)
            entry_kind = None if entry.is_scoring else entry.unit_method
            if units and entry_kind != kind:
                break
            kind, rest = entry_kind, entry.num_left
            if units and entry.begin == 0 and left_tokens < rest <= self._config.chunk_tokens:
                break  # what fits of it would be a launch more
            whole = min(left_tokens, rest)
            length, cost = self._next_unit(entry, left_tokens, seconds)
            if units and length > left_tokens:
                break
            if seconds is not None:
                if units and cost > seconds:
                    break
                seconds -= cost
            units.append(entry.take_unit(length))
            self._charge(entry, cost)
            if entry.remaining() == 0:
                self.drop(entry)
                finished.append(entry)
            left_tokens -= length
            if length < whole:
                break
        return units, finished

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
        if entry is self.jobs[0]:
            self._owed_seconds = 0.0
        self.jobs.remove(entry)

    def seconds_left(self, sequence: Sequence) -> float | None:
        """Return the seconds of work until the sequence's job is done, whatever comes between; None if it has none."""
        entry = self.job_of(sequence)
        if entry is None:
            return None
        prompts, method = entry.job.prompts, entry.method
        whole = sum(self.prompt_seconds(prompt.begin, len(prompt.token_ids), method) for prompt in prompts)
        whole += self._costs.logits_seconds(entry.job.num_scored_tokens)
        return whole * entry.share_left()

    def prompt_seconds(self, begin: int, end: int, method: PartId) -> float:
        """Return the seconds of work for a prompt's tokens `[begin, end)` in all layers."""
        return self.num_layers * self._costs.unit_seconds(end - begin, end, method)

    def _eligible_jobs(self, seconds: float | None, has_units: bool) -> list[JobInProgress]:
        """Return jobs that may have the next unit: those of the background only where there are no others; one whose
        next layer is on its way from the disk only where there is nothing else to do.
        """
        jobs = [entry for entry in self.jobs if not entry.is_background] or self.jobs
        loaded = [entry for entry in jobs if entry.begin or self.is_loaded(entry.job.job_id, entry.layer)]
        return loaded if loaded or has_units or seconds is not None else jobs

    def _is_oldest_due(self, seconds: float | None) -> bool:
        """Tell whether what the oldest job is owed pays for its next unit.

        This is asked once a step, and a step of shorter jobs owes it less than a step, so two whole units of it never
        come in a row while a shorter one waits.
        """
        if self._owed_seconds <= 0:
            return False
        oldest = self.jobs[0]
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
        if entry is self.jobs[0]:
            self._owed_seconds = max(0.0, self._owed_seconds - cost)
        else:
            share = self._config.oldest_share
            self._owed_seconds += cost * share / (1.0 - share)
