"""Compute prompts through a gated delta net, in chunks, on a GPU: four kernels for all sequences of a unit.

`delta_net` and `delta_rule` have the formulas. The first kernel convolves and norms queries, keys and values, and
writes them to a part of memory for each chunk and value head. The second has one program for each part: it computes
gates, the products of keys and queries, and the inverse of I + A. If T is the inverse of the blocks of n on the
diagonal, and L is what lies below them within blocks of 2 n, then the inverse of the blocks of 2 n is T - T L T. Six
doublings invert 64 rows, each as exactly as substitution. The third kernel has one program for each sequence, value
head and share of the values. It goes through the chunks with the state in registers, and copies the state where a
prompt leaves a branch. The last kernel norms outputs and multiplies them by their gates. Parts are kept for
CHUNKS_AT_ONCE chunks, in float32, so that memory does not grow with prompts.

Mamba-2 (`mamba2`) uses the same kernels without a system to solve: it writes a token's time step times its value. Its
outputs, in float32, start as the values' own shares, and are normed when all are there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.model.spec import Recurrent
from gpu.operations.arguments import check
from gpu.operations.recurrent.delta_net import HEAD_EPS, LayerStates, RecurrentWeights, run_segment
from gpu.operations.recurrent.mamba2 import gated_norm
from gpu.operations.recurrent.state_arrays import CHUNK_TOKENS, CHUNKS_AT_ONCE, chunk_arrays, padded
from gpu.upload import upload
from transfer.allocation import allocate_empty

_COLUMNS = 64  # columns of a chunk's rows that are multiplied at once
_VALUES = 64  # columns of values that a program takes through the chunks; of Mamba-2's narrower heads, half as many


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `[begin, end)` of a unit that are consecutive tokens of one sequence.

    number: of the sequence's state. first: position of the first token. part_begin: the sequence's first row in the
    unit. copies: states that get a copy of the state after the last row.
    """

    number: int
    begin: int
    end: int
    first: int
    part_begin: int
    copies: tuple[int, ...] = ()


def run_spans_reference(
    mixed: Tensor, gates: Tensor, weights: RecurrentWeights, own: Recurrent, eps: float, held: LayerStates,
    spans: Sequence[Span], out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `delta_prefill` in plain torch, span by span."""
    outs = []
    for span in spans:
        rows = slice(span.begin, span.end)
        outs.append(run_segment(mixed[rows], gates[rows], weights, own, eps, held, span.number, span.first))
        for number in span.copies:
            for arena in (held.states, held.rings):
                arena[number].copy_(arena[span.number])
    made = outs[0] if len(outs) == 1 else torch.cat(outs)
    return made if out is None else out.copy_(made)


@dataclass(frozen=True, slots=True)
class PlannedSpans:
    """The spans of a unit on the device, the same for all layers.

    table: int32 `[chunks, 6]`, for each chunk its first row, its number of rows, its first position, the state, the
        first row of its sequence, and the state that gets a copy, or -1.
    groups: first and last chunk of each group, and int32 `[sequences, 2]`, first and last chunk of each of its
        sequences.
    rings: int64 `[2, rows]`, the inputs to keep: their places in the rings of all states, and their rows.
    ring_copies: states whose rings are copied to others before the rings are written.
    state_copies: states that have further copies.
    """

    num_rows: int
    table: Tensor
    groups: tuple[tuple[int, int, Tensor], ...]
    rings: Tensor
    ring_copies: tuple[tuple[int, int], ...]
    state_copies: tuple[tuple[int, int], ...]


def plan_spans(spans: Sequence[Span], ring_length: int, device: torch.device) -> PlannedSpans:
    """Arrange the spans of a unit for the kernels. Spans are in order, and those of a sequence follow one another."""
    table, kept, ring_copies, state_copies = [], [], [], []
    for index, span in enumerate(spans):
        part_first = span.first - (span.begin - span.part_begin)
        for row in range(span.begin, span.end, CHUNK_TOKENS):
            rows = min(CHUNK_TOKENS, span.end - row)
            copy = span.copies[0] if span.copies and row + rows == span.end else -1
            table.append((row, rows, part_first + row - span.part_begin, span.number, span.part_begin, copy))
        end = part_first + span.end - span.part_begin
        is_last = index + 1 == len(spans) or spans[index + 1].part_begin != span.part_begin
        for number in (*span.copies[:1], *((span.number,) if is_last else ())):
            places = range(max(part_first, end - ring_length), end)
            kept += [
                (number * ring_length + place % ring_length, span.part_begin + place - part_first) for place in places
            ]
        if span.copies and part_first > max(0, end - ring_length):
            ring_copies.append((span.number, span.copies[0]))
        state_copies += [(span.copies[0], other) for other in span.copies[1:]]
    groups = []
    for begin in range(0, len(table), CHUNKS_AT_ONCE):
        end = min(begin + CHUNKS_AT_ONCE, len(table))
        starts = [chunk for chunk in range(begin, end) if chunk == begin or table[chunk][4] != table[chunk - 1][4]]
        ends = [*starts[1:], end]
        own = np.array(list(zip(starts, ends, strict=True)), np.int32) - begin
        groups.append((begin, end, upload(own, device)))
    return PlannedSpans(
        spans[-1].end, upload(np.array(table, np.int32), device), tuple(groups),
        upload(np.array(kept, np.int64).T.copy(), device), tuple(ring_copies), tuple(state_copies),
    )  # fmt: skip


@triton.jit
def _rounded(numbers, PRECISION: tl.constexpr):
    """Round float32 to the 10 bits that TF32 products take.

    Tensor cores would cut the other bits off, which gives twice the error, all on one side.
    """
    if PRECISION == "tf32":
        rounded = ((numbers.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        return tl.where(numbers == numbers, rounded, numbers)  # a card's NaN has all bits, and would become -0
    return numbers


@triton.jit
def _convolved_tile(
    mixed, mixed_row, rows, first, ring, conv, conv_bias, cells, channels, inside,
    TAPS: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Return the SiLU of the convolution of some channels, for a chunk's rows.

    first: the sequence's first row in the unit.
    """
    summed = tl.zeros(inside.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        own = inside & (rows - back >= first)[:, None]
        kept = inside & ((rows - back < first) & (cells >= back))[:, None]
        here = tl.load(mixed + (rows - back)[:, None] * mixed_row + channels[None, :], mask=own, other=0.0)
        places = ((cells - back + LENGTH) % LENGTH) * WIDTH
        before = tl.load(ring + places[:, None] + channels[None, :], mask=kept, other=0.0)
        weight = tl.load(conv + channels * TAPS + tap, mask=channels < WIDTH, other=0.0).to(tl.float32)
        summed += (here.to(tl.float32) + before.to(tl.float32)) * weight[None, :]
    if HAS_BIAS:
        summed += tl.load(conv_bias + channels, mask=channels < WIDTH, other=0.0).to(tl.float32)[None, :]
    return tl.where(inside, summed * tl.sigmoid(summed), 0.0)


@triton.jit
def _delta_inputs_kernel(
    mixed, conv, conv_bias, rings, table, parts, first_chunk, mixed_row, ring_stride, head_eps, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr, TAPS: tl.constexpr, LENGTH: tl.constexpr,
    CHUNK: tl.constexpr, IS_TILED: tl.constexpr, IS_MAMBA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, head, kind = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = table + (first_chunk + chunk) * 6
    row, count, cell = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    number, first = tl.load(entry + 3).to(tl.int64), tl.load(entry + 4)
    width: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    at, k_at, v_at = tl.arange(0, CHUNK), tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    is_row = at < count
    rows, cells = (row + at).to(tl.int64), cell + at
    key_head = head % KEY_HEADS if IS_TILED else head // (VALUE_HEADS // KEY_HEADS)
    ring = rings + number * ring_stride
    size: tl.constexpr = CHUNK * (3 * BLOCK_KEY + BLOCK_VALUE + CHUNK)
    part = parts + (chunk * VALUE_HEADS + head).to(tl.int64) * size
    if kind == 2:  # Triton merges equal names of both branches, so tensors of other shapes have other names
        v_inside = is_row[:, None] & (v_at < VALUE_DIM)[None, :]
        v_channels = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v_at
        v = _convolved_tile(mixed, mixed_row, rows, first, ring, conv, conv_bias, cells, v_channels, v_inside,
                            TAPS, LENGTH, width, IS_MAMBA)  # fmt: skip
        tl.store(part + CHUNK * (3 * BLOCK_KEY + CHUNK) + at[:, None] * BLOCK_VALUE + v_at[None, :], v)
    else:
        inside = is_row[:, None] & (k_at < KEY_DIM)[None, :]
        channels = (kind * KEY_HEADS + key_head) * KEY_DIM + k_at
        made = _convolved_tile(mixed, mixed_row, rows, first, ring, conv, conv_bias, cells, channels, inside,
                               TAPS, LENGTH, width, IS_MAMBA)  # fmt: skip
        if not IS_MAMBA:
            made = made * (tl.rsqrt(tl.sum(made * made, 1) + head_eps) * tl.where(kind == 0, scale, 1.0))[:, None]
        places = part + (2 - kind) * CHUNK * BLOCK_KEY + at[:, None] * BLOCK_KEY + k_at[None, :]
        tl.store(places, _rounded(made, PRECISION))


@triton.jit
def _delta_chunk_kernel(
    gates, decay, time_bias, skip, table, parts, fades, out, first_chunk, gates_row,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, DOUBLINGS: tl.constexpr, IS_MAMBA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    entry = table + (first_chunk + chunk) * 6
    row, count = tl.load(entry), tl.load(entry + 1)
    at, column = tl.arange(0, CHUNK), tl.arange(0, COLUMNS)
    is_row = at < count
    rows = (row + at).to(tl.int64)
    size: tl.constexpr = CHUNK * (3 * BLOCK_KEY + BLOCK_VALUE + CHUNK)
    part = parts + (chunk * VALUE_HEADS + head).to(tl.int64) * size
    own_key = part + CHUNK * BLOCK_KEY
    own_query = own_key + CHUNK * BLOCK_KEY
    square = own_query + CHUNK * BLOCK_KEY
    keys = tl.zeros([CHUNK, CHUNK], tl.float32)
    attended = tl.zeros([CHUNK, CHUNK], tl.float32)
    for begin in range(0, BLOCK_KEY, COLUMNS):
        cells = at[:, None] * BLOCK_KEY + (begin + column)[None, :]
        q, k = tl.load(own_query + cells), tl.load(own_key + cells)
        if not IS_MAMBA:
            keys = tl.dot(k, tl.trans(k), keys, input_precision=PRECISION)
        attended = tl.dot(q, tl.trans(k), attended, input_precision=PRECISION)
    share = tl.load(gates + rows * gates_row + head, mask=is_row, other=0.0).to(tl.float32)
    time = share
    if not IS_MAMBA:
        time = tl.load(gates + rows * gates_row + VALUE_HEADS + head, mask=is_row, other=0.0).to(tl.float32)
    time += tl.load(time_bias + head)
    soft = tl.where(time > 20.0, time, tl.log(1.0 + tl.exp(tl.minimum(time, 20.0))))
    share = tl.where(is_row, soft if IS_MAMBA else tl.sigmoid(share), 0.0)
    steps = tl.where(is_row, -tl.exp(tl.load(decay + head)) * soft, 0.0)
    summed, last = tl.cumsum(steps, 0), tl.sum(steps, 0)
    is_behind = at[:, None] > at[None, :]
    is_own = at[:, None] == at[None, :]
    fading = tl.where(is_behind, tl.exp(tl.where(is_behind, summed[:, None] - summed[None, :], 0.0)), 0.0)
    shares = _rounded(attended * tl.where(is_own, 1.0, fading), PRECISION)
    tl.store(square + at[:, None] * CHUNK + at[None, :], shares)
    if not IS_MAMBA:
        system = keys * fading * share[:, None]
        solved = tl.where(is_own, 1.0, 0.0)
        for doubling in tl.static_range(DOUBLINGS):
            place = at >> doubling
            is_pair = (place[:, None] ^ 1) == place[None, :]
            across = tl.where(is_pair & is_behind, system, 0.0)
            if doubling == 0:
                solved -= across
            else:
                made = tl.dot(solved, across, input_precision=PRECISION)
                solved -= tl.dot(made, solved, input_precision=PRECISION)
    for begin in range(0, BLOCK_KEY, COLUMNS):
        cells = at[:, None] * BLOCK_KEY + (begin + column)[None, :]
        q, k = tl.load(own_query + cells), tl.load(own_key + cells)
        tl.store(own_query + cells, _rounded(q * tl.exp(summed)[:, None], PRECISION))
        tl.store(own_key + cells, _rounded(k * tl.exp(last - summed)[:, None], PRECISION))
        if not IS_MAMBA:
            read = tl.dot(solved, k * (share * tl.exp(summed))[:, None], input_precision=PRECISION)
            tl.store(part + cells, _rounded(read, PRECISION))
    for begin in range(0, BLOCK_VALUE, COLUMNS):
        places = square + CHUNK * CHUNK + at[:, None] * BLOCK_VALUE + (begin + column)[None, :]
        v = tl.load(places)
        if IS_MAMBA:
            written = v * share[:, None]
            inside = is_row[:, None] & (begin + column < VALUE_DIM)[None, :]
            own_out = out + rows[:, None] * (VALUE_HEADS * VALUE_DIM) + (head * VALUE_DIM + begin + column)[None, :]
            tl.store(own_out, v * tl.load(skip + head), mask=inside)
        else:
            written = tl.dot(solved, v * share[:, None], input_precision=PRECISION)
        tl.store(places, written)
    tl.store(fades + chunk * VALUE_HEADS + head, tl.exp(last))


@triton.jit
def _delta_scan_kernel(
    table, sequences, parts, fades, states, first_chunk, state_stride,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, IS_MAMBA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    at, k_at = tl.arange(0, CHUNK), tl.arange(0, BLOCK_KEY)
    v_at = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    begin, end = tl.load(sequences + 2 * sequence), tl.load(sequences + 2 * sequence + 1)
    entry = table + (first_chunk + begin) * 6
    inside = (k_at < KEY_DIM)[:, None] & (v_at < VALUE_DIM)[None, :]
    places = (head * KEY_DIM + k_at)[:, None] * VALUE_DIM + v_at[None, :]
    own = states + tl.load(entry + 3).to(tl.int64) * state_stride + places
    goes_on = k_at * 0 + tl.load(entry + 2) > 0  # a block, as masks must be
    state = tl.load(own, mask=inside & goes_on[:, None], other=0.0).to(tl.float32)
    size: tl.constexpr = CHUNK * (3 * BLOCK_KEY + BLOCK_VALUE + CHUNK)
    k_cells = at[:, None] * BLOCK_KEY + k_at[None, :]
    v_cells = at[:, None] * BLOCK_VALUE + v_at[None, :]
    for chunk in range(begin, end):
        part = parts + (chunk * VALUE_HEADS + head).to(tl.int64) * size
        square = part + 3 * CHUNK * BLOCK_KEY
        made = square + CHUNK * CHUNK + v_cells
        rows = tl.load(made)
        read = _rounded(state, PRECISION)
        if not IS_MAMBA:
            rows -= tl.dot(tl.load(part + k_cells), read, input_precision=PRECISION)
        rows = _rounded(rows, PRECISION)
        attended = tl.load(square + at[:, None] * CHUNK + at[None, :])
        out = tl.dot(tl.load(part + 2 * CHUNK * BLOCK_KEY + k_cells), read, input_precision=PRECISION)
        out = tl.dot(attended, rows, out, input_precision=PRECISION)
        tl.store(made, out)
        keys = tl.load(part + CHUNK * BLOCK_KEY + at[None, :] * BLOCK_KEY + k_at[:, None])
        state = tl.dot(keys, rows, state * tl.load(fades + chunk * VALUE_HEADS + head), input_precision=PRECISION)
        copy = tl.load(table + (first_chunk + chunk) * 6 + 5)
        if copy >= 0:
            kept = states + copy.to(tl.int64) * state_stride + places
            tl.store(kept, state.to(states.dtype.element_ty), mask=inside)
    tl.store(own, state.to(states.dtype.element_ty), mask=inside)


@triton.jit
def _delta_out_kernel(
    mixed, norm, table, parts, out, first_chunk, mixed_row, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr, CHUNK: tl.constexpr, IS_MAMBA: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    entry = table + (first_chunk + chunk) * 6
    row, count = tl.load(entry), tl.load(entry + 1)
    at, v_at = tl.arange(0, CHUNK), tl.arange(0, BLOCK_VALUE)
    inside = (at < count)[:, None] & (v_at < VALUE_DIM)[None, :]
    size: tl.constexpr = CHUNK * (3 * BLOCK_KEY + BLOCK_VALUE + CHUNK)
    made = parts + (chunk * VALUE_HEADS + head).to(tl.int64) * size + CHUNK * (3 * BLOCK_KEY + CHUNK)
    o = tl.load(made + at[:, None] * BLOCK_VALUE + v_at[None, :], mask=inside, other=0.0)
    rows, columns = (row + at).to(tl.int64), head * VALUE_DIM + v_at
    place = out + rows[:, None] * (VALUE_HEADS * VALUE_DIM) + columns[None, :]
    if IS_MAMBA:
        tl.store(place, o + tl.load(place, mask=inside, other=0.0), mask=inside)
    else:
        o = o * tl.rsqrt(tl.sum(o * o, 1) / VALUE_DIM + eps)[:, None]
        o = o * tl.load(norm + v_at, mask=v_at < VALUE_DIM, other=0.0).to(tl.float32)[None, :]
        width: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        z = tl.load(mixed + rows[:, None] * mixed_row + width + columns[None, :], mask=inside, other=0.0)
        z = z.to(tl.float32)
        tl.store(place, (o * z * tl.sigmoid(z)).to(out.dtype.element_ty), mask=inside)


def delta_prefill(
    mixed: Tensor, gates: Tensor, weights: RecurrentWeights, own: Recurrent, eps: float, held: LayerStates,
    planned: PlannedSpans, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute a unit's tokens, update their sequences' states in place, and copy states where spans ask for it.

    Returns `[tokens, value_heads * value_dim]` in mixed's dtype, in `out` if it is given, else new. mixed: `[tokens,
    projected_width]`, gates: `[tokens, gate_rows]`, bf16 or float32: see `delta_net.run_segment`. Products are computed
    in float32 if mixed is, else in TF32. Raises ValueError for another shape or type.
    """
    tokens, device, heads = planned.num_rows, mixed.device, own.value_heads
    check("delta_prefill", "mixed", mixed, (tokens, own.projected_width), mixed.dtype, device)
    check("delta_prefill", "gates", gates, (tokens, own.gate_rows), mixed.dtype, device)
    check("delta_prefill", "rings", held.rings, tuple(held.rings.shape), mixed.dtype, device)
    is_wide, is_mamba = mixed.dtype == torch.float32, own.is_mamba
    if out is None:
        out = torch.empty(tokens, own.value_width, dtype=mixed.dtype, device=device)
    check("delta_prefill", "out", out, (tokens, own.value_width), mixed.dtype, device)
    made = torch.empty_like(out, dtype=torch.float32) if is_mamba else out
    arrays = {name: allocate_empty(one, device) for name, one in chunk_arrays(own, len(planned.table)).items()}
    parts, fades = arrays["parts"], arrays["fades"]
    sizes = {"VALUE_DIM": own.value_dim, "VALUE_HEADS": heads, "CHUNK": CHUNK_TOKENS,
             "BLOCK_KEY": padded(own.key_dim), "BLOCK_VALUE": padded(own.value_dim),
             "IS_MAMBA": is_mamba}  # fmt: skip
    conv_bias, skip = (weights.conv_bias, weights.skip) if is_mamba else (weights.conv, weights.decay)
    values, precision = min(_VALUES // (1 + is_mamba), sizes["BLOCK_VALUE"]), "ieee" if is_wide else "tf32"
    for begin, end, sequences in planned.groups:
        _delta_inputs_kernel[(end - begin, heads, 3)](
            mixed, weights.conv, conv_bias, held.rings, planned.table, parts, begin, mixed.stride(0),
            held.rings.stride(0), HEAD_EPS, own.key_dim**-0.5, KEY_HEADS=own.key_heads, KEY_DIM=own.key_dim,
            TAPS=own.conv_tokens, LENGTH=held.rings.shape[1], IS_TILED=own.is_tiled,
            PRECISION=precision, **sizes, num_warps=8,
        )  # fmt: skip
        _delta_chunk_kernel[(end - begin, heads)](
            gates, weights.decay, weights.time_bias, skip, planned.table, parts, fades, made, begin, gates.stride(0),
            COLUMNS=min(_COLUMNS, sizes["BLOCK_KEY"], sizes["BLOCK_VALUE"]), DOUBLINGS=CHUNK_TOKENS.bit_length() - 1,
            PRECISION=precision, **sizes, num_warps=4, num_stages=1,
        )  # fmt: skip
        _delta_scan_kernel[(len(sequences), heads, sizes["BLOCK_VALUE"] // values)](
            planned.table, sequences, parts, fades, held.states, begin, held.states.stride(0), VALUES=values,
            KEY_DIM=own.key_dim,
            PRECISION=precision, **sizes, num_warps=4, num_stages=1,
        )  # fmt: skip
        _delta_out_kernel[(end - begin, heads)](
            mixed, weights.norm, planned.table, parts, made, begin, mixed.stride(0), eps, KEY_HEADS=own.key_heads,
            KEY_DIM=own.key_dim, **sizes, num_warps=4,
        )  # fmt: skip
    for source, target in planned.ring_copies:
        held.rings[target].copy_(held.rings[source])
    places, rows = planned.rings.unbind(0)
    held.rings.flatten(0, 1).index_copy_(0, places, mixed.narrow(1, 0, own.conv_width).index_select(0, rows))
    for source, target in planned.state_copies:
        held.states[target].copy_(held.states[source])
        held.rings[target].copy_(held.rings[source])
    if is_mamba:
        z = mixed.narrow(1, own.conv_width, own.value_width)
        gated_norm(made, z, weights.norm, own.key_heads, eps, out=out)
    return out
