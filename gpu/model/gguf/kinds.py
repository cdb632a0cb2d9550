"""The kinds of tensors in GGUF files that are served, and how a matrix of them is stored here.

A number of every kind of few bits is `q * d * scale - least * offset`: q below 2**8, d and least float16 of a run of
groups, scale and offset whole numbers of a group. So nothing is rounded on the way from the file. Kinds with one scale
a group, and the same zero point in all, have a scale alone. Matrices that are one product here are stored alike: by the
finest groups of their parts, in 8 bits if one of them has more than 4, and plain if one of them is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpu.model.matrix_format import Kind, MatrixFormat


@dataclass(frozen=True, slots=True)
class BlockKind:
    """A kind of block. block: columns that lie together in a file, in num_bytes; group: to a scale; run: to d. stored:
    the fewest bits that hold a number here. has_pairs: whether groups have scales and offsets of their own, or d is
    all.
    """

    block: int
    num_bytes: int
    group: int
    run: int
    bits: int
    stored: Kind
    has_pairs: bool

    @property
    def is_repacked(self) -> bool:
        """Return whether numbers take more bits here than in the file."""
        return (self.bits, self.stored) not in ((4, "int4"), (8, "int8"))


FLOAT_KINDS = ("F32", "F16", "BF16")
BLOCK_KINDS = {
    "Q4_0": BlockKind(32, 18, 32, 32, 4, "int4", has_pairs=False),
    "Q4_1": BlockKind(32, 20, 32, 32, 4, "int4", has_pairs=True),
    "Q5_0": BlockKind(32, 22, 32, 32, 5, "int8", has_pairs=False),
    "Q5_1": BlockKind(32, 24, 32, 32, 5, "int8", has_pairs=True),
    "Q8_0": BlockKind(32, 34, 32, 32, 8, "int8", has_pairs=False),
    "Q4_K": BlockKind(256, 144, 32, 256, 4, "int4", has_pairs=True),
    "Q5_K": BlockKind(256, 176, 32, 256, 5, "int8", has_pairs=True),
    "Q6_K": BlockKind(256, 210, 16, 256, 6, "int8", has_pairs=True),
}
SERVED = (*FLOAT_KINDS, *BLOCK_KINDS)


def format_of(kinds: Sequence[str]) -> MatrixFormat | None:
    """Return the format of a matrix whose parts are of these kinds; None: plain."""
    blocks = [BLOCK_KINDS[kind] for kind in kinds if kind in BLOCK_KINDS]
    if not blocks or len(blocks) < len(kinds):
        return None
    stored: Kind = "int4" if all(block.stored == "int4" for block in blocks) else "int8"
    group = min(block.group for block in blocks)
    has_pairs = any(block.has_pairs for block in blocks)
    return MatrixFormat(stored, group, run=min(block.run for block in blocks) if has_pairs else None)
