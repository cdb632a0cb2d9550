"""Track a running prefill job: its progress, its next unit, and the work left.

Invariant: units of a job come in order, and have each token once.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

from gpu.step import FUSED, LogitsUnit, PartId, PrefillJob, PrefillUnit, Unit
from scheduler.sequences.sequence import Sequence


@dataclass(eq=False, slots=True)
class JobInProgress:
    """The progress of a prefill job. The next unit begins at token `begin` of `layer`; after the last layer, `begin` is
    a scored token.

    method: of all its prompts. align_tokens: units end at multiples of this in a prompt, or at a prompt's end.
    is_background: it runs only if no other job can.
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
        """Return the lowest number among its sequences' priorities; jobs of document chunks have the default, 0."""
        return min((sequence.priority for sequence in self.sequences), default=0)

    @property
    def is_from_disk(self) -> bool:
        """Return whether its units wait for blocks from disk, which may turn out to be lost."""
        return any(prompt.disk is not None for prompt in self.job.prompts)

    @property
    def is_scattered(self) -> bool:
        """Return whether its next unit has scattered tokens of the prompt, not consecutive ones."""
        return self.job.is_scattered(self.layer)

    @property
    def is_scoring(self) -> bool:
        """Return whether all layers are done, so that its next unit computes logits."""
        return self.layer == self.num_layers

    @property
    def unit_method(self) -> PartId:
        """Return the method that computes its next unit, under which the unit's time is learnt."""
        return FUSED if self.is_scattered else self.method

    @property
    def num_left(self) -> int:
        """Count the tokens left of the current layer, or the scored tokens left."""
        job = self.job
        return (job.num_scored_tokens if self.is_scoring else job.num_tokens_in(self.layer)) - self.begin

    def remaining(self) -> int:
        """Count the token-layers still to do; the logits of a scored token count as one."""
        return self._token_layers(self.layer) + self.job.num_scored_tokens - self.begin

    def share_left(self) -> float:
        """Return the share of the job's work that is still to do, in [0, 1]."""
        return self.remaining() / (self._token_layers(0) + self.job.num_scored_tokens)

    @property
    def num_left_tokens(self) -> int:
        """Count the tokens that are still to be computed; all layers of one token are one."""
        return round(self.share_left() * sum(prompt.num_computed_tokens for prompt in self.job.prompts))

    def num_done_tokens(self, sequence: Sequence) -> int:
        """Count the tokens of a sequence that were cached or are computed; all layers of one token are one."""
        prompt = self.job.prompts[self.sequences.index(sequence)]
        return prompt.begin + int((1.0 - self.share_left()) * prompt.num_computed_tokens)

    def _token_layers(self, first: int) -> int:
        """Count the token-layers of layers from `first` on."""
        stages = pairwise([*self.job.stages, (self.num_layers, 0)])
        return sum(tokens * max(0, end - max(begin, first)) for (begin, tokens), (end, _) in stages)

    def take_unit(self, length: int) -> Unit:
        """Return the next unit, of `length` tokens of the layer or scored tokens, and advance to its end."""
        job_id, begin, end = self.job.job_id, self.begin, self.begin + length
        unit: Unit
        if self.is_scoring:
            unit = LogitsUnit(job_id, begin, end)
        else:
            unit = PrefillUnit(job_id, self.layer, begin, end, self.unit_method)
        self._stand_at(end)
        return unit

    def _stand_at(self, token: int) -> None:
        """Move to a token of the layer, or to the start of the next layer if the layer ends there."""
        self.begin = token
        if not self.is_scoring and self.begin == self.job.num_tokens_in(self.layer):
            self.layer, self.begin = self.layer + 1, 0

    def cut(self, sequence: Sequence) -> None:
        """Take one of several prompts out of the job, which keeps its progress in the others."""
        index = self.sequences.index(sequence)
        prompts = self.job.prompts
        counts = [prompt.num_scored_tokens if self.is_scoring else prompt.num_computed_tokens for prompt in prompts]
        self.begin -= min(counts[index], max(0, self.begin - sum(counts[:index])))
        self.job = replace(self.job, prompts=(*prompts[:index], *prompts[index + 1 :]))
        del self.sequences[index]
        self._stand_at(self.begin)

    def context_of(self, unit: Unit) -> int:
        """Return where a unit ends in its prompt; 0 for a unit of logits."""
        if isinstance(unit, LogitsUnit):
            return 0
        return self.longest if self.job.is_scattered(unit.layer) else self.context_at(unit.end)

    @property
    def longest(self) -> int:
        """Return the length of its first prompt, which is the only one if tokens are scattered."""
        return len(self.job.prompts[0].token_ids)

    def context_at(self, token: int) -> int:
        """Return the context of the job's token `token - 1`: its position in its prompt, plus one."""
        for prompt in self.job.prompts:
            if token <= prompt.num_computed_tokens:
                return prompt.begin + token
            token -= prompt.num_computed_tokens
        raise AssertionError("prefill: the token is past the end of the job")

    def aligned(self, length: int) -> int:
        """Return the tokens of the longest next unit with at most `length`, or of the shortest if that has more."""
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
