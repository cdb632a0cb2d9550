"""Define where rows of keys and values are written, and how they are rotated."""

from typing import NamedTuple

from torch import Tensor


class RowPlaces(NamedTuple):
    """Where tokens' rows are written, and how they are rotated.

    cos, sin: float32 `[positions, rotated / 2]`. positions: int64 `[tokens]`, of RoPE. cells: int64 `[tokens]`, in the
    context. slots: int32 `[tokens]`, -1 for padding.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor
    cells: Tensor
    slots: Tensor
