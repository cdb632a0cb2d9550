"""Counts of what decode steps read.

Invariant: each token of a context is counted once: read on the device, covered by the host tier, reused or dropped.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class DecodeReads:
    """Sums over the rows of all decode steps; differences are taken of two.

    context_tokens: of each row, its new token included, once whatever the layers; host_tokens: that the host tier
    stood for, and of these host_keys: whose logit entered the softmax, both counted for each of its layers and each
    query head; host_bytes: of rows and hash tables that the tier read for them. Of rows that hold rings, in layers that
    look for matches: tries, query heads that did, and of these hits, and tried_tokens, of their contexts; reused_tokens
    of these were taken over and are neither on the device's nor on the host's account; spared_rows: rows of KV that KV
    heads did not read on the device, host_tokens' among them; ring_bytes: of rings, read and written. Of rows whose
    blocks are predicted: dropped_rows, of KV that their KV heads did not read and nobody else did, and looked_rows,
    whose keys alone were read, to predict by.
    """

    context_tokens: int
    host_tokens: int
    host_keys: int
    host_bytes: int
    tries: int = 0
    hits: int = 0
    tried_tokens: int = 0
    reused_tokens: int = 0
    spared_rows: int = 0
    ring_bytes: int = 0
    dropped_rows: int = 0
    looked_rows: int = 0

    def __sub__(self, before: "DecodeReads") -> "DecodeReads":
        return DecodeReads(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(DecodeReads)))
