"""Pad the rows of prompts' last tokens to sizes for which kernels were compiled at the start.

Kernels for few rows are compiled for the number of rows, or for a multiple of 16. If prompts ended in other numbers
than decode steps have rows, requests would wait for a compilation.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def pad_indices(indices: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """Return indices of rows, int64: these, and the last one again up to the least of `sizes` that holds them all.

    None is added if there is no such size, or no index.
    """
    size = min((size for size in sizes if size >= len(indices)), default=len(indices))
    more = size - len(indices) if indices else 0
    return np.array([*indices, *indices[-1:] * more], dtype=np.int64)


def pad_rows(rows: Tensor, size: int) -> Tensor:
    """Return rows `[size, ..]`: these, and the last one again."""
    return torch.cat([rows, rows[-1:].expand(size - len(rows), *rows.shape[1:])]) if len(rows) < size else rows
