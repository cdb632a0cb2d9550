"""Where rows of keys and values are written, and how they are rotated on the way."""

from typing import NamedTuple

from torch import Tensor


class RowPlaces(NamedTuple):
    """Places of tokens. cos, sin: float32 `[positions, rotated / 2]`; positions: of the rotation, and cells: of the
    context, int64 `[tokens]`; slots: int32 `[tokens]`, -1 for padding.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor
    cells: Tensor
    slots: Tensor
