"""Find how long contexts must be for an index of resident pages to be faster than full attention. No torch.

What a layer costs beside bytes is of a card, and no plan knows it. So an engine measures it when it starts
(`gpu.method_times`), and keeps it, with what it depends on, for `tandem plan`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpu.methods.indexed.settings import IndexedSettings
from gpu.methods.method import Where

Crossovers = Mapping[int, int | None]
"""Tokens of each context, by rows of a step: from so many on, or None: up to the longest context it does not pay."""

WHAT = "resident_index"  # of an entry of the measured file
PAYS = 1.05  # time in full over time by an index, at least


def identify(where: Where, settings: IndexedSettings) -> dict[str, Any]:
    """Return what times depend on."""
    shape = where.architecture
    return {
        "gpu": where.gpu,
        "layers": where.num_layers,
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "dim": shape.dim,
        "kv": where.kv,
        "key_bits": settings.key_bits,
        "value_bits": settings.value_bits,
        "share": settings.budget_share,
    }


def read_crossovers(entries: Iterable[Mapping[str, Any]], of: Mapping[str, Any]) -> Crossovers | None:
    """Return what an engine kept last of these; None: nothing. entries: of `transfer.measured.read_measured`."""
    found = None
    for entry in entries:
        if (entry["what"], entry["of"]) == (WHAT, of) and isinstance(entry["result"], dict):
            found = {int(rows): least for rows, least in entry["result"].items()}
    return found


def find_crossover(tokens: tuple[int, int], times: Sequence[tuple[float, float]]) -> int | None:
    """Return the tokens from which an index pays, of times in full and by an index at two lengths; between them both
    are lines. None: at the greater one it does not.
    """
    gains = [full - PAYS * indexed for full, indexed in times]
    if gains[1] < 0:
        return None
    if gains[0] >= 0:
        return tokens[0]
    share = gains[0] / (gains[0] - gains[1])
    return tokens[0] + round(share * (tokens[1] - tokens[0]))


def pays(crossovers: Crossovers, num_rows: int, num_tokens: int) -> bool:
    """Return whether a step of so many rows, which have so many tokens together, is faster by an index: as the largest
    measured step that has no more rows says.
    """
    measured = max((rows for rows in crossovers if rows <= num_rows), default=None)
    least = None if measured is None else crossovers[measured]
    return least is not None and num_tokens >= least * num_rows


def measure_crossovers(
    time: Callable[[int, int], tuple[float, float]], sizes: Sequence[int], shortest: int, longest: int
) -> Crossovers:
    """Return what was measured of steps of these rows, at two lengths of contexts; empty where these are too short."""
    if shortest >= longest:
        return {}
    return {rows: find_crossover((shortest, longest), [time(rows, shortest), time(rows, longest)]) for rows in sizes}


def describe(crossovers: Crossovers | None) -> str:
    """Return what a plan says. None: no engine has measured there."""
    if crossovers is None:
        return (
            "no engine has measured here yet for which contexts on the card an index is faster than all their rows; "
            "the times of this plan count bytes"
        )
    said = [
        f"{'never' if least is None else f'from {least:,} tokens each'} in a step of {rows}"
        for rows, least in sorted(crossovers.items())
    ]
    by_index = (
        f"by an index {', '.join(said)}" if any(least is not None for least in crossovers.values()) else "in full"
    )
    return f"contexts on the card are read {by_index}, as an engine measured here; the times of this plan count bytes"
