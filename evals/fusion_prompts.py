"""Tasks' prompts as documents' chunks in a new order: what fused prompts are judged on.

A task's document is cut as the server cuts documents, its chunks are shuffled, and all policies get the same token ids.
It refuses to know policies. Invariant: answers fit the order in which the chunks come.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal
from typing import Any

from evals.cells import Cell, PromptSettings
from evals.run import make_prompts
from evals.samples import Sample
from evals.tasks.reference import NUM_VALUES, TURN_BEGIN, TURN_END, user_turn
from server.chunker import Chunker
from server.tokenizer import Tokenizer

DEFAULT_TASKS = ("many_needles", "several_values", "facts_one_hop", "facts_two_hops")


@dataclass(frozen=True)
class FusionPrompt:
    """spans: of the chunks in `token_ids`, half-open."""

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
    """Prompts of a length, of all tasks together, turn by turn."""

    model: Path
    tasks: tuple[str, ...]
    num_prompts: int
    chunk_tokens: int
    seed: int


def fusion_prompts(plan: PromptPlan, length_tokens: int) -> list[FusionPrompt]:
    """Made here and now."""
    return _in_turns(plan, [_prompts_of_task(plan, task, length_tokens) for task in plan.tasks])


@contextmanager
def prompts_ahead(
    plan: PromptPlan, lengths: Sequence[int], workers: int
) -> Iterator[Callable[[int], list[FusionPrompt]]]:
    """Gives the prompts of a length, which processes have made meanwhile; workers 0: made when they are asked for."""
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
    return [prompt for turn in zip(*made, strict=True) for prompt in turn][: plan.num_prompts]


def _prompts_of_task(plan: PromptPlan, task: str, length_tokens: int) -> list[FusionPrompt]:
    tokenizer = Tokenizer(plan.model, None)
    chunker = Chunker(tokenizer, plan.chunk_tokens)
    each = -(-plan.num_prompts // len(plan.tasks))
    settings = PromptSettings(plan.model, "reference", plan.seed, ())
    made = make_prompts(Cell(task, length_tokens, each, ("full",), 0), settings)
    return [shuffle_chunks(prompt.sample, tokenizer, chunker, length_tokens, plan.seed) for prompt in made]


def shuffle_chunks(
    sample: Sample, tokenizer: Tokenizer, chunker: Chunker, most_tokens: int, seed: int
) -> FusionPrompt:  # fmt: skip
    document, _, question = user_turn(sample.prompt).rpartition("\n\n")
    chunks = [list(chunk) for chunk in chunker.cut(document, most_tokens)]
    random.Random(f"{seed}:{sample.task}:{sample.sample_id}").shuffle(chunks)
    token_ids, spans = tokenizer.encode(TURN_BEGIN, False), []
    for chunk in chunks:
        spans.append((len(token_ids), len(token_ids) + len(chunk)))
        token_ids += chunk
    text = tokenizer.decode(token_ids, False)
    token_ids += tokenizer.encode(f"\n\n{question}{TURN_END}", False)
    answers = sample.answers
    if sample.task in NUM_VALUES:  # in the order of their appearance
        answers = [", ".join(sorted(answer.split(", "), key=text.find)) for answer in answers]
    name = f"{sample.task}:{sample.sample_id}"
    return FusionPrompt(
        name, sample.task, token_ids, spans, answers, sample.metric, sample.max_new_tokens, sample.meta
    )  # fmt: skip
