"""What a record of a model's contexts holds. No torch.

A part is of a layer that has pages: the block's pages of keys, then those of values, as they lie on the device.
"""

from gpu.model.architecture import Architecture
from gpu.page_layout import KvFormat, row_bytes
from transfer.disk.context_store import KV
from transfer.disk.record_format import RecordShape

MIB = 2**20
PIECE_BYTES = 8 * MIB  # that a thread reads and copies at once


def piece_blocks(part_bytes: int) -> int:
    """Return the blocks of a piece."""
    return max(1, PIECE_BYTES // part_bytes)


def num_buffers(memory_mib: float, record_bytes: int) -> int:
    """Return how many blocks may be on their way to the disk at once."""
    return max(2, int(memory_mib * MIB) // record_bytes)


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
