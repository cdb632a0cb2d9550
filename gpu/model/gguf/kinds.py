"""List the kinds of tensors in GGUF files that are served, and say how a matrix of them is stored here.

A number of most kinds of few bits is `q * d * scale - least * offset`: q below 2**8, d and least float16 of a run of
groups, scale and offset whole numbers of a group. So nothing is rounded on the way from the file. Kinds with one scale
a group, and the same zero point in all, have a scale alone. MXFP4 has numbers of FP4 and powers of two. IQ2 and IQ3
are entries of tables, which the gguf package widens. Matrices that are one product here are stored alike: by the finest
groups of their parts, in 8 bits if one of them has more than 4, and plain if one of them is, or if MXFP4 stands beside
another kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpu.model.matrix_format import Kind, MatrixFormat


@dataclass(frozen=True, slots=True)
class BlockKind:
    """A kind of block.

    block: columns that lie together in a file, in num_bytes.
    group: to a scale.
    run: to d.
    bits: of a number in the file.
    stored: the fewest bits that hold one here, None: it is plain here.
    has_pairs: whether groups have scales and offsets of their own, or d is all.
    zero: which q is 0 then.
    """

    block: int
    num_bytes: int
    group: int
    run: int
    bits: int
    stored: Kind | None
    has_pairs: bool = False
    zero: int = 0

    @property
    def is_repacked(self) -> bool:
        """Return whether numbers take more bits here than in the file."""
        return (self.bits, self.stored) not in ((4, "int4"), (4, "fp4"), (8, "int8"))


FLOAT_KINDS = ("F32", "F16", "BF16")
BLOCK_KINDS = {
    "Q4_0": BlockKind(32, 18, 32, 32, 4, "int4", zero=8),
    "Q4_1": BlockKind(32, 20, 32, 32, 4, "int4", has_pairs=True),
    "Q5_0": BlockKind(32, 22, 32, 32, 5, "int8", zero=16),
    "Q5_1": BlockKind(32, 24, 32, 32, 5, "int8", has_pairs=True),
    "Q8_0": BlockKind(32, 34, 32, 32, 8, "int8", zero=128),
    "Q2_K": BlockKind(256, 84, 16, 256, 2, "int4", has_pairs=True),
    "Q3_K": BlockKind(256, 110, 16, 256, 3, "int4", has_pairs=True),
    "Q4_K": BlockKind(256, 144, 32, 256, 4, "int4", has_pairs=True),
    "Q5_K": BlockKind(256, 176, 32, 256, 5, "int8", has_pairs=True),
    "Q6_K": BlockKind(256, 210, 16, 256, 6, "int8", has_pairs=True),
    "IQ4_NL": BlockKind(32, 18, 32, 32, 4, "int8", zero=128),
    "IQ4_XS": BlockKind(256, 136, 32, 256, 4, "int8", has_pairs=True),
    "MXFP4": BlockKind(32, 17, 32, 32, 4, "fp4"),
    "IQ2_XXS": BlockKind(256, 66, 32, 256, 2, None),
    "IQ2_XS": BlockKind(256, 74, 16, 256, 2, None),
    "IQ2_S": BlockKind(256, 82, 16, 256, 2, None),
    "IQ3_XXS": BlockKind(256, 98, 32, 256, 3, None),
    "IQ3_S": BlockKind(256, 110, 32, 256, 3, None),
}
SERVED = (*FLOAT_KINDS, *BLOCK_KINDS)


def format_of(kinds: Sequence[str]) -> MatrixFormat | None:
    """Return the format of a matrix whose parts are of these kinds; None: plain."""
    blocks = [BLOCK_KINDS[kind] for kind in kinds if kind in BLOCK_KINDS]
    stored_kinds = {block.stored for block in blocks}
    if not blocks or len(blocks) < len(kinds) or None in stored_kinds:
        return None
    if "fp4" in stored_kinds:
        return MatrixFormat("fp4", blocks[0].group, scale_bytes=1) if len(stored_kinds) == 1 else None
    stored: Kind = "int4" if stored_kinds == {"int4"} else "int8"
    group = min(block.group for block in blocks)
    has_pairs = any(block.has_pairs for block in blocks)
    return MatrixFormat(stored, group, run=min(block.run for block in blocks) if has_pairs else None)
