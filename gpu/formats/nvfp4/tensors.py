"""Tensors of FP4 modules: Model Optimizer's NVFP4, and compressed-tensors' NVFP4 and MXFP4.

A scale of NVFP4 is an FP8 number times one of the whole module, or over it in compressed-tensors. Here it is their
product, in float16: rounded by up to 2**-11 of itself, and by 3e-8 where it is below 6e-5.
"""

import torch
from torch import Tensor

from gpu.model.matrix_format import MatrixFormat
from gpu.weights.stored import ModuleRows, StoredError, StoredTensor, input_scale

_OF_ALL = ((), (1,), (1, 1))


def stored_tensors(scheme: str, stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    """Return the tensors of a module: two numbers a byte, the first in its lower bits, and scales."""
    rows, inner, groups = part.rows, part.packed.inner, part.num_groups
    numbers = StoredTensor(((rows, inner // 2),), ("U8",), lambda pairs: part.put_numbers(unpack_pairs(pairs)))
    if scheme == "mxfp4-pack-quantized":
        exponents = StoredTensor(((rows, groups),), ("U8",), part.put_exponents)
        return {".weight_packed": numbers, ".weight_scale": exponents}
    is_inverse, factor = scheme == "nvfp4-pack-quantized", torch.ones(())

    def fill_factor(number: Tensor) -> None:
        value = number.reshape(()).float().cpu()
        if not bool(value.isfinite()) or not bool(value > 0):
            raise StoredError(f"is {value.item()}; wanted a finite number above 0")
        factor.copy_(1 / value if is_inverse else value)

    def fill_scales(scales: Tensor) -> None:
        wide = scales.float() * factor.to(scales.device)
        if bool((wide.abs() > torch.finfo(torch.float16).max).any()):
            raise StoredError("holds scales beyond what float16 holds; wanted smaller ones")
        part.put_scales(wide, 1)

    scales = StoredTensor(((rows, groups),), ("F8_E4M3",), fill_scales)
    of_all = StoredTensor(_OF_ALL, ("F32",), fill_factor, comes_first=True)
    if is_inverse:
        not_used = StoredTensor(_OF_ALL, ("F32",), None, is_needed=False)  # of tokens, which are not rounded here
        return {".weight_packed": numbers, ".weight_scale": scales, ".weight_global_scale": of_all,
                ".input_global_scale": not_used}  # fmt: skip
    return {".weight": numbers, ".weight_scale": scales, ".weight_scale_2": of_all} | input_scale()


def unpack_pairs(pairs: Tensor) -> Tensor:
    """Unpack uint8 `[rows, inner / 2]` to uint8 `[rows, inner]` of codes."""
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)
