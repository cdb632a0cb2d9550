"""Share the shapes and types of arrays between the code that allocates them and the plans that count them. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "uint16": 2, "int8": 1,
    "uint8": 1, "bool": 1,
}  # fmt: skip
FLOATS = {2: "bfloat16", 4: "float32", 8: "float64"}
"""Floating types by the bytes of a number."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """The shape and type of an array. dtype: its name in torch."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def times(self, *sizes: int) -> "ArraySpec":
        """Return the spec with axes of `sizes` added in front."""
        return ArraySpec((*sizes, *self.shape), self.dtype)


def sum_bytes(specs: Iterable[ArraySpec]) -> int:
    return sum(spec.num_bytes for spec in specs)
