"""Allocate tensors for array specs (`transfer.arrays`)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from transfer.arrays import ArraySpec


def allocate(spec: ArraySpec, device: torch.device) -> Tensor:
    """Return a tensor of zeros."""
    return torch.zeros(spec.shape, dtype=dtype_of(spec), device=device)


def allocate_all(specs: Mapping[str, ArraySpec], device: torch.device) -> dict[str, Tensor]:
    """Return tensors of zeros by name."""
    return {name: allocate(spec, device) for name, spec in specs.items()}


def allocate_empty(spec: ArraySpec, device: torch.device) -> Tensor:
    """Return a tensor with uninitialised numbers."""
    return torch.empty(spec.shape, dtype=dtype_of(spec), device=device)


def allocate_on_host(specs: Mapping[str, ArraySpec], is_pinned: bool) -> dict[str, Tensor]:
    """Return tensors of zeros by name in host memory, pinned where a GPU reads them."""
    return {name: torch.zeros(spec.shape, dtype=dtype_of(spec), pin_memory=is_pinned) for name, spec in specs.items()}


def dtype_of(spec: ArraySpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name by which specs call a type."""
    return str(dtype).removeprefix("torch.")
