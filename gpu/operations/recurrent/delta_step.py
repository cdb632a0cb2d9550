"""Compute a decode step of a gated delta net or of Mamba-2 between its projections: one token per row.

`delta_net` and `mamba2` have the formulas. A program has one value head of one sequence. With few rows it has a share
of the head's values, so that all multiprocessors are in use; then the norm of a head's output is a launch of its own.
The state stays in registers over the rows of its sequence, which follow one another. A program reads the inputs of
earlier tokens from the ring, or from the step's own rows. It writes its own inputs to places that no program of the
step reads: a sequence has at most MOST_STEP_ROWS rows. Programs that share a key head write the same. Bytes moved: the
state twice, `2 * 4 * value_width * key_dim` per sequence.

Tokens of a draft come after all others of their sequence, and change the state only in registers: the stored state is
the one before them. Their inputs are in the ring, and their gates are kept. Once it is known which of them are
accepted, `delta_commit` updates the states with these, in all layers at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.model.spec import Recurrent
from gpu.operations.arguments import check, runs_on_triton
from gpu.operations.recurrent.delta_net import HEAD_EPS, LayerStates, RecurrentWeights, run_segment
from gpu.operations.recurrent.mamba2 import gated_norm
from gpu.operations.recurrent.short_conv import short_step
from gpu.operations.recurrent.state_arrays import MOST_STEP_ROWS

ENOUGH = 128  # programs, about one for each multiprocessor
LEAST_VALUES = 32  # of a program, which are 128 bytes of each row of a state


def delta_step_reference(
    mixed: Tensor, gates: Tensor, weights: RecurrentWeights, own: Recurrent, eps: float, held: LayerStates,
    state_of_slot: Tensor, slots: Tensor, cells: Tensor, drafted: Tensor,
) -> Tensor:  # fmt: skip
    """Compute `delta_step` in plain torch, row by row."""
    out = mixed.new_zeros(len(mixed), own.value_width)
    in_front: dict[int, Tensor] = {}  # states before their drafts, by number
    num_drafted = 0
    for row, (slot, cell, is_draft) in enumerate(zip(slots.tolist(), cells.tolist(), drafted.tolist(), strict=True)):
        if slot >= 0:
            one = slice(row, row + 1)
            number = int(state_of_slot[slot])
            num_drafted = num_drafted + 1 if is_draft else 0
            if is_draft:
                in_front.setdefault(number, held.states[number].clone())
                held.drafts[slot, num_drafted - 1] = gates[row]
            out[one] = run_segment(mixed[one], gates[one], weights, own, eps, held, number, cell, is_chunked=False)
    for number, state in in_front.items():
        held.states[number] = state
    return out


def delta_commit_reference(
    weights: RecurrentWeights, own: Recurrent, held: LayerStates, state_of_slot: Tensor, slots: Tensor, cells: Tensor,
    accepted: Tensor,
) -> None:  # fmt: skip
    """Compute `delta_commit` for one layer in plain torch."""
    length = held.rings.shape[1]
    for slot, cell, count in zip(slots.tolist(), cells.tolist(), accepted.tolist(), strict=True):
        if count:
            number = int(state_of_slot[slot])
            behind = torch.arange(cell + 1, cell + 1 + count, device=held.rings.device)
            inputs = held.rings[number, behind % length]
            mixed = torch.cat([inputs, inputs.new_zeros(count, own.value_width)], 1)
            gates = held.drafts[slot, :count].clone()
            run_segment(mixed, gates, weights, own, 1.0, held, number, cell + 1, is_chunked=False)


@triton.jit
def _convolved(
    mixed, mixed_row, row, first, ring, conv, conv_bias, cell, channels, inside,
    TAPS: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Return the SiLU of the convolution of some channels, for one row. first: the sequence's first row in the step."""
    summed = tl.zeros(channels.shape, tl.float32)
    if HAS_BIAS:
        summed += tl.load(conv_bias + channels, mask=inside, other=0.0).to(tl.float32)
    none = channels * 0  # a block, as masks must be
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        own = inside & (none + (row - back) >= first)
        kept = inside & (none + (row - back) < first) & (none + cell >= back)
        here = tl.load(mixed + (row - back) * mixed_row + channels, mask=own, other=0.0).to(tl.float32)
        place = ((cell - back + LENGTH) % LENGTH) * WIDTH
        before = tl.load(ring + place + channels, mask=kept, other=0.0).to(tl.float32)
        summed += (here + before) * tl.load(conv + channels * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
    return summed * tl.sigmoid(summed)


@triton.jit
def _updated_state(state, k, v, share, time, rate, bias, IS_MAMBA: tl.constexpr):
    """Return a head's state after one more token."""
    time = time.to(tl.float32) + bias
    soft = tl.where(time > 20.0, time, tl.log(1.0 + tl.exp(tl.minimum(time, 20.0))))
    state = state * tl.exp(rate * soft)
    if IS_MAMBA:
        written = soft * v
    else:
        seen = tl.sum(state * k[:, None], 0)
        written = tl.sigmoid(share.to(tl.float32)) * (v - seen)
    return state + k[:, None] * written[None, :]


@triton.jit
def _delta_step_kernel(
    mixed, gates, conv, conv_bias, decay, time_bias, gains, states, rings, state_of_slot, slots, cells, drafted, drafts,
    out, rows, mixed_row, gates_row, state_stride, ring_stride, eps, head_eps, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr, TAPS: tl.constexpr, LENGTH: tl.constexpr,
    MOST_STEPS: tl.constexpr, MOST_ROWS: tl.constexpr, IS_TILED: tl.constexpr, IS_MAMBA: tl.constexpr,
    NORMS: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0), tl.program_id(1)
    k_at, v_at = tl.arange(0, BLOCK_KEY), tl.program_id(2) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    k_in, v_in = k_at < KEY_DIM, v_at < VALUE_DIM
    width: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    slot = tl.load(slots + first)
    before = tl.load(slots + tl.maximum(first - 1, 0))
    next_at = first + tl.arange(0, MOST_ROWS)
    count = 0
    sure = 0
    if slot < 0:
        none = tl.zeros([BLOCK_VALUE], tl.float32).to(out.dtype.element_ty)
        tl.store(out + (first.to(tl.int64) * VALUE_HEADS + head) * VALUE_DIM + v_at, none, mask=v_in)
    elif (first == 0) | (before != slot):  # rows of a slot are neighbours
        own_rows = (tl.load(slots + next_at, mask=next_at < rows, other=-1) == slot).to(tl.int32)
        count = tl.sum(own_rows, 0)
        sure = count - tl.sum(own_rows * tl.load(drafted + next_at, mask=next_at < rows, other=0), 0)
    if count > 0:
        number = tl.load(state_of_slot + slot).to(tl.int64)
        key_head = head % KEY_HEADS if IS_TILED else head // (VALUE_HEADS // KEY_HEADS)
        q_channels = key_head * KEY_DIM + k_at
        k_channels = KEY_HEADS * KEY_DIM + q_channels
        v_channels = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v_at
        ring = rings + number * ring_stride
        inside = k_in[:, None] & v_in[None, :]
        address = states + number * state_stride + head * KEY_DIM * VALUE_DIM
        address += k_at[:, None] * VALUE_DIM + v_at[None, :]
        begins = tl.load(cells + first) == 0
        state = tl.where(begins, 0.0, tl.load(address, mask=inside, other=0.0).to(tl.float32))
        rate = -tl.exp(tl.load(decay + head))
        bias = tl.load(time_bias + head)
        # For Mamba-2 the share of a value that is added to the output, else the norm's weights.
        gain = tl.load(gains + (v_at * 0 + head if IS_MAMBA else v_at), mask=v_in, other=0.0).to(tl.float32)
        for step in range(count):
            row = first.to(tl.int64) + step
            cell = tl.load(cells + row)
            q = _convolved(mixed, mixed_row, row, first, ring, conv, conv_bias, cell, q_channels, k_in,
                           TAPS, LENGTH, width, IS_MAMBA)  # fmt: skip
            k = _convolved(mixed, mixed_row, row, first, ring, conv, conv_bias, cell, k_channels, k_in,
                           TAPS, LENGTH, width, IS_MAMBA)  # fmt: skip
            v = _convolved(mixed, mixed_row, row, first, ring, conv, conv_bias, cell, v_channels, v_in,
                           TAPS, LENGTH, width, IS_MAMBA)  # fmt: skip
            own_share = tl.load(gates + row * gates_row + head)
            own_time = own_share
            if not IS_MAMBA:
                q = q * (tl.rsqrt(tl.sum(q * q, 0) + head_eps) * scale)
                k = k * tl.rsqrt(tl.sum(k * k, 0) + head_eps)
                own_time = tl.load(gates + row * gates_row + VALUE_HEADS + head)
            state = _updated_state(state, k, v, own_share, own_time, rate, bias, IS_MAMBA)
            if step == sure - 1:
                tl.store(address, state.to(states.dtype.element_ty), mask=inside)
            if step >= sure:
                gate_rows: tl.constexpr = VALUE_HEADS if IS_MAMBA else 2 * VALUE_HEADS
                kept = drafts + ((slot * (MOST_STEPS - 1) + step - sure) * gate_rows + head).to(tl.int64)
                tl.store(kept, own_share)
                if not IS_MAMBA:
                    tl.store(kept + VALUE_HEADS, own_time)
            made = tl.sum(state * q[:, None], 0)
            if IS_MAMBA:
                made += gain * v
            elif NORMS:
                made = made * tl.rsqrt(tl.sum(made * made, 0) / VALUE_DIM + eps) * gain
                z_at = mixed + row * mixed_row + width + head * VALUE_DIM + v_at
                z = tl.load(z_at, mask=v_in, other=0.0).to(tl.float32)
                made = made * z * tl.sigmoid(z)
            out_at = out + (row * VALUE_HEADS + head) * VALUE_DIM + v_at
            tl.store(out_at, made.to(out.dtype.element_ty), mask=v_in)
            place = ring + (cell % LENGTH) * width
            own = mixed + row * mixed_row
            tl.store(place + q_channels, tl.load(own + q_channels, mask=k_in, other=0.0), mask=k_in)
            tl.store(place + k_channels, tl.load(own + k_channels, mask=k_in, other=0.0), mask=k_in)
            tl.store(place + v_channels, tl.load(own + v_channels, mask=v_in, other=0.0), mask=v_in)


def delta_step(
    mixed: Tensor, gates: Tensor, weights: RecurrentWeights, own: Recurrent, eps: float, held: LayerStates,
    state_of_slot: Tensor, slots: Tensor, cells: Tensor, drafted: Tensor,
) -> Tensor:  # fmt: skip
    """Compute one token per row, and update its slot's state in place.

    Returns `[rows, value_heads * value_dim]` in mixed's dtype, zeros in rows that are not in use. mixed: `[rows,
    projected_width]`, gates: `[rows, gate_rows]`: see `delta_net.run_segment`. state_of_slot: int32 `[slots]`. slots:
    int32 `[rows]`, -1 in rows that are not in use. cells: int64 `[rows]`, positions. Rows of one slot follow one
    another, at most MOST_STEP_ROWS. drafted: int32 `[rows]`, 1 for tokens that may be refused, after one of their slot
    that may not: they leave the stored state as it is, and wait for `delta_commit`. Raises ValueError for another shape
    or type.
    """
    rows, device = len(mixed), mixed.device
    check("delta_step", "mixed", mixed, (rows, own.projected_width), mixed.dtype, device)
    check("delta_step", "gates", gates, (rows, own.gate_rows), mixed.dtype, device)
    check("delta_step", "slots", slots, (rows,), torch.int32, device)
    check("delta_step", "cells", cells, (rows,), torch.int64, device)
    check("delta_step", "drafted", drafted, (rows,), torch.int32, device)
    check("delta_step", "rings", held.rings, tuple(held.rings.shape), mixed.dtype, device)
    if not runs_on_triton(mixed) or not rows:
        return delta_step_reference(mixed, gates, weights, own, eps, held, state_of_slot, slots, cells, drafted)
    if own.is_short:
        return short_step(mixed, weights.conv, own, held.rings, state_of_slot, slots, cells)
    values = _values_at_once(rows, own)
    parts = triton.cdiv(triton.next_power_of_2(own.value_dim), values)
    is_mamba, norms = own.is_mamba, not own.is_mamba and parts == 1
    out = torch.empty(rows, own.value_width, dtype=mixed.dtype if norms else torch.float32, device=device)
    _delta_step_kernel[(rows, own.value_heads, parts)](
        mixed, gates, weights.conv, weights.conv_bias if is_mamba else weights.conv, weights.decay, weights.time_bias,
        weights.skip if is_mamba else weights.norm, held.states, held.rings,
        state_of_slot, slots, cells, drafted, held.drafts, out, rows, mixed.stride(0), gates.stride(0),
        held.states.stride(0), held.rings.stride(0), eps, HEAD_EPS, own.key_dim**-0.5,
        KEY_HEADS=own.key_heads, VALUE_HEADS=own.value_heads, KEY_DIM=own.key_dim, VALUE_DIM=own.value_dim,
        BLOCK_KEY=triton.next_power_of_2(own.key_dim), BLOCK_VALUE=values,
        TAPS=own.conv_tokens, LENGTH=held.rings.shape[1], MOST_STEPS=MOST_STEP_ROWS,
        MOST_ROWS=triton.next_power_of_2(MOST_STEP_ROWS), IS_TILED=own.is_tiled, IS_MAMBA=is_mamba, NORMS=norms,
        num_warps=8 if parts == 1 else 4,
    )  # fmt: skip
    if norms:
        return out
    z, groups = mixed.narrow(1, own.conv_width, own.value_width), own.key_heads if is_mamba else own.value_heads
    return gated_norm(out, z, weights.norm, groups, eps, slots, gates_last=not is_mamba)


def _values_at_once(rows: int, own: Recurrent) -> int:
    """Return how many values of a head one program has: all, or fewer if otherwise there would be too few programs."""
    values = triton.next_power_of_2(own.value_dim)
    while values > LEAST_VALUES and rows * own.value_heads * (triton.next_power_of_2(own.value_dim) // values) < ENOUGH:
        values //= 2
    return values


@triton.jit
def _delta_commit_kernel(
    conv, conv_bias, decay, time_bias, drafts, states, rings, state_of_slot, slots, cells, accepted, drafts_layer,
    states_layer, rings_layer, state_stride, ring_stride, head_eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr, TAPS: tl.constexpr, LENGTH: tl.constexpr,
    MOST_STEPS: tl.constexpr, IS_TILED: tl.constexpr, IS_MAMBA: tl.constexpr,
):  # fmt: skip
    place, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    count = tl.load(accepted + place).to(tl.int32)
    if count > 0:
        k_at, v_at = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
        k_in, v_in = k_at < KEY_DIM, v_at < VALUE_DIM
        width: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        slot = tl.load(slots + place)
        first = tl.load(cells + place) + 1
        number = tl.load(state_of_slot + slot).to(tl.int64)
        key_head = head % KEY_HEADS if IS_TILED else head // (VALUE_HEADS // KEY_HEADS)
        k_channels = KEY_HEADS * KEY_DIM + key_head * KEY_DIM + k_at
        v_channels = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v_at
        ring = rings + layer * rings_layer + number * ring_stride
        taps = conv + layer * width * TAPS
        offsets = conv_bias + layer * width
        inside = k_in[:, None] & v_in[None, :]
        address = states + layer * states_layer + number * state_stride + head * KEY_DIM * VALUE_DIM
        address += k_at[:, None] * VALUE_DIM + v_at[None, :]
        state = tl.load(address, mask=inside, other=0.0).to(tl.float32)
        rate = -tl.exp(tl.load(decay + layer * VALUE_HEADS + head))
        bias = tl.load(time_bias + layer * VALUE_HEADS + head)
        gate_rows: tl.constexpr = VALUE_HEADS if IS_MAMBA else 2 * VALUE_HEADS
        kept = drafts + layer * drafts_layer + slot * (MOST_STEPS - 1) * gate_rows + head
        for step in range(count):
            cell = first + step
            none = step * 0  # all inputs are in the ring, and none in rows of the step
            k = _convolved(ring, width, none, none + 1, ring, taps, offsets, cell, k_channels, k_in,
                           TAPS, LENGTH, width, IS_MAMBA)  # fmt: skip
            v = _convolved(ring, width, none, none + 1, ring, taps, offsets, cell, v_channels, v_in,
                           TAPS, LENGTH, width, IS_MAMBA)  # fmt: skip
            gate = kept + step * gate_rows
            share = tl.load(gate)
            time = share
            if not IS_MAMBA:
                k = k * tl.rsqrt(tl.sum(k * k, 0) + head_eps)
                time = tl.load(gate + VALUE_HEADS)
            state = _updated_state(state, k, v, share, time, rate, bias, IS_MAMBA)
        tl.store(address, state.to(states.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class StackedWeights:
    """The weights of state updates, of all layers.

    conv: `[layers, conv_width, conv_tokens]`. conv_bias: `[layers, conv_width]` or None. decay, time_bias: float32
    `[layers, value_heads]`.
    """

    conv: Tensor
    conv_bias: Tensor | None
    decay: Tensor
    time_bias: Tensor


def stack(layers: Sequence[RecurrentWeights]) -> StackedWeights:
    """Return copies of the layers' weights, stacked."""
    biases = [one.conv_bias for one in layers if one.conv_bias is not None]
    return StackedWeights(
        torch.stack([one.conv[:, 0] for one in layers]), torch.stack(biases) if biases else None,
        torch.stack([one.decay for one in layers]), torch.stack([one.time_bias for one in layers]),
    )  # fmt: skip


def delta_commit(
    stacked: StackedWeights, own: Recurrent, held: LayerStates, state_of_slot: Tensor, slots: Tensor, cells: Tensor,
    accepted: Tensor,
) -> None:  # fmt: skip
    """Update the states of all layers with the first `accepted[i]` tokens that were drafted for `slots[i]` in the last
    step.

    These come after the token at `cells[i]`. Nothing may have been drafted for the slots since. held: with an axis of
    layers in front. state_of_slot: int32 `[slots]`. slots, cells, accepted: int64 `[count]`. Needs a device with Triton
    (elsewhere `delta_commit_reference`).
    """
    for name, given in (("slots", slots), ("cells", cells), ("accepted", accepted)):
        check("delta_commit", name, given, (len(slots),), torch.int64, held.states.device)
    _delta_commit_kernel[(len(slots), own.value_heads, len(held.states))](
        stacked.conv, stacked.conv if stacked.conv_bias is None else stacked.conv_bias, stacked.decay,
        stacked.time_bias, held.drafts, held.states, held.rings, state_of_slot, slots,
        cells, accepted, held.drafts.stride(0), held.states.stride(0), held.rings.stride(0), held.states.stride(1),
        held.rings.stride(1), HEAD_EPS,
        KEY_HEADS=own.key_heads, VALUE_HEADS=own.value_heads, KEY_DIM=own.key_dim, VALUE_DIM=own.value_dim,
        BLOCK_KEY=triton.next_power_of_2(own.key_dim), BLOCK_VALUE=triton.next_power_of_2(own.value_dim),
        TAPS=own.conv_tokens, LENGTH=held.rings.shape[2], MOST_STEPS=MOST_STEP_ROWS, IS_TILED=own.is_tiled,
        IS_MAMBA=own.is_mamba, num_warps=8,
    )  # fmt: skip
