"""Define the content of records of a model's contexts. No torch.

A block has a part for each layer with pages: its pages of keys, then those of values, as they are on the device. Rows
may be stored in int8 if pages have the dtype that computes. If a model has layers without pages, a prefix also has an
**end**: the pages behind its last whole block, in parts of a block's size, and a part for each layer with a window or a
state.
"""

from typing import Literal

from gpu.model.architecture import Architecture
from gpu.page_layout import KvFormat, row_bytes
from transfer.disk.context_store import END, KV
from transfer.disk.record_format import RecordShape

MIB = 2**20
PIECE_BYTES = 8 * MIB  # bytes that a thread reads and copies at once


def piece_blocks(part_bytes: int) -> int:
    """Return how many blocks a piece has."""
    return max(1, PIECE_BYTES // part_bytes)


def piece_bytes(block: RecordShape, end: RecordShape | None) -> int:
    """Return the bytes of the largest piece."""
    part = block.part_bytes[0]
    return max([part * piece_blocks(part), *(end.part_bytes if end is not None else ())])


def num_buffers(memory_mib: float, record_bytes: int) -> int:
    """Return how many blocks may be on their way to the disk at once."""
    return max(2, int(memory_mib * MIB) // record_bytes)


def paged_layers(architecture: Architecture, window_layers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layers that have whole contexts in pages."""
    apart = {*window_layers, *architecture.layers_without_kv}
    return tuple(layer for layer in range(architecture.num_layers) if layer not in apart)


def disk_format(rows: Literal["same", "int8"], kv: KvFormat) -> KvFormat:
    """Return the format of rows on disk. rows: the setting `disk.rows`. kv: the format of rows in pages."""
    return kv if rows == "same" else rows


def kv_record(
    architecture: Architecture, window_layers: tuple[int, ...], kv: KvFormat, block_tokens: int
) -> RecordShape:
    """Return the shape of a block of keys and values; `window_layers` have no pages."""
    row = (
        architecture.rows_of_head
        * architecture.num_kv_heads
        * row_bytes(kv, architecture.dim, architecture.latent is not None)
    )
    return RecordShape(KV, (block_tokens * row,) * len(paged_layers(architecture, window_layers)))


def end_record(architecture: Architecture, window_bytes: int, block: RecordShape) -> RecordShape | None:
    """Return the shape of a prefix's end; None if pages have whole contexts. window_bytes: bytes of a window, or a
    state, in all layers that have one.
    """
    num_apart = len(architecture.recurrent_layers) or architecture.num_layers - len(block.part_bytes)
    if not num_apart:
        return None
    assert window_bytes % num_apart == 0, "layers without pages are alike"
    return RecordShape(END, (*block.part_bytes, *(window_bytes // num_apart,) * num_apart))
