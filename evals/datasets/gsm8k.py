"""GSM8K: grade-school word problems, rows of `question` and `answer`, the answer's number after `####`.

Source: GSM8K (Cobbe et al., 2021). The worked examples before the question are this project's own.
"""

from collections.abc import Iterator
from pathlib import Path

from evals.datasets.jsonl import field, read_rows
from evals.samples import Sample

MAX_NEW_TOKENS = 400
EXAMPLES = (
    (
        "A baker fills 6 trays with 8 rolls each and sells 29 rolls. How many rolls are left?",
        "6 trays hold 6 * 8 = 48 rolls. 48 - 29 = 19 rolls are left.",
        "19",
    ),
    (
        "Nora reads 15 pages a day on weekdays and 40 pages a day at the weekend. How many pages does she read a week?",
        "On 5 weekdays she reads 5 * 15 = 75 pages, at the weekend 2 * 40 = 80. Together 75 + 80 = 155 pages.",
        "155",
    ),
    (
        "A rope of 90 meters is cut into 3 equal parts, and one part into 5 equal pieces. How long is a piece?",
        "Each part is 90 / 3 = 30 meters. A piece is 30 / 5 = 6 meters.",
        "6",
    ),
    (
        "Tickets cost $12, and children pay half. What do 2 adults and 3 children pay?",
        "Two adults pay 2 * 12 = 24 dollars. A child pays 12 / 2 = 6, three pay 18. Together 24 + 18 = 42 dollars.",
        "42",
    ),
)
INSTRUCTION = "Solve each problem step by step. End with the number alone, after ####.\n\n"


def read(path: Path) -> Iterator[Sample]:
    """Yield the samples of a GSM8K file. Raises ValueError at a row without a published field."""
    shown = "".join(f"Question: {question}\nAnswer: {steps}\n#### {result}\n\n" for question, steps, result in EXAMPLES)
    for number, row in read_rows(path):
        answer = str(field(path, number, row, "answer"))
        if "####" not in answer:
            raise ValueError(f"{path}:{number}: answer without `#### number`")
        yield Sample(
            task="gsm8k",
            sample_id=str(number),
            prompt=f"{INSTRUCTION}{shown}Question: {field(path, number, row, 'question')}\nAnswer:",
            answers=[answer.split("####")[-1].strip()],
            metric="last_number",
            max_new_tokens=MAX_NEW_TOKENS,
            length_tokens=0,
            depth=None,
            meta={"stop": ["\nQuestion:"]},
        )
