"""Kernels that start while the one before them in their stream still runs, and wait for it themselves.

Programmatic dependent launch, of Hopper and later: what a launch costs, and a program's first instructions, pass while
the last programs before it end. It refuses to know what kernels do. Invariants: a kernel that follows waits, in every
program, before it reads or writes what others do, so what has ended when it ends is all that was launched before it;
and it is launched right behind a kernel of its own stream, with no other stream's event between.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST_MAJOR = 9  # of a card's capability


@triton.jit
def follow(FOLLOWS: tl.constexpr):
    """Let the kernel behind this one start, and wait for the end of those before."""
    if FOLLOWS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def following(tensor: Tensor, is_behind: bool = True) -> dict[str, bool]:
    """What a kernel on this tensor's device is launched with. is_behind: False where it may have an event before it."""
    if is_behind and tensor.is_cuda and _has_it(tensor.device.index):
        return {"FOLLOWS": True, "launch_pdl": True}
    return {"FOLLOWS": False}


@cache
def _has_it(index: int | None) -> bool:
    return bool(torch.cuda.get_device_properties(index).major >= LEAST_MAJOR)
