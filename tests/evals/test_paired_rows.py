"""Rows are paired with full attention over the same text only."""

from evals.score_rows import summarize
from evals.store import Record


def record(method: str, text: str, sample: int, score: float) -> Record:
    cell = {"method": method, "settings": {}, "task": "needle", "length": 512, "metric": "exact_match", "text": text}
    return Record(f"{method}{text}{sample}", cell, str(sample), score, "", None, None, {})


def test_a_row_is_not_paired_with_full_attention_on_another_text() -> None:
    scores = {"chronicle": [1.0, 1.0, 1.0], "novel.txt": [0.0, 1.0, 0.0]}
    records = [record("full", text, at, score) for text, found in scores.items() for at, score in enumerate(found)]
    records += [record("topk", "novel.txt", at, score) for at, score in enumerate(scores["novel.txt"])]
    records += [record("topk", "other.txt", at, 1.0) for at in range(3)]
    told = {
        (row["method"], row["text"]): (row["difference"], row["losses"], row["gains"]) for row in summarize(records)
    }
    assert told["topk", "novel.txt"] == (0.0, 0, 0)
    assert told["topk", "other.txt"] == (None, None, None)
