"""Record the course of one request.

Times are seconds on the run's clock (0 is its start). Invariant: `outcome` is how the request ended, and `reason` is
filled for every outcome but "completed".
"""

from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

Outcome = Literal["completed", "failed", "unfinished", "skipped"]


@dataclass(slots=True)
class RequestRecord:
    """One request. due_s: when it should have been sent. Latencies start there, so that a late client hides nothing.

    chunk_times_s: arrival of each chunk with output. outcome `skipped`: a turn not sent because an earlier one failed.
    output_source: where output_tokens comes from: "usage", "tokenizer" or "chunks".
    """

    job: int
    turn: int
    due_s: float
    asked_tokens: int | None
    sent_s: float = 0.0
    end_s: float = 0.0
    outcome: Outcome = "unfinished"
    reason: str = ""
    status: int = 0
    retries: int = 0
    num_429: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    reused_tokens: int | None = None
    recomputed_tokens: int | None = None
    accepted_tokens: int | None = None
    rejected_tokens: int | None = None
    output_tokens: int = 0
    output_source: str = "chunks"
    finish_reason: str | None = None
    chunk_times_s: "array[float]" = field(default_factory=lambda: array("d"))
    text: list[str] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Return seconds from due to the first chunk of output, or to the end if the output was empty."""
        return (self.chunk_times_s[0] if self.chunk_times_s else self.end_s) - self.due_s

    @property
    def e2el_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Return the mean seconds per token after the first; None for a single token."""
        if self.output_tokens < 2 or len(self.chunk_times_s) < 2:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Return the times between neighbouring chunks of output, in seconds."""
        times = self.chunk_times_s
        return [later - earlier for earlier, later in pairwise(times)]

    def to_json(self) -> dict[str, Any]:
        """Return everything but the text, for --raw."""
        skip = {"text", "chunk_times_s"}
        tree = {name: getattr(self, name) for name in self.__slots__ if name not in skip}
        tree["chunk_times_s"] = [round(time, 6) for time in self.chunk_times_s]
        return tree
