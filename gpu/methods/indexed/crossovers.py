"""From which context on an index of resident pages is faster than reading them in full, by rows of a step. No torch.

What a layer costs beside bytes is of a card, and no plan knows it. So an engine measures it when it starts
(`gpu.resident_times`), and keeps it, with what it depends on, for `tandem plan`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpu.methods.indexed.settings import IndexedSettings
from gpu.model.architecture import Architecture

Crossovers = Mapping[int, int | None]
"""Tokens of each context, by rows of a step: from so many on, or None: up to the longest context it does not pay."""

WHAT = "resident_index"  # of an entry of the measured file
PAYS = 1.05  # time in full over time by an index, at least


def identify(gpu: str, kv: str, num_layers: int, shape: Architecture, settings: IndexedSettings) -> dict[str, Any]:
    """Return what times depend on. kv: how rows are stored on the device; num_layers: that are read by an index."""
    return {
        "gpu": gpu, "layers": num_layers, "heads": shape.num_heads, "kv_heads": shape.num_kv_heads, "dim": shape.dim,
        "kv": kv, "key_bits": settings.key_bits, "value_bits": settings.value_bits, "share": settings.budget_share,
    }  # fmt: skip


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
