"""Generated tasks fill their length, keep their answers in the prompt, and depend on nothing but their arguments."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from evals.chronicle.chronicler import chronicle
from evals.tasks import RULER_TASKS, TASK_NAMES, TASKS, generate
from evals.tasks.fitting import count_chat_tokens, count_tokens
from evals.tasks.haystack import Haystack, TextSource
from evals.tasks.reference import COMMON_TIMES, COUNTED, OF_RULER, OTHER_TIMES, REFERENCE_TASKS, user_turn
from evals.tasks.text import generated_text, text_source
from tests.evals.tokenizers import ByteTokenizer, SpaceTokenizer
from tests.tolerances import PROMPT_FILLED

REFERENCE_MODEL = Path(__file__).parents[2] / "deploy" / "models" / "reference"
AT_LENGTH = ("niah_multikey_3", "vt", "cwe", "qa_1", "common_words", "list")  # of every kind of text, one
CASES = [("ruler", task) for task in RULER_TASKS] + [("reference", task) for task in TASK_NAMES]


@pytest.fixture(scope="module")
def reference_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(REFERENCE_MODEL)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TextSource:
    """The chronicle, with question files in SQuAD's and HotpotQA's formats."""
    folder = tmp_path_factory.mktemp("questions")
    told = chronicle(7)
    stories = [" ".join(next(told) for _ in range(6)) for _ in range(40)]
    squad = {
        "data": [
            {
                "paragraphs": [
                    {
                        "context": f"{story} Fact {number} is told by person{number}.",
                        "qas": [
                            {"question": f"Who tells fact {number}?", "answers": [{"text": f"person{number}"}]},
                            {"question": "Unanswerable?", "answers": [], "is_impossible": True},
                        ],
                    }
                ]
            }
            for number, story in enumerate(stories)
        ]
    }
    hotpot = [
        {
            "question": f"Which town has house {number}?",
            "answer": f"town{number}",
            "context": [
                [f"House {number}", [f"House {number} is blue.", f" {stories[number]}"]],
                [f"Town {number}", [f"In town{number} all is blue.", f" {stories[-number]}"]],
            ],
        }
        for number in range(20)
    ]
    (folder / "squad.json").write_text(json.dumps(squad))
    (folder / "hotpot.json").write_text(json.dumps(hotpot))
    return text_source([], {"qa_1": folder / "squad.json", "qa_2": folder / "hotpot.json"})


def test_all_thirteen_of_ruler_are_there() -> None:
    assert len(RULER_TASKS) == 13
    assert set(OF_RULER) == set(RULER_TASKS)


FILLED = [
    pytest.param(form, task, length, marks=[] if length == 1536 or task in AT_LENGTH else pytest.mark.long)
    for form, task in CASES
    for length in (1536, 4096)
]


@pytest.mark.parametrize(("form", "task", "length"), FILLED)
def test_prompt_and_answer_room_fill_the_length(
    form: str, task: str, length: int, reference_tokenizer: Any, source: TextSource
) -> None:
    for sample in generate(task, reference_tokenizer, length, 2, 0, form, source):
        assert sample.length_tokens == count_tokens(reference_tokenizer, sample.prompt)
        chat = 0 if sample.meta.get("raw") else count_chat_tokens(reference_tokenizer)
        assert PROMPT_FILLED * length <= sample.length_tokens + sample.max_new_tokens + chat <= length


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), SpaceTokenizer()])
@pytest.mark.parametrize("task", RULER_TASKS)
def test_any_tokenizer_is_counted_by(task: str, tokenizer: Any, source: TextSource) -> None:
    length = 20_000 if isinstance(tokenizer, ByteTokenizer) else 2_500
    (sample,) = generate(task, tokenizer, length, 1, 3, "ruler", source)
    total = count_tokens(tokenizer, sample.prompt) + sample.max_new_tokens + count_chat_tokens(tokenizer)
    assert PROMPT_FILLED * length <= total <= length


@pytest.mark.parametrize(("form", "task"), CASES)
def test_first_samples_do_not_depend_on_how_many_are_asked(
    form: str, task: str, reference_tokenizer: Any, source: TextSource
) -> None:
    few = generate(task, reference_tokenizer, 1536, 1, 5, form, source)
    more = generate(task, reference_tokenizer, 1536, 2, 5, form, source)
    other_seed = generate(task, reference_tokenizer, 1536, 1, 6, form, source)
    assert few == more[:1]
    assert few[0].prompt != more[1].prompt
    assert few[0].prompt != other_seed[0].prompt
    assert len({sample.sample_id for sample in more + other_seed}) == 3


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_3"])
def test_needle_stands_at_the_depth_that_is_asked(task: str, depth: float, reference_tokenizer: Any) -> None:
    sample = generate(task, reference_tokenizer, 2048, 1, 0, "ruler", None, depths=[depth])[0]
    begin, end = sample.prompt.index("\n"), sample.prompt.rindex("\n")
    place = (sample.prompt.index(sample.answers[0]) - begin) / (end - begin)
    assert sample.depth == depth
    assert abs(place - depth) < 0.05


def test_depths_are_taken_in_turn(reference_tokenizer: Any) -> None:
    samples = TASKS["needle"](reference_tokenizer, 1024, 5, 0, "reference", None, depths=[0.1, 0.9])
    assert [sample.depth for sample in samples] == [0.1, 0.9, 0.1, 0.9, 0.1]


def test_reference_prompts_are_what_the_chat_template_writes(reference_tokenizer: Any) -> None:
    for task in REFERENCE_TASKS:
        (sample,) = generate(task, reference_tokenizer, 1536, 1, 0, "reference", None)
        turn = [{"role": "user", "content": user_turn(sample.prompt)}]
        written = reference_tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        assert sample.meta["raw"]
        assert written == sample.prompt


def test_links_of_a_chain_stand_in_order(reference_tokenizer: Any) -> None:
    for sample in generate("vt", reference_tokenizer, 2048, 3, 0, "ruler", None):
        places = [sample.prompt.index(f"VAR {name} =") for name in sample.answers]
        assert places == sorted(places)


@pytest.mark.parametrize("task", COUNTED)
def test_common_words_of_the_reference_form_come_fifteen_times_as_often(task: str, reference_tokenizer: Any) -> None:
    (sample,) = generate(task, reference_tokenizer, 2048, 1, 0, "reference", None)
    counts = Counter(user_turn(sample.prompt).split("\n\n")[0].split(", ")).most_common()
    common = sample.answers[0].split(", ")
    assert len(common) == COUNTED[task][0]
    assert {word for word, count in counts if count == COMMON_TIMES} == set(common)
    assert max(count for word, count in counts if word not in common) == OTHER_TIMES


def test_documents_that_the_question_needs_are_in_the_prompt(reference_tokenizer: Any, source: TextSource) -> None:
    for sample in generate("qa_2", reference_tokenizer, 4096, 4, 0, "ruler", source):
        number = sample.answers[0].removeprefix("town")
        assert f"\nHouse {number}\n" in sample.prompt
        assert f"\nTown {number}\n" in sample.prompt


def test_text_files_are_the_haystack_and_never_wrap_into_themselves(reference_tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n".join(f"Sentence number {number} of the book is here." for number in range(3000)))
    (sample,) = generate("niah_single_2", reference_tokenizer, 4096, 1, 0, "ruler", text_source([path], {}))
    numbers = re.findall(r"Sentence number (\d+) of", sample.prompt)
    assert len(numbers) == len(set(numbers)) > 100
    with pytest.raises(ValueError, match="give more text"):
        generate("niah_single_2", reference_tokenizer, 65536, 1, 0, "ruler", text_source([path], {}))


def test_inserts_stand_only_at_sentence_ends() -> None:
    haystack = Haystack(generated_text().sentences(0, 500))
    text = haystack.document(400, [(depth / 10, "@") for depth in range(11)])
    assert text.count("@") == 11
    assert not re.findall(r"[^.!?\"@] @", text)


def test_wrong_requests_say_what_is_wanted(reference_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="niah_single_1"):
        generate("nope", reference_tokenizer, 1024, 1, 0, "ruler", None)
    with pytest.raises(ValueError, match="only the form 'reference'"):
        generate("list", reference_tokenizer, 1024, 1, 0, "ruler", None)
    with pytest.raises(ValueError, match="no question file"):
        generate("qa_1", reference_tokenizer, 1024, 1, 0, "ruler", None)
    with pytest.raises(ValueError, match="ask for a longer length"):
        generate("cwe", reference_tokenizer, 512, 1, 0, "ruler", None)
    with pytest.raises(FileNotFoundError, match="missing"):
        text_source([tmp_path / "missing.txt"], {})


@pytest.mark.parametrize("task", REFERENCE_TASKS)
def test_answers_of_the_reference_forms_fit_in_their_room(task: str, reference_tokenizer: Any) -> None:
    for sample in generate(task, reference_tokenizer, 2048, 6, 0, "reference", None):
        num_tokens = len(reference_tokenizer.encode(sample.answers[0], add_special_tokens=False))
        assert num_tokens + 1 <= sample.max_new_tokens
