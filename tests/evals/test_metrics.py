"""Metrics equal the published scorers: each expected number is worked out by hand from the published formula."""

import pytest

from evals.metrics import METRICS, last_number, normalize, score
from tests.tolerances import SCORE_ROUNDING


def test_squad_normalisation_drops_case_punctuation_articles_and_spaces() -> None:
    assert normalize("  The Quick,  brown-Fox's  a tale. ") == "quick brownfoxs tale"


@pytest.mark.parametrize(
    ("metric", "prediction", "answers", "meta", "wanted"),
    [
        # "the cat sat" -> cat sat; "a cat sat down" -> cat sat down: P 2/2, R 2/3, F1 0.8
        ("qa_f1", "The cat sat.", ["a cat sat down"], {}, 0.8),
        ("qa_f1", "The cat sat.", ["nothing", "cat sat"], {}, 1.0),
        # counted with multiplicity: common {b, b} of 3 and 2
        ("qa_f1", "b b b", ["b b"], {}, 0.8),
        ("squad_exact", "The Eiffel Tower!", ["eiffel tower"], {}, 1.0),
        ("squad_exact", "", ["the"], {}, 0.0),
        ("exact_match", " 1234567\n", ["1234567"], {}, 1.0),
        ("exact_match", "1234567.", ["1234567"], {}, 0.0),
        # RULER: 2 of 4 occur, case aside; part: any
        ("string_match_all", "ABC then 7", ["abc", "7", "8", "9"], {}, 0.5),
        ("string_match_part", "in Paris, I think", ["Rome", "paris"], {}, 1.0),
        ("string_match_part", "in Oslo", ["Rome", "paris"], {}, 0.0),
        # ROUGE-L of "a b c d" against "a c d": LCS 3, P 3/4, R 3/3, F 6/7
        ("rouge_l", "a b c d", ["a c d"], {}, 6 / 7),
        ("rouge_l", "", ["a c d"], {}, 0.0),
        ("rouge_l", "x y", ["a c d"], {}, 0.0),
        # rouge-score lower-cases and drops punctuation; lines apart: union LCS "the cat" + "sat" = 3, P 3/4, R 3/3
        ("rouge_l_sum", "The cat\nsat today", ["the cat\nsat"], {}, 6 / 7),
        # first line without a comment; 2 * matches / lengths = 2 * 4 / (5 + 4) = 0.889 -> 89 %
        ("code_similarity", "# note\nabcde\nabcd", ["abcd"], {}, 0.89),
        ("code_similarity", "```\n", ["abcd"], {}, 0.0),
        ("retrieval", "Paragraph 12, or 3, or 12", ["Paragraph 12"], {}, 2 / 3),
        ("retrieval", "段落7", ["段落7"], {}, 1.0),
        ("retrieval", "none", ["Paragraph 12"], {}, 0.0),
        ("count", "17 or 18", ["17"], {}, 0.5),
        ("count", "117", ["17"], {}, 0.0),
        ("classification", "It is a City.", ["City"], {"all_classes": ["City", "Other"]}, 1.0),
        ("classification", "City or State", ["City"], {"all_classes": ["City", "State"]}, 0.5),
        # "entity" is named inside the right class's name and is not counted
        ("classification", "Other entity", ["Other entity"], {"all_classes": ["entity", "Other entity"]}, 1.0),
        ("classification", "State", ["City"], {"all_classes": ["City", "State"]}, 0.0),
        ("choice", "Hm. **The correct answer is (C)**", ["C"], {}, 1.0),
        ("choice", "The correct answer is C", ["C"], {}, 1.0),
        ("choice", "The correct answer is B; no: The correct answer is (C)", ["C"], {}, 1.0),
        ("choice", "C", ["C"], {}, 0.0),
        ("last_number", "First 12, then 3 * 12 = 36. So $1,036.00", ["1036"], {}, 1.0),
        ("last_number", "#### 18", ["6 + 12 = 18\n#### 18"], {}, 1.0),
        ("last_number", "no idea", ["18"], {}, 0.0),
        ("last_number", "18\nQuestion: 5 apples", ["18"], {"stop": ["\nQuestion:"]}, 1.0),
        ("qa_f1", "\nyes\nno no no", ["yes"], {"first_line": True}, 1.0),
        ("first_integer", "The key is 00719. Not 3", ["00719"], {}, 1.0),
        ("first_integer", "719", ["00719"], {}, 0.0),
        ("among_words", '{"value": "ab-12"}', ["ab-12"], {}, 1.0),
        ("among_words", "ab-123", ["ab-12"], {}, 0.0),
        ("among_names", "It is Ada: surely", ["ADA"], {}, 1.0),
        ("last_integer", "func returns `-7`.", ["-7"], {}, 1.0),
        ("last_integer", "func returns seven", ["7"], {}, 0.0),
        ("first_decimal", "about 3.5 of 7", ["3.5"], {}, 1.0),
        ("first_decimal", "12.5", ["12"], {}, 0.0),
        # right, right, wrong: the fourth no longer counts
        ("leading_integers", "[1, 3, 9, 4]", ["1", "3", "8", "4"], {}, 0.5),
        ("choice_or_text", "B. because", ["B", "the mill"], {}, 1.0),
        ("choice_or_text", "I say the answer is the mill", ["B", "the mill"], {}, 1.0),
        ("choice_or_text", "perhaps D or B", ["B", "the mill"], {}, 0.0),
        ("choice_or_text", "", ["B", "the mill"], {}, 0.0),
        ("debug_choice", "C. f is wrong", ["run_all", "C"], {}, 1.0),
        ("debug_choice", "The answer is: run_all", ["run_all", "C"], {}, 1.0),
        ("debug_choice", "run_all", ["run_all", "C"], {}, 0.0),
        ("lines", "a: 1\nc: 2\n", ["a: 1\nb: 2\nc: 2"], {}, 1 / 3),
        # 4 wanted words, one exchanged; what follows is not judged
        ("words_edit", "one two 3 four five six", ["one two three four"], {}, 0.75),
        ("qa_f1_characters", "北京，市", ["北京"], {}, 0.8),
        ("qa_f1_chinese", "北京。", ["北京"], {}, 1.0),
        ("rouge_l_chinese", "今天 天气 好", ["今天 天气 好"], {}, 1.0),
    ],
)
def test_metric_equals_the_published_formula(
    metric: str, prediction: str, answers: list[str], meta: dict[str, object], wanted: float
) -> None:
    assert score(metric, prediction, answers, meta) == pytest.approx(wanted, abs=SCORE_ROUNDING)


def test_every_metric_scores_an_empty_prediction_zero() -> None:
    answers = {"retrieval": ["Paragraph 3"], "leading_integers": ["1", "2"], "debug_choice": ["run", "A"]}
    for metric in METRICS:
        assert score(metric, "", answers.get(metric, ["7"]), {"all_classes": ["7"]}) == 0.0, metric


def test_a_score_off_by_more_than_its_rounding_is_told_apart() -> None:
    assert score("qa_f1", "The cat sat.", ["a cat sat down"], {}) != pytest.approx(0.81, abs=SCORE_ROUNDING)


def test_unknown_metric_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match="exact_match"):
        score("bleu", "", [], {})


@pytest.mark.parametrize(
    ("text", "number"), [("1,234.50", "1234.5"), ("-3", "-3"), ("$42.", "42"), ("none", None), ("100", "100")]
)
def test_last_number_is_written_one_way(text: str, number: str | None) -> None:
    assert last_number(text) == number
