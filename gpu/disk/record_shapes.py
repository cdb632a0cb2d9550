"""What a record of a model's contexts holds. No torch.

A part is of a layer that has pages: the block's pages of keys, then those of values, as they lie on the device.
"""

from gpu.model.architecture import Architecture
from gpu.page_layout import KvFormat, row_bytes
from transfer.disk.context_store import KV
from transfer.disk.record_format import RecordShape


def paged_layers(architecture: Architecture, window_layers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layers that have all of a context in pages."""
    apart = {*window_layers, *architecture.recurrent_layers}
    return tuple(layer for layer in range(architecture.num_layers) if layer not in apart)


def kv_record(
    architecture: Architecture, window_layers: tuple[int, ...], kv: KvFormat, block_tokens: int
) -> RecordShape:
    """Return the shape of a block of keys and values; `window_layers` have no pages."""
    row = architecture.rows_of_head * architecture.num_kv_heads * row_bytes(kv, architecture.dim)
    return RecordShape(KV, (block_tokens * row,) * len(paged_layers(architecture, window_layers)))
