"""Define the request for generated samples, and the last step of all tasks: fit a prompt, and wrap it as a sample.

The invariant: sample `index` of a request depends on (task, form, length, seed, index, text), never on the number of
samples that are asked for.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from evals.samples import Sample
from evals.tasks.fitting import count_chat_tokens, fit
from evals.tasks.haystack import TextSource

WORDS_A_TOKEN = 1.1


@dataclass(frozen=True)
class Request:
    """The samples that are wanted.

    length_tokens: of prompt, chat turn and answer room together. depths: taken in turn; None: drawn.
    """

    task: str
    form: str
    tokenizer: Any
    length_tokens: int
    seed: int
    source: TextSource
    depths: tuple[float, ...] | None

    def random(self, index: int) -> random.Random:
        """Return the random generator of one sample."""
        return random.Random(f"{self.task}/{self.form}/{self.length_tokens}/{self.seed}/{index}")

    def depth(self, index: int, drawn: float) -> float:
        """Return the depth that is asked for sample index, or the drawn one if none is."""
        return drawn if self.depths is None else self.depths[index % len(self.depths)]

    def sentences(self, index: int) -> list[str]:
        """Return enough sentences to fill the length."""
        seed = self.random(index).getrandbits(48)
        return self.source.sentences(seed, int(self.length_tokens * WORDS_A_TOKEN))


class Wanted(NamedTuple):
    """The answers of a sample. metric: a name of `evals.metrics.METRICS`. max_new_tokens: room for the answer."""

    answers: Sequence[str]
    metric: str
    max_new_tokens: int


def make_sample(
    request: Request,
    index: int,
    build: Callable[[int], str],
    wanted: Wanted,
    depth: float | None,
    meta: dict[str, Any],
    around: tuple[str, str] | None,
) -> Sample:
    """Fit `build` to the request's length and return the sample. Raises ValueError if it cannot be fitted.

    around: the texts that `build` puts before and after the document; None if they depend on the amount.
    """
    reserved = 0 if meta.get("raw") else count_chat_tokens(request.tokenizer)
    amount, prompt, num_tokens = fit(
        build,
        request.tokenizer,
        request.length_tokens,
        wanted.max_new_tokens,
        reserved,
        int(request.length_tokens * WORDS_A_TOKEN),
        0,
    )
    meta = {
        **meta,
        "form": request.form,
        "target_tokens": request.length_tokens,
        "filler": amount,
        "seed": request.seed,
    }
    return Sample(
        task=request.task,
        sample_id=f"{request.form}-{request.length_tokens}-{request.seed}-{index}",
        prompt=prompt,
        answers=list(wanted.answers),
        metric=wanted.metric,
        max_new_tokens=wanted.max_new_tokens,
        length_tokens=num_tokens,
        depth=depth,
        meta=meta,
        around=None if around is None else (len(around[0]), len(around[1])),
    )
