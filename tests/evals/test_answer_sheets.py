"""Answer sheets written by hand: right answers score right and wrong ones wrong, in every task.

Sheets share nothing with generators and readers: what is right is read off the prompt by other code, or stands here.
Every prediction is scored three ways, as runs do: by its metric, in the reference decoder, and served.
"""

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import evals.run
from evals.cells import Cell
from evals.datasets import DATASETS, read, read_own
from evals.decode import Decoded
from evals.meter import Fractions
from evals.metrics import score
from evals.run import Prompt
from evals.samples import Sample
from evals.served import Entry, Server, run_profiles
from evals.serving import Answer, DecodeRequest
from evals.session import run_remotely
from evals.store import Record
from evals.tasks import RULER_TASKS, generate
from evals.tasks.needles import SETTINGS as NEEDLES
from evals.tasks.reference import REFERENCE_TASKS, user_turn
from evals.tasks.text import text_source
from evals.tokenizer import load_tokenizer
from tests.evals.test_datasets import CONTEXT, row_of
from tests.evals.test_run import SETTINGS
from tests.evals.test_served import SHAPE, FakeEngine, Texts, make_ledger
from tests.reference_solver import solve
from tests.tolerances import SCORE_ROUNDING

Sheet = dict[str, float]
"""Predictions and what each scores."""

REFUSALS = ("", "I do not know.", "Some text that answers nothing.")


def scored(sample: Sample, prediction: str) -> float:
    """By its metric; raises where the decoder's scoring or the served one says otherwise."""
    value = score(sample.metric, prediction, sample.answers, sample.meta)
    ids = [ord(letter) for letter in prediction]
    long = replace(sample, max_new_tokens=len(ids) + 1)
    cell, read = Cell(sample.task, 512, 1, ("full",), 0), Fractions(0.5, 0.5, 0.5, 0.5)
    keys, prompt = evals.run._Keys(cell, SETTINGS, "model"), Prompt(long, np.zeros(1, np.int32))
    (decoded,) = evals.run._score(Texts(), keys, "full", [prompt], Decoded([ids], [read], []), None, None)
    served = Entry("profile:x", {}, cell, SETTINGS, "model").record(long, prediction, None)
    assert decoded.score == served.score == value
    assert decoded.prediction == served.prediction == prediction
    return value


def check(sample: Sample, sheet: Sheet) -> None:
    """Every prediction scores as the sheet says, and one at least is right and one wrong."""
    found = {prediction: scored(sample, prediction) for prediction in sheet}
    assert found == pytest.approx(sheet, abs=SCORE_ROUNDING), sample.task
    assert max(sheet.values()) == 1
    assert min(sheet.values()) == 0


# --- RULER's wording


def needles_of(prompt: str) -> list[str]:
    """Values of the keys that are asked for, in the order in which they stand."""
    found = re.search(r"What (?:are all|is) the special magic \w+ for (.+?) mentioned in", prompt)
    asked = re.split(r", and |, ", found[1])
    held = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+?)\.", prompt)
    return [value for key, value in held if key in asked]


def chain_of(prompt: str) -> list[str]:
    document, question = prompt.split("Memorize and track")[-1].split("\nQuestion: ")
    value = re.findall(r"\d{5}", question)[0]
    names = re.findall(rf"VAR (\w+) = {value}", document)
    for _ in range(4):
        names += re.findall(rf"VAR (\w+) = VAR {names[-1]}\b", document)
    return names


def most_common(words: list[str], count: int) -> list[str]:
    ranked = Counter(words).most_common(count + 1)
    assert ranked[count - 1][1] > ranked[count][1], "the answer is unique"
    return [word for word, _ in ranked[:count]]


def common_of(prompt: str) -> list[str]:
    return most_common(re.findall(r"\d+\. ([a-z]+)", prompt.split("Memorize the ones")[-1]), 10)


def frequent_of(prompt: str) -> list[str]:
    words = prompt.split("coded words. ")[1].split("\nQuestion: ")[0].split()
    return most_common([word for word in words if word != "..."], 3)


def told_of(prompt: str) -> list[str]:
    """The question files of this test say it in one sentence each."""
    number = re.findall(r"Question: Who keeps house (\d+)\?", prompt)[0]
    return re.findall(rf"\bHouse {number} is kept by (\w+)\.", prompt)


READERS: dict[str, Callable[[str], list[str]]] = {
    **dict.fromkeys(RULER_TASKS[:8], needles_of),
    "vt": chain_of, "cwe": common_of, "fwe": frequent_of, "qa_1": told_of, "qa_2": told_of,
}  # fmt: skip
NUM_ANSWERS = {"niah_multivalue": 4, "niah_multiquery": 4, "vt": 5, "cwe": 10, "fwe": 3}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(SETTINGS.model)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("questions")
    keepers = [f"{first}{last}" for first in ("Ada", "Ben", "Cor", "Dan") for last in ("well", "mont", "wick", "ford")]
    facts = [f"House {number} is kept by {keeper}." for number, keeper in enumerate(keepers)]
    asked = [f"Who keeps house {number}?" for number in range(len(facts))]
    pad = "The road is long and the day is short. " * 40
    squad = [
        {"paragraphs": [{"context": pad + fact, "qas": [{"question": question, "answers": [{"text": keeper}]}]}]}
        for fact, question, keeper in zip(facts, asked, keepers, strict=True)
    ]
    hotpot = [
        {"question": question, "answer": keeper, "context": [["Roads", [pad]], ["Houses", [pad, fact]]]}
        for fact, question, keeper in zip(facts, asked, keepers, strict=True)
    ]
    (folder / "qa_1.json").write_text(json.dumps({"data": squad}))
    (folder / "qa_2.json").write_text(json.dumps(hotpot))
    return text_source([], {name: folder / f"{name}.json" for name in ("qa_1", "qa_2")})


def altered(answer: str) -> str:
    """Another answer that differs in its last letter or digit."""
    last = answer[-1]
    other = str((int(last) + 1) % 10) if last.isdigit() else ("q" if last.islower() else "Q")
    return answer[:-1] + (other if other != last else "x")


@pytest.mark.parametrize("task", RULER_TASKS)
def test_rulers_answers_are_those_that_the_prompt_holds_and_no_others(
    task: str, tokenizer: Any, questions: Any
) -> None:
    one, other = generate(task, tokenizer, 2048, 2, 9, "ruler", questions)
    right, wrong = READERS[task](one.prompt), READERS[task](other.prompt)
    assert len(right) == len(set(right)) == NUM_ANSWERS.get(task, 1)
    assert sorted(one.answers) == sorted(right)
    if task in NEEDLES:
        held = set(re.findall(r"special magic \w+ for (\S+) is: ", one.prompt))
        assert len(held) >= NEEDLES[task].num_keys
    said, num = ", ".join(right), len(right)
    check(one, {
        f"They are {said}.": 1.0,
        said.upper(): 1.0,
        ", ".join(wrong): 0.0,
        ", ".join(map(altered, right)): 0.0,
        ", ".join(answer[:-1] for answer in right): 0.0,
        ", ".join([*right[1:], altered(right[0])]): (num - 1) / num,
        **dict.fromkeys(REFUSALS, 0.0),
    })  # fmt: skip


# --- the reference model's form


@pytest.mark.parametrize("task", [task for task in REFERENCE_TASKS if task != "continue"])
def test_answers_of_the_reference_form_are_those_that_the_document_holds(task: str, tokenizer: Any) -> None:
    samples = generate(task, tokenizer, 2048, 12, 9, "reference", None)
    solved = [solve(*user_turn(sample.prompt).rsplit("\n\n", 1)) for sample in samples]
    assert [[text] for text in solved] == [sample.answers for sample in samples]
    one, right, wrong = samples[0], *solved[:2]
    if "list" in task:
        lines = right.split("\n")
        check(one, {
            right: 1.0,
            "\n".join(map(altered, lines)): 0.0,
            wrong: 0.0,
            "\n".join(lines[::2]): 1 / len(lines),  # lines count at their places
            "\n".join([altered(lines[0]), *lines[1:]]): 1 - 1 / len(lines),
            **dict.fromkeys(REFUSALS, 0.0),
        })  # fmt: skip
        return
    parts = right.split(", ")
    backwards = {", ".join(parts[::-1]): 0.0} if len(parts) > 1 else {}
    sheet = {right: 1.0, f"\n{right} ": 1.0, altered(right): 0.0, wrong: 0.0, f"{right} and more": 0.0}
    check(one, sheet | backwards | dict.fromkeys(REFUSALS, 0.0))


def test_a_passage_is_scored_by_its_words_in_order(tokenizer: Any) -> None:
    (sample,) = generate("continue", tokenizer, 2048, 1, 9, "reference", None)
    document, opening = user_turn(sample.prompt).split("\n\nContinue the passage that begins with: ")
    words = document.split(opening, 1)[1].split()[:60]
    check(sample, {" ".join(words): 1.0, " ".join(words[:30]): 0.5, " ".join(["@", *words[1:]]): 59 / 60,
                   " ".join("@" * 60): 0.0, "": 0.0})  # fmt: skip


# --- published datasets: rows are those of `tests/evals/test_datasets.py`

QA: Sheet = {"The old mill.": 1.0, "old mill by the sea": 2 / 3, "mill": 2 / 3, "the new barn": 0.0}
CHINESE: Sheet = {"河边的磨坊": 1.0, "城堡": 0.0, "不知道": 0.0}
SUMMARY: Sheet = {"the old mill": 1.0, "some new barns": 0.0}
CODE: Sheet = {
    "    return total + 1\nmore()": 1.0,
    "# note\n    return total + 1": 1.0,
    "zzz\n    return total + 1": 0.0,
}
SHEETS: dict[str, Sheet] = {
    **{f"longbench/{name}": QA for name in (
        "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"
    )},
    "longbench/triviaqa": {**QA, "the new barn\nthe old mill": 0.0, "\nthe old mill\nQuestion: more": 1.0},
    "longbench/multifieldqa_zh": CHINESE, "longbench/dureader": CHINESE, "longbench/vcsum": CHINESE,
    **{f"longbench/{name}": SUMMARY for name in ("gov_report", "qmsum", "multi_news")},
    "longbench/samsum": {**SUMMARY, "some new barns\nthe old mill": 0.0},
    "longbench/trec": {"the old mill": 1.0, "another class": 0.0, "the old mill or another class": 0.5,
                       "another class\nthe old mill": 0.0},
    "longbench/lsht": {"体育": 1.0, "another class": 0.0},
    "longbench/passage_count": {"12": 1.0, "There are 12.": 1.0, "13": 0.0, "112": 0.0, "12 or 13": 0.5},
    "longbench/passage_retrieval_en": {"Paragraph 12": 1.0, "Paragraph 2": 0.0, "Paragraph 121": 0.0},
    "longbench/passage_retrieval_zh": {"段落12": 1.0, "段落2": 0.0},
    "longbench/lcc": CODE, "longbench/repobench-p": CODE,
    "longbench_v2": {"The correct answer is (C)": 1.0, "The correct answer is (B)": 0.0, "C": 0.0},
    "gsm8k": {"2 + 2 = 4.\n#### 4": 1.0, "#### 4.0": 1.0, "#### 5": 0.0, "4, no, 5": 0.0, "#### 40": 0.0,
              "#### 4\nQuestion: 1 + 1?": 1.0},
    "infinitebench/passkey": {"71432": 1.0, "It is 71432.": 1.0, "71433": 0.0, "714320": 0.0, "1, or 71432": 0.0},
    "infinitebench/number_string": {"7711432255": 1.0, "771143225": 0.0, "77114322555": 0.0},
    "infinitebench/kv_retrieval": {'"cd-99"': 1.0, "cd-98": 0.0, "cd-991": 0.0},
    "infinitebench/longbook_sum_eng": SUMMARY,
    "infinitebench/longbook_choice_eng": {"B": 1.0, "B. the mill": 1.0, "The answer is the mill": 1.0, "A": 0.0,
                                          "C. the quay": 0.0, "The answer is the quay": 0.0},
    "infinitebench/longbook_qa_eng": QA, "infinitebench/longbook_qa_chn": CHINESE,
    "infinitebench/longdialogue_qa_eng": {"Ada": 1.0, "It is ADA!": 1.0, "Adam": 0.0, "Ben": 0.0},
    "infinitebench/math_find": {"12.5": 1.0, "12.50": 1.0, "12": 0.0, "125": 0.0},
    "infinitebench/math_calc": {"[1, 5, 3]": 1.0, "[1, 5, 4]": 2 / 3, "[1, 6, 3]": 1 / 3, "[2, 5, 3]": 0.0},
    "infinitebench/code_run": {"-12": 1.0, "It returns -12.": 1.0, "12": 0.0, "-1": 0.0},
    "infinitebench/code_debug": {"D.": 1.0, "The answer is: run_all": 1.0, "A.": 0.0, "The answer is: walk": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("name", DATASETS)
def test_answers_to_a_published_row_score_as_its_benchmark_says(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row_of(name)) for _ in range(3)) + "\n\n", encoding="utf-8")
    sample, *others = read(name, path, None)
    assert len(others) == 2
    assert (CONTEXT in sample.prompt) == (name != "gsm8k")
    assert "{" not in sample.prompt.replace(CONTEXT, "")
    check(sample, SHEETS[name] | {"": 0.0})


@pytest.mark.parametrize("answers", ["the old mill", [], [3]])
def test_a_row_whose_answers_are_no_list_of_texts_is_refused(answers: Any, tmp_path: Path) -> None:
    """One text would be taken for its letters, and score right for nearly anything."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row_of("longbench/qasper") | {"answers": answers}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: answers"):
        read("longbench/qasper", path, None)


# --- seeds


def test_seeds_have_no_question_and_no_row_in_common(tokenizer: Any, questions: Any, tmp_path: Path) -> None:
    """So settings are not scored on what they were chosen on."""
    asked = [
        {re.findall(r"Question: (.+)", sample.prompt)[0] for sample in generate(*arguments, seed, "ruler", questions)}
        for arguments in [("qa_1", tokenizer, 2048, 2)]
        for seed in range(8)
    ]
    assert len(set().union(*asked)) == sum(map(len, asked)) == 16
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row_of("gsm8k") | {"question": str(number)}) for number in range(7)))
    own = [[sample.sample_id for sample in read_own("gsm8k", path, 3, seed)] for seed in range(3)]
    assert own == [["1", "2", "3"], ["4", "5", "6"], ["1", "2", "3"]]
    assert len(read_own("gsm8k", path, 50, 1)) == 7, "a file may hold fewer than are asked"


# --- served


def sheet_of(task: str, tokenizer: Any) -> tuple[list[Sample], list[str], list[float]]:
    """Samples, what is said of each, and what that scores: every second answer is wrong."""
    samples = generate(task, tokenizer, 256, 4, 3, "reference", None)
    right = [solve(*user_turn(sample.prompt).rsplit("\n\n", 1)) for sample in samples]
    return samples, [altered(text) if place % 2 else text for place, text in enumerate(right)], [1.0, 0.0, 1.0, 0.0]


class SheetEngine(FakeEngine):
    """Answers from a sheet, the last prompt first."""

    def answer(self, asks: Sequence[DecodeRequest], profile: str) -> Iterator[Answer]:
        for ask in reversed(asks):
            yield Answer(ask.key, token_ids=[ord(letter) for letter in self.answers[ask.token_ids[0]]])


def test_an_engines_answers_are_scored_each_by_its_own_prompt(tokenizer: Any) -> None:
    samples, said, wanted = sheet_of("needle", tokenizer)
    prompts = [Prompt(sample, np.array([place], np.int32)) for place, sample in enumerate(samples)]
    records: dict[str, Record] = {}
    cell, engine, shape = Cell("needle", 256, 4, ("profile:x",), 0), SheetEngine(said), SHAPE
    profiles: Any = {"profile:x": "x"}
    arguments: Any = (engine, Texts(), shape, [(cell, prompts)], profiles, SETTINGS, make_ledger(records), None)
    run_profiles(*arguments)
    found = {record.sample_id: (record.prediction, record.score) for record in records.values()}
    assert [found[sample.sample_id] for sample in samples] == list(zip(said, wanted, strict=True))


def test_a_servers_answers_are_scored_each_by_its_own_prompt(tokenizer: Any) -> None:
    samples, said, wanted = sheet_of("needle", tokenizer)
    sheet = {sample.prompt: text for sample, text in zip(samples, said, strict=True)}

    class SheetServer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            data = json.dumps({"choices": [{"text": sheet.get(body["prompt"], "")}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Keeps the test's output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), SheetServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = Server(f"http://127.0.0.1:{server.server_port}/v1", "reference", None, 2, 0, 60.0)
        cells = [Cell("needle", 256, 4, ("profile:exact",), 0)]
        records = run_remotely(cells, replace(SETTINGS, seed=3), asked, None, None, None)
        server.shutdown()
    found = {record.sample_id: (record.prediction, record.score) for record in records}
    assert [found[sample.sample_id] for sample in samples] == list(zip(said, wanted, strict=True))
