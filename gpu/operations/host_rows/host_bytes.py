"""View host memory at an address, for references that read what a device reads there."""

import ctypes

import numpy as np
import torch
from torch import Tensor


def bytes_at(address: int, num_bytes: int) -> Tensor:
    """Return host memory as uint8 `[num_bytes]`, without a copy. The caller keeps the memory alive."""
    return torch.from_numpy(np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), np.uint8))
