"""Reuse what a similar, recent query has read: match, amend, complete (MAC, arXiv 2604.00235).

A head looks for one of its last `capacity` queries, before RoPE, that is near its own. If there is one, the head takes
over that query's summary of the far context, and reads only a band in front of the match and the tail. A head without a
match reads everything, so no token is out of reach. Both leave a summary for later queries.
"""

from typing import Any

from gpu.methods.counters import Counter, Counts, SavedReads, Share
from gpu.methods.kept import Kept
from gpu.methods.mac.settings import MacSettings
from gpu.methods.method import Footprint, RingMethod
from gpu.model.architecture import Architecture
from transfer.arrays import ArraySpec, sum_bytes
from transfer.host_config import HostConfig

COUNTERS = {
    "reuse_tries": Counter("query heads of rows that looked for a match", by_layer=True),
    "reuse_hits": Counter("of these, those that found one", by_layer=True),
    "reuse_context_cells": Counter("cells of the contexts that they had, counted for each head", by_layer=True),
    "reuse_skipped_cells": Counter("cells that they took over and did not read", by_layer=True),
    "reuse_gaps": Counter("positions back to matches", by_layer=True),
    "reuse_ages": Counter("positions back to where the oldest part of what was taken over was read", by_layer=True),
    "reuse_kv_cells": Counter(
        "cells that KV heads read on the device, once for all heads of a group", by_layer=True
    ),
    "reuse_whole_groups": Counter("KV heads of which every query head found a match", by_layer=True),
    "reuse_refused": Counter(
        "query heads that found none but one whose prefix held too much of its own attention", by_layer=True
    ),
    "reuse_stops": Counter("times that a layer stopped matching, since it read more than it saved", by_layer=True),
    "reuse_matching": Counter("settings by which the layer looks for matches now", by_layer=True, is_gauge=True),
}  # fmt: skip


def entry_arrays(settings: MacSettings, architecture: Architecture) -> dict[str, ArraySpec]:
    """Return what a query head stores for one position, by the fields of `gpu.methods.mac.rings.Ring`."""
    dim = architecture.dim
    return {
        "queries": ArraySpec((dim,), "bfloat16"),
        "norms": ArraySpec((), "float32"),
        "outs": ArraySpec((dim,), settings.summaries),
        "lses": ArraySpec((), "float32"),
        "origins": ArraySpec((), "int32"),
        "is_estimate": ArraySpec((), "uint8"),
    }


def ring_arrays(settings: MacSettings, architecture: Architecture, num_rings: int) -> dict[str, ArraySpec]:
    """Return the rings of all matching layers, `[layers, rings, heads, capacity, ...]`."""
    sizes = len(settings.layers(architecture)), num_rings, architecture.num_heads, settings.capacity
    return {name: entry.times(*sizes) for name, entry in entry_arrays(settings, architecture).items()}


def try_bytes(settings: MacSettings, architecture: Architecture) -> int:
    """Return the bytes that a query head reads and writes in its ring per step: for the search, and of summaries."""
    entry = entry_arrays(settings, architecture)
    looked = sum_bytes(entry[name] for name in ("queries", "norms", "origins"))
    return settings.most_gap * looked + 2 * sum_bytes(entry.values())


class Mac(RingMethod):
    name = "mac"
    summary = (
        "A head whose query is near a recent one takes over what that one read of the far context, and reads the rest "
        "itself."
    )
    slot = "reuse"
    settings = MacSettings
    kv_settings = {
        "tau": "tau",
        "share": "max_prefix_share",
        "k": "capacity",
        "r": "band",
        "sink": "sink_tokens",
        "gap": "most_gap",
        "near": "min_gap",
        "age": "max_age",
        "seeds": "num_seeds",
        "summaries": "summaries",
        "from": "min_context_tokens",
        "layers": "layer_tau",
        "stops": "stops_matching",
    }
    refuses = {"predicted": "a head that reuses reads no blocks, so what predicts them would see too few"}
    device_side = "gpu.methods.mac.device"
    counters = COUNTERS
    shares = {
        "acceptance": Share("reuse_hits", "reuse_tries", of_all_layers=True),
        "skipped_fraction": Share("reuse_skipped_cells", "reuse_context_cells", of_all_layers=True),
        "gap": Share("reuse_gaps", "reuse_hits"),
        "age": Share("reuse_ages", "reuse_hits"),
        "whole_groups": Share("reuse_whole_groups", "reuse_tries", by_group=True),
        "kv_read": Share("reuse_kv_cells", "reuse_context_cells", by_group=True),
        "refused": Share("reuse_refused", "reuse_tries"),
    }
    measured = (
        "loses 0.7 points (1.2 to 0.3) on SmolLM2-135M-Instruct over 3,033 prompts; counting words has a KL of 0.011, "
        "where 0.010 is the most"
    )

    def find_kept(self, settings: Any, host: HostConfig, architecture: Architecture) -> Kept:
        """Return a window that includes the band in front of the oldest match, so that a hit asks the host
        for nothing.
        """
        return Kept(settings.sink_tokens, settings.capacity + settings.band, ())

    def why_no_draft(self, settings: Any, most_tokens: int) -> str:
        """Refuse drafts whose rows would match one another's entries, or entries that a refused row wrote.

        A row of `n` drafted tokens finds neither if a match is more than n positions back, and more than n short of the
        ring.
        """
        if settings.min_gap > most_tokens and settings.most_gap < settings.capacity - most_tokens:
            return ""
        return (
            f"a row of a draft would match what is not drawn; set min_gap to {most_tokens + 1} and max_gap to "
            f"{settings.capacity - most_tokens - 1} at most"
        )

    def works_in(self, settings: Any, architecture: Architecture) -> bool:
        return bool(settings.layers(architecture))

    def footprint(self, settings: Any, architecture: Architecture, max_running: int) -> Footprint:
        return Footprint(sequence_bytes=sum_bytes(ring_arrays(settings, architecture, 1).values()))

    def saved_reads(self, settings: Any, counts: Counts, architecture: Architecture) -> SavedReads:
        cells, tries = sum(counts["reuse_context_cells"]), sum(counts["reuse_tries"])
        return SavedReads(
            keys=sum(counts["reuse_skipped_cells"]),
            rows=cells // architecture.group - sum(counts["reuse_kv_cells"]),
            own_bytes=tries * try_bytes(settings, architecture),
            rows_include_host=tries > 0,
        )


METHOD = Mac()
