"""What decode steps read, by the engine's own counts. Plain numbers: no device, no model.

Invariant: a token of a context is either covered by the host tier, whose own counts say what it read of it, or lies on
the device, where all of it is read.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeReads:
    """Sums over the rows of all decode steps; differences are taken of two.

    context_tokens: of each row, its new token included, once whatever the layers; host_tokens: that the host tier
    stood for, and of these host_keys: whose logit entered the softmax, both counted for each of its layers and each
    query head; host_bytes: of rows and hash tables that the tier read for them.
    """

    context_tokens: int
    host_tokens: int
    host_keys: int
    host_bytes: int

    def __sub__(self, before: "DecodeReads") -> "DecodeReads":
        return DecodeReads(
            self.context_tokens - before.context_tokens,
            self.host_tokens - before.host_tokens,
            self.host_keys - before.host_keys,
            self.host_bytes - before.host_bytes,
        )
