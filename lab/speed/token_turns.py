"""Define loads of random token ids and the records of their requests, for our server and for other programs alike.

Prompts follow from seed, request and turn. A next turn's prompt is the one before it, its answer, and new tokens. Times
are of `time.perf_counter`, which on Linux all processes of a host share. Importing it loads neither HTTP nor torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from bench.load.arrivals import draw_arrivals

FIRST_ID, LAST_ID = 3, 500  # range of ids in prompts, which every vocabulary has, none of them special


@dataclass(frozen=True, slots=True)
class TokenLoad:
    """Requests of `tokens_in` and `tokens_out` tokens. concurrency: open at once; None: all. rate: Poisson arrivals a
    second. turns: of each chat; a turn after the first has `tokens_in` new tokens.
    """

    requests: int
    tokens_in: int
    tokens_out: int
    concurrency: int | None = None
    rate: float | None = None
    turns: int = 1
    seed: int = 0

    def arrivals(self) -> list[float] | None:
        """Return when requests arrive, in seconds; None: as soon as there is room."""
        if self.rate is None:
            return None
        return [float(at) for at in draw_arrivals(self.rate, 1.0, self.seed, self.requests, None)]


@dataclass(slots=True)
class Turn:
    """One request and its answer: when it was due and sent, when its chunks came, and the answer's tokens."""

    due_s: float
    sent_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        """Return the seconds from the due time to the first chunk."""
        return self.times_s[0] - self.due_s

    @property
    def token_s(self) -> float | None:
        """Return the seconds per token after the first; None if there is only one."""
        count = len(self.token_ids) - 1
        return (self.times_s[-1] - self.times_s[0]) / count if count > 0 and len(self.times_s) > 1 else None


def draw_tokens(load: TokenLoad, request: int, turn: int) -> list[int]:
    """Draw the new tokens of a request's turn."""
    random = np.random.default_rng([load.seed, request, turn])
    tokens: list[int] = random.integers(FIRST_ID, LAST_ID, load.tokens_in).tolist()
    return tokens


def summarise_turns(turns: list[Turn]) -> dict[str, float]:
    """Return seconds in total, tokens/s, and median and 99th percentile of first tokens, time per token and gaps."""
    seconds = max(turn.times_s[-1] for turn in turns) - min(turn.due_s for turn in turns)
    tokens = sum(len(turn.token_ids) for turn in turns)
    kinds = {
        "first_s": [turn.first_s for turn in turns],
        "token_s": [turn.token_s for turn in turns if turn.token_s is not None],
        "gap_s": [late - early for turn in turns for early, late in pairwise(turn.times_s)],
    }
    summary = {"seconds": seconds, "tokens_per_s": tokens / seconds}
    for name, values in kinds.items():
        for share in (50, 99):
            summary[f"{name}_p{share}"] = float(np.percentile(values, share)) if values else 0.0
        summary[f"{name}_most"] = max(values, default=0.0)
    return summary


def steady_step_s(turns: Sequence[Turn]) -> float:
    """Return the seconds of a step of all streams together, from the last stream's first token to the first one's end.

    NaN if the streams do not overlap.
    """
    begin, end = max(turn.times_s[0] for turn in turns), min(turn.times_s[-1] for turn in turns)
    counts = [sum(begin < at <= end for at in turn.times_s) for turn in turns]
    return (end - begin) * len(turns) / sum(counts) if sum(counts) else float("nan")
