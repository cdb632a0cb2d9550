"""Check the arguments of operations, and decide which implementation serves a tensor."""

import torch
import triton
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
FINITE_OR_NOT = {"reassoc", "contract", "nsz", "arcp"}
"""numba's fast math: sums in any order, but NaN and infinity are kept."""


def runs_on_numba(tensor: Tensor) -> bool:
    """Return whether functions compiled by numba serve this tensor: float32 on the CPU."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


def runs_on_triton(tensor: Tensor) -> bool:
    """Return whether Triton runs for this tensor: on CUDA, and under its interpreter anywhere."""
    return tensor.is_cuda or INTERPRETED


def multiplies_on_tensor_cores(tensor: Tensor) -> bool:
    """Return whether the kernels of large products serve this tensor: bf16 on CUDA, or any under the interpreter."""
    return (tensor.is_cuda and tensor.dtype == torch.bfloat16) or INTERPRETED


def check(op: str, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless `tensor` has this shape, dtype and device, and its last axis is contiguous."""
    if tensor.shape == shape and tensor.dtype == dtype and tensor.device == device and tensor.stride(-1) == 1:
        return
    if tensor.numel() == 0 and tensor.shape == shape:
        return
    got = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, strides {tensor.stride()}"
    raise ValueError(f"{op}: {name} is {got}; wanted {shape} {dtype} on {device}, last axis contiguous")


def check_contiguous(op: str, name: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{op}: {name} has strides {tensor.stride()} for {tuple(tensor.shape)}; wanted contiguous")


def check_dtype(op: str, tensor: Tensor) -> None:
    """Raise ValueError unless the dtype is one that the kernels support."""
    if tensor.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{op}: dtype is {tensor.dtype}; on {tensor.device} wanted torch.bfloat16 or torch.float32")
