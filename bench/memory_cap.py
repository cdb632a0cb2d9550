"""Limit a card to less memory than it has, so that a benchmark shows how a smaller card would do.

Invariant: torch's allocations, memory of graphs included, stay within the limit together with a reserve for CUDA's own
memory, which torch cannot count. A larger allocation raises OutOfMemoryError.
"""

import torch

from gpu.memory.demand import CUDA_RUNTIME_BYTES


def cap_memory(limit_bytes: int, device: torch.device) -> None:
    """Limit the memory of this process until it ends or another limit is set. Does nothing without a GPU."""
    if device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    index = torch.cuda.current_device() if device.index is None else device.index  # a plain `cuda` is not accepted
    torch.cuda.set_per_process_memory_fraction(min((limit_bytes - CUDA_RUNTIME_BYTES) / total, 1.0), index)
