"""The places of experts that lie apart from a layer's others, as products are given them.

Every expert has one place, on either side. Where something else computes those on the far side, products leave them
out, and their sums are float32, since more is added.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.linear.packed_matrix import Stored


@dataclass(frozen=True, slots=True)
class FarExperts:
    """The experts of a layer that lie apart. gate_up, down: as in `weights.ExpertWeights`, of as many experts as there
    are slots; None: somebody else computes them. places: int32 `[experts]`, of each the number among those in the
    layer's own matrices, or `~slot`.
    """

    gate_up: Stored | None
    down: Stored | None
    places: Tensor

    def find(self, expert: int, near: tuple[Stored, Stored]) -> tuple[tuple[Stored, Stored], int] | None:
        """Return an expert's matrices, and its number in them; None: it is left out. Waits for the device."""
        place = int(self.places[expert])
        if place >= 0:
            return near, place
        if self.gate_up is None or self.down is None:
            return None
        return (self.gate_up, self.down), ~place


@triton.jit
def find_place(places, expert, HAS_FAR: tl.constexpr):
    """Return each expert's number in its matrix, int64, and whether that is the far one; experts: integers."""
    number = expert.to(tl.int64)
    is_far = number < 0
    if HAS_FAR:
        place = tl.load(places + expert).to(tl.int64)
        is_far = place < 0
        number = tl.where(is_far, -1 - place, place)
    return number, is_far


@triton.jit
def base_of(near, far, is_far, HAS_FAR: tl.constexpr):
    """Return which of a pair of pointers each expert's rows are counted from."""
    base = near
    if HAS_FAR:
        base = tl.where(is_far, far, near)
    return base


def leaves_out(far: FarExperts | None) -> bool:
    """Return whether something else computes the experts on the far side."""
    return far is not None and far.gate_up is None


def places_of(far: FarExperts | None, x: Tensor) -> Tensor:
    """Return what a kernel is given as `places`; anything, where nothing lies far."""
    return x if far is None else far.places
