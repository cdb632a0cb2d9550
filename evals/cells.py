"""Define what a run consists of: tasks at lengths under methods. No model, no torch."""

from dataclasses import dataclass
from pathlib import Path

CHRONICLE = "chronicle"
"""The name of the generated text in rows."""

CHOOSING_SEED = 1_000
"""Seed of texts on which settings are chosen, unless another is asked for; evaluations begin at 0."""

SENT_AS = ("auto", "chat", "completion")


@dataclass(frozen=True)
class Cell:
    """One task at one length under some methods (texts of `parse_method`).

    forced_tokens: with 0 free answers are scored by the task's metric. Otherwise every method is fed this many tokens
    of full attention's answer, and the score is its agreement with them.
    """

    task: str
    length_tokens: int
    num_samples: int
    methods: tuple[str, ...]
    forced_tokens: int


@dataclass(frozen=True)
class PromptSettings:
    """How prompts are made.

    model: a Hugging Face folder or a GGUF file. form: `reference` or `ruler`. text_files: texts that hide the needles;
    empty: the chronicle. question_files: for RULER's `qa_1` and `qa_2`. datasets: published benchmarks by name
    (`evals.datasets`), which then count as tasks. sent_as: `chat` or `completion`; `auto` sends a prompt with the
    model's own special tokens as it is, and any other as chat if the tokenizer has a template.
    """

    model: Path
    form: str
    seed: int
    text_files: tuple[Path, ...]
    question_files: tuple[tuple[str, Path], ...] = ()
    datasets: tuple[tuple[str, Path], ...] = ()
    sent_as: str = "auto"

    @property
    def text(self) -> str:
        """Return how a row names the text around the needles: by file names alone, never by content."""
        return ",".join(path.name for path in self.text_files) or CHRONICLE

    def __post_init__(self) -> None:
        if self.sent_as not in SENT_AS:
            raise ValueError(f"prompts sent as {self.sent_as!r}: unknown; wanted one of {', '.join(SENT_AS)}")
