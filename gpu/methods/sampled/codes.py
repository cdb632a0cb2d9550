"""Compute hash codes on the device: of keys that are offloaded, and of queries, so that the host finds collisions."""

from typing import ClassVar

from torch import Tensor

from gpu.methods.device_side import DeviceSide, LayerReads, Site
from gpu.methods.sampled.encode import Hyperplanes, draw_hyperplanes, encode_keys, encode_queries
from transfer.host_config import SampledConfig


def make_device_side(settings: SampledConfig, site: Site) -> DeviceSide:
    """Draw the hyperplanes. One draw serves all layers and heads, and is the same in every engine run."""
    assert site.tier_shape is not None, "sampled: the engine has no host tier"
    return Codes(draw_hyperplanes(settings, site.tier_shape.dim, site.dtype, site.device))


class Codes(DeviceSide):
    """Computes the hash codes of keys and queries with the same hyperplanes."""

    needs_host_reads: ClassVar[bool] = True
    makes_codes: ClassVar[bool] = True

    def __init__(self, hyperplanes: Hyperplanes) -> None:
        self.hyperplanes = hyperplanes

    def before(self, reads: LayerReads) -> None:
        """Compute the codes of the rotated query as it is, without a centre (MagicPIG section 4.2)."""
        if reads.reads_host:
            reads.codes = encode_queries(reads.query, self.hyperplanes)

    def encode_keys(self, keys: Tensor, codes: Tensor) -> None:
        encode_keys(keys, self.hyperplanes, codes)
