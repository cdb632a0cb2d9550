"""Generate RULER's variable tracking: chains of assignments in noise, and a question for the names with one value.

Source: RULER (Hsieh et al., 2024), `vt`: one chain of four hops, with one worked example before the question. The
invariant: every link of a chain comes after the link that it copies from.
"""

import itertools
import random

from evals.samples import Sample
from evals.tasks.needles import Distinct, hide, noise_lines
from evals.tasks.request import Request, Wanted, make_sample
from evals.tasks.task_words import KEY_WORDS

NUM_HOPS = 4
EXAMPLE_SENTENCES = 25
PROMPT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{document}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {num} variables are assigned the "
    "value {value}, they are: "
)
MAX_NEW_TOKENS = 30


def chain(distinct: Distinct, num_letters: int, value: str) -> tuple[list[str], list[str]]:
    """Return the variables of a chain and its sentences, in order."""
    names = [distinct.variable(num_letters) for _ in range(NUM_HOPS + 1)]
    links = [f"VAR {names[0]} = {value}"]
    links += [f"VAR {name} = VAR {source}" for source, name in itertools.pairwise(names)]
    return names, links


def ascending(draw: random.Random, count: int) -> list[float]:
    """Return `count` random places in [0, 1], ascending."""
    return sorted(draw.random() for _ in range(count))


def generate_tracing(request: Request, index: int) -> Sample:
    """Generate sample `index` of `vt`, after one worked example."""
    draw = request.random(index)
    distinct = Distinct(draw, KEY_WORDS)
    example_value, value = map(str, draw.sample(range(10_000, 100_000), 2))
    example_names, example_links = chain(distinct, 3, example_value)
    names, links = chain(distinct, 5, value)
    example_inserts = list(zip(ascending(draw, len(links)), example_links, strict=True))
    inserts = list(zip(ascending(draw, len(links)), links, strict=True))
    prefix = PREFIX.format(num=len(names), value=value)
    example = (
        PROMPT.format(document=hide(noise_lines(EXAMPLE_SENTENCES), example_inserts), value=example_value)
        + PREFIX.format(num=len(example_names), value=example_value)
        + " ".join(example_names)
        + "\n\n"
    )
    before, after = PROMPT.split("{document}")
    around = example + before, after.format(value=value) + prefix
    return make_sample(
        request,
        index,
        build=lambda amount: hide(noise_lines(amount), inserts).join(around),
        wanted=Wanted(names, "string_match_all", MAX_NEW_TOKENS),
        depth=None,
        meta={"answer_prefix": prefix},
        around=around,
    )
