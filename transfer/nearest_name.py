"""Find the known name that an unknown one was probably meant to be, if one is near."""

from collections.abc import Iterable

_LETTERS_A_SLIP = 4  # for each so many letters, one may be wrong, or two may be swapped
_LEAST_LETTERS = 3  # shorter names give no hint what was meant


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name with the fewest wrong letters, or else the most similar one that shares its words; None if
    none is near.

    Names share their words if each word of one is the begin of a word of the other, and the known name is not a small
    part of the given one: `limit` is near `memory_limit_gib`, but `n_predict` is not near `n`.
    """
    if len(name) < _LEAST_LETTERS:
        return None
    from rapidfuzz import fuzz  # needed for messages alone, so it is not imported at each process's start
    from rapidfuzz.distance import OSA

    names = list(known)
    most = max(1, len(name) // _LETTERS_A_SLIP)
    slips = [one for one in names if len(one) >= _LEAST_LETTERS and OSA.distance(name, one, score_cutoff=most) <= most]
    if slips:
        return min(slips, key=lambda one: OSA.distance(name, one))
    parts = [one for one in names if _is_part(name, one) or (2 * len(one) >= len(name) and _is_part(one, name))]
    return max(parts, key=lambda one: fuzz.ratio(name, one), default=None)


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """Return `; the nearest known one is 'x'` for the end of a message about an unknown name; empty if none is near."""
    nearest = nearest_name(name, known)
    return "" if nearest is None else f"; the nearest known one is {nearest!r}"


def _is_part(name: str, whole: str) -> bool:
    words, others = ([word for word in one.split("_") if word] for one in (name, whole))
    return bool(words) and all(any(other.startswith(word) for other in others) for word in words)
