"""Score predictions against answers, in [0, 1]. Each metric follows the published scorer that it is named after.

Text metrics come from libraries (`rouge`, `rouge-score`, `rapidfuzz`, `jieba`), the short rules around them from the
papers' published formulas. The invariant: a metric takes (prediction, answers, meta) and returns a float. Of several
answers the best counts, except in metrics that count all.

Sources: RULER (string_match_all, string_match_part), SQuAD (F1 and its normalisation), LongBench (F1, ROUGE-L,
classification, retrieval, count, code similarity; first line only where `meta["first_line"]`), LongBench v2 (choice),
InfiniteBench (its twelve rules), GSM8K (the last number).
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

Metric = Callable[[str, Sequence[str], dict[str, Any]], float]

ARTICLES = re.compile(r"\b(a|an|the)\b")
DIGITS = re.compile(r"\d+")
DECIMAL = re.compile(r"\d+\.\d+|\d+")
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
CHOICES = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))
CODE_COMMENTS = ("`", "#", "//")
ANSWER_PREFIXES = ("answer is:", "answer:", "answer is", "option is")
DEBUG_PREFIXES = ("answer is:", "is:", "answer:")
CHINESE_PUNCTUATION = "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～、《》「」『』【】〔〕—‘’“”…·"
PUNCTUATION = set(string.punctuation)
ALL_PUNCTUATION = PUNCTUATION | set(CHINESE_PUNCTUATION)


def score(metric: str, prediction: str, answers: Sequence[str], meta: dict[str, Any]) -> float:
    """Return the metric of a prediction, 0 (nothing right) to 1 (all right). Raises KeyError for an unknown metric.

    meta["stop"]: texts at which the prediction ends; meta["first_line"]: whether only its first line counts.
    """
    if metric not in METRICS:
        raise KeyError(f"metric {metric!r}: unknown; have {', '.join(METRICS)}")
    for stop in meta.get("stop", ()):
        prediction = prediction.split(stop)[0]
    if meta.get("first_line"):
        prediction = prediction.lstrip("\n").split("\n")[0]
    return float(METRICS[metric](prediction, answers, meta))


def best(rule: Callable[[str, str], float]) -> Metric:
    """Make a metric from a rule for one answer: it takes the best of the answers."""
    return lambda prediction, answers, meta: max((rule(prediction, answer) for answer in answers), default=0.0)


def normalize(text: str) -> str:
    """Normalise a text as SQuAD does: lower case, no punctuation, no articles, single spaces."""
    kept = "".join(letter for letter in text.lower() if letter not in PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", kept).split())


def f1(predicted: Sequence[str], wanted: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over the tokens' counts."""
    num_same = sum((Counter(predicted) & Counter(wanted)).values())
    return 2 * num_same / (len(predicted) + len(wanted)) if num_same else 0.0


def qa_f1(prediction: str, answer: str) -> float:
    """Return SQuAD's F1 of the normalised words."""
    return f1(normalize(prediction).split(), normalize(answer).split())


def squad_exact(prediction: str, answer: str) -> float:
    """Return 1 where the normalised texts are equal."""
    return float(bool(prediction.strip()) and normalize(prediction) == normalize(answer))


def exact_match(prediction: str, answer: str) -> float:
    """Return 1 where the texts are equal apart from the white space around them."""
    return float(prediction.strip() == answer.strip())


def without_marks(text: str) -> str:
    """Normalise a Chinese text: lower case, no punctuation of either script, no white space."""
    return "".join(letter for letter in text.lower() if letter not in ALL_PUNCTUATION and not letter.isspace())


def cut_words(text: str) -> list[str]:
    """Return the words of a Chinese text, as jieba segments it."""
    import jieba

    jieba.setLogLevel("WARNING")
    return list(jieba.cut(text, cut_all=False))


def qa_f1_chinese(prediction: str, answer: str) -> float:
    """Return LongBench's F1 of jieba's words, normalised and without empty ones."""
    words = [[kept for word in cut_words(text) if (kept := without_marks(word))] for text in (prediction, answer)]
    return f1(*words)


def qa_f1_characters(prediction: str, answer: str) -> float:
    """Return InfiniteBench's F1 of Chinese characters."""
    return f1(list(without_marks(prediction)), list(without_marks(answer)))


def rouge_l(prediction: str, answer: str) -> float:
    """Return LongBench's ROUGE-L: the `rouge` package's F; texts without a word score 0."""
    from rouge import Rouge

    if not prediction.strip(" .\n") or not answer.strip(" .\n"):
        return 0.0
    return Rouge(metrics=["rouge-l"]).get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]


def rouge_l_chinese(prediction: str, answer: str) -> float:
    """Return LongBench's ROUGE-L over jieba's words."""
    return rouge_l(" ".join(cut_words(prediction)), " ".join(cut_words(answer)))


def rouge_l_sum(prediction: str, answer: str) -> float:
    """Return InfiniteBench's ROUGE-Lsum: the `rouge-score` package's F over lines, without a stemmer."""
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeLsum"], use_stemmer=False).score(answer, prediction)["rougeLsum"].fmeasure


def code_similarity(prediction: str, answer: str) -> float:
    """Return LongBench's code metric: edit similarity in whole per cents.

    Only the prediction's first line that is neither comment nor fence counts.
    """
    from rapidfuzz import fuzz

    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in CODE_COMMENTS)), "")
    return round(fuzz.ratio(line, answer)) / 100 if line and answer else 0.0


def share_of_numbers(prediction: str, number: str) -> float:
    """Return the share of the prediction's numbers that equal `number`: LongBench's rule for retrieval and counting."""
    numbers = DIGITS.findall(prediction)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """Return LongBench's passage retrieval score. The number is that of an answer `Paragraph 12` (or `段落12`)."""
    found = re.search(r"(?:Paragraph |段落)(\d+)", answer)
    if not found:
        raise ValueError(f"retrieval answer: got {answer!r}, wanted `Paragraph N`")
    return share_of_numbers(prediction, found[1])


def classification(prediction: str, answers: Sequence[str], meta: dict[str, Any]) -> float:
    """Return LongBench's classification score: 1 over the number of classes named, if the right one is among them.

    meta["all_classes"]: every class. A named class that is only a part of the right one's name is not counted. The
    published loop removes classes while it iterates, so it skips the class after a removed one; this one does, too.
    """
    top = 0.0
    for answer in answers:
        named = [name for name in meta["all_classes"] if name in prediction]
        place = 0
        while place < len(named):
            if named[place] in answer and named[place] != answer:
                named.remove(named[place])
            place += 1
        top = max(top, 1 / len(named) if answer in named else 0.0)
    return top


def string_match_all(prediction: str, answers: Sequence[str], meta: dict[str, Any]) -> float:
    """Return RULER's score: the share of answers that occur in the prediction, in upper or lower case."""
    return sum(answer.lower() in prediction.lower() for answer in answers) / len(answers) if answers else 0.0


def string_match_part(prediction: str, answers: Sequence[str], meta: dict[str, Any]) -> float:
    """Return RULER's score of questions: 1 if any answer occurs in the prediction."""
    return float(any(answer.lower() in prediction.lower() for answer in answers))


def lines(prediction: str, answers: Sequence[str], meta: dict[str, Any]) -> float:
    """Return the share of the answer's lines that the prediction has, equal, at the same line number."""
    wanted = answers[0].strip().split("\n")
    got = [line.strip() for line in prediction.strip().split("\n")]
    return sum(line.strip() == other for line, other in zip(wanted, got, strict=False)) / len(wanted)


def words_edit(prediction: str, answer: str) -> float:
    """Return 1 - the words' Levenshtein distance over the answer's length.

    Words of the prediction beyond that length are ignored.
    """
    from rapidfuzz.distance import Levenshtein

    wanted = answer.split()
    return Levenshtein.normalized_similarity(prediction.split()[: len(wanted)], wanted) if prediction.strip() else 0.0


def last_number(text: str) -> str | None:
    """Return the last number of a text, without commas, currency and a trailing `.0`; None if it has none."""
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    number = numbers[-1].replace(",", "").replace("$", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def last_number_match(prediction: str, answer: str) -> float:
    """Return GSM8K's score: 1 if the prediction's last number is the answer's (its number after `####`, if any)."""
    wanted = last_number(answer.split("####")[-1])
    return float(wanted is not None and last_number(prediction) == wanted)


def first_integer(prediction: str, answer: str) -> float:
    """Return InfiniteBench's passkey and number string score: 1 if the first run of digits equals the answer."""
    found = re.search(r"[0-9]+", prediction)
    return float(found is not None and found[0] == answer)


def blanked(text: str, marks: str) -> list[str]:
    """Return the words of a text after its marks are replaced by blanks."""
    return text.translate(str.maketrans(dict.fromkeys(marks, " "))).split()


def among_words(prediction: str, answer: str) -> float:
    """Return InfiniteBench's key-value score: 1 if the answer is a word of the prediction."""
    return float(answer in blanked(prediction, "\n:\"'.,?!{}"))


def among_names(prediction: str, answer: str) -> float:
    """Return InfiniteBench's dialogue score: 1 if the name is a word of the prediction, both in capitals."""
    return float(answer in [word.upper() for word in blanked(prediction, "\n:\"'.,?!{}")])


def last_integer(prediction: str, answer: str) -> float:
    """Return InfiniteBench's code run score: 1 if the last word is the integer."""
    words = blanked(prediction.strip(), "\n.`'\":")
    return float(bool(words) and re.fullmatch(r"[+-]?\d+", words[-1]) is not None and int(words[-1]) == int(answer))


def first_decimal(prediction: str, answer: str) -> float:
    """Return InfiniteBench's math find score: 1 if the first number, whole or decimal, has the answer's value."""
    found = DECIMAL.search(prediction)
    if found is None:
        return 0.0
    return float(float(found[0]) == float(answer))


def leading_integers(prediction: str, answers: Sequence[str], meta: dict[str, Any]) -> float:
    """Return InfiniteBench's math calc score: the share of intermediate results that are right before the first wrong
    one.
    """
    got = [int(number) for number in re.findall(r"[0-9]+", prediction)]
    num_right = 0
    for wanted, number in zip(answers, got, strict=False):
        if int(wanted) != number:
            break
        num_right += 1
    return num_right / len(answers)


def after_prefix(text: str, prefixes: Sequence[str]) -> str | None:
    """Return the text behind a prefix and one blank; None if no prefix occurs.

    Prefixes are tried in order, and the first that occurs counts.
    """
    for prefix in prefixes:
        place = text.find(prefix)
        if place >= 0:
            return text[place + len(prefix) + 1 :]
    return None


def choice_or_text(prediction: str, answers: Sequence[str], meta: dict[str, Any]) -> float:
    """Return InfiniteBench's book choice score.

    The choice is the first letter, or what follows `answer is`, or the first A, B, C or D that stands alone. answers:
    the option's letter and its text.
    """
    if prediction[:1] and prediction[0] in "ABCD":
        return float(prediction[0] in answers)
    words = blanked(prediction, "\n\"'.,?!{}")
    named = after_prefix(" ".join(words), ANSWER_PREFIXES)
    if named is not None:
        return float(any(named.startswith(answer) for answer in answers))
    letter = next((word for word in words if word in "ABCD"), None)
    return float(letter is not None and letter in answers)


def debug_choice(prediction: str, answers: Sequence[str], meta: dict[str, Any]) -> float:
    """Return InfiniteBench's code debug score. answers: the function's name and the option's letter."""
    name, letter = answers
    if prediction[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = re.sub(r"[\n`'\"*-]|[Oo]ption", " ", prediction.strip())
    named = after_prefix(re.sub(" +", " ", text), DEBUG_PREFIXES)
    return float(named is not None and named.startswith((letter, name)))


def choice(prediction: str, answer: str) -> float:
    """Return LongBench v2's score: 1 if the letter in `The correct answer is (X)` is the answer.

    Asterisks are removed first, and the brackets may be missing.
    """
    plain = prediction.replace("*", "")
    found = next((match for form in CHOICES if (match := form.search(plain))), None)
    return float(found is not None and found[1] == answer)


METRICS: dict[str, Metric] = {
    "exact_match": best(exact_match),
    "squad_exact": best(squad_exact),
    "qa_f1": best(qa_f1),
    "qa_f1_chinese": best(qa_f1_chinese),
    "qa_f1_characters": best(qa_f1_characters),
    "rouge_l": best(rouge_l),
    "rouge_l_chinese": best(rouge_l_chinese),
    "rouge_l_sum": best(rouge_l_sum),
    "code_similarity": best(code_similarity),
    "classification": classification,
    "retrieval": best(retrieval),
    "count": best(share_of_numbers),
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
    "lines": lines,
    "words_edit": best(words_edit),
    "last_number": best(last_number_match),
    "first_integer": best(first_integer),
    "among_words": best(among_words),
    "among_names": best(among_names),
    "last_integer": best(last_integer),
    "first_decimal": best(first_decimal),
    "leading_integers": leading_integers,
    "choice_or_text": choice_or_text,
    "debug_choice": debug_choice,
    "choice": best(choice),
}
