"""Tensors of planned arrays."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gpu.arrays import ArraySpec


def allocate(spec: ArraySpec, device: torch.device) -> Tensor:
    """Return a tensor of zeros."""
    return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)


def allocate_all(specs: Mapping[str, ArraySpec], device: torch.device) -> dict[str, Tensor]:
    return {name: allocate(spec, device) for name, spec in specs.items()}
