"""LongBench v2: multiple-choice questions over long texts, one row format for all.

Source: LongBench v2 (Bai et al., 2024): the fields and the reply's form `The correct answer is (X)`.
"""

from collections.abc import Iterator
from pathlib import Path

from evals.datasets.jsonl import field, read_rows
from evals.samples import Sample

LETTERS = "ABCD"
MAX_NEW_TOKENS = 128


def read(path: Path) -> Iterator[Sample]:
    """Yield the samples of a LongBench v2 file. Raises ValueError at a row without a published field."""
    for number, row in read_rows(path):
        options = "\n".join(f"({letter}) {field(path, number, row, f'choice_{letter}')}" for letter in LETTERS)
        answer = str(field(path, number, row, "answer")).strip()
        if answer not in LETTERS or not answer:
            raise ValueError(f"{path}:{number}: answer {answer!r}, wanted one of A, B, C, D")
        prompt = (
            f"Read this text, then choose the right answer to the question after it.\n\n<text>\n"
            f"{str(field(path, number, row, 'context')).strip()}\n</text>\n\n"
            f"Question: {str(field(path, number, row, 'question')).strip()}\n{options}\n\n"
            f'Reply in the form "The correct answer is (A)", with the letter of your choice.'
        )
        yield Sample(
            task="longbench_v2",
            sample_id=str(row.get("_id", number)),
            prompt=prompt,
            answers=[answer],
            metric="choice",
            max_new_tokens=MAX_NEW_TOKENS,
            length_tokens=0,
            depth=None,
            meta={key: row[key] for key in ("domain", "sub_domain", "difficulty", "length") if key in row},
        )
