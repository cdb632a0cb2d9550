"""Tokenise novels with the ends of their sentences, and hold some novels out of training.

The invariant: training and held-out text share no novel. They are split at the paragraph where the names of people and
places on the two sides have least in common.
"""

import itertools
import lzma
import multiprocessing
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.reference.spelling import Spelling
from training.narrative import Narrator

SENTENCE = re.compile(r"(?<=[.!?])([\"')\]]*)\s+(?=[\"'(\[]?[A-Z])")
NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]+")
NAMES_REACH = (40_000, 100_000, 250_000)
FEWEST_TIMES, FEWEST_NAMES = 4, 8
MOST_IN_HEADING = 100
PARAGRAPHS_A_BATCH = 20_000


@dataclass(frozen=True)
class Text:
    """A text in tokens. tokens: uint16 `[tokens]`; ends: int64 `[sentences + 1]`, sentence i is `tokens[ends[i]:ends[i
    + 1]]`.
    """

    tokens: np.ndarray
    ends: np.ndarray

    def save(self, path: Path) -> None:
        np.savez(path, tokens=self.tokens, ends=self.ends)

    @staticmethod
    def load(path: Path) -> "Text":
        with np.load(path) as stored:
            return Text(stored["tokens"], stored["ends"])


def read_text(path: Path, most_characters: int | None) -> str:
    """Return the text of a UTF-8 file, plain or .xz, or its first `most_characters`."""
    with (lzma.open if path.suffix == ".xz" else open)(path, "rb") as file:
        text = file.read().decode("utf-8", errors="replace").replace("\0", "")
    return text[:most_characters]


def split_novels(text: str, share: float) -> tuple[str, str]:
    """Return training and held-out text. The last `share` is held out; the split is at a novel's boundary nearby."""
    begin, end = int(len(text) * (1 - 1.3 * share)), int(len(text) * (1 - 0.7 * share))
    names = Names(text, max(0, begin - NAMES_REACH[-1]))
    paragraphs = [place + 1 for place in range(begin, end) if text[place] == "\n"]
    place = min(
        paragraphs, key=lambda place: (round(names.shared(place), 2), not is_heading(text, place), place), default=begin
    )
    return text[:place], text[place:]


def is_heading(text: str, place: int) -> bool:
    """Return whether the paragraph that begins at the place is short and ends without a full stop."""
    paragraph = text[place : place + MOST_IN_HEADING].partition("\n")
    return bool(paragraph[1]) and paragraph[0][-1:].isalnum()


class Names:
    """The positions of names of people and places in a text, from `begin` on."""

    def __init__(self, text: str, begin: int) -> None:
        numbers: dict[str, int] = {}
        found = [(match.start(), match.group()) for match in NAME.finditer(text, begin)]
        self._places = np.array([place for place, _ in found], np.int64)
        self._names = np.array([numbers.setdefault(name, len(numbers)) for _, name in found], np.int64)

    def shared(self, place: int) -> float:
        """Return the share of names that both sides of a place have, summed over reaches; high if there are too few."""
        shared = 0.0
        for reach in NAMES_REACH:
            before, after = self._often(place - reach, place), self._often(place, place + reach)
            fewest = min(len(before), len(after))
            both = len(np.intersect1d(before, after, assume_unique=True))
            shared += both / fewest if fewest >= FEWEST_NAMES else len(NAMES_REACH)
        return shared

    def _often(self, begin: int, end: int) -> np.ndarray:
        chosen = self._names[slice(*np.searchsorted(self._places, (begin, end)))]
        return np.flatnonzero(np.bincount(chosen) >= FEWEST_TIMES)


def tokenise_with(text: str, tokenizer: Path, num_processes: int) -> tuple[Text, Text]:
    """Return `tokenise` by several processes, each on a range of paragraphs."""
    marks = np.linspace(0, len(text), num_processes + 1).astype(int)[1:-1]
    cuts = [0, *sorted({text.find("\n", mark) + 1 for mark in marks} - {0}), len(text)]
    parts = [(text[begin:end], tokenizer) for begin, end in itertools.pairwise(cuts)]
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        done = pool.starmap(_tokenise_part, parts, chunksize=1)
    spaced, lined = zip(*done, strict=True)
    return chained(spaced), chained(lined)


def _tokenise_part(text: str, tokenizer: Path) -> tuple[Text, Text]:
    return tokenise(text, Spelling(tokenizer))


def chained(texts: Sequence[Text]) -> Text:
    """Return texts end to end."""
    begins = np.cumsum([0, *(len(text.tokens) for text in texts)])
    ends = [text.ends[1:] + begin for text, begin in zip(texts, begins, strict=False)]
    return Text(np.concatenate([text.tokens for text in texts]), np.concatenate([[0], *ends]))


def sentences_of(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph; a quotation mark stays with the sentence that it closes."""
    return [part for part in SENTENCE.sub(r"\1\n", " ".join(paragraph.split())).split("\n") if part]


def tokenise(text: str, spelling: Spelling) -> tuple[Text, Text]:
    """Return the text twice: with paragraphs joined by spaces, as in documents, and with a line for each paragraph."""
    paragraphs = [sentences_of(line) for line in text.split("\n") if line.strip()]
    encode = spelling.tokenizer.encode_batch_fast
    spaced: list[np.ndarray] = []
    lined: list[np.ndarray] = []
    for begin in range(0, len(paragraphs), PARAGRAPHS_A_BATCH):
        chunk = paragraphs[begin : begin + PARAGRAPHS_A_BATCH]
        flat = [f" {sentence}" for sentences in chunk for sentence in sentences]
        firsts = [f"\n{sentences[0]}" for sentences in chunk]
        whole = [np.array(done.ids, np.uint16) for done in encode(flat, add_special_tokens=False)]
        opened = iter(encode(firsts, add_special_tokens=False))
        spaced += whole
        place = 0
        for sentences in chunk:
            lined.append(np.array(next(opened).ids, np.uint16))
            lined += whole[place + 1 : place + len(sentences)]
            place += len(sentences)
    return joined(spaced), joined(lined)


def narrate(num_sentences: int, seed: int, spelling: Spelling) -> Text:
    """Return generated prose, a source of filler besides novels. Evaluations use another text (`evals.chronicle`)."""
    narrator = Narrator(seed)
    flat = [f" {narrator.sentence()}" for _ in range(num_sentences)]
    return joined(
        [np.array(done.ids, np.uint16) for done in spelling.tokenizer.encode_batch_fast(flat, add_special_tokens=False)]
    )


def joined(sentences: list[np.ndarray]) -> Text:
    """Return sentences end to end."""
    ends = np.zeros(len(sentences) + 1, np.int64)
    np.cumsum([len(sentence) for sentence in sentences], out=ends[1:])
    return Text(np.concatenate(sentences), ends)
