"""Prefill jobs under way, and whose unit runs next: the shortest remaining job's, with a bound on how long it passes.

A job is layer-major: all its tokens go through layer l before any goes through l + 1. Chunk borders may differ from
layer to layer, so a unit is as long as the time it may take allows. Invariant: units of a job come in order.
"""

from dataclasses import dataclass

from gpu.step import PrefillJob, PrefillUnit
from scheduler.config import PrefillConfig
from scheduler.cost_model import CostModel
from scheduler.sequence import Sequence

LEAST_UNIT_TOKENS = 64


@dataclass(eq=False, slots=True)
class JobInProgress:
    """Where a job stands: the next unit begins at token `begin` of `layer`."""

    job: PrefillJob
    sequences: list[Sequence]
    layer: int = 0
    begin: int = 0
    num_passed: int = 0  # units of shorter jobs since this one's last

    def remaining(self, num_layers: int) -> int:
        """Token-layers still to do."""
        return (num_layers - self.layer) * self.job.num_tokens - self.begin

    def context_at(self, token: int) -> int:
        """The position in its prompt of packed token `token - 1`, plus one: the context that token attends to."""
        for prompt in self.job.prompts:
            if token <= prompt.num_computed_tokens:
                return prompt.begin + token
            token -= prompt.num_computed_tokens
        raise AssertionError("token past the end of the job")


class PrefillQueue:
    def __init__(self, config: PrefillConfig, num_layers: int, costs: CostModel) -> None:
        self._config = config
        self._num_layers = num_layers
        self._costs = costs
        self.jobs: list[JobInProgress] = []  # in order of arrival

    @property
    def num_hidden_tokens(self) -> int:
        return sum(entry.job.num_tokens for entry in self.jobs)

    def next_units(self, seconds: float | None) -> tuple[list[PrefillUnit], list[JobInProgress]]:
        """Units for one step, and the jobs that they complete (taken off the queue).

        `seconds` bounds their time if given (at least one small unit comes all the same). Without a bound a step takes
        one whole chunk, or as many layers of shorter jobs as are the same work: an arrival never waits for more.
        """
        units: list[PrefillUnit] = []
        finished: list[JobInProgress] = []
        left_tokens = self._config.chunk_tokens
        if seconds is not None:
            left_tokens = min(left_tokens, max(self._costs.familiar_tokens, LEAST_UNIT_TOKENS))
        while self.jobs and left_tokens > 0:
            entry = self._pick()
            length = whole = min(left_tokens, entry.job.num_tokens - entry.begin)
            if seconds is not None:
                begin = entry.context_at(entry.begin + 1) - 1
                length = self._costs.tokens_within(seconds, begin, whole, LEAST_UNIT_TOKENS)
                cost = self._costs.unit_seconds(length, begin + length)
                if units and cost > seconds:
                    break
                seconds -= cost
            units.append(PrefillUnit(entry.job.job_id, entry.layer, entry.begin, entry.begin + length))
            self._advance(entry, length)
            if entry.layer == self._num_layers:
                self.jobs.remove(entry)
                finished.append(entry)
            left_tokens -= length
            if length < whole:
                break
        return units, finished

    def drop(self, entry: JobInProgress) -> None:
        self.jobs.remove(entry)

    def _pick(self) -> JobInProgress:
        oldest = self.jobs[0]
        shortest = min(self.jobs, key=lambda entry: entry.remaining(self._num_layers))
        chosen = oldest if oldest.num_passed >= self._config.bypass_units else shortest
        if chosen is oldest:
            oldest.num_passed = 0
        else:
            oldest.num_passed += 1
        return chosen

    def _advance(self, entry: JobInProgress, length: int) -> None:
        entry.begin += length
        if entry.begin == entry.job.num_tokens:
            entry.layer += 1
            entry.begin = 0
