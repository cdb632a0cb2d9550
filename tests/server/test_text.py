"""Tokens to text: whole characters, stop strings, offsets."""

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Vocabulary
from tokenizers import decoders, models

from scheduler.messages import ACCEPTED, REJECTED, Delta, Logprob
from server.generation.answer_choice import Choice
from server.text.model_tokenizer import Tokenizer
from server.text.text_stream import StopMatcher, TextDecoder
from tests.server.live_server import REFERENCE
from tests.tolerances import STOP_STRINGS_GAIN, STOP_STRINGS_S

TOKENIZER = Tokenizer(REFERENCE, REFERENCE)

few_letters = st.text(alphabet="abé", max_size=30)
stop_strings = st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=4)


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[begin:end] for begin, end in pairwise(at)]


def before_first_stop(text: str, stops: list[str]) -> str:
    """Find by brute force the shortest prefix that ends with a stop string, less the longest one it ends with."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


def stream(text_pieces: list[str], stops: list[str]) -> list[str]:
    matcher = StopMatcher(stops, keeps_stop=False)
    out = []
    for piece in text_pieces:
        out.append(matcher.feed(piece))
        if matcher.matched:
            return out
    return [*out, matcher.finish()]


@given(few_letters, stop_strings, st.lists(st.integers(0, 30), max_size=8))
def test_streamed_pieces_join_to_the_text_before_the_first_stop_however_it_is_cut(text, stops, places):
    pieces = stream(cut(text, places), stops)
    assert "".join(pieces) == before_first_stop(text, stops)
    assert "".join(stream(list(text), stops)) == "".join(stream([text], stops)) == "".join(pieces)


@given(few_letters, stop_strings)
def test_what_is_held_back_is_only_what_may_begin_a_stop_string(text, stops):
    matcher = StopMatcher(stops, keeps_stop=False)
    sent = ""
    for i, char in enumerate(text):
        sent += matcher.feed(char)
        if matcher.matched:
            return
        held = text[len(sent) : i + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def seconds_of(matcher, num_tokens: int) -> float:
    began = time.thread_time()
    for _ in range(num_tokens):
        matcher.feed("aaaa")
    return time.thread_time() - began


def test_many_long_stop_strings_that_almost_match_cost_little():
    """One keeps a thousand letters held back, in which a search of every beginning finds none of the others."""
    stops = ["b" * (i + 1) + "a" * (999 - i) for i in range(15)] + ["a" * 999 + "c"]

    class EveryBeginning(StopMatcher):
        def _first_beginning(self, text: str) -> int:
            longest = 0
            for stop in self._stops:
                for size in range(min(len(stop) - 1, len(text)), longest, -1):
                    if text.endswith(stop[:size]):
                        longest = size
                        break
            return len(text) - longest

    assert seconds_of(StopMatcher(stops, keeps_stop=False), 2000) < STOP_STRINGS_S
    ours, every_beginning = (seconds_of(way(stops, keeps_stop=False), 400) for way in (StopMatcher, EveryBeginning))
    assert every_beginning > STOP_STRINGS_GAIN * ours, "another way would be noticed"


@given(st.lists(st.integers(0, 8191), max_size=40))
def test_streamed_text_equals_the_tokenizers_own_decoding(token_ids):
    decoder = TextDecoder(TOKENIZER, skip_special_tokens=True)
    pieces = [decoder.step(token_id) for token_id in token_ids] + [decoder.finish()]
    assert "".join(pieces) == TOKENIZER.decode(token_ids, skip_special_tokens=True)


@given(st.text(max_size=40))
def test_a_text_survives_encoding_and_streamed_decoding_without_broken_characters(text):
    decoder = TextDecoder(TOKENIZER, skip_special_tokens=False)
    pieces = [decoder.step(token_id) for token_id in TOKENIZER.encode(text, True)]
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces) or "�" in text


def test_an_unfinished_character_ends_as_one_replacement_character():
    euro = TOKENIZER.encode("€", False)
    assert len(euro) > 1, "the test needs a character of several tokens"
    choice = Choice(TOKENIZER, [], 0, keeps_stop=False)
    first = choice.feed(Delta(request_id="r", token_ids=euro[:-1]))
    last = choice.feed(Delta(request_id="r", token_ids=[], finish_reason="length"))
    assert (first.text, last.text) == ("", "�")


@pytest.mark.parametrize("words", ["one two STOP", "STOP three four five"])
def test_drafted_tokens_behind_a_stop_string_are_rejected(words):
    """A draft of all but the last token of a step: what it guessed is accepted as far as it is in the answer."""
    token_ids = TOKENIZER.encode(words, False)
    choice = Choice(TOKENIZER, ["STOP"], 0, keeps_stop=False)
    choice.feed(Delta(request_id="r", token_ids=TOKENIZER.encode("a", False), figures={ACCEPTED: 1, REJECTED: 2}))
    before = choice.num_tokens
    num_drafted = len(token_ids) - 1
    choice.feed(Delta(request_id="r", token_ids=token_ids, figures={ACCEPTED: 1 + num_drafted, REJECTED: 2}))
    assert choice.finish_reason == "stop"
    assert choice.figures == {
        ACCEPTED: 1 + min(num_drafted, choice.num_tokens - before),
        REJECTED: 2 + max(0, num_drafted - choice.num_tokens + before),
    }


def byte_fallback_tokenizer() -> Tokenizer:
    """Return a small SentencePiece-like vocabulary: words with ▁, single bytes as <0xNN>."""
    words = ["<unk>", "▁hello", "▁world", "!"] + [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = Vocabulary(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    vocabulary.decoder = decoders.Sequence(steps)
    tokenizer = Tokenizer(REFERENCE, REFERENCE)
    tokenizer.vocabulary, tokenizer.is_byte_level = vocabulary, False
    tokenizer.special_ids, tokenizer._bytes = frozenset(), {}
    return tokenizer


BYTE_FALLBACK = byte_fallback_tokenizer()


@given(st.lists(st.sampled_from([" hello", " world", "!", "é", "€", "東"]), max_size=12))
def test_byte_fallback_vocabularies_stream_their_own_decoding(words):
    known = {" hello": [1], " world": [2], "!": [3]}
    token_ids = [i for word in words for i in known.get(word) or [4 + byte for byte in word.encode()]]
    decoder = TextDecoder(BYTE_FALLBACK, skip_special_tokens=True)
    pieces = [decoder.step(token_id) for token_id in token_ids]
    assert "".join(pieces) == BYTE_FALLBACK.decode(token_ids, True) == "".join(words)
    assert decoder.finish() == ""


@given(st.lists(st.integers(1, 259), max_size=12))
def test_byte_fallback_tokens_in_any_order_are_the_utf8_of_their_bytes(token_ids):
    decoder = TextDecoder(BYTE_FALLBACK, skip_special_tokens=True)
    text = "".join(decoder.step(token_id) for token_id in token_ids) + decoder.finish()
    assert text == b"".join(map(BYTE_FALLBACK.token_bytes, token_ids)).decode(errors="replace")
    assert BYTE_FALLBACK.token_bytes(4 + 0xE2) == b"\xe2"


def test_token_bytes_join_to_the_text_of_special_and_unknown_tokens_too():
    assert TOKENIZER.token_bytes(5) == b"<|end|>"
    assert TOKENIZER.token_bytes(9000) == b"<|9000|>"
    euro = TOKENIZER.encode("€", False)
    assert b"".join(map(TOKENIZER.token_bytes, euro)).decode() == "€"
    assert TOKENIZER.token_text(euro[0]).startswith("bytes:\\x")


def told(choice, token_ids, at_once):
    """Return the text of tokens that come so many at once, and their entries: of the first tokens, and no more."""
    pieces = []
    for begin in range(0, len(token_ids), at_once):
        some = token_ids[begin : begin + at_once]
        pieces.append(choice.feed(Delta(request_id="r", token_ids=some, logprobs=[Logprob(-1.0, []) for _ in some])))
        if choice.finish_reason:
            break
    else:
        pieces.append(choice.feed(Delta(request_id="r", token_ids=[], finish_reason="length")))
    whole = "".join(piece.text for piece in pieces)
    entries = [entry for piece in pieces for entry in piece.entries]
    assert [entry.token_id for entry in entries] == token_ids[: len(entries)]
    assert all(entry.offset < len(whole) for entry in entries)
    joined = b"".join(TOKENIZER.token_bytes(entry.token_id) for entry in entries).decode(errors="replace")
    assert joined.startswith(whole), "entries cover the text"
    return whole, entries


@given(st.text(alphabet="ab€ ", max_size=20), stop_strings, st.integers(1, 3))
def test_offsets_point_at_their_tokens_and_nothing_of_a_stop_string_is_reported(text, stops, at_once):
    token_ids = TOKENIZER.encode(text, False)
    whole, entries = told(Choice(TOKENIZER, stops, 0, keeps_stop=False), token_ids, at_once)
    assert whole == before_first_stop(text, stops)
    assert [entry.offset for entry in entries] == sorted(entry.offset for entry in entries)


@given(st.text(alphabet="ab€ ", max_size=20), stop_strings, st.integers(1, 3), st.integers(0, 12))
def test_a_stop_string_that_begins_before_min_tokens_is_plain_text(text, stops, at_once, min_tokens):
    token_ids = TOKENIZER.encode(text, False)
    decoder = TextDecoder(TOKENIZER, skip_special_tokens=True)
    plain = "".join(map(decoder.step, token_ids[:min_tokens]))
    whole, _ = told(Choice(TOKENIZER, stops, min_tokens, keeps_stop=False), token_ids, at_once)
    assert whole == plain + before_first_stop(text[len(plain) :], stops)


def test_the_stop_token_is_counted_and_has_an_entry_but_no_text():
    choice = Choice(TOKENIZER, [], 0, keeps_stop=False)
    x = TOKENIZER.encode("x", False)[0]
    piece = choice.feed(Delta(request_id="r", token_ids=[x, x], logprobs=[Logprob(-1.0, [])] * 2, finish_reason="stop"))
    assert (piece.text, len(piece.entries), choice.num_tokens, piece.finish_reason) == ("x", 2, 2, "stop")


@pytest.mark.parametrize("text", ["", "<|begin_of_text|>", "a<|end|>b"])
def test_special_tokens_in_a_prompt_are_not_mistaken_for_added_ones(text):
    assert TOKENIZER.num_leading_specials(text, TOKENIZER.encode(text, True)) == 0
    assert TOKENIZER.num_leading_specials("plain", [0, *TOKENIZER.encode("plain", True)]) == 1
