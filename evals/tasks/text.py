"""Which text a run's documents are made of: the survey's chronicle, or the user's own text files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from evals.chronicle.chronicler import chronicle
from evals.tasks.haystack import TextSource


def text_source(text_files: Sequence[Path], question_files: Mapping[str, Path]) -> TextSource:
    """Return a source over the given files, or of the chronicle where there is no text file. question_files: by task
    name.

    Raises FileNotFoundError naming the first file that is missing.
    """
    for path in [*text_files, *question_files.values()]:
        if not Path(path).is_file():
            raise FileNotFoundError(f"text source: no file {path}; give paths of UTF-8 text, SQuAD or HotpotQA files")
    questions = {name: Path(path) for name, path in question_files.items()}
    return TextSource(chronicle, tuple(Path(path) for path in text_files), questions)


def generated_text() -> TextSource:
    """Return the chronicle, and no question files."""
    return text_source([], {})
