"""Tasks' prompts as documents' chunks in a new order: what fused prompts are judged on.

A task's document is cut as the server cuts documents, its chunks are shuffled, and all policies get the same token ids.
It refuses to know policies. Invariant: answers fit the order in which the chunks come.
"""

import random
from dataclasses import dataclass
from pathlib import Path
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


def fusion_prompts(
    model: Path, tasks: tuple[str, ...], length_tokens: int, num_prompts: int, chunk_tokens: int, seed: int
) -> list[FusionPrompt]:
    """`num_prompts` of all tasks together, turn by turn."""
    tokenizer = Tokenizer(model, None)
    chunker = Chunker(tokenizer, chunk_tokens)
    each = -(-num_prompts // len(tasks))
    settings = PromptSettings(model, "reference", seed, ())
    made = [make_prompts(Cell(task, length_tokens, each, ("full",), 0), settings) for task in tasks]
    samples = [prompt.sample for turn in zip(*made, strict=True) for prompt in turn][:num_prompts]
    return [shuffle_chunks(sample, tokenizer, chunker, length_tokens, seed) for sample in samples]


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
