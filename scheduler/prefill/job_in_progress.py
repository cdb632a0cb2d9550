"""One prefill job under way: where it stands, its next unit, and what is left of it.

Invariant: units of a job come in order, and each token once.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

from gpu.step import FUSED, LogitsUnit, PartId, PrefillJob, PrefillUnit, Unit
from scheduler.sequences.sequence import Sequence


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
    def is_from_disk(self) -> bool:
        """Return whether its units wait for what comes from the disk, and which may turn out not to be there."""
        return any(prompt.disk is not None for prompt in self.job.prompts)

    @property
    def is_scattered(self) -> bool:
        """Return whether its next unit is of tokens that may be any of its prompt's."""
        return self.job.is_scattered(self.layer)

    @property
    def is_scoring(self) -> bool:
        """Return whether all layers are done, and its next unit is of logits."""
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

    def remaining_each(self) -> float:
        """Return the token-layers still to do for each of its prompts."""
        return self.remaining() / len(self.job.prompts)

    def share_left(self) -> float:
        """Return the share of the job's work that is still to do, in [0, 1]."""
        return self.remaining() / (self._token_layers(0) + self.job.num_scored_tokens)

    @property
    def num_left_tokens(self) -> int:
        """Count the tokens that are still to be computed; all layers of one token are one."""
        return round(self.share_left() * sum(prompt.num_computed_tokens for prompt in self.job.prompts))

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
