"""Sampling's part in a decode step: the codes of each query, by which the host finds what collides with it."""

from gpu.decode.method import LayerReads, StepMethod
from gpu.methods.sampled.encode import Hyperplanes, encode_queries


class QueryCodes(StepMethod):
    """hyperplanes: those of the keys."""

    def __init__(self, hyperplanes: Hyperplanes) -> None:
        self.hyperplanes = hyperplanes

    def before(self, reads: LayerReads) -> None:
        """Codes of the rotated query as it is, not centred (MagicPIG section 4.2)."""
        if reads.asks:
            reads.codes = encode_queries(reads.query, self.hyperplanes)
