"""Make the device wait for the answer to its last request: one program reads a stamp in pinned memory until it is
there.

The answer is complete before its stamp is written. The next kernel reads the answer, and the boundary between the two
kernels orders its reads, so the reads of the stamp need no acquire. The wait is launched ahead of the answer, which
hides the time of the launch. The host must in any case answer or release the slot.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, runs_on_triton
from transfer.exchange import RELEASED, Handshake

_RELEASED = tl.constexpr(RELEASED)


def await_answer_reference(counters: Tensor, slot: Handshake) -> None:
    """Check on the CPU that the host has already answered. Raises AssertionError if it has not."""
    stamp, answered = int(counters[0]), int(slot.answered)
    assert answered in (stamp, RELEASED), f"await_answer: request {stamp} has the answer to request {answered}"


@triton.jit
def _await_answer_kernel(counters, answered):
    stamp = tl.load(counters)
    seen = tl.load(answered, volatile=True)
    while (seen != stamp) & (seen != _RELEASED):
        seen = tl.load(answered, volatile=True)


def await_answer(counters: Tensor, slot: Handshake) -> None:
    """Wait, in stream order, until the last host request is answered or the slot is released. May be captured.

    counters: those with which the request was packed (`exchange_pack.new_counters`). Raises ValueError for other
    counters.
    """
    check("await_answer", "counters", counters, (len(slot.flags),), torch.int32, counters.device)
    if not runs_on_triton(counters):
        await_answer_reference(counters, slot)
        return
    _await_answer_kernel[(1,)](counters, slot.answered, num_warps=1)
