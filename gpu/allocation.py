"""Tensors of stated arrays."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gpu.arrays import ArraySpec


def allocate(spec: ArraySpec, device: torch.device) -> Tensor:
    """Return a tensor of zeros."""
    return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)


def allocate_all(specs: Mapping[str, ArraySpec], device: torch.device) -> dict[str, Tensor]:
    """Return tensors of zeros by name."""
    return {name: allocate(spec, device) for name, spec in specs.items()}


def allocate_empty(spec: ArraySpec, device: torch.device) -> Tensor:
    """Return a tensor whose numbers mean nothing yet."""
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
