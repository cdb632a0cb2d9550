"""How much a JSON text holds and how deep, counted before any of it is decoded: what costs memory and time for each
item of it, and what templates, schemas and encoders follow by recursion.

Knows bytes alone, and that what stands in strings does not count. It never says too little; of text that is not JSON it
may say anything. Invariant: the work is a few passes in C, whatever the text.
"""

import numpy as np

from server.api_error import invalid

MOST = {
    "objects and lists": 2**15,  # messages, their parts, tools and their schemas
    "names in objects": 2**17,  # a microsecond each
    "values in objects and lists": 5 * 2**18,  # a prompt of token ids has as many; no context has so many tokens
}
MOST_LEVELS = 100  # of objects and lists in one another; whoever follows them takes at least 128
_FEWEST = min(MOST.values())
_QUOTE = ord('"')


def check_json_size(raw: bytes) -> None:
    """Raises ApiError 400 for a text of too many lists, objects, names or values, or of too many in one another."""
    _check_items(raw)
    levels = count_levels(raw)
    if levels > MOST_LEVELS:
        raise invalid("body", f"nested {levels} levels deep, at most {MOST_LEVELS} are read")


def _check_items(raw: bytes) -> None:
    if len(raw) <= _FEWEST or sum(map(raw.count, (b",", b":", b"[", b"{"))) <= _FEWEST:
        return  # counted within strings too, they are few: true of nearly all bodies
    for what, number in count_items(raw).items():
        if number > MOST[what]:
            raise invalid("body", f"{number} {what}, at most {MOST[what]} are read")


def count_items(raw: bytes) -> dict[str, int]:
    """How many there are of what `MOST` limits; of each empty object or list, one value too many."""
    text, outside = _read_outside(raw)
    commas, names, lists, objects = (int(np.count_nonzero(outside & (text == ord(char)))) for char in ",:[{")
    containers = lists + objects
    return dict(zip(MOST, (containers, names, commas + containers), strict=True))


def count_levels(raw: bytes) -> int:
    """How deep objects and lists stand in one another; of a text that has few of them, how many there are."""
    number = raw.count(b"[") + raw.count(b"{")
    if number <= MOST_LEVELS:
        return number
    text, outside = _read_outside(raw)
    begins = outside & ((text == ord("[")) | (text == ord("{")))
    places = np.flatnonzero(begins | (outside & ((text == ord("]")) | (text == ord("}")))))
    return int(np.where(begins[places], 1, -1).cumsum().max(initial=0))


def _read_outside(raw: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The text less what is escaped, uint8 `[bytes]`, and where it stands in no string."""
    text = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    return text, np.bitwise_xor.accumulate((text == _QUOTE).view(np.uint8)) == 0
