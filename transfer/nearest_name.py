"""Which of the names that there are an unknown one may stand for."""

from collections.abc import Iterable

from rapidfuzz import fuzz, process

_SLIP = 70  # of 100, how alike two names are of which one is the other with a letter or two amiss


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Of the same letters, but for a slip; else one of which the name is a part. known: one at least."""
    names = list(known)
    found = process.extractOne(name, names, scorer=fuzz.ratio, score_cutoff=_SLIP) or process.extractOne(name, names)
    return str(found[0])
