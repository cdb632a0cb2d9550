"""Make the text around the needles: sentences generated from a seed or taken from the user's text files.

For a seed a source gives as many sentences as asked. The same seed gives the same sentences, and asking for more only
adds to the list. Text files are read from a place that the seed picks, and nothing repeats within one document: a file
that is too short raises ValueError instead.
"""

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

FEWEST_CHARACTERS_A_WORD = 2
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]?[A-Z])")


@dataclass(frozen=True)
class TextSource:
    """Sentences for haystacks, and the files that question tasks read.

    told: yields endless sentences from a seed, used if there are no files. files: text files, UTF-8. questions: the
    file of questions and documents of each task (`qa_1`, `qa_2`), in SQuAD's or HotpotQA's format.
    """

    told: Callable[[int], Iterator[str]]
    files: tuple[Path, ...]
    questions: Mapping[str, Path]

    @cached_property
    def _file_sentences(self) -> list[str]:
        texts = [" ".join(path.read_text(encoding="utf-8").split()) for path in self.files]
        return [sentence for text in texts for sentence in SENTENCE_END.split(text) if sentence]

    @cached_property
    def _file_lines(self) -> list[str]:
        texts = [path.read_text(encoding="utf-8") for path in self.files]
        return [line for text in texts for line in (text if text.endswith("\n") else text + "\n").splitlines(True)]

    def sentences(self, seed: int, num_words: int) -> list[str]:
        """Return sentences with at least num_words words together. Raises ValueError if the text files have fewer."""
        if not self.files:
            return self._told(seed, num_words)
        own = self._file_sentences
        begin = random.Random(f"text-{seed}").randrange(max(1, len(own)))
        chosen, num_chosen = [], 0
        for sentence in own[begin:] + own[:begin]:
            chosen.append(sentence)
            num_chosen += sentence.count(" ") + 1
            if num_chosen >= num_words:
                return chosen
        raise ValueError(f"text files: hold {num_chosen} words, wanted {num_words}; give more text or shorter lengths")

    def passage(self, seed: int, num_characters: int) -> str:
        """Return running text of at least num_characters.

        Files give whole lines, from one that the seed picks, with indents and line ends, so that code stays code.
        Raises ValueError if they are too short.
        """
        if not self.files:
            return " ".join(self._told(seed, num_characters // FEWEST_CHARACTERS_A_WORD + 1))
        lines = self._file_lines
        begin = random.Random(f"text-{seed}").randrange(max(1, len(lines)))
        chosen, num_chosen = [], 0
        for line in lines[begin:] + lines[:begin]:
            chosen.append(line)
            num_chosen += len(line)
            if num_chosen >= num_characters:
                return "".join(chosen)
        raise ValueError(
            f"text files: hold {num_chosen} characters, wanted {num_characters}; give more text or shorter lengths"
        )

    def _told(self, seed: int, num_words: int) -> list[str]:
        sentences, chosen, num_chosen = self.told(seed), [], 0
        while num_chosen < num_words:
            chosen.append(next(sentences))
            num_chosen += chosen[-1].count(" ") + 1
        return chosen


class Haystack:
    """A document of n words with inserts at sentence ends. n can be as large as the sentences are long."""

    def __init__(self, sentences: list[str]) -> None:
        self.sentences = sentences
        self.ends = list(accumulate(sentence.count(" ") + 1 for sentence in sentences))

    def cut(self, num_words: int) -> list[str]:
        """Return the first num_words words as sentences. If the last one is cut short, it ends with a full stop."""
        kept: list[str] = []
        begin = 0
        for sentence, end in zip(self.sentences, self.ends, strict=True):
            if end > num_words:
                words = sentence.split(" ")[: num_words - begin]
                if words:
                    kept.append(" ".join(words).rstrip(",;:\"-.!?'") + ".")
                return kept
            kept.append(sentence)
            begin = end
        return kept

    def document(self, num_words: int, inserts: Sequence[tuple[float, str]]) -> str:
        """Return num_words words with each insert after the sentence end that is nearest to its depth.

        inserts: (depth in [0, 1], text), placed in the order of their depths; equal depths keep the given order.
        """
        kept = self.cut(num_words)
        placed = sorted(range(len(inserts)), key=lambda index: inserts[index][0])
        slots: dict[int, list[str]] = {}
        for index in placed:
            depth, text = inserts[index]
            slots.setdefault(self._slot(depth * num_words, len(kept)), []).append(text)
        pieces = list(slots.get(0, []))
        for position, sentence in enumerate(kept, start=1):
            pieces.append(sentence)
            pieces.extend(slots.get(position, []))
        return " ".join(pieces)

    def _slot(self, word: float, num_kept: int) -> int:
        """Return the number of sentences before an insert: it goes to the sentence end nearest to the word."""
        after = bisect_left(self.ends, word)
        before_end = self.ends[after - 1] if after else 0
        after_end = self.ends[after] if after < len(self.ends) else before_end
        nearest = after if word - before_end <= after_end - word else after + 1
        return min(nearest, num_kept)
