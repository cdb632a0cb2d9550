"""How much a JSON text holds, counted before any of it is decoded: what costs memory and time for each item of it.

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
_FEWEST = min(MOST.values())
_QUOTE = ord('"')


def check_json_size(raw: bytes) -> None:
    """Raises ApiError 400 for a text of too many lists, objects, names or values."""
    if len(raw) <= _FEWEST or sum(map(raw.count, (b",", b":", b"[", b"{"))) <= _FEWEST:
        return  # counted within strings too, they are few: true of nearly all bodies
    for what, number in count_items(raw).items():
        if number > MOST[what]:
            raise invalid("body", f"{number} {what}, at most {MOST[what]} are read")


def count_items(raw: bytes) -> dict[str, int]:
    """How many there are of what `MOST` limits; of each empty object or list, one value too many."""
    without_escapes = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(without_escapes, np.uint8)
    outside = np.bitwise_xor.accumulate((text == _QUOTE).view(np.uint8)) == 0
    commas, names, lists, objects = (int(np.count_nonzero(outside & (text == ord(char)))) for char in ",:[{")
    containers = lists + objects
    return dict(zip(MOST, (containers, names, commas + containers), strict=True))
