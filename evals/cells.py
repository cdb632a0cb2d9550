"""Define what a run consists of: tasks at lengths under methods. No model, no torch."""

from dataclasses import dataclass
from pathlib import Path

CHRONICLE = "chronicle"
"""The generated text, as rows name it."""

CHOOSING_SEED = 1_000
"""Of texts on which settings are chosen, unless another is asked for; evaluations begin at 0."""

SENT_AS = ("auto", "chat", "completion")


@dataclass(frozen=True)
class Cell:
    """One task at one length under some methods (texts of `parse_method`).

    forced_tokens: 0 scores free answers by the task's metric; otherwise so many tokens of full attention's answer are
    fed to every method, and its agreement with them is the score.
    """

    task: str
    length_tokens: int
    num_samples: int
    methods: tuple[str, ...]
    forced_tokens: int


@dataclass(frozen=True)
class PromptSettings:
    """How prompts are made.

    model: a Hugging Face folder or a GGUF file. form: `reference` or `ruler`. text_files: haystacks; none: the
    chronicle. question_files: of RULER's `qa_1` and `qa_2`. datasets: published benchmarks by name (`evals.datasets`),
    which then count as tasks. sent_as: `chat` or `completion`; `auto` sends what holds a model's own special tokens as
    it is, and all else as chat where the tokenizer has a template.
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
        """Return what a row says of the text around the needles: files' names, nothing of what they hold."""
        return ",".join(path.name for path in self.text_files) or CHRONICLE

    def __post_init__(self) -> None:
        if self.sent_as not in SENT_AS:
            raise ValueError(f"prompts sent as {self.sent_as!r}: unknown; wanted one of {', '.join(SENT_AS)}")
