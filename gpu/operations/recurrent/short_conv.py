"""Compute a gated short convolution between its projections (LFM2), by the contract of `delta_net`.

A token's projected x has three parts, b, c and v, each as wide as hidden states. Each channel of b * v goes through a
causal convolution by itself, without an activation, and the result is multiplied by c. All that a sequence keeps of its
past is the last inputs of its convolution, in the same ring as a gated delta net's. So drafted tokens that are refused
leave nothing behind, and those that are accepted need no update. Everything is computed in float32, or in float64 if x
is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.model.spec import Recurrent

_BLOCK = 256


def run_short_segment(
    mixed: Tensor, conv: Tensor, held_rings: Tensor, number: int, begin: int
) -> Tensor:  # fmt: skip
    """Compute consecutive tokens of one sequence; return `[tokens, width]` in mixed's dtype.

    mixed: `[tokens, 3 * width]`. conv: `[width, 1, taps]`. held_rings: `[states, ring length, width]`. number: the
    sequence's. begin: the position of the first token; 0 begins a new sequence.
    """
    wide = torch.promote_types(mixed.dtype, torch.float32)
    front, gate, back = mixed.chunk(3, 1)
    made = convolve(front * back, conv[:, 0].to(wide), held_rings[number], begin)
    return made.mul_(gate).to(mixed.dtype)


def convolve(inputs: Tensor, conv: Tensor, ring: Tensor, begin: int) -> Tensor:
    """Return a causal convolution of each channel, `[tokens, channels]`, and write the last inputs to the ring.

    conv: `[channels, taps]`, in the compute dtype.
    """
    num_tokens, taps, length = len(inputs), conv.shape[1], len(ring)
    before = torch.arange(begin - taps + 1, begin, device=inputs.device)
    rows = torch.cat([ring[before % length] if begin else ring.new_zeros(taps - 1, ring.shape[1]), inputs])
    if 0 < begin < taps - 1:
        rows[: taps - 1 - begin] = 0.0
    rows = rows.to(conv.dtype)
    summed = rows[:num_tokens] * conv[:, 0]
    for tap in range(1, taps):
        summed.addcmul_(rows[tap : tap + num_tokens], conv[:, tap])
    kept = inputs[-length:]
    places = torch.arange(begin + num_tokens - len(kept), begin + num_tokens, device=inputs.device) % length
    ring[places] = kept
    return summed


@triton.jit
def _short_step_kernel(
    mixed, conv, rings, state_of_slot, slots, cells, out, mixed_row, ring_stride,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    slot = tl.load(slots + row)
    summed = tl.zeros([BLOCK], tl.float32)
    if slot >= 0:
        cell = tl.load(cells + row)
        ring = rings + tl.load(state_of_slot + slot).to(tl.int64) * ring_stride
        none = channel * 0  # a block, as masks must be
        in_step = 1
        for back in tl.static_range(TAPS):
            at = tl.maximum(row - back, 0)
            # Rows of a slot are neighbours.
            in_step = in_step * (row >= back).to(tl.int32) * (tl.load(slots + at) == slot).to(tl.int32)
            own_rows = inside & (none + in_step == 1)
            front = tl.load(mixed + at * mixed_row + channel, mask=own_rows, other=0.0)
            last = tl.load(mixed + at * mixed_row + 2 * WIDTH + channel, mask=own_rows, other=0.0)
            own = (front * last).to(mixed.dtype.element_ty)
            before = inside & (none + cell >= back) & (none + in_step == 0)
            kept = tl.load(ring + ((cell - back + LENGTH) % LENGTH) * WIDTH + channel, mask=before, other=0.0)
            tap = tl.load(conv + channel * TAPS + TAPS - 1 - back, mask=inside, other=0.0).to(tl.float32)
            summed += (own.to(tl.float32) + kept.to(tl.float32)) * tap
            if back == 0:
                tl.store(ring + (cell % LENGTH) * WIDTH + channel, own, mask=inside)
        gate = tl.load(mixed + row * mixed_row + WIDTH + channel, mask=inside, other=0.0).to(tl.float32)
        summed *= gate
    tl.store(out + row * WIDTH + channel, summed.to(out.dtype.element_ty), mask=inside)


def short_step(
    mixed: Tensor, conv: Tensor, own: Recurrent, rings: Tensor, state_of_slot: Tensor, slots: Tensor, cells: Tensor
) -> Tensor:  # fmt: skip
    """Compute one token per row, with the arguments of `delta_step`, on a device with Triton.

    `delta_step` has the reference. A row reads the inputs of earlier tokens from earlier rows, or from the ring. Rows
    write to places of the ring that no row of the step reads. Bytes moved: rows read and written once, and the ring's.
    """
    out = mixed.new_empty(len(mixed), own.value_width)
    _short_step_kernel[(len(mixed), triton.cdiv(own.value_width, _BLOCK))](
        mixed, conv, rings, state_of_slot, slots, cells, out, mixed.stride(0), rings.stride(0),
        WIDTH=own.value_width, TAPS=own.conv_tokens, LENGTH=rings.shape[1], BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out
