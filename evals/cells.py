"""What a run consists of: tasks at lengths under methods. No model, no torch."""

from dataclasses import dataclass
from pathlib import Path


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
    """How prompts are made. form: `reference` or `ruler`. text_files: haystacks; none: generated prose."""

    model: Path
    form: str
    seed: int
    text_files: tuple[Path, ...]
