"""Hold text with the position of every token, so that a prompt of n tokens is one slice of it.

Token positions come from the model's tokenizer (exact), from the server's /tokenize route (exact for pieces of a few
hundred characters, interpolated inside one), or from a ratio of characters to tokens (reported as an estimate).
Invariant: `starts` ascends, begins at 0 and ends at `len(text)`.
"""

import json
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.load.load_plan import PlanError
from gpu.model.sentencepiece_file import MODEL_FILE
from server.deployment import ConfigError
from server.text.model_tokenizer import Tokenizer as ServedTokenizer

DEFAULT_CHARS_PER_TOKEN = 4.0
PIECE_CHARS = 400
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


@dataclass(frozen=True)
class TextPool:
    """Text, and where its tokens begin.

    starts: int64 `[tokens + 1]`, character positions. sentences: int64 `[sentences]`, tokens that begin a sentence.
    count: counts the tokens of a whole prompt, including special ones; None if only estimates are known.
    added_tokens: what the server puts before a prompt (BOS), if `count` does not know. method: how tokens are counted,
    in words.
    """

    text: str
    starts: NDArray[np.int64]
    sentences: NDArray[np.int64]
    count: Callable[[str], int] | None
    added_tokens: int
    method: str

    @property
    def num_tokens(self) -> int:
        return len(self.starts) - 1

    @property
    def chars_per_token(self) -> float:
        return len(self.text) / self.num_tokens

    def cut(self, begin: int, num_tokens: int) -> str:
        """Return the text of `num_tokens` tokens from token `begin`; after the end the text begins again."""
        parts = []
        while num_tokens > 0:
            end = min(begin + num_tokens, self.num_tokens)
            parts.append(self.text[self.starts[begin] : self.starts[end]])
            num_tokens -= end - begin
            begin = 0
        return "".join(parts)

    def estimate(self, text: str) -> int:
        """Return the number of tokens of any text: counted if possible, else by the pool's ratio."""
        return self.count(text) if self.count else round(len(text) / self.chars_per_token)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder or a GGUF file (or a tokenizer.json). Raises PlanError."""
    path = folder / "tokenizer.json" if folder.is_dir() else folder
    if path.suffix == ".gguf" or (not path.is_file() and (folder / MODEL_FILE).is_file()):
        try:
            return ServedTokenizer(folder, None).vocabulary
        except ConfigError as error:
            raise PlanError(f"--{error}") from None
    if not path.is_file():
        raise PlanError(f"--tokenizer: {path} is missing; wanted a model folder with tokenizer.json")
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"--tokenizer: {path} cannot be read: {error}") from None
    if not isinstance(tree, dict) or "model" not in tree:
        raise PlanError(f"--tokenizer: {path} has no `model`; wanted a tokenizer of the tokenizers library")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def pool_by_tokenizer(text: str, tokenizer: Tokenizer, name: str) -> TextPool:
    """Make a pool with exact positions, from the tokenizer's offsets. name: of the tokenizer, for the report."""
    pieces = list(split_text(text, 20 * PIECE_CHARS))
    encodings = tokenizer.encode_batch(pieces, add_special_tokens=False)
    starts: list[int] = []
    begin = 0
    for piece, encoding in zip(pieces, encodings, strict=True):
        starts.extend(begin + first for first, _ in encoding.offsets)
        begin += len(piece)

    def count(prompt: str) -> int:
        return len(tokenizer.encode(prompt).ids)

    return _make_pool(text, np.asarray([*starts, begin]), count, 0, f"tokenizer {name}")


async def pool_by_server(text: str, added_tokens: int, count_piece: Callable[[str], Awaitable[int]]) -> TextPool:
    """Make a pool with positions from a server's counts of short pieces. Errors of count_piece pass through."""
    starts: list[NDArray[np.float64]] = []
    begin = 0
    for piece in split_text(text, PIECE_CHARS):
        num_tokens = max(1, await count_piece(piece))
        starts.append(np.linspace(begin, begin + len(piece), num_tokens, endpoint=False))
        begin += len(piece)
    positions = np.concatenate([*starts, [begin]]).astype(np.int64)
    return _make_pool(
        text, positions, None, added_tokens, f"the server's /tokenize, on pieces of {PIECE_CHARS} characters"
    )


def pool_by_ratio(text: str, chars_per_token: float, source: str) -> TextPool:
    """Make a pool with estimated positions, a token every `chars_per_token` characters. source: of the ratio."""
    num_tokens = max(1, round(len(text) / chars_per_token))
    positions = np.linspace(0, len(text), num_tokens + 1).astype(np.int64)
    return _make_pool(text, positions, None, 0, f"ESTIMATED at {chars_per_token:.2f} characters a token ({source})")


def split_text(text: str, piece_chars: int) -> Iterator[str]:
    """Yield the text in pieces of about `piece_chars`, split before a space if there is one. Joined, the pieces are the
    text.
    """
    begin = 0
    while begin < len(text):
        end = begin + piece_chars
        if end < len(text):
            space = text.rfind(" ", begin + 1, end)
            end = space if space > begin else end
        yield text[begin:end]
        begin = end


def _make_pool(
    text: str, starts: NDArray[np.int64], count: Callable[[str], int] | None, added_tokens: int, method: str
) -> TextPool:
    starts = np.maximum.accumulate(starts.astype(np.int64))
    starts[0] = 0
    openings = [0, *(match.end() for match in _SENTENCE_END.finditer(text) if match.end() < len(text))]
    sentences = np.unique(np.searchsorted(starts[:-1], openings, side="left"))
    return TextPool(text, starts, sentences[sentences < len(starts) - 1], count, added_tokens, method)
