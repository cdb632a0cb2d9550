"""Whether a grammar accepts a text, byte by byte."""

from functools import cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class _Bytes:
    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def spell_bytes() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def allows(grammar: str, text: str, is_whole: bool = True) -> bool:
    """Return whether the text may be all of an answer, or at least its beginning."""
    matcher = LLMatcher(spell_bytes(), grammar)
    assert not matcher.is_error(), matcher.get_error()
    raw = text.encode()
    return matcher.try_consume_tokens(list(raw)) == len(raw) and (not is_whole or matcher.is_accepting())
