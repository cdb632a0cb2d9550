"""Generate long-context tasks: RULER's thirteen, and the reference model's own, for any length and any tokenizer.

`TASKS` maps a name to its generator. A generator knows the tokenizer's interface and a text source, but no model and no
method. `form` is "ruler" (RULER's wording; for a model's chat template or for completions) or "reference" (the
reference model's own forms, as raw completions). The invariant: the same arguments give the same samples on every
machine. Samples fill their length to within 2 % and never exceed it, and the first n samples of a longer run are those
of a shorter one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from evals.samples import Sample
from evals.tasks.counting_words import generate_common, generate_frequent
from evals.tasks.haystack import TextSource
from evals.tasks.needles import SETTINGS, generate_needles
from evals.tasks.questions import generate_question
from evals.tasks.reference import REFERENCE_TASKS, generate_reference
from evals.tasks.request import Request
from evals.tasks.text import generated_text
from evals.tasks.tracing import generate_tracing

CODE_VERSION = "2"
FORMS = ("ruler", "reference")
RULER_MAKERS: dict[str, Callable[[Request, int], Sample]] = {
    **dict.fromkeys(SETTINGS, generate_needles),
    "vt": generate_tracing,
    "cwe": generate_common,
    "fwe": generate_frequent,
    "qa_1": generate_question,
    "qa_2": generate_question,
}
TASK_NAMES = (*RULER_MAKERS, *REFERENCE_TASKS)
RULER_TASKS = tuple(RULER_MAKERS)


def generate(
    task: str,
    tokenizer: Any,
    length_tokens: int,
    num_samples: int,
    seed: int,
    form: str,
    text_source: TextSource | None,
    depths: Sequence[float] | None = None,
) -> list[Sample]:
    """Return samples of a task.

    tokenizer: a Hugging Face tokenizer. length_tokens: of prompt, chat turn and answer room together. text_source:
    None: the chronicle. depths: places in [0, 1] of the needle that is asked for, taken in turn; None: drawn.
    Raises KeyError for an unknown task, ValueError for an unknown form, a reference-only task in RULER's form, or a
    length that cannot be filled.
    """
    if task not in TASK_NAMES:
        raise KeyError(f"task {task!r}: unknown; have {', '.join(TASK_NAMES)}")
    if form not in FORMS:
        raise ValueError(f"form {form!r}: unknown; have {', '.join(FORMS)}")
    if form == "ruler" and task not in RULER_MAKERS:
        raise ValueError(f"task {task}: has only the form 'reference', got 'ruler'")
    if depths is not None and not (depths and all(0 <= depth <= 1 for depth in depths)):
        raise ValueError(f"depths: got {depths}, wanted one or more numbers from 0 to 1")
    make = RULER_MAKERS[task] if form == "ruler" else generate_reference
    request = Request(
        task, form, tokenizer, length_tokens, seed, text_source or generated_text(), tuple(depths) if depths else None
    )
    return [make(request, index) for index in range(num_samples)]


TASKS: dict[str, Callable[..., list[Sample]]] = {name: partial(generate, name) for name in TASK_NAMES}
"""Name to generator: `TASKS[name](tokenizer, length_tokens, num_samples, seed, form, text_source, depths=None)`."""
