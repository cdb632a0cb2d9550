"""Choose rows, columns, warps and stages of the programs of `expert_tiles`."""

import torch
from torch import Tensor

from gpu.model.matrix_format import Kind
from gpu.operations.arguments import INTERPRETED

# By (pairs of a tile, whether the product is gated): rows, columns at once, num_warps, num_stages.
PLAIN = {  # these fit all cards
    (16, True): (64, 64, 8, 4), (16, False): (128, 64, 4, 4),
    (32, True): (64, 64, 4, 4), (32, False): (64, 64, 4, 4),
    (64, True): (64, 64, 4, 3), (64, False): (128, 64, 4, 3),
    (128, True): (128, 32, 8, 4), (128, False): (256, 32, 8, 4),
}  # fmt: skip
PLAIN_OF_LARGER_CARDS = {(64, True): (128, 64, 8, 4), (128, True): (128, 64, 8, 4), (128, False): (256, 64, 8, 3)}
# Rows, splits (parts of a row's columns that warps share, each a unit of words at once), num_warps, num_stages.
PACKED = {
    (8, True): (64, 1, 4, 3), (8, False): (64, 1, 4, 3),
    (16, True): (64, 1, 4, 3), (16, False): (64, 1, 4, 3),
    (32, True): (64, 1, 4, 3), (32, False): (64, 1, 4, 4),
    (64, True): (64, 1, 4, 3), (64, False): (64, 1, 4, 2),
}  # fmt: skip
PACKED_ALONE = (16, 2, 2, 4)  # for one token: more programs, each with fewer rows, whose warps share the columns
PACKED_FP4 = {(64, True): (64, 1, 4, 2)}  # where FP4 differs
LEAST_SHARED_BYTES = 99 * 2**10  # of a block, on the smallest card that is served


def packed_config(
    tokens: int, per_tile: int, gates: bool, kind: Kind, dtype: torch.dtype
) -> tuple[int, int, int, int]:  # fmt: skip
    """Return rows, splits, num_warps and num_stages for tiles of a packed matrix.

    gates: whether its product is gated. dtype: of products.
    """
    if dtype == torch.float32:
        return 16, 1, 4, 1
    if tokens == 1:
        return PACKED_ALONE
    key = per_tile, gates
    return PACKED_FP4[key] if kind == "fp4" and key in PACKED_FP4 else PACKED[key]


def plain_config(per_tile: int, gates: bool, x: Tensor) -> tuple[int, int, int, int]:
    """Return rows, columns at once, num_warps and num_stages for tiles of a plain matrix, such that they
    fit x's card.
    """
    key, shared = (per_tile, gates), LEAST_SHARED_BYTES
    if x.device.type == "cuda" and not INTERPRETED:
        shared = torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin
    rows, block, num_warps, num_stages = PLAIN_OF_LARGER_CARDS.get(key, PLAIN[key])
    if num_stages * block * (rows * (2 if gates else 1) + per_tile) * x.element_size() >= shared:
        rows, block, num_warps, num_stages = PLAIN[key]
    if x.dtype == torch.float32:
        return rows, max(16, block // 2), num_warps, 2
    return rows, block, num_warps, num_stages
