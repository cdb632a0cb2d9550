"""Measure the model on text that it has not seen: exact match of each task, perplexity of held-out novels.

Answers are scored under teacher forcing. If all of an answer's tokens and its end are the most likely ones, greedy
decoding would give exactly the answer. The prompts are those of `evals.tasks.reference`.
"""

import itertools
import math
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from evals.tasks.counting_words import words_of
from evals.tasks.reference import COMMON_TIMES, COUNTED, OTHER_TIMES, PLANS
from lab.reference.conversation_rows import CONTINUE, Library, Row, RowError, document_row, draw_row, list_row, text_row
from lab.reference.feed import NO_HINT, Batch
from lab.reference.model import Llama
from lab.reference.tasks import TASKS, WORD_TOKENS, Exercise, other_words, shuffled, turn

EVALUATED = (*PLANS, *COUNTED, CONTINUE)


@dataclass(frozen=True)
class Target:
    """The targets that a batch is scored by, on the model's device: tokens int64 `[rows, length + 1]`, classes int64
    `[rows * length]`, spans int64 `[answers, 3]`, hints int64 `[hints, 3]`.
    """

    tokens: Tensor
    classes: Tensor
    spans: Tensor
    hints: Tensor


def place(batch: Batch, device: torch.device) -> Target:
    """Return the batch on a device, copied without waiting where it can be."""

    def move(array: np.ndarray, dtype: type) -> Tensor:
        tensor = torch.from_numpy(array.astype(dtype))
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    return Target(
        move(batch.tokens, np.int32).long(),
        move(batch.classes, np.uint8).flatten().long(),
        move(batch.spans, np.int64),
        move(batch.hints, np.int64),
    )


def exact(right: Tensor, spans: Tensor) -> Tensor:
    """Return whether each answer is right to its end, float32 `[answers]`.

    right: bool `[tokens]`. spans: `[answers, 3]`.
    """
    counted = torch.cat([right.new_zeros(1, dtype=torch.int64), right.long().cumsum(0)])
    return (counted[spans[:, 2]] - counted[spans[:, 1]] == spans[:, 2] - spans[:, 1]).float()


def common_exercise(task: str, length: int, draw: random.Random) -> Exercise:
    """Draw the evaluations' list: common words thirty times, and other words twice until the length is filled."""
    num_common, question = COUNTED[task]
    words = words_of(draw)
    common = list(itertools.islice(words, num_common))
    left = 0.97 * (length - 60) - num_common * COMMON_TIMES * WORD_TOKENS
    others = other_words(words, left, num_common, OTHER_TIMES)
    listed = shuffled(draw, common * COMMON_TIMES + others * OTHER_TIMES)
    return Exercise([], [turn(task, question, ", ".join(sorted(common)))], ", ".join(listed))


def evaluation_row(library: Library, task: str, length: int, draw: random.Random) -> Row:
    """Draw one prompt of a task with its answer. Raises RowError if it does not fit."""
    if task == CONTINUE:
        return draw_row(library, CONTINUE, {}, length, draw)
    if task in COUNTED:
        return list_row(library, [common_exercise(task, length, draw)], length, draw)
    inserts, question, answers, _, _ = PLANS[task](draw, library.words, None)
    sentences = [sentence for _, sentence in sorted(inserts, key=lambda insert: insert[0])]
    name = task if task in TASKS else "needle"
    return document_row(library, Exercise(sentences, [turn(name, question, answers[0])]), length, draw)


def draw_evaluation(library: Library, length: int, num_prompts: int, seed: int) -> list[Row]:
    """Return num_prompts rows of each task. A task that does not fit the length is left out."""
    rows = []
    for task in EVALUATED:
        draw = random.Random(f"{task}/{length}/{seed}")
        done = 0
        for _ in range(4 * num_prompts):
            try:
                rows.append(evaluation_row(library, task, length, draw))
            except RowError:
                continue
            done += 1
            if done == num_prompts:
                break
    return rows


def batches_of(rows: list[Row], num_rows: int) -> list[Batch]:
    """Return rows in batches of num_rows. The last one is filled up with rows whose answers do not count."""
    batches = []
    for begin in range(0, len(rows), num_rows):
        part = rows[begin : begin + num_rows]
        length = len(part[0].classes)
        spans = [
            (task, number * length + first, number * length + last)
            for number, row in enumerate(part)
            for task, first, last in row.spans[:1]
        ]
        part = part + [part[0]] * (num_rows - len(part))
        batches.append(
            Batch(
                np.stack([row.tokens for row in part]),
                np.stack([row.classes for row in part]),
                np.array(spans, np.int64).reshape(-1, 3),
                np.array([NO_HINT], np.int64),
            )
        )
    return batches


def accuracy(model: Llama, library: Library, length: int, num_prompts: int, batch_tokens: int) -> dict[str, float]:
    """Return exact match in per cent by task over num_prompts prompts each."""
    hits: dict[str, list[float]] = {}
    device = model.embedding.device
    for batch in batches_of(draw_evaluation(library, length, num_prompts, 0), max(1, batch_tokens // length)):
        target = place(batch, device)
        _, right = model.losses(model(target.tokens[:, :-1]), target.tokens[:, 1:].flatten())
        found = exact(right, target.spans).tolist()
        for task, hit in zip(batch.spans[:, 0].tolist(), found, strict=True):
            hits.setdefault(TASKS[task], []).append(hit)
    return {task: 100 * sum(found) / len(found) for task, found in hits.items()}


def perplexity(model: Llama, library: Library, length: int, batch_tokens: int, num_batches: int) -> float:
    """Return the perplexity per token over rows of held-out text; the first token of each row is given."""
    device = model.embedding.device
    draw, numbers = random.Random(length), np.random.default_rng(0)
    total, count = 0.0, 0
    for _ in range(num_batches):
        rows = [text_row(library, length, draw, numbers) for _ in range(max(1, batch_tokens // length))]
        target = place(batches_of(rows, len(rows))[0], device)
        nll, _ = model.losses(model(target.tokens[:, :-1]), target.tokens[:, 1:].flatten())
        total += nll.detach().double().sum().item()
        count += nll.numel()
    return math.exp(total / count)
