"""Check grammars in llguidance's format, with the same limits as when they are compiled.

Invariant: what passes `check` compiles in an engine.
"""

from collections.abc import Sequence
from functools import cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MOST_BYTES = 64 * 1024  # of a grammar; longer ones are refused unread
MOST_SECONDS = 2.0  # of processor time to check a grammar; the largest that pass take about half of it
MOST_MEMORY_BYTES = 1 << 30
MOST_STEP_FUEL = 50_000  # llguidance's unit of work for one mask: some milliseconds
MOST_STATES = 20_000  # of a grammar's automaton, a KiB or two each
_NO_TOKENIZER = "no tokenizer"  # llguidance warns so if it cannot check special tokens
_NOTHING_ALLOWED = "NoExtensionBias"  # llguidance's name for "no token is allowed"
_SHORT_OF_STATE = "<non-verbose/>"  # llguidance writes this in place of its state
_ERROR_CHARS = 300


def limits() -> LLParserLimits:
    """Return the limits of one grammar: some tens of MiB, 0.1 s for its first mask, and milliseconds for others."""
    return limits_of(MOST_STEP_FUEL, MOST_STATES)


def limits_of(step_fuel: int, num_states: int) -> LLParserLimits:
    """Return the limits with another fuel for a step and another number of the automaton's states."""
    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=step_fuel,
        max_items_in_row=4_000,
        max_lexer_states=num_states,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def check(grammar: str) -> str:
    """Return llguidance's reason why a grammar cannot be compiled; empty if it can.

    It is compiled for a vocabulary of bytes, together with the first mask after the forced tokens. A grammar that is
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
    """A vocabulary: token 0 ends the text, token b + 1 is byte b, and words follow."""

    eos_token_id = 0
    bos_token_id = None
    special_token_ids = (0,)

    def __init__(self, words: Sequence[bytes]) -> None:
        self.tokens = (b"<end>", *(bytes([byte]) for byte in range(256)), *words)

    def __call__(self, text: bytes) -> list[int]:
        return [byte + 1 for byte in text]


@cache
def bytes_alone() -> LLTokenizer:
    """Return a vocabulary of 257 tokens: token 0 ends the text, and token b + 1 is byte b."""
    return LLTokenizer(TokenizerWrapper(ByteVocabulary(())))
