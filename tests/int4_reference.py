"""Int4 rows as they stand in host memory, packed and unpacked in numpy from their description alone."""

import numpy as np
import torch

GROUP = 32


def width_of(dim: int) -> int:
    """Bytes of a row: half a byte a dimension and four a group, filled up to 16."""
    return -(-(dim // 2 + dim // GROUP * 4) // 16) * 16


def pack(rows: np.ndarray) -> np.ndarray:
    """Rows `[..., dim]` as uint8 `[..., width]`."""
    dim = rows.shape[-1]
    groups = rows.astype(np.float32).reshape(*rows.shape[:-1], dim // GROUP, GROUP)
    offset = _bits(groups.min(-1))
    scale = _bits((groups.max(-1) - _float(offset)) / np.float32(15))
    steps = (groups - _float(offset)[..., None]) / np.maximum(_float(scale), 1e-30)[..., None]
    codes = np.nan_to_num(np.clip(np.floor(steps + 0.5), 0, 15)).astype(np.uint8)
    packed = np.zeros((*rows.shape[:-1], width_of(dim)), np.uint8)
    for column in range(dim):
        group, within = divmod(column, GROUP)
        packed[..., 16 * group + within % 16] |= codes[..., group, within] << (4 if within >= 16 else 0)
    words = np.stack([scale, offset], -1).astype("<u2").reshape(*rows.shape[:-1], -1)
    packed[..., dim // 2 : dim // 2 + dim // GROUP * 4] = words.view(np.uint8)
    return packed


def unpack(packed: np.ndarray, dim: int) -> np.ndarray:
    """Float64 `[..., dim]` of packed rows."""
    rows = np.zeros((*packed.shape[:-1], dim))
    for column in range(dim):
        group, within = divmod(column, GROUP)
        code = packed[..., 16 * group + within % 16] >> (4 if within >= 16 else 0) & 15
        at = dim // 2 + 4 * group
        words = np.ascontiguousarray(packed[..., at : at + 4]).view("<u2")
        rows[..., column] = _float(words[..., 1]) + code * _float(words[..., 0]).astype(np.float64)
    return rows


def _bits(numbers: np.ndarray) -> np.ndarray:
    """The nearest bf16, as uint16."""
    return torch.tensor(numbers).bfloat16().view(torch.int16).numpy().view(np.uint16)


def _float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)
