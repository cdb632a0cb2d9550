"""Count the items and the depth of a JSON text before it is decoded, since they cost memory, time and recursion.

The count is never too low for JSON, and may be anything for other text. It takes a few passes in C, whatever the text.
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
    """Check the number of lists, objects, names and values, and their depth. Raises ApiError 400."""
    # Nearly all bodies have so few of these, counted within strings too, that nothing is looked at.
    if len(raw) > _FEWEST and sum(map(raw.count, (b",", b":", b"[", b"{"))) > _FEWEST:
        for what, number in count_items(raw).items():
            if number > MOST[what]:
                raise invalid("body", f"{number} {what}, at most {MOST[what]} are read")
    levels = count_levels(raw)
    if levels > MOST_LEVELS:
        raise invalid("body", f"nested {levels} levels deep, at most {MOST_LEVELS} are read")


def count_items(raw: bytes) -> dict[str, int]:
    """Return the counts that `MOST` limits; an empty object or list counts as one value too many."""
    text, outside = _read_outside(raw)
    commas, names, lists, objects = (int(np.count_nonzero(outside & (text == ord(char)))) for char in ",:[{")
    containers = lists + objects
    return dict(zip(MOST, (containers, names, commas + containers), strict=True))


def count_levels(raw: bytes) -> int:
    """Return the depth of objects and lists; of a text that has few of them, their number."""
    number = raw.count(b"[") + raw.count(b"{")
    if number <= MOST_LEVELS:
        return number
    text, outside = _read_outside(raw)
    begins = outside & ((text == ord("[")) | (text == ord("{")))
    places = np.flatnonzero(begins | (outside & ((text == ord("]")) | (text == ord("}")))))
    return int(np.where(begins[places], 1, -1).cumsum().max(initial=0))


def _read_outside(raw: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the text without escaped characters, uint8 `[bytes]`, and a mask of what is in no string."""
    text = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    return text, np.bitwise_xor.accumulate((text == _QUOTE).view(np.uint8)) == 0
