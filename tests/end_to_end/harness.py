"""Run a third party's harness, `lm_eval`, as its user does: a folder of tasks, its command line, its result files.

The tasks are the reference model's own forms over
generated text, so nothing is fetched: the hub and data sets are offline, the tokenizer is the model's folder.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from evals.samples import Sample
from evals.tasks import generate
from evals.tasks.reference import user_turn
from evals.tasks.text import generated_text

REPOSITORY = Path(__file__).parents[2]
MODEL_FOLDER = REPOSITORY / "deploy/models/reference"
MAX_LENGTH = 1024  # the harness's limit: longer texts are scored window by window
RUN_SECONDS = 200
SEED = 1
PROMPT_TOKENS = 320  # the facts of two hops take 251
GENERATED = {"many_needles": 3, "facts_one_hop": 2, "facts_two_hops": 2}
NUM_CHOSEN = 2  # samples of each kind with choices
NUM_CHOICES = 3
CHOICES = {
    "many_needles": re.compile(r"The special magic number for \S+ is (\d{7})\."),
    "facts_two_hops": re.compile(r"The mayor of [^.]+ is ([^.]+)\."),
}
TEXT_WORDS = (60, 200, 1100)
# Its command line, once for each list of arguments: a process takes ten seconds to load it. The ten thousand tasks that
# come with it, which take it ten more to list, are left out.
HARNESS = """
import json, sys
from functools import partialmethod
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager
TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
"""


@dataclass(frozen=True)
class HarnessRun:
    """What the harness wrote. results: task to metrics. samples: task to its samples in the order of the documents."""

    results: dict[str, dict[str, Any]]
    samples: dict[str, list[dict[str, Any]]]


def asked_samples(tokenizer: Any) -> list[Sample]:
    """Questions that the model mostly answers; those of two hops with another mayor as their answer."""
    return [
        mislabelled(sample) if task == "facts_two_hops" else sample
        for task, num_samples in GENERATED.items()
        for sample in generate(task, tokenizer, PROMPT_TOKENS, num_samples, SEED, "reference", None)
    ]


def mislabelled(sample: Sample) -> Sample:
    """The sample with a wrong answer, so that scores are neither all right nor all wrong."""
    mayors = CHOICES[sample.task].findall(sample.prompt)
    return replace(sample, answers=[next(mayor for mayor in mayors if mayor != sample.answers[0])])


def generation_documents(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The raw prompt, and the turn that the chat template makes the same prompt of."""
    return [
        {"prompt": sample.prompt, "turn": user_turn(sample.prompt), "answer": sample.answers[0]} for sample in samples
    ]


def choice_documents(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The answer among others of its kind from the same document, in alphabetical order."""
    documents = []
    for task, pattern in CHOICES.items():
        for sample in [sample for sample in samples if sample.task == task][:NUM_CHOSEN]:
            answer = sample.answers[0]
            others = [text for text in pattern.findall(sample.prompt) if text != answer]
            choices = sorted([answer, *others[: NUM_CHOICES - 1]])
            documents.append({"prompt": sample.prompt, "choices": choices, "gold": choices.index(answer)})
    return documents


def text_documents() -> list[dict[str, Any]]:
    """Prose; the last text is longer than MAX_LENGTH tokens."""
    return [
        {"text": " ".join(generated_text().sentences(seed, num_words))} for seed, num_words in enumerate(TEXT_WORDS)
    ]


def write_tasks(folder: Path, samples: Sequence[Sample]) -> None:
    """A YAML and a JSONL file each: tandem_completion, tandem_chat, tandem_choice and tandem_text."""
    answered = {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<|end|>"], "max_gen_toks": 16, "do_sample": False, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    chosen = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    read = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    }
    asked = generation_documents(samples)
    write_task(folder, "tandem_completion", answered | {"doc_to_text": "{{prompt}}"}, asked)
    write_task(folder, "tandem_chat", answered | {"doc_to_text": "{{turn}}"}, asked)
    write_task(folder, "tandem_choice", chosen, choice_documents(samples))
    write_task(folder, "tandem_text", read, text_documents())


def write_task(folder: Path, name: str, settings: dict[str, Any], documents: Sequence[dict[str, Any]]) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **source, **settings}))


@dataclass(frozen=True)
class Evaluation:
    """One `lm_eval run` over tasks of a folder."""

    model: str
    arguments: dict[str, Any]
    tasks: tuple[str, ...]
    options: tuple[str, ...]

    def output(self, folder: Path) -> Path:
        return folder / f"out_{self.model}"

    def command_line(self, folder: Path) -> list[str]:
        return [
            *("run", "--model", self.model),
            *("--model_args", ",".join(f"{name}={value}" for name, value in self.arguments.items())),
            *("--tasks", ",".join(str(folder / f"{task}.yaml") for task in self.tasks)),
            *("--output_path", str(self.output(folder)), "--log_samples", *self.options),
        ]


def run_harness(folder: Path, evaluations: Sequence[Evaluation]) -> list[HarnessRun]:
    """One after the other in a process of their own. Fails with the end of its output."""
    command = [sys.executable, "-c", HARNESS, json.dumps([each.command_line(folder) for each in evaluations])]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "NO_PROXY": "*"}
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **offline}, capture_output=True, text=True, timeout=RUN_SECONDS
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return [read_run(each.output(folder), each.tasks) for each in evaluations]


def read_run(output: Path, tasks: Sequence[str]) -> HarnessRun:
    (results,) = output.rglob("results_*.json")
    samples = {}
    for task in tasks:
        (logged,) = output.rglob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in logged.read_text().splitlines()]
        samples[task] = sorted(lines, key=lambda sample: sample["doc_id"])
    return HarnessRun(json.loads(results.read_text())["results"], samples)
