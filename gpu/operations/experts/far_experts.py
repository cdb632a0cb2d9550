"""Define the places of experts that are stored apart from a layer's others.

Every expert has one place, on either side. If the CPU computes the experts of the far side, products leave them out,
and sums are float32, since more is added later.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.linear.packed_matrix import Stored


@dataclass(frozen=True, slots=True)
class FarExperts:
    """The experts of a layer that are stored apart.

    gate_up, down: as in `weights.ExpertWeights`, with as many experts as there are slots; None: something else computes
    them. places: int32 `[experts]`: for an expert in the layer's own matrices its number there, else `~slot`.
    """

    gate_up: Stored | None
    down: Stored | None
    places: Tensor

    def find(self, expert: int, near: tuple[Stored, Stored]) -> tuple[tuple[Stored, Stored], int] | None:
        """Return an expert's matrices and its number in them, or None if it is left out. Waits for the device."""
        place = int(self.places[expert])
        if place >= 0:
            return near, place
        if self.gate_up is None or self.down is None:
            return None
        return (self.gate_up, self.down), ~place


@triton.jit
def find_place(places, expert, HAS_FAR: tl.constexpr):
    """Return each expert's number in its matrix, int64, and whether that is the far matrix. expert: integers."""
    number = expert.to(tl.int64)
    is_far = number < 0
    if HAS_FAR:
        place = tl.load(places + expert).to(tl.int64)
        is_far = place < 0
        number = tl.where(is_far, -1 - place, place)
    return number, is_far


@triton.jit
def base_of(near, far, is_far, HAS_FAR: tl.constexpr):
    """Return the pointer, near or far, from which each expert's rows are counted."""
    base = near
    if HAS_FAR:
        base = tl.where(is_far, far, near)
    return base


def leaves_out(far: FarExperts | None) -> bool:
    """Return whether the experts of the far side are computed elsewhere."""
    return far is not None and far.gate_up is None


def places_of(far: FarExperts | None, x: Tensor) -> Tensor:
    """Return a kernel's argument `places`, or a placeholder if no experts are far."""
    return x if far is None else far.places
