"""Copy many short runs of several layers from one device buffer to pinned host memory, in one launch.

A copy engine takes some microseconds per run, whatever its length, and an offload block of 128 tokens is tens of
thousands of runs. `source[layer, head, inner]` is written to `targets[layer][head, inner]`, and nothing between runs is
touched. Bytes moved: the source, over the link.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check_contiguous, runs_on_triton
from gpu.upload import upload

BLOCK = 1024
VECTOR_BYTES = 16
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def scatter_runs_reference(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Compute `scatter_runs` in plain torch."""
    for layer, target in zip(source, targets, strict=True):
        target.copy_(layer)


@triton.jit
def _scatter_kernel(
    source, addresses, heads, inners, length, head_stride, inner_stride, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    run = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    layer, head, inner = run // (heads * inners), run // inners % heads, run % inners
    value = tl.load(source + run * length + element, mask=element < length)
    address = tl.load(addresses + layer)
    target = address.to(tl.pointer_type(source.dtype.element_ty)) + head * head_stride + inner * inner_stride
    if ALIGNED:
        target = tl.multiple_of(target, 16)
    tl.store(target + element, value, mask=element < length)


def scatter_runs(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Write `source[layer]` to `targets[layer]`.

    source: `[layers, heads, inner, length]`, contiguous, on CUDA. targets: `[heads, inner, length]` in pinned memory,
    of one dtype and with equal strides; runs are contiguous. Raises ValueError for a source that is not contiguous;
    equal targets are asserted.
    """
    check_contiguous("scatter_runs", "source", source)
    shape, strides = source.shape[1:], targets[0].stride()
    for target in targets:
        assert (target.shape, target.dtype, target.stride()) == (shape, source.dtype, (*strides[:2], 1))
    if not runs_on_triton(source):
        scatter_runs_reference(source, targets)
        return
    addresses = [target.data_ptr() for target in targets]
    width = source.element_size()
    places = [*addresses, strides[0] * width, strides[1] * width, shape[2] * width]
    is_aligned = all(place % VECTOR_BYTES == 0 for place in places)
    launch(source.view(_INTEGERS[width]), upload(torch.tensor(addresses).numpy(), source.device), strides, is_aligned)


def launch(source: Tensor, addresses: Tensor, strides: tuple[int, ...], is_aligned: bool) -> None:
    """Launch the copy. addresses: int64 `[layers]`, of the targets. strides: of heads and inner, in elements."""
    layers, heads, inners, length = source.shape
    _scatter_kernel[(layers * heads * inners, triton.cdiv(length, BLOCK))](
        source, addresses, heads, inners, length, strides[0], strides[1],
        ALIGNED=is_aligned, BLOCK=min(BLOCK, triton.next_power_of_2(length)), num_warps=1,
    )  # fmt: skip
