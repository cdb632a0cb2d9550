"""LongBench: 21 datasets of one row format, `input, context, answers, all_classes, length, _id`.

Source: LongBench (Bai et al., 2023): its datasets, answer lengths and the metric of each; for the few-shot datasets
only the answer's first line counts. The instructions are worded for this project.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from evals.datasets.jsonl import field, read_rows, texts
from evals.samples import Sample

SHORT = "Reply with the answer alone, in as few words as you can."
PASSAGES = f"Use the passages below to answer the question after them. {SHORT}\n\n{{context}}\n\n{{input}}\nAnswer:"
CHINESE = "请阅读下面的材料，并根据材料回答最后的问题。\n\n{context}\n\n问题：{input}\n答案："


@dataclass(frozen=True)
class Dataset:
    """One LongBench task. metric: a name in `evals.metrics`. first_line: whether only a prediction's first line is
    scored.
    """

    template: str
    metric: str
    max_new_tokens: int
    first_line: bool = False


def question(material: str, limit: str) -> str:
    """Return a template that asks a question about one piece of material."""
    return f"Below is {material}. Answer the question after it. {limit}\n\n{{context}}\n\nQuestion: {{input}}\nAnswer:"


def summary(material: str) -> str:
    """Return a template that asks for a summary of about a page."""
    return f"Below is {material}. Summarize it in about one page.\n\n{{context}}\n\nSummary:"


DATASETS = {
    "narrativeqa": Dataset(question("a story or a film script", SHORT), "qa_f1", 128),
    "qasper": Dataset(
        question("a research paper", f'{SHORT} Say "unanswerable" if the paper does not tell; say yes or no if asked.'),
        "qa_f1",
        128,
    ),
    "multifieldqa_en": Dataset(question("a text", SHORT), "qa_f1", 64),
    "multifieldqa_zh": Dataset(CHINESE, "qa_f1_chinese", 64),
    "hotpotqa": Dataset(PASSAGES, "qa_f1", 32),
    "2wikimqa": Dataset(PASSAGES, "qa_f1", 32),
    "musique": Dataset(PASSAGES, "qa_f1", 32),
    "dureader": Dataset(CHINESE, "rouge_l_chinese", 128),
    "gov_report": Dataset(summary("a government report"), "rouge_l", 512),
    "qmsum": Dataset(question("the transcript of a meeting", "Use one or a few sentences."), "rouge_l", 512),
    "multi_news": Dataset(summary("a set of news articles on one event"), "rouge_l", 512),
    "vcsum": Dataset("请总结下面的会议记录。\n\n{context}\n\n总结：", "rouge_l_chinese", 512),
    "trec": Dataset(
        "Name the last question's type, as in the examples.\n\n{context}\n{input}", "classification", 64, True
    ),
    "triviaqa": Dataset(
        f"Answer the last question from its passage, as in the examples. {SHORT}\n\n{{context}}\n\n{{input}}",
        "qa_f1",
        32,
        True,
    ),
    "samsum": Dataset("Sum up the last dialogue, as in the examples.\n\n{context}\n\n{input}", "rouge_l", 128, True),
    "lsht": Dataset("参照例子，写出最后一条新闻的类别。\n\n{context}\n{input}", "classification", 64, True),
    "passage_count": Dataset(
        "Some of the paragraphs below are repeated. Count the different ones.\n\n{context}\n\n"
        "Write only the number of different paragraphs: ",
        "count",
        32,
    ),
    "passage_retrieval_en": Dataset(
        "Below are numbered paragraphs, then an abstract of one of them.\n\n{context}\n\nAbstract: {input}\n\n"
        'Write only the number of its paragraph, in the form "Paragraph 1": ',
        "retrieval",
        32,
    ),
    "passage_retrieval_zh": Dataset(
        "下面是若干编号的段落和其中一段的摘要。\n\n{context}\n\n摘要：{input}\n\n只写该段落的编号，格式为“段落1”：",
        "retrieval",
        32,
    ),
    "lcc": Dataset("Write the next line of this code.\n{context}Next line:\n", "code_similarity", 64),
    "repobench-p": Dataset("Write the next line of this code.\n{context}{input}Next line:\n", "code_similarity", 64),
}


def reader(name: str) -> Callable[[Path], Iterator[Sample]]:
    """Return the reader of one dataset's file."""
    return lambda path: read(name, path)


def read(name: str, path: Path) -> Iterator[Sample]:
    """Yield the samples of a LongBench file. Raises ValueError at a row without a published field."""
    dataset = DATASETS[name]
    for number, row in read_rows(path):
        before, after = dataset.template.split("{context}")
        after = after.replace("{input}", field(path, number, row, "input"))
        context = field(path, number, row, "context")
        classes = row.get("all_classes")
        if dataset.metric == "classification" and not classes:
            raise ValueError(f"{path}:{number}: no all_classes; {name} is scored by them")
        yield Sample(
            task=f"longbench/{name}",
            sample_id=str(row.get("_id", number)),
            prompt=before + context + after,
            answers=texts(path, number, row, "answers"),
            metric=dataset.metric,
            max_new_tokens=dataset.max_new_tokens,
            length_tokens=0,
            depth=None,
            meta={"all_classes": classes or [], "first_line": dataset.first_line, "length_words": row.get("length")},
            around=(len(before), len(after)),
        )
