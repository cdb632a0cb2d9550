"""Check grammars as llguidance writes them, within limits that hold wherever they are compiled.

Invariant: what passes `check` compiles in an engine.
"""

from collections.abc import Sequence
from functools import cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MOST_BYTES = 64 * 1024  # of a grammar; what is longer is refused unseen
MOST_SECONDS = 2.0  # of processor time to check one; what is known to be that long and is allowed takes half of one
MOST_MEMORY_BYTES = 1 << 30
MOST_STEP_FUEL = 50_000  # in which llguidance counts the work of one mask: some milliseconds
MOST_STATES = 20_000  # of a grammar's automaton, a KiB or two each
_NO_TOKENIZER = "no tokenizer"  # how llguidance says that it leaves special tokens to who has one
_NOTHING_ALLOWED = "NoExtensionBias"  # and that no token may come
_SHORT_OF_STATE = "<non-verbose/>"  # stands where its state would
_ERROR_CHARS = 300


def limits() -> LLParserLimits:
    """Return the limits of one grammar: some tens of MiB, a tenth of a second for its first mask, milliseconds for
    others.
    """
    return limits_of(MOST_STEP_FUEL, MOST_STATES)


def limits_of(step_fuel: int, num_states: int) -> LLParserLimits:
    """Return the limits with others for a step and for the automaton of the grammar's texts."""
    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=step_fuel,
        max_items_in_row=4_000,
        max_lexer_states=num_states,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def check(grammar: str) -> str:
    """Return why a grammar cannot be compiled, as llguidance says it; empty if it can.

    It is compiled for a vocabulary of bytes, together with the first mask behind the forced tokens: a grammar that is
    too complex fails there.
    """
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits())
    if is_error:
        return shorten(messages[0])
    if any(message.startswith(_NO_TOKENIZER) for message in messages):
        return ""
    matcher = LLMatcher(bytes_alone(), grammar, log_level=0, limits=limits())
    if not matcher.is_error() and matcher.consume_tokens(matcher.compute_ff_tokens()):
        matcher.compute_logit_bias()
    return shorten(matcher.get_error()) if matcher.is_error() else ""


def shorten(message: str) -> str:
    """Shorten a message of llguidance to one line."""
    line = " ".join(message.partition("\n<state>")[0].replace(_SHORT_OF_STATE, "").split())
    if line == _NOTHING_ALLOWED:
        return "it allows no token"
    return line if len(line) <= _ERROR_CHARS else line[:_ERROR_CHARS] + " ..."


class ByteVocabulary:
    """A vocabulary: the end token, 0, of byte b token b + 1, and behind them words."""

    eos_token_id = 0
    bos_token_id = None
    special_token_ids = (0,)

    def __init__(self, words: Sequence[bytes]) -> None:
        self.tokens = (b"<end>", *(bytes([byte]) for byte in range(256)), *words)

    def __call__(self, text: bytes) -> list[int]:
        return [byte + 1 for byte in text]


@cache
def bytes_alone() -> LLTokenizer:
    """Return a vocabulary of 257 tokens: the end token, 0, and byte b is token b + 1."""
    return LLTokenizer(TokenizerWrapper(ByteVocabulary(())))
