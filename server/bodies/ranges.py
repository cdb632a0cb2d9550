"""List the ranges of the numbers in request bodies, by field.

A field has one range in every body, and `/openapi.json` states the same one. That of int64 is stated by its name, since
a browser's numbers end before it.
"""

from server.api_error import invalid

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MOST_SECONDS = 10**6  # of a request
MOST_EPSILON = 1000  # a relative error

INT64 = (-(2**63), 2**63 - 1, True)
# field -> (least, most, whether the least itself is allowed)
RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, 2, True),
    "top_p": (0, 1, False),
    "top_k": (-1, 2**31 - 1, True),
    "min_p": (0, 1, True),
    "repetition_penalty": (0.01, 10, True),  # less, and a float32 score divided by it is infinite
    "presence_penalty": (-2, 2, True),
    "frequency_penalty": (-2, 2, True),
    "seed": INT64,
    "n": (1, MAX_CHOICES, True),
    "max_tokens": (0, 2**31 - 1, True),
    "max_completion_tokens": (1, 2**31 - 1, True),
    "min_tokens": (0, 2**31 - 1, True),
    "top_logprobs": (0, MAX_TOP_LOGPROBS, True),
    "priority": (-(2**31), 2**31 - 1, True),
    "attention_epsilon": (0, MOST_EPSILON, False),
    "max_seconds": (0, MOST_SECONDS, False),
}


def check_range(field: str, value: float, name: str | None = None) -> None:
    """Check a value against the field's range. Raises ApiError 400 that names `name`, or else the field."""
    least, most, closed = RANGES[field]
    if not (least <= value <= most) or (value == least and not closed):
        raise invalid(name or field, f"got {spell(value)}, wanted {describe_range(least, most, closed)}")


def describe_range(least: float, most: float, closed: bool) -> str:
    """Return `from 0 to 2`, or `above 0 to 1` where the least value itself is not allowed."""
    return f"{'from' if closed else 'above'} {spell(least)} to {spell(most)}"


def spell(value: float) -> str:
    """Return a number as people write it: whole ones without a point, others with all of their digits."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**64 else repr(value)
