"""Index tokens from their rows, which are read in place: in host memory or in resident pages.

The device reads pinned memory by address, so nothing is copied first and one launch serves all layers. The caller holds
a loan of the rows until the device has passed. Bytes: the rows, once, over the link or from device memory.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from gpu.methods.indexed import BLOCK_TOKENS, SPLIT_TOKENS
from gpu.methods.indexed.codes import (
    CENTRED_SHARE,
    VALUE_STEPS,
    encode_keys_reference,
    encode_values_reference,
    find_centre_reference,
    plane_bytes,
)
from gpu.methods.indexed.host_rows import find_piece, read_rows, restored_rows, row_address
from gpu.methods.indexed.page_rows import Pages, page_rows, read_pages
from gpu.methods.indexed.ring import Index, Layout
from gpu.operations.arguments import runs_on_triton
from gpu.operations.host_rows.host_bytes import bytes_at
from gpu.operations.kv.kv_rows import kind_of
from transfer import places
from transfer.places import COLUMNS

TILE = BLOCK_TOKENS  # tokens of a program; with 64, products of Triton 3.6 on Hopper read outside of shared memory
PART_BYTES = 64  # bytes of a token's codes that are computed at once
LEAST_STEP = float(torch.finfo(torch.float16).tiny)
LEAST_SCALE = 2.0**-24  # the smallest float16: a scale whose sign has a meaning must not be 0

_KEYS, _VALUES = tl.constexpr(places.KEYS), tl.constexpr(places.VALUES)
_COLUMNS, _SPLIT = tl.constexpr(COLUMNS), tl.constexpr(SPLIT_TOKENS)
_LEAST_STEP, _LEAST_SCALE = tl.constexpr(LEAST_STEP), tl.constexpr(LEAST_SCALE)


def index_tokens_reference(index: Index, ring: int, begin: int, end: int, layout: Layout) -> None:
    """Compute `index_tokens` in plain torch."""
    tokens = torch.arange(begin, end)
    for layer in range(len(index.codes)):
        for kv_head in range(layout.kv_heads):
            place = ring * layout.kv_heads + kv_head
            keys, values = read_rows(index.layer(layer), ring, kv_head, tokens, layout.rows)
            _index_rows(index.layer(layer), place, begin, end, keys, values, layout)


def index_pages_reference(
    index: Index, ring: int, slot: int, begin: int, end: int, pages: Sequence[Pages], layout: Layout
) -> None:
    """Compute `index_pages` in plain torch."""
    tokens = torch.arange(begin, end)
    for layer, own in enumerate(pages):
        for kv_head in range(layout.kv_heads):
            keys, values = (read_pages(rows, own, slot, tokens, kv_head) for rows in (own.keys, own.values))
            place = ring * layout.kv_heads + kv_head
            _index_rows(index.layer(layer), place, begin, end, keys, values, layout)


def _index_rows(
    index: Index, place: int, begin: int, end: int, keys: torch.Tensor, values: torch.Tensor, layout: Layout
) -> None:
    """Write the codes, scales and value centres of rows, float32 `[tokens, dim]`, in one layer."""
    cells = index.cells_of(place, torch.arange(begin, end, device=keys.device), layout.kv_heads)
    rotated = (keys - index.centres[place]) @ layout.rotation
    index.codes[cells], index.scales[cells] = encode_keys_reference(rotated, layout.key_bits)
    rotated = values @ layout.rotation
    is_centred = torch.zeros(end - begin, dtype=torch.bool, device=rotated.device)
    for first in range(0, end - begin, BLOCK_TOKENS):
        block = rotated[first : first + BLOCK_TOKENS]
        centre = find_centre_reference(block)
        page, kv_head, token = (one[first] if isinstance(one, torch.Tensor) else one for one in cells)
        index.value_centres[page, kv_head, token // BLOCK_TOKENS] = centre
        is_centred[first : first + BLOCK_TOKENS] = bool(centre.any())
        block -= centre.float()
    codes, scales = encode_values_reference(rotated, layout.value_bits)
    index.value_codes[cells] = codes
    index.value_scales[cells] = torch.where(is_centred, -scales.clamp_min(LEAST_SCALE), scales)


@triton.jit
def _rotate_part(rows, rotation, first, end, PART: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Return dimensions `[first, end)` of the rotated rows, float32 `[tokens, PART]`; 0 behind `end`."""
    row, column = tl.arange(0, WIDE)[:, None], first + tl.arange(0, PART)[None, :]
    own = tl.load(rotation + row * DIM + column, mask=(row < DIM) & (column < end), other=0.0)
    return tl.dot(rows.to(tl.float16), own.to(tl.float16))


@triton.jit
def _codes_of(rotated, step, BITS: tl.constexpr):
    half = 1 << (BITS - 1)
    return tl.minimum(tl.maximum(tl.floor(rotated / step[:, None]) + half, 0.0), 2.0 * half - 1.0)


@triton.jit
def _mean_of(rotated, is_there):
    """Return the mean of the tokens for which `is_there`, `[PART]`."""
    count = tl.maximum(tl.sum(is_there.to(tl.float32), 0), 1.0)
    return tl.sum(tl.where(is_there[:, None], rotated, 0.0), 0) / count


@triton.jit(do_not_specialize=["ring", "first_layer", "begin", "end", "slot"])  # one kernel for any run
def _index_kernel(
    codes, scales, value_codes, value_scales, value_centres, table_of_rings, centres, lies, piece_centres,
    piece_key_scales, piece_value_scales, key_pages, value_pages, page_table, rotation, ring, num_rings, first_layer,
    begin, end, num_pages, splits, value_step, centred_share, slot, max_pages, first_cell,
    KV_HEADS: tl.constexpr, PIECES: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, ROW: tl.constexpr,
    W: tl.constexpr, PLANES: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr,
    VALUE_W: tl.constexpr, VALUE_PART: tl.constexpr, VALUE_BITS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    PAGED: tl.constexpr, PAGE_TOKENS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Index one tile of tokens of one KV head in one layer."""
    layer, kv_head = (first_layer + tl.program_id(1) // KV_HEADS).to(tl.int64), tl.program_id(1) % KV_HEADS
    place = (layer * num_rings + ring) * KV_HEADS + kv_head
    own_lies = lies + (layer * num_rings + ring) * (_COLUMNS * PIECES)
    own_piece = (layer * num_rings + ring) * PIECES
    first_token = begin + tl.program_id(0) * TILE
    token = first_token + tl.arange(0, TILE)
    is_there = token < end
    page = tl.load(table_of_rings + (layer * num_rings + ring) * splits + first_token // _SPLIT)
    page = (layer * num_pages + page) * KV_HEADS + kv_head
    column = tl.arange(0, WIDE)[None, :]
    is_number = is_there[:, None] & (column < DIM)
    if PAGED:
        table, cell = page_table + slot.to(tl.int64) * max_pages, first_cell + token
        key = page_rows(key_pages, table, cell, is_there, kv_head, KV_HEADS, PAGE_TOKENS, DIM, WIDE, KIND)
        key = key.to(tl.float32)
        value = page_rows(value_pages, table, cell, is_there, kv_head, KV_HEADS, PAGE_TOKENS, DIM, WIDE, KIND)
        value = value.to(tl.float32)
    else:
        piece = find_piece(own_lies, token, PIECES)
        head = (own_piece + piece) * KV_HEADS + kv_head
        scale = piece_key_scales + head
        at = row_address(own_lies, piece, token, kv_head, is_there, _KEYS, PIECES)
        key = restored_rows(at, is_there, scale, scale, DIM, WIDE, ROWS, False)
        key += tl.load(piece_centres + head[:, None] * DIM + column, mask=is_number, other=0.0)
        at = row_address(own_lies, piece, token, kv_head, is_there, _VALUES, PIECES)
        value = restored_rows(at, is_there, scale, piece_value_scales + head * DIM, DIM, WIDE, ROWS, True)
    key -= tl.load(centres + place * DIM + column, mask=column < DIM, other=0.0)
    key = tl.where(is_number, key, 0.0)

    most = tl.zeros([TILE], tl.float32)
    for part in tl.static_range(PLANES * PARTS):
        first, end = part // PARTS * W + part % PARTS * PART, part // PARTS * W + W
        most = tl.maximum(most, tl.max(tl.abs(_rotate_part(key, rotation, first, end, PART, DIM, WIDE)), 1))
    cell = page * _SPLIT + token % _SPLIT
    stored = (most / ((1 << (BITS - 1)) - 0.5)).to(tl.float16)
    step = tl.maximum(stored.to(tl.float32), _LEAST_STEP)
    for part in tl.static_range(PARTS):
        packed, thirds = tl.zeros([TILE, PART], tl.int32), tl.zeros([TILE, PART], tl.int32)
        byte = part * PART + tl.arange(0, PART)[None, :]
        for plane in tl.static_range(PLANES):
            rotated = _rotate_part(key, rotation, plane * W + part * PART, plane * W + W, PART, DIM, WIDE)
            code = _codes_of(rotated, step, BITS).to(tl.int32)
            if BITS == 3:
                thirds |= (code >> 2) << (plane + 4 * (byte % 2))
                code &= 3
            packed |= code << (plane * (8 // PLANES))
        if BITS == 3:
            pairs = tl.sum(tl.reshape(thirds, [TILE, PART // 2, 2]), 2)
            pair = part * (PART // 2) + tl.arange(0, PART // 2)[None, :]
            own_thirds = codes + cell[:, None] * ROW + W + pair
            tl.store(own_thirds, pairs.to(tl.uint8), mask=is_there[:, None] & (pair < W // 2))
        tl.store(codes + cell[:, None] * ROW + byte, packed.to(tl.uint8), mask=is_there[:, None] & (byte < W))
    tl.store(scales + cell, stored, mask=is_there)

    value = tl.where(is_number, value, 0.0)
    mean = _mean_of(value, is_there)
    squares = tl.sum(value * value)  # which the rotation keeps
    count = tl.sum(is_there.to(tl.float32), 0)
    is_centred = (count * tl.sum(mean * mean, 0) > centred_share * squares).to(tl.float32)
    own_centre = value_centres + (page * (_SPLIT // TILE) + first_token % _SPLIT // TILE) * DIM
    square, along = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    dim = tl.arange(0, VALUE_PART)
    for plane in tl.static_range(8 // VALUE_BITS):
        first, end_of = plane * VALUE_W, plane * VALUE_W + VALUE_W
        rotated = _rotate_part(value, rotation, first, end_of, VALUE_PART, DIM, WIDE)
        centre = (_mean_of(rotated, is_there) * is_centred).to(tl.bfloat16)
        tl.store(own_centre + first + dim, centre, mask=dim < VALUE_W)
        rotated -= centre.to(tl.float32)[None, :]
        square += tl.sum(rotated * rotated, 1)
    step = tl.maximum(tl.sqrt(square / DIM) * value_step, _LEAST_STEP)
    packed = tl.zeros([TILE, VALUE_PART], tl.int32)
    for plane in tl.static_range(8 // VALUE_BITS):
        first, end_of = plane * VALUE_W, plane * VALUE_W + VALUE_W
        rotated = _rotate_part(value, rotation, first, end_of, VALUE_PART, DIM, WIDE)
        rotated -= (_mean_of(rotated, is_there) * is_centred).to(tl.bfloat16).to(tl.float32)[None, :]
        code = _codes_of(rotated, step, VALUE_BITS)
        along += tl.sum(rotated * (code + 0.5 - (1 << (VALUE_BITS - 1))), 1)  # 0 behind the end
        packed |= code.to(tl.int32) << (plane * VALUE_BITS)
    own_codes = value_codes + cell[:, None] * VALUE_W + dim[None, :]
    tl.store(own_codes, packed.to(tl.uint8), mask=is_there[:, None] & (dim < VALUE_W)[None, :])
    stored = square / tl.maximum(along, 1.1754943508222875e-38)
    stored = tl.where(is_centred > 0, -tl.maximum(stored, _LEAST_SCALE), stored).to(tl.float16)
    tl.store(value_scales + cell, stored, mask=is_there)


def index_tokens(index: Index, ring: int, begin: int, end: int, layout: Layout) -> None:
    """Write codes, scales and value centres for tokens `[begin, end)` of a ring's run, in all layers.

    index: with the axis of layers; its table of pieces and the copies of their centres and scales belong to this run,
    and `centres` are set. begin: a multiple of BLOCK_TOKENS. Raises ValueError for another.
    """
    if begin % BLOCK_TOKENS:
        raise ValueError(f"index_tokens: begin {begin}; wanted a multiple of {BLOCK_TOKENS}")
    if not runs_on_triton(index.codes):
        index_tokens_reference(index, ring, begin, end, layout)
        return
    _launch(index, ring, begin, end, layout)


def index_pages(
    index: Index, ring: int, slot: int, begin: int, end: int, pages: Sequence[Pages], layout: Layout
) -> None:
    """Index tokens as `index_tokens` does, from a slot's pages of each layer.

    index: with the axis of layers; `centres` are set. Raises ValueError if `begin` is no multiple of BLOCK_TOKENS.
    """
    if begin % BLOCK_TOKENS:
        raise ValueError(f"index_pages: begin {begin}; wanted a multiple of {BLOCK_TOKENS}")
    if not runs_on_triton(index.codes):
        index_pages_reference(index, ring, slot, begin, end, pages, layout)
        return
    for layer, own in enumerate(pages):
        _launch(index, ring, begin, end, layout, layer, slot, own)


def _launch(
    index: Index, ring: int, begin: int, end: int, layout: Layout, layer: int = 0, slot: int = 0,
    pages: Pages | None = None,
) -> None:  # fmt: skip
    """Launch for all layers, if the rows are in host memory, or for one layer, if they are in a slot's pages."""
    num_layers, num_rings, _, pieces = index.lies.shape
    dim, value_width = index.centres.shape[2], index.value_codes.shape[4]
    planes, width = plane_bytes(dim, layout.key_bits)
    part = max(16, min(PART_BYTES, triton.next_power_of_2(width)))
    num_layers = num_layers if pages is None else 1
    _index_kernel[(triton.cdiv(end - begin, TILE), num_layers * layout.kv_heads)](
        index.codes, index.scales, index.value_codes, index.value_scales, index.value_centres, index.table,
        index.centres, index.lies, index.piece_centres, index.piece_key_scales, index.piece_value_scales,
        *((index.keys, index.values, index.ids) if pages is None else (pages.keys, pages.values, pages.table)),
        layout.rotation, ring, num_rings, layer, begin, end, index.codes.shape[1], index.table.shape[2],
        VALUE_STEPS[layout.value_bits], CENTRED_SHARE, slot, 0 if pages is None else pages.table.stride(0),
        0 if pages is None else pages.first_cell,
        KV_HEADS=layout.kv_heads, PIECES=pieces, DIM=dim, WIDE=triton.next_power_of_2(dim),
        ROW=index.codes.shape[4], W=width, PLANES=planes,
        PART=part, PARTS=triton.cdiv(width, part), BITS=layout.key_bits, VALUE_W=value_width,
        VALUE_PART=max(16, triton.next_power_of_2(value_width)), VALUE_BITS=layout.value_bits, TILE=TILE,
        ROWS=layout.rows, PAGED=pages is not None, PAGE_TOKENS=1 if pages is None else pages.keys.shape[2],
        KIND=0 if pages is None else kind_of(pages.keys), num_warps=4,
    )  # fmt: skip


@triton.jit
def _copy_pieces_kernel(
    lies, piece_centres, piece_key_scales, piece_value_scales, ring, num_rings, CENTRE: tl.constexpr,
    KEY_SCALE: tl.constexpr, VALUE_SCALE: tl.constexpr, KV_HEADS: tl.constexpr, PIECES: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    piece, kv_head = tl.program_id(0), tl.program_id(1) % KV_HEADS
    layer = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    table = lies + (layer * num_rings + ring) * (COLUMNS * PIECES)
    head = ((layer * num_rings + ring) * PIECES + piece) * KV_HEADS + kv_head
    column = tl.arange(0, WIDE)
    inside = column < DIM
    at = (tl.load(table + CENTRE * PIECES + piece) + 4 * DIM * kv_head).to(tl.pointer_type(tl.float32))
    tl.store(piece_centres + head * DIM + column, tl.load(at + column, mask=inside, other=0.0), mask=inside)
    if ROWS == "int8":
        at = (tl.load(table + VALUE_SCALE * PIECES + piece) + 4 * DIM * kv_head).to(tl.pointer_type(tl.float32))
        tl.store(piece_value_scales + head * DIM + column, tl.load(at + column, mask=inside, other=0.0), mask=inside)
        at = (tl.load(table + KEY_SCALE * PIECES + piece) + 4 * kv_head).to(tl.pointer_type(tl.float32))
        tl.store(piece_key_scales + head, tl.load(at))


def copy_pieces_reference(index: Index, ring: int, num_pieces: int, layout: Layout) -> None:
    """Compute `copy_pieces` in plain torch, on the CPU."""
    heads, dim = layout.kv_heads, index.centres.shape[2]
    for layer in range(len(index.lies)):
        for piece, place in enumerate(index.lies[layer, ring, :, :num_pieces].T.tolist()):
            index.piece_centres[layer, ring, piece] = floats_at(place[places.CENTRE], heads * dim).view(heads, dim)
            if layout.rows == "int8":
                index.piece_key_scales[layer, ring, piece] = floats_at(place[places.KEY_SCALE], heads)
                scales = floats_at(place[places.VALUE_SCALE], heads * dim)
                index.piece_value_scales[layer, ring, piece] = scales.view(heads, dim)


def floats_at(address: int, count: int) -> torch.Tensor:
    """Return a copy of so many float32 numbers at an address of host memory."""
    return bytes_at(address, 4 * count).view(torch.float32).clone()


def copy_pieces(index: Index, ring: int, num_pieces: int, layout: Layout) -> None:
    """Copy the centres and scales of a ring's first pieces, in all layers, from host memory to the device."""
    if not runs_on_triton(index.codes):
        copy_pieces_reference(index, ring, num_pieces, layout)
        return
    num_layers, num_rings, _, pieces = index.lies.shape
    dim = index.centres.shape[2]
    _copy_pieces_kernel[(num_pieces, num_layers * layout.kv_heads)](
        index.lies, index.piece_centres, index.piece_key_scales, index.piece_value_scales, ring, num_rings,
        CENTRE=places.CENTRE, KEY_SCALE=places.KEY_SCALE, VALUE_SCALE=places.VALUE_SCALE, KV_HEADS=layout.kv_heads,
        PIECES=pieces, DIM=dim, WIDE=triton.next_power_of_2(dim), COLUMNS=COLUMNS, ROWS=layout.rows, num_warps=1,
    )  # fmt: skip
