"""InfiniteBench: twelve datasets of one row format, `id, context, input, answer, options`.

Source: InfiniteBench (Zhang et al., 2024): its datasets, answer lengths and scoring rules. The instructions are worded
for this project. Multiple-choice answers are scored by letter or text, as published.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.datasets.jsonl import field, read_rows
from evals.samples import Sample

LETTERS = "ABCD"
MASK = "$$MASK$$"


@dataclass(frozen=True)
class Dataset:
    """One InfiniteBench task. metric: a name in `evals.metrics`. options: whether the row's four options follow the
    question.
    """

    before: str
    after: str
    metric: str
    max_new_tokens: int
    options: bool = False


BOOK = "Below is a book. Read it, then answer."
DATASETS = {
    "passkey": Dataset("One fact is hidden in a lot of filler. Remember it.", "{input}", "first_integer", 6),
    "number_string": Dataset("One fact is hidden in a lot of filler. Remember it.", "{input}", "first_integer", 12),
    "kv_retrieval": Dataset("Find the value of one key in this JSON object.", "{input}", "among_words", 50),
    "longbook_sum_eng": Dataset("Below is a book. Summarize it.", "Summary:", "rouge_l_sum", 1200),
    "longbook_choice_eng": Dataset(
        BOOK,
        "Question: {input}\n{options}\nReply with the letter of the right answer alone.",
        "choice_or_text",
        40,
        True,
    ),
    "longbook_qa_eng": Dataset(BOOK, "Question: {input}\nReply with a few words.\nAnswer:", "qa_f1", 40),
    "longbook_qa_chn": Dataset("请阅读下面的书，然后回答问题。", "问题：{input}\n请简短回答：", "qa_f1_characters", 40),
    "longdialogue_qa_eng": Dataset(
        f"In the dialogue below, one name is replaced by {MASK}.",
        f"Who is {MASK}? Reply with the name alone, as the script writes it.",
        "among_names",
        40,
    ),
    "math_find": Dataset("Below is a list of numbers.", "{input}", "first_decimal", 3),
    "math_calc": Dataset(
        "Compute the value after each operation.\nExpression: 2 + 7 - 4\nValues: [2, 9, 5]\n\nExpression:",
        "Values:",
        "leading_integers",
        30000,
    ),
    "code_run": Dataset(
        "Below are Python functions.", "{input}\nReply with the returned number alone.", "last_integer", 5
    ),
    "code_debug": Dataset(
        "One function of this project has an obvious error put in on purpose.",
        "Which function is it?\n{options}\nReply with the letter alone.\nThe correct option is:",
        "debug_choice",
        5,
        True,
    ),
}


def reader(name: str) -> Callable[[Path], Iterator[Sample]]:
    """Return the reader of one dataset's file."""
    return lambda path: read(name, path)


def read(name: str, path: Path) -> Iterator[Sample]:
    """Yield the samples of an InfiniteBench file. Raises ValueError at a row without a published field."""
    dataset = DATASETS[name]
    for number, row in read_rows(path):
        answer = field(path, number, row, "answer")
        listed = [answer] if isinstance(answer, str | int | float) else list(answer)
        options = [str(option) for option in row.get("options", [])]
        if dataset.options and len(options) != len(LETTERS):
            raise ValueError(f"{path}:{number}: {len(options)} options, wanted {len(LETTERS)}")
        after = dataset.after.replace("{options}", "\n".join(map(". ".join, zip(LETTERS, options, strict=False))))
        after = after.replace("{input}", str(field(path, number, row, "input")))
        yield Sample(
            task=f"infinitebench/{name}",
            sample_id=str(row.get("id", number)),
            prompt=f"{dataset.before}\n\n{field(path, number, row, 'context', 'content')}\n\n{after}",
            answers=answers_of(dataset.metric, listed, options, f"{path}:{number}"),
            metric=dataset.metric,
            max_new_tokens=dataset.max_new_tokens,
            length_tokens=0,
            depth=None,
            meta={},
        )


def answers_of(metric: str, listed: list[Any], options: list[str], where: str) -> list[str]:
    """Return the answers in the metric's form. A choice's letter is found by its text among the options."""
    texts = [str(answer) for answer in listed]
    if metric not in ("choice_or_text", "debug_choice"):
        return [text.upper() for text in texts] if metric == "among_names" else texts
    text = next((text for text in texts if text in options), None)
    letter = next((text for text in texts if re.fullmatch(f"[{LETTERS}]", text)), None)
    if text is None and letter is None:
        raise ValueError(f"{where}: answer {texts} is none of the options {options}")
    letter = letter or LETTERS[options.index(text or "")]
    text = text or options[LETTERS.index(letter)]
    return [letter, text] if metric == "choice_or_text" else [text, letter]
