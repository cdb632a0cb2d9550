"""Attention of a decode step to resident cells, by the compiled kernel of the device that holds the pages."""

from gpu.kv.pool import KvPool
from gpu.methods.device_side import LayerReads
from gpu.operations.arguments import runs_on_numba
from gpu.operations.decode_attention.decode_launch import PagedReads
from gpu.operations.decode_attention.latent_decode_attention import LatentReads, latent_decode_attention
from gpu.operations.decode_attention.numba_decode_attention import paged_decode_attention_cpu
from gpu.operations.decode_attention.paged_decode_attention import DevicePartials, Workspace, paged_decode_attention


def attend(reads: LayerReads, pool: KvPool, scale: float, workspace: Workspace, is_counted: bool) -> DevicePartials:
    """Return the partials over the cells that are read, of pages that hold the rows' own tokens already."""
    rows, layer = reads.rows, reads.layer
    if pool.latent_rank is not None:
        own = LatentReads(
            reads.query, pool.key_pages[layer], pool.table_of(layer), rows.slots, rows.context_lens, scale,
            pool.latent_rank,
        )  # fmt: skip
        return DevicePartials(latent_decode_attention(own, workspace, is_counted), None)
    table = pool.table_of(layer)
    asked = PagedReads(
        reads.query, pool.key_pages[layer], pool.value_pages[layer], table, rows.slots, rows.context_lens, scale
    )
    parts = (reads.bounds, reads.has_far, reads.maxima)
    if runs_on_numba(pool.key_pages[layer]):
        return paged_decode_attention_cpu(asked, *parts)
    return paged_decode_attention(asked, workspace, *parts, is_counted)
