"""Chunks: the text's ids in order, no longer than asked, at sentence ends where one is near."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.chunker import Chunker, count_tokens, ends_sentence
from server.text.model_tokenizer import Tokenizer, TooManyTokens
from tests.server.live_server import REFERENCE

TOKENIZER = Tokenizer(REFERENCE, REFERENCE)
MOST = 100_000
PIECES = ["A fact. ", "Is it?\n\n", "naïve 東京。", "<|end|>", "3.14 ", "word ", "x" * 40, "\x00", "“Yes.” "]


def join(chunks) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=80).map("".join), st.integers(16, 64))
def test_chunks_joined_are_the_ids_of_the_text_and_none_is_longer_than_asked(text: str, size: int) -> None:
    chunks = Chunker(TOKENIZER, size).cut(text, MOST)
    assert join(chunks) == TOKENIZER.encode_plain(text)
    assert all(size - size // 4 < len(chunk) <= size for chunk in chunks[:-1])
    assert not set(join(chunks)) & TOKENIZER.special_ids
    assert all(chunks), "no chunk is empty"


def test_a_chunk_ends_with_the_last_sentence_that_is_near_and_else_where_it_is_full() -> None:
    rng = random.Random(7)
    sentences = [f"The {rng.choice(['baker', 'pilot'])} saw {rng.randrange(100)} boats." for _ in range(60)]
    text = " ".join(sentences)
    chunks = Chunker(TOKENIZER, 64).cut(text, MOST)
    assert len(chunks) > 4
    for chunk in chunks:
        assert TOKENIZER.decode(list(chunk), False).endswith(".")
        assert len(chunk) > 48 or chunk is chunks[-1]
    endless = Chunker(TOKENIZER, 64).cut("word " * 300, MOST)
    assert [len(chunk) for chunk in endless[:-1]] == [64] * (len(endless) - 1)


@pytest.mark.parametrize(
    ("text", "position", "ends"),
    [
        ("It is. Then", 6, True), ("It is. Then", 7, True), ("It is. Then", 5, False), ("It is. Then", 11, False),
        ("3.14", 2, False), ("so “it is.” And", 11, True), ("e.g.this", 4, False), ("line\nnext", 5, True),
        ("東京。大阪", 3, True), ("東京、大阪", 3, False), ("done!", 5, True), ("done", 4, False),
    ],
)  # fmt: skip
def test_sentences_end_behind_their_marks_and_before_a_space(text: str, position: int, ends: bool) -> None:
    assert ends_sentence(text, position) is ends


def test_a_text_with_too_many_tokens_is_refused_and_a_known_one_is_not_tokenised_again(monkeypatch) -> None:
    chunker = Chunker(TOKENIZER, 64)
    text = "one two three. " * 100
    size = count_tokens(chunker.cut(text, MOST))
    with pytest.raises(TooManyTokens):
        Chunker(TOKENIZER, 64).cut(text, size - 1)
    monkeypatch.setattr(TOKENIZER, "encode_plain_with_offsets", None)
    assert count_tokens(chunker.cut(text, size)) == size
    with pytest.raises(TooManyTokens):
        chunker.cut(text, size - 1)


def test_texts_are_kept_as_long_as_there_is_room(monkeypatch) -> None:
    monkeypatch.setattr("server.text.chunker._MOST_KEPT_TOKENS", 100)
    chunker = Chunker(TOKENIZER, 64)
    texts = [f"{i} and no more. " * 8 for i in range(5)]
    for text in texts:
        chunker.cut(text, MOST)
    assert 0 < chunker._num_kept_tokens <= 100
    assert sum(map(count_tokens, chunker._kept.values())) == chunker._num_kept_tokens
    assert join(chunker.cut(texts[0], MOST)) == TOKENIZER.encode_plain(texts[0])
