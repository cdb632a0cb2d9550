"""Count what decode steps read.

Invariant: each token of a context is counted once, as read on the device, covered by the host tier, reused or dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpu.methods.counters import subtract_counts


@dataclass(frozen=True, slots=True)
class DecodeReads:
    """Sums over the rows of all decode steps. The difference of two gives the reads between them.

    context_tokens: tokens of each row's context, its new token included, counted once for all layers.
    host_tokens: tokens that the host tier covered, counted for each of its layers and query heads.
    host_keys: those of them whose logit entered the softmax, counted likewise.
    host_bytes: bytes of rows and hash tables that the host tier read for them.
    methods: the methods' own counts, by counter (`Method.saved_reads`).
    host_rows: rows (a key and a value) that the host tier read for them, counted for each layer and KV head. Heads that
    choose their rows for themselves count each.
    """

    context_tokens: int
    host_tokens: int
    host_keys: int
    host_bytes: int
    methods: Mapping[str, Sequence[int]] = field(default_factory=dict)
    host_rows: int = 0

    def __sub__(self, before: "DecodeReads") -> "DecodeReads":
        return DecodeReads(
            self.context_tokens - before.context_tokens,
            self.host_tokens - before.host_tokens,
            self.host_keys - before.host_keys,
            self.host_bytes - before.host_bytes,
            subtract_counts(self.methods, before.methods),
            self.host_rows - before.host_rows,
        )
