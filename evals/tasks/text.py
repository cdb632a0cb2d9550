"""Choose the text of a run's documents: the survey's chronicle, or the user's own text files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from evals.chronicle.chronicler import chronicle
from evals.tasks.haystack import TextSource


def text_source(text_files: Sequence[Path], question_files: Mapping[str, Path]) -> TextSource:
    """Return a source over the given text files, or over the chronicle if there are none.

    question_files: by task name. Raises FileNotFoundError, which names the first missing file.
    """
    for path in [*text_files, *question_files.values()]:
        if not Path(path).is_file():
            raise FileNotFoundError(f"text source: no file {path}; give paths of UTF-8 text, SQuAD or HotpotQA files")
    questions = {name: Path(path) for name, path in question_files.items()}
    return TextSource(chronicle, tuple(Path(path) for path in text_files), questions)


def generated_text() -> TextSource:
    """Return a source over the chronicle, without question files."""
    return text_source([], {})
