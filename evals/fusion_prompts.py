"""Make prompts of tasks and datasets with their documents as chunks.

A prompt is written by the model's chat template (or in the reference model's own form), and its document is cut as the
server cuts documents. All policies get the same token ids. Chunks of generated tasks are shuffled. Those of a dataset
keep their order, since its answers may depend on it. Invariant: answers fit the order of the chunks.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from multiprocessing import get_context
from signal import SIG_IGN, SIGINT, signal
from typing import Any

from evals.cells import Cell, PromptSettings
from evals.run import make_prompts, sent_text
from evals.samples import Sample
from evals.tasks.reference import NUM_VALUES
from evals.tokenizer import load_tokenizer
from server.text.chunker import Chunker
from server.text.model_tokenizer import Tokenizer

DEFAULT_TASKS = {
    "reference": ("many_needles", "several_values", "facts_one_hop", "facts_two_hops"),
    "ruler": ("niah_single_2", "niah_multikey_1", "niah_multivalue", "vt"),
}
"""Default tasks by the form of prompts."""


@dataclass(frozen=True)
class FusionPrompt:
    """A prompt made of chunks. spans: half-open ranges of the chunks in `token_ids`."""

    name: str
    task: str
    token_ids: list[int]
    spans: list[tuple[int, int]]
    answers: list[str]
    metric: str
    max_new_tokens: int
    meta: dict[str, Any]


@dataclass(frozen=True)
class PromptPlan:
    """Prompts of one length; tasks take turns. most_answer_tokens: limit of any answer; None: the task's own."""

    settings: PromptSettings
    tasks: tuple[str, ...]
    num_prompts: int
    chunk_tokens: int
    most_answer_tokens: int | None


def fusion_prompts(plan: PromptPlan, length_tokens: int) -> list[FusionPrompt]:
    """Make the prompts of one length in this process."""
    return _in_turns(plan, [_prompts_of_task(plan, task, length_tokens) for task in plan.tasks])


@contextmanager
def prompts_ahead(
    plan: PromptPlan, lengths: Sequence[int], workers: int
) -> Iterator[Callable[[int], list[FusionPrompt]]]:
    """Yield a function that returns the prompts of a length, which worker processes make ahead of time.

    workers 0: they are made in this process when they are asked for.
    """
    if not workers:
        yield partial(fusion_prompts, plan)
        return
    ignore_interrupts = partial(signal, SIGINT, SIG_IGN)  # a terminal sends them to all; this process decides
    pool = ProcessPoolExecutor(workers, get_context("spawn"), ignore_interrupts)
    parts = {length: [pool.submit(_prompts_of_task, plan, task, length) for task in plan.tasks] for length in lengths}
    try:
        yield lambda length: _in_turns(plan, [part.result() for part in parts[length]])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _in_turns(plan: PromptPlan, made: Sequence[list[FusionPrompt]]) -> list[FusionPrompt]:
    return [prompt for turn in zip_longest(*made) for prompt in turn if prompt is not None][: plan.num_prompts]


def _prompts_of_task(plan: PromptPlan, task: str, length_tokens: int) -> list[FusionPrompt]:
    settings = plan.settings
    cut = Cut(settings, plan.chunk_tokens, task not in dict(settings.datasets), length_tokens)
    made = make_prompts(Cell(task, length_tokens, -(-plan.num_prompts // len(plan.tasks)), ("full",), 0), settings)
    most = plan.most_answer_tokens
    prompts = [cut.prompt(prompt.sample) for prompt in made]
    return [replace(one, max_new_tokens=min(one.max_new_tokens, most or one.max_new_tokens)) for one in prompts]


class Cut:
    """Cuts documents of prompts of at most `length_tokens` into chunks. is_shuffled: whether to shuffle the chunks."""

    def __init__(self, settings: PromptSettings, chunk_tokens: int, is_shuffled: bool, length_tokens: int) -> None:
        self._settings, self._is_shuffled, self._length_tokens = settings, is_shuffled, length_tokens
        self._tokenizer, self._templates = Tokenizer(settings.model, None), load_tokenizer(settings.model)
        self._chunker = Chunker(self._tokenizer, chunk_tokens)

    def prompt(self, sample: Sample) -> FusionPrompt:
        """Return a sample's prompt. Raises ValueError if it has no document, or if the chat template changes it."""
        text, adds_special = sent_text(sample, self._templates, self._settings.sent_as)
        document = sample.document
        if not document or document not in text:
            why = "it has no document" if not document else "the chat template changes its document"
            raise ValueError(f"task {sample.task}: {why}; name another with --tasks or --dataset")
        before, _, after = text.partition(document)
        chunks = [list(chunk) for chunk in self._chunker.cut(document, self._length_tokens)]
        if self._is_shuffled:
            random.Random(f"{self._settings.seed}:{sample.task}:{sample.sample_id}").shuffle(chunks)
        token_ids, spans = self._tokenizer.encode(before, adds_special), []
        for chunk in chunks:
            spans.append((len(token_ids), len(token_ids) + len(chunk)))
            token_ids += chunk
        answers = sample.answers
        if sample.task in NUM_VALUES:  # in the order of their appearance
            order = self._tokenizer.decode(token_ids, False)
            answers = [", ".join(sorted(answer.split(", "), key=order.find)) for answer in answers]
        token_ids += self._tokenizer.encode_inside(after)
        name = f"{sample.task}:{sample.sample_id}"
        return FusionPrompt(
            name, sample.task, token_ids, spans, answers, sample.metric, sample.max_new_tokens, sample.meta
        )  # fmt: skip
