"""Define the content of records of a model's contexts, and the arrays that they pass through. No torch.

A block has a part for each layer with pages: its pages of keys, then those of values, as they are on the device. Rows
may be stored in int8 if pages have the dtype that computes. If a model has layers without pages, a prefix also has an
**end**: the pages behind its last whole block, in parts of a block's size, and a part for each layer with a window or a
state.
"""

from collections.abc import Iterable
from typing import Literal

from gpu.model.architecture import Architecture
from gpu.page_layout import KvFormat, row_bytes
from transfer.arrays import ArraySpec
from transfer.disk.context_store import END, KV
from transfer.disk.record_format import RecordShape

MIB = 2**20
STAGED_BLOCKS = 2  # blocks on the device on their way to the host; also the most that a plan saves
PIECE_BYTES = 8 * MIB  # bytes that a thread reads and copies at once


def piece_blocks(part_bytes: int) -> int:
    """Return how many blocks a piece has."""
    return max(1, PIECE_BYTES // part_bytes)


def piece_array(block: RecordShape, end: RecordShape | None) -> ArraySpec:
    """Return the memory of the largest piece: a reading thread has it pinned, and copies it to the device."""
    part = block.part_bytes[0]
    return ArraySpec((max([part * piece_blocks(part), *(end.part_bytes if end is not None else ())]),), "uint8")


def decoded_arrays(piece: ArraySpec) -> dict[str, ArraySpec]:
    """Return the arrays on the device in which a piece of codes is decoded: the codes in one run, and the rows, of at
    most four bytes for each code.
    """
    return {"codes": piece, "rows": ArraySpec(piece.shape, "float32")}


def block_array(shapes: Iterable[RecordShape], more_bytes: int = 0) -> ArraySpec:
    """Return the memory of a block, or of a prefix's end, on its way to the disk: pinned, and again on the device.

    shapes: of blocks and ends. more_bytes: what rows as they are in pages take beyond rows as they are in `shapes`.
    """
    return ArraySpec((max(sum(shape.part_bytes) for shape in shapes) + more_bytes,), "uint8")


def saving_arrays(block: ArraySpec) -> dict[str, ArraySpec]:
    """Return the arrays on the device that blocks take on their way to the disk.

    staged: until they are in host memory. gathered: a block's pages as they are selected, and in a record's order.
    """
    return {"staged": block.times(STAGED_BLOCKS), "gathered": block.times(2)}


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
