"""Score settings of an index on tasks: the same prompts by full attention and by every setting, within a time limit.

Prompts of all tasks take turns, so that a run that is cut has equally many of each.
"""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from evals import aims, metrics
from evals.cells import Cell, PromptSettings
from evals.decode import decode_greedy, prefill_batch
from evals.forward import ReferenceDecoder
from evals.methods.full import Full
from evals.paired import FEWEST_PROMPTS
from evals.run import Prompt, make_prompts
from evals.score_rows import Row, summarize
from evals.stopping import RunCut, Stop
from evals.store import Record
from evals.tokenizer import load_tokenizer
from evals.tuning.index import KEPT, count_at_once
from evals.tuning.index_method import Index

FULL = Full().label
AIM = aims.Aim(("",), (), None, None, ())


def run_tasks(
    decoder: ReferenceDecoder,
    cells: Sequence[Cell],
    settings: PromptSettings,
    grid: Sequence[Index],
    stop: Stop,
    advance: Callable[[], None],
) -> list[Record]:
    """Return a record of each prompt by full attention and by each setting.

    Prompts run in rounds of one for each task, and `advance` is called after each round. A run that is cut (`stop`) has
    whole rounds. The first rounds always run, until there are enough pairs for an interval.
    """
    tokenizer = load_tokenizer(settings.model)
    made = [make_prompts(cell, settings) for cell in cells]
    records: list[Record] = []
    took, num_prompts = 0.0, 0
    for prompts in zip(*made, strict=True):
        if num_prompts >= FEWEST_PROMPTS:
            try:
                stop.check_room(took)
            except RunCut:
                break
        began = monotonic()
        answers = _answer(decoder, prompts, grid)
        for label, told in answers.items():
            for cell, prompt, tokens in zip(cells, prompts, told, strict=True):
                records.append(_record(label, cell, settings, prompt, tokens, tokenizer))
        took, num_prompts = monotonic() - began, num_prompts + len(cells)
        advance()
    return records


def _answer(decoder: ReferenceDecoder, prompts: Sequence[Prompt], grid: Sequence[Index]) -> dict[str, list[list[int]]]:
    """Decode answers to the prompts, and return their tokens by method label."""
    ids = [prompt.token_ids.tolist() for prompt in prompts]
    room = decoder.architecture.max_context_tokens - max(map(len, ids))
    tokens = min(max(prompt.sample.max_new_tokens for prompt in prompts), room)
    stops = frozenset(decoder.architecture.eos_token_ids)
    at_once = count_at_once(decoder, sum(map(len, ids)))
    answers: dict[str, list[list[int]]] = {}
    for begin in range(0, len(grid), at_once):
        methods = [*([] if begin else [Full()]), *grid[begin : begin + at_once]]
        batch = prefill_batch(decoder, ids, tokens, methods)
        for which, method in enumerate(methods):
            answers[method.label] = decode_greedy(batch, which, tokens, stops, None).tokens
    return answers


def _record(
    label: str, cell: Cell, settings: PromptSettings, prompt: Prompt, tokens: Sequence[int], tokenizer: Any
) -> Record:
    sample = prompt.sample
    identity = {
        "method": label, "task": cell.task, "length": cell.length_tokens, "metric": sample.metric,
        "text": settings.text, "seed": settings.seed,
    }  # fmt: skip
    text = tokenizer.decode(tokens[: sample.max_new_tokens], skip_special_tokens=True)
    score = metrics.score(sample.metric, text, sample.answers, sample.meta)
    return Record(f"{label} {sample.sample_id}", identity, sample.sample_id, score, text, None, sample.depth, {})


def add_scores(rows: Sequence[Row], records: Sequence[Record]) -> list[Row]:
    """Return the settings' rows with their figures on tasks.

    task_prompts: their number. task_exact, task_score: full attention's and the setting's points over the tasks that
    full attention can do (`evals.aims`). task_difference, with its interval task_low, task_high. task_fails: whether
    the setting certainly loses too much. Numbers are None if there are no such prompts.
    """
    found = summarize(records)
    return [row | _scores(found, Index(**{name: row[name] for name in KEPT}).label) for row in rows]


def _scores(found: Sequence[Row], label: str) -> Row:
    judged = aims.judge(found, label, AIM)
    pooled = judged.pooled
    if pooled is None:
        names = ("task_exact", "task_score", "task_difference", "task_low", "task_high")
        return {"task_prompts": 0} | dict.fromkeys(names) | {"task_fails": False}
    strong = [row for row in found if row["method"] == FULL and row["score"] >= aims.STRONG_SCORE]
    exact = sum(row["score"] * row["samples"] for row in strong) / sum(row["samples"] for row in strong)
    return {
        "task_prompts": pooled.num_prompts,
        "task_exact": exact,
        "task_score": exact + pooled.mean,
        "task_difference": pooled.mean,
        "task_low": pooled.low,
        "task_high": pooled.high,
        "task_fails": judged.verdict == aims.FAILS,
    }


def describe_gate(row: Row, most_kl: float, tasks: Sequence[str]) -> str:
    """Return a sentence on the checks that a chosen setting has passed, and on what is not known."""
    by_kl = f"a KL of {most_kl:g} at most"
    if not tasks:
        return f"{by_kl}, alone: no tasks were asked for"
    if row["task_difference"] is None:
        return f"{by_kl}, alone: full attention scores under {aims.STRONG_SCORE:g} points on {', '.join(tasks)}"
    few = "" if row["task_low"] >= aims.LOWEST_END else "; so few prompts show no more than a large loss"
    return (
        f"{by_kl}, and by {row['task_prompts']} prompts no loss of tasks above {aims.MOST_LOST:g} point for "
        f"certain{few}"
    )
