"""Turn text to token ids and back, from a Hugging Face folder, on `tokenizers` alone (transformers would import torch).

Its files are read by `gpu.model.vocabulary`; which tokens end a text says `gpu.model.end_tokens`. Holds no state of a
request; the invariant is that `token_bytes` of a sequence, joined, is what its text is made of.
"""

import re
from pathlib import Path
from threading import Lock

from tokenizers import Tokenizer as Vocabulary

from gpu.config import ModelConfig
from gpu.model.end_tokens import end_token_ids
from gpu.model.spec import ModelError
from gpu.model.vocabulary import read_vocabulary, token_text
from server.deployment import ConfigError

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_PIECE_CHARS = 32_768  # of a long text, tokenised to count its tokens
_LONG_CHARS_PER_TOKEN = 6  # a text with fewer for each token that it may have is not counted before it is tokenised


class TooManyTokens(Exception):
    """A text has at least `num_tokens` tokens, more than allowed."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens


class Tokenizer:
    """Converts between text and token ids, and knows which ids end a text. Thread-safe; encoding releases the GIL."""

    def __init__(self, folder: Path, model_folder: Path | None) -> None:
        """Load a folder's tokenizer. Raises ConfigError if it lacks a usable tokenizer.json or tokenizer.model."""
        try:
            self.vocabulary, self.settings = read_vocabulary(folder)
        except (ModelError, OSError) as error:
            raise ConfigError(f"tokenizer: {error}") from None
        self.vocabulary.no_truncation()
        self.vocabulary.no_padding()
        self.folder = folder
        added = self.vocabulary.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.special_tokens = {
            name: text for name in _SPECIAL_NAMES if (text := token_text(self.settings.get(name))) is not None
        }
        self.is_byte_level = "ByteLevel" in str(self.vocabulary.decoder)
        self.eos_ids = self._eos_ids(model_folder or folder)
        self.longest_token_chars = max(map(len, self.vocabulary.get_vocab()), default=1)
        self._bytes: dict[int, bytes] = {}
        self._inside: dict[bool, Vocabulary] = {}
        self._inside_lock = Lock()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.vocabulary.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_within(self, text: str, add_special_tokens: bool, most_tokens: int) -> list[int]:
        """Encode a text of at most so many tokens. Raises TooManyTokens, cheaply for a text that is far too long.

        Tokenising takes some hundred bytes of memory a character, so a long text is counted piece by piece first.
        """
        self.check_fits(text, most_tokens)
        return self.encode(text, add_special_tokens)

    def check_fits(self, text: str, most_tokens: int) -> None:
        """Check that a text does not clearly have too many tokens; one that passes may have a few more.

        A byte-level vocabulary without a normalizer spells every byte, so the length alone can show that a text is too
        long. Otherwise pieces are tokenised until there are too many tokens. A cut splits at most one token, into parts
        with fewer characters each, so the surplus of the pieces is bounded by the characters of a token. Raises
        TooManyTokens.
        """
        if self.is_byte_level and self.vocabulary.normalizer is None:
            least = len(text) // self.longest_token_chars
            if least > most_tokens:
                raise TooManyTokens(least)
        if len(text) <= _LONG_CHARS_PER_TOKEN * most_tokens:
            return
        num_tokens = 0
        for begin in range(0, len(text), _PIECE_CHARS):
            num_piece = len(self.encode(text[begin : begin + _PIECE_CHARS], False))
            num_tokens += max(0, num_piece - self.longest_token_chars)
            if num_tokens > most_tokens:
                raise TooManyTokens(num_tokens)

    def encode_with_offsets(self, text: str, is_inside: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Return token ids, and where the text of each begins and ends, in characters. `is_inside`: of another text."""
        vocabulary = self._vocabulary_inside(controls_are_text=False) if is_inside else self.vocabulary
        encoding = vocabulary.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_inside(self, text: str) -> list[int]:
        """Return the ids of a text in the middle of another, in which control tokens count."""
        vocabulary = self._vocabulary_inside(controls_are_text=False)
        ids: list[int] = vocabulary.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text in the middle of another, in which control tokens are plain text."""
        vocabulary = self._vocabulary_inside(controls_are_text=True)
        ids: list[int] = vocabulary.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_plain_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of `encode_plain`, and where the text of each begins and ends, in characters."""
        encoding = self._vocabulary_inside(controls_are_text=True).encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def _vocabulary_inside(self, controls_are_text: bool) -> Vocabulary:
        """Return the vocabulary that puts nothing before a text, for one that is not a beginning."""
        begins_words = getattr(self.vocabulary.pre_tokenizer, "prepend_scheme", None) == "first"
        if not (controls_are_text or begins_words):
            return self.vocabulary
        with self._inside_lock:
            if controls_are_text not in self._inside:
                vocabulary = Vocabulary.from_str(self.vocabulary.to_str())
                vocabulary.no_truncation()
                vocabulary.no_padding()
                vocabulary.encode_special_tokens = controls_are_text
                if begins_words:
                    vocabulary.pre_tokenizer.prepend_scheme = "never"
                self._inside[controls_are_text] = vocabulary
            return self._inside[controls_are_text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self.vocabulary.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def num_leading_specials(self, text: str, token_ids: list[int]) -> int:
        """Return the number of leading tokens that the tokenizer added (BOS), which the text does not spell out."""
        num = 0
        while num < len(token_ids) and token_ids[num] in self.special_ids:
            if text.startswith(self.token_bytes(token_ids[num]).decode()):
                break
            num += 1
        return num

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; special tokens are spelled out. Takes ids beyond the vocabulary too."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        r"""Return a token as logprobs name it: its text, or `bytes:\xe2\x80` if it is no whole UTF-8."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _spell(self, token_id: int) -> bytes:
        token = self.vocabulary.id_to_token(token_id)
        if token is None:
            return f"<|{token_id}|>".encode()
        if self.is_byte_level:
            try:
                return bytes(_BYTE_OF[char] for char in token)
            except KeyError:
                return bytes(token.encode())
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        return bytes(token.replace("▁", " ").encode())

    def _eos_ids(self, model_folder: Path) -> list[int]:
        try:
            ids = set(end_token_ids(model_folder))
        except ModelError as error:
            raise ConfigError(f"tokenizer: {error}") from None
        text = self.special_tokens.get("eos_token")
        own = self.vocabulary.token_to_id(text) if text else None
        return sorted(ids | ({own} if own is not None else set()))


def load_tokenizer(model: ModelConfig) -> Tokenizer:
    folder = model.tokenizer or model.path
    if folder is None:
        raise ConfigError("model.tokenizer: missing; random weights have none of their own, name a folder that has one")
    return Tokenizer(folder, model.path)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte-level BPE alphabet (Radford et al.

    2019): printable Latin-1 bytes stand for themselves, the other 68 follow one another from U+0100.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(shifted)}


_BYTE_OF = _byte_alphabet()
