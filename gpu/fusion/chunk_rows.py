"""Convert keys and values of a chunk's layer between the stored and the computing format.

A layer is keys `[tokens, kv_heads, row]`, then values of that shape (`transfer.chunks.chunk_format`), in the format
`ChunkShape.rows`. Invariant: bf16 and float32 rows of a model of that dtype are read back unchanged.
"""

import torch
from torch import Tensor

from gpu.operations.kv.fused_rows import fuse_rows, widen_rows
from transfer.chunks.chunk_format import ChunkShape

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def store_rows(rows: Tensor, shape: ChunkShape) -> Tensor:
    """Return rows `[tokens, kv_heads, dim]` (tokens strided) as uint8 `[tokens, kv_heads * row_bytes]`.

    Raises ValueError for int8 rows that are not finite, on the CPU; on CUDA the library refuses them.
    """
    tokens, kv_heads, _ = rows.shape
    if shape.rows == "int8":
        stored = torch.empty(tokens, kv_heads, shape.row_bytes, dtype=torch.uint8, device=rows.device)
        fuse_rows(rows, stored)
        return stored.view(tokens, -1)
    return rows.to(_DTYPES[shape.rows]).contiguous().view(tokens, -1).view(torch.uint8)


def read_rows(stored: Tensor, rows: Tensor, shape: ChunkShape) -> None:
    """Fill rows `[tokens, kv_heads, dim]` (strided, of the model's type) from uint8 `[tokens, kv_heads * row_bytes]`,
    contiguous.
    """
    tokens, kv_heads, _ = rows.shape
    if shape.rows == "int8":
        widen_rows(stored.view(tokens, kv_heads, shape.row_bytes), rows)
        return
    rows.copy_(stored.view(_DTYPES[shape.rows]).view(rows.shape))
