"""Find from which context length on an index of resident pages is faster than full attention. No torch.

What a layer costs beside its bytes depends on the card, and no plan can know it. So an engine measures it when it
starts (`gpu.method_times`), and stores it, with what it depends on, for `tandem plan`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpu.methods.indexed.settings import IndexedSettings
from gpu.methods.method import Where

Crossovers = Mapping[int, int | None]
"""By rows of a step, the tokens of each context from which an index is faster; None: up to the longest it is not."""

WHAT = "resident_index"  # name of the entries in the measured file
PAYS = 1.05  # an index must be faster by at least this factor


def identify(where: Where, settings: IndexedSettings) -> dict[str, Any]:
    """Return what the measured times depend on."""
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
    """Return the latest of these entries that was measured for `of`, or None.

    entries: from `transfer.measured.read_measured`.
    """
    found = None
    for entry in entries:
        if (entry["what"], entry["of"]) == (WHAT, of) and isinstance(entry["result"], dict):
            found = {int(rows): least for rows, least in entry["result"].items()}
    return found


def find_crossover(tokens: tuple[int, int], times: Sequence[tuple[float, float]]) -> int | None:
    """Return the context tokens from which an index pays, or None if it does not at the greater length.

    times: at the two lengths `tokens`, of full attention and with an index; both are taken to be linear in between.
    """
    gains = [full - PAYS * indexed for full, indexed in times]
    if gains[1] < 0:
        return None
    if gains[0] >= 0:
        return tokens[0]
    share = gains[0] / (gains[0] - gains[1])
    return tokens[0] + round(share * (tokens[1] - tokens[0]))


def pays(crossovers: Crossovers, num_rows: int, num_tokens: int) -> bool:
    """Return whether a step is faster with an index, by the largest measured step that has no more rows.

    num_tokens: of all contexts of the step together.
    """
    measured = max((rows for rows in crossovers if rows <= num_rows), default=None)
    least = None if measured is None else crossovers[measured]
    return least is not None and num_tokens >= least * num_rows


def measure_crossovers(
    time: Callable[[int, int], tuple[float, float]], sizes: Sequence[int], shortest: int, longest: int
) -> Crossovers:
    """Measure steps of these numbers of rows at two context lengths. Empty if contexts are too short for that."""
    if shortest >= longest:
        return {}
    return {rows: find_crossover((shortest, longest), [time(rows, shortest), time(rows, longest)]) for rows in sizes}


def describe(crossovers: Crossovers | None) -> str:
    """Return what a plan says about the crossovers. None: no engine has measured them."""
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
