"""Matrices of few bits, drawn, with the float64 numbers that they stand for, by the definition of each kind."""

from dataclasses import dataclass

import numpy as np
import torch

from gpu.model.matrix_format import BITS
from gpu.operations.linear.packed_matrix import Packed
from gpu.operations.linear.word_layout import pack_words


@dataclass(frozen=True)
class Drawn:
    """wanted: float64 `[rows, inner]`."""

    packed: Packed
    wanted: np.ndarray


def e4m3(codes: np.ndarray) -> np.ndarray:
    """float64 of bytes: a sign, four bits of exponent less 7, three of mantissa; exponent 0 has no leading one."""
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = ((codes >> 3) & 15).astype(int), (codes & 7) / 8.0
    return sign * np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))


def e2m1(codes: np.ndarray) -> np.ndarray:
    """float64 of four bits: a sign, two bits of exponent less 1, one of mantissa; exponent 0 has no leading one."""
    sign = np.where(codes & 8, -1.0, 1.0)
    exponent, mantissa = ((codes >> 1) & 3).astype(int), (codes & 1) / 2.0
    return sign * np.where(exponent == 0, mantissa, (1 + mantissa) * 2.0 ** (exponent - 1.0))


def draw_codes(generator: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """uint8: every number of the kind, small FP8 ones as often as large ones, and no NaN."""
    codes = generator.integers(0, 2 ** BITS[kind], shape, dtype=np.uint8)
    return np.where((codes & 0x7F) == 0x7F, codes ^ 0x40, codes) if kind == "fp8" else codes


def draw_packed(
    kind: str, rows: int, inner: int, group: int, row_block: int, has_zeros: bool, has_order: bool, dtype: torch.dtype,
    device: str, run: int | None = None,
) -> Drawn:  # fmt: skip
    """Scales and zero points stand in buffers of NaN and of 255. run: see `draw_runs`."""
    if run is not None:
        return draw_runs(kind, rows, inner, group, run, dtype, device)
    generator = np.random.default_rng(rows * inner + group)
    codes = draw_codes(generator, kind, (rows, inner))
    shape = (-(-rows // row_block), -(-inner // group))
    scales = torch.from_numpy(generator.uniform(0.5, 1.5, shape) * 2.0 ** -BITS[kind])
    scales = scales.float() if kind == "fp8" else scales.bfloat16()
    has_exponents = kind == "fp4" and group != 16  # MXFP4; of 16 columns NVFP4
    if kind == "fp4" and not has_exponents:
        scales = scales.to(torch.float8_e4m3fn).half()  # times a number for all that has no more bits
    if has_exponents:
        exponents = generator.integers(120, 127, shape, dtype=np.uint8)
        exponents[0, 0] = 0  # too small for a float32, and of numbers that are 0 in files
        codes[0, :group] = 0
        scales = torch.from_numpy(2.0 ** (exponents - 127.0))
    zeros = generator.integers(0, 2 ** BITS[kind], shape, dtype=np.uint8) if has_zeros else None
    order = generator.permutation(inner) if has_order else None
    wide_scales = np.repeat(np.repeat(scales.double().numpy(), row_block, 0), group, 1)[:rows, :inner]
    if kind == "fp8":
        numbers = e4m3(codes)
    elif kind == "fp4":
        numbers = e2m1(codes)
        scales = torch.from_numpy(exponents) if has_exponents else scales
    elif zeros is None:
        numbers = codes - 2.0 ** (BITS[kind] - 1)
    else:
        numbers = codes - np.repeat(np.repeat(zeros.astype(float), row_block, 0), group, 1)[:rows, :inner]
    wanted = numbers * wide_scales
    if order is not None:
        placed = np.empty_like(wanted)
        placed[:, order] = wanted
        wanted = placed
    words = pack_words(torch.from_numpy(codes), BITS[kind])
    packed = Packed(
        kind, dtype, inner, group, row_block, words.to(device),
        poisoned(scales.to(device), 255 if has_exponents else float("nan")),
        None if zeros is None else poisoned(torch.from_numpy(zeros).to(device), 255),
        None if order is None else torch.from_numpy(order).to(device),
    )  # fmt: skip
    return Drawn(packed, wanted)


def draw_runs(kind: str, rows: int, inner: int, group: int, run: int, dtype: torch.dtype, device: str) -> Drawn:
    """Of groups with a scale and an offset, any bytes, times two float16 numbers of a run of columns; rows are of
    length one, about.
    """
    generator = np.random.default_rng(rows * inner + group)
    codes = draw_codes(generator, kind, (rows, inner))
    pairs = generator.integers(-128, 128, (rows, inner // group, 2), dtype=np.int8)
    halves = generator.uniform(-1, 1, (rows, inner // run, 2)) * 2.0 ** -(BITS[kind] + 6) * inner**-0.5
    halves[..., 1] *= 2.0 ** (BITS[kind] - 1)
    halves = halves.astype(np.float16)
    scale, offset = np.repeat(pairs.astype(float), group, 1).transpose(2, 0, 1)
    d, least = np.repeat(halves.astype(float), run, 1).transpose(2, 0, 1)
    words = pack_words(torch.from_numpy(codes), BITS[kind])
    packed = Packed(
        kind, dtype, inner, group, 1, words.to(device),
        poisoned(torch.from_numpy(pairs.view(np.int16)[..., 0]).to(device), -1),
        runs=poisoned(torch.from_numpy(halves.view(np.int32)[..., 0]).to(device), -1),
    )  # fmt: skip
    return Drawn(packed, codes * d * scale - least * offset)


def poisoned(tensor: torch.Tensor, poison: float) -> torch.Tensor:
    """The same, contiguous, in the midst of a buffer of `poison`."""
    buffer = torch.full((tensor.numel() + 512,), poison, dtype=tensor.dtype, device=tensor.device)
    inside = buffer[256 : 256 + tensor.numel()].view(tensor.shape)
    return inside.copy_(tensor)
