"""Fill a prompt up to a length: find how much filler brings it just below the limit, in tokens of any tokenizer.

The invariant: a fitted prompt, the model's chat turn around it and its answer together are at most the limit and at
least `FILLED` of it; otherwise ValueError is raised.
"""

from collections.abc import Callable
from typing import Any

FILLED = 0.98
CLOSE_ENOUGH = 0.995


def count_tokens(tokenizer: Any, text: str) -> int:
    """Return the tokens of a text as it is sent, including the special tokens that the tokenizer adds.

    tokenizer: any Hugging Face tokenizer.
    """
    return len(tokenizer(text, verbose=False)["input_ids"])


def count_chat_tokens(tokenizer: Any) -> int:
    """Return the number of tokens that the chat template puts around a user's turn; 0 without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return 0
    turn = tokenizer.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True, tokenize=False)
    return len(tokenizer(turn, add_special_tokens=False)["input_ids"])


def fit(
    build: Callable[[int], str],
    tokenizer: Any,
    limit_tokens: int,
    max_new_tokens: int,
    reserved_tokens: int,
    most: int,
    min_amount: int,
) -> tuple[int, str, int]:
    """Return the largest amount of filler, within half a per cent, whose prompt and answer room fit the limit.

    build(amount) returns a prompt. Amounts from min_amount to most are tried, by interpolation between the nearest
    known counts. Returns (amount, prompt, tokens of the prompt). Raises ValueError if min_amount is too much already,
    or if `most`, or the size of one unit of filler, leaves more than 2 % of the limit empty.
    """
    room = limit_tokens - max_new_tokens - reserved_tokens
    low, low_prompt = min_amount, build(min_amount)
    low_count = count_tokens(tokenizer, low_prompt)
    if low_count > room:
        raise ValueError(
            f"length {limit_tokens}: {low_count} tokens of prompt without filler and {max_new_tokens} of answer "
            f"do not fit; ask for a longer length"
        )
    high, high_count = most + 1, None
    aim = room - (1 - CLOSE_ENOUGH) * limit_tokens / 2
    while high - low > 1 and low_count < limit_tokens * CLOSE_ENOUGH - max_new_tokens - reserved_tokens:
        if high_count is None:
            rate = max((low_count - 0.5) / max(low, 1), 0.25) if low > min_amount else 2.0
        else:
            rate = max((high_count - low_count) / (high - low), 1e-6)
        amount = min(high - 1, max(low + 1, low + int((aim - low_count) / rate)))
        prompt = build(amount)
        count = count_tokens(tokenizer, prompt)
        if count <= room:
            low, low_prompt, low_count = amount, prompt, count
        else:
            high, high_count = amount, count
    if low_count + max_new_tokens + reserved_tokens < FILLED * limit_tokens:
        raise ValueError(
            f"length {limit_tokens}: filled {low_count + max_new_tokens + reserved_tokens} tokens with {low} units "
            f"of filler; the source holds too little or its units are too coarse"
        )
    return low, low_prompt, low_count
