"""Counts of what decode steps read.

Invariant: each token of a context is counted once: read on the device, covered by the host tier, reused or dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpu.methods.counters import subtract_counts


@dataclass(frozen=True, slots=True)
class DecodeReads:
    """Sums over the rows of all decode steps; subtract two for what was read between them.

    context_tokens: of each row, its new token included, once whatever the layers.
    host_tokens: that the host tier covers, and host_keys, those of them whose logit entered the softmax, counted for
        each of its layers and query heads.
    host_bytes: of rows and hash tables that the tier read for them.
    methods: what the methods counted, by counter (`Method.saved_reads`).
    """

    context_tokens: int
    host_tokens: int
    host_keys: int
    host_bytes: int
    methods: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __sub__(self, before: "DecodeReads") -> "DecodeReads":
        return DecodeReads(
            self.context_tokens - before.context_tokens,
            self.host_tokens - before.host_tokens,
            self.host_keys - before.host_keys,
            self.host_bytes - before.host_bytes,
            subtract_counts(self.methods, before.methods),
        )
