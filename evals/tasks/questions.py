"""Generate RULER's question answering: the documents of a question among those of other questions, from a file.

Source: RULER (Hsieh et al., 2024), `qa_1` over a file in SQuAD's format and `qa_2` over one in HotpotQA's. The
invariant: every document that the answer needs is in the prompt.
"""

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import Any

from evals.samples import Sample
from evals.tasks.request import Request, Wanted, make_sample

PROMPT = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{document}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: {question}"
)
PREFIX = " Answer:"
MAX_NEW_TOKENS = 32
NUM_SEEDS = 8
"""Number of seeds whose questions are disjoint, so that settings are not scored on those that they were chosen on."""


@dataclass(frozen=True)
class Question:
    """A question, its right answers and the indices of the documents that contain them."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]


@lru_cache(maxsize=4)
def read_questions(path: Path) -> tuple[list[Question], list[str]]:
    """Return questions and distinct documents of a SQuAD file (an object with `data`) or a HotpotQA file (a list).

    Questions without an answer are left out, as RULER does. Raises ValueError on another layout or an empty file.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, dict) and "data" in content:
        found = squad_questions(content["data"])
    elif isinstance(content, list):
        found = hotpot_questions(content)
    else:
        raise ValueError(f"{path}: wanted SQuAD's object with `data` or HotpotQA's list, got {type(content).__name__}")
    indices: dict[str, int] = {}
    questions = [
        Question(text, answers, tuple(indices.setdefault(document, len(indices)) for document in documents))
        for text, answers, documents in found
    ]
    if not questions:
        raise ValueError(f"{path}: holds no question with an answer")
    return questions, list(indices)


def squad_questions(articles: list[dict[str, Any]]) -> list[tuple[str, tuple[str, ...], list[str]]]:
    """Return (question, answers, documents) of SQuAD 1.1 or 2.0."""
    return [
        (qa["question"], tuple(dict.fromkeys(answer["text"] for answer in qa["answers"])), [paragraph["context"]])
        for article in articles
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
        if qa["answers"] and not qa.get("is_impossible", False)
    ]


def hotpot_questions(rows: list[dict[str, Any]]) -> list[tuple[str, tuple[str, ...], list[str]]]:
    """Return (question, answers, documents) of HotpotQA: each document is its title and its sentences."""
    return [
        (row["question"], (row["answer"],), [f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]])
        for row in rows
    ]


def filling(documents: list[str], others: list[int], num_words: int) -> list[str]:
    """Return num_words words of other documents. The last one is cut; after the last document the first comes again."""
    texts: list[str] = []
    for document in cycle(others):
        words = documents[document].split(" ")
        if num_words <= len(words):
            return [*texts, " ".join(words[:num_words])] if num_words else texts
        texts.append(documents[document])
        num_words -= len(words)
    return texts


def own_questions(questions: list[Question], seed: int) -> list[Question]:
    """Return the questions of a seed. Two seeds share none unless they are equal modulo NUM_SEEDS."""
    return questions[seed % NUM_SEEDS :: NUM_SEEDS] or questions


def generate_question(request: Request, index: int) -> Sample:
    """Generate sample `index` of `qa_1` or `qa_2` from the questions that belong to the seed, in the file's order.

    Raises ValueError if no question file was given.
    """
    path = request.source.questions.get(request.task)
    if path is None:
        raise ValueError(f"task {request.task}: no question file; give one in SQuAD's or HotpotQA's format")
    questions, documents = read_questions(path)
    draw = request.random(index)
    own = own_questions(questions, request.seed)
    question = own[index % len(own)]
    needed = set(question.documents)
    others = [document for document in range(len(documents)) if document not in needed]
    draw.shuffle(others)
    places = draw.getrandbits(32)
    before, after = PROMPT.split("{document}")
    around = before, after.format(question=question.text) + PREFIX

    def build(num_words: int) -> str:
        chosen = [documents[document] for document in question.documents] + filling(documents, others, num_words)
        order = sorted(range(len(chosen)), key=lambda number: random.Random(f"{places}-{number}").random())
        text = "\n\n".join(f"Document {place}:\n{chosen[number]}" for place, number in enumerate(order, start=1))
        return text.join(around)

    return make_sample(
        request,
        index,
        build=build,
        wanted=Wanted(question.answers, "string_match_part", MAX_NEW_TOKENS),
        depth=None,
        meta={"answer_prefix": PREFIX},
        around=around,
    )
