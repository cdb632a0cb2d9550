"""Define a sample: one prompt of a task, with the answers that it is scored by.

A sample is immutable and complete: given the prompt, a runner needs nothing else to get a prediction, and given the
prediction, `evals.metrics.score` needs only `metric`, `answers` and `meta`. `prompt` is the text of the user's turn or
of the completion; with `meta["raw"]` true it already holds the model's own special tokens and must be sent as a raw
completion, without another chat template.
"""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """A prompt and its answers.

    task: the registry name, such as `niah_single_1`. sample_id: unique within (task, length, seed).
    metric: a name of `evals.metrics.METRICS`. max_new_tokens: room for the answer, in tokens.
    length_tokens: the tokens of `prompt` as counted by the tokenizer that it was made for (0 for datasets read
    without one). depth: the place of the answer in the context, 0 (start) to 1 (end), or None if it has none.
    around: characters of the prompt before its document and after it; None if no single part of it is the document.
    meta: further values for the metric or a report, JSON values only.
    """

    task: str
    sample_id: str
    prompt: str
    answers: list[str]
    metric: str
    max_new_tokens: int
    length_tokens: int
    depth: float | None
    meta: dict[str, Any] = field(default_factory=dict)
    around: tuple[int, int] | None = None

    @property
    def document(self) -> str | None:
        """Return the part of the prompt that the question is about, or None."""
        if self.around is None:
            return None
        return self.prompt[self.around[0] : len(self.prompt) - self.around[1]]

    def to_json(self) -> dict[str, Any]:
        """Return the sample as a dict of JSON values."""
        return asdict(self)
