"""Attention of a decode step to what is on the device: the compiled kernel of the device that the pages lie on.

It refuses to know projections and sampling, and what lies in a hole.
"""

from dataclasses import dataclass

from torch import Tensor

from gpu.cpu_device.attention import applies, paged_decode_attention_cpu
from gpu.kernels.paged_decode_attention import Reading, Workspace, paged_decode_attention


@dataclass(frozen=True, slots=True)
class Reads:
    """One layer's queries, one a row, and the cells that each head reads; the pages hold the rows' own tokens already.

    See `gpu.kernels.paged_decode_attention.paged_decode_attention`. bounds: None, where a row reads its whole context.
    """

    query: Tensor
    key_pages: Tensor
    value_pages: Tensor
    page_table: Tensor
    slots: Tensor
    context_lens: Tensor
    scale: float
    workspace: Workspace
    bounds: Tensor | None = None
    is_counted: bool = False


def attend(reads: Reads) -> Reading:
    """The partials over the cells that are read."""
    cells = (reads.page_table, reads.slots, reads.context_lens, reads.scale)
    if applies(reads.query):
        return paged_decode_attention_cpu(reads.query, reads.key_pages, reads.value_pages, *cells, reads.bounds)
    return paged_decode_attention(
        reads.query, reads.key_pages, reads.value_pages, *cells, reads.workspace, reads.bounds,
        is_counted=reads.is_counted,
    )  # fmt: skip
