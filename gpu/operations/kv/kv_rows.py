"""Read and write rows of keys and values as pages hold them: in the compute dtype, or as 8-bit codes with a scale per
row.

A page of a KV head is `page_tokens` rows of `dim` codes and, behind them all, `page_tokens` float32 scales. So loads of
codes are aligned, and a whole page is one piece to copy. Its tensor has the shape `[pages, kv_heads, page_tokens, dim +
4]` and a dtype that names the format: int8, or uint8 for the bytes of FP8 (e4m3). A row is read as code * scale. A
row's largest element has the largest code, and a row with an element that is not finite is read as NaN. Bytes moved:
rows read once and written once.

No card needs FP8 arithmetic: the byte, moved to the bits of a float, is the number times 2**-120. No code stands for
NaN: the scale does. In bf16 four codes are widened with 8 (int8) or 10 instructions, since conversions between integers
and floats are the slowest instructions of a card.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import INTERPRETED, check, check_contiguous, check_dtype, runs_on_triton
from gpu.page_layout import SCALE_BYTES, row_array
from transfer.allocation import dtype_of

CODE_DTYPES = {"int8": torch.int8, "fp8": torch.uint8}
LARGEST_CODE = {torch.int8: 127.0, torch.uint8: 448.0}
SMALLEST_SCALE = 1e-30  # for rows of zeros
BLOCK_ROWS = 32

PLAIN, INT8, FP8 = range(3)  # how a kernel reads rows: in the compute dtype, int8 or e4m3
_INT8, _FP8, _INTERPRETED = tl.constexpr(INT8), tl.constexpr(FP8), tl.constexpr(INTERPRETED)
_SMALLEST = tl.constexpr(SMALLEST_SCALE)
# Turns four codes in a register into two pairs of bf16. The lower 7 bits of an int8 code, behind 128's exponent, make
# 128 plus themselves. From that 128 is subtracted, or 256 if the sign bit is set, which turns 128 into 256.
_INT8_TO_BF16 = tl.constexpr(
    """{
        .reg .b32 pair<2>, more<2>, less<2>, one;
        mov.b32 one, 0x3F803F80;
        prmt.b32 pair0, $2, 0, 0x4140;
        prmt.b32 pair1, $2, 0, 0x4342;
        lop3.b32 more0, pair0, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 more1, pair1, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 less0, pair0, 0x00800080, 0xC300C300, 0xEA;
        lop3.b32 less1, pair1, 0x00800080, 0xC300C300, 0xEA;
        fma.rn.bf16x2 $0, more0, one, less0;
        fma.rn.bf16x2 $1, more1, one, less1;
    }"""
)
# An e4m3 code is a sign and 7 bits, which behind a bf16's sign are the number times 2**-120. -0 is added to it.
_FP8_TO_BF16 = tl.constexpr(
    """{
        .reg .b32 pair<2>, size<2>, power, zero;
        mov.b32 power, 0x7B807B80;
        mov.b32 zero, 0x80008000;
        prmt.b32 pair0, $2, 0, 0x1404;
        prmt.b32 pair1, $2, 0, 0x3424;
        shr.u32 size0, pair0, 4;
        shr.u32 size1, pair1, 4;
        and.b32 size0, size0, 0x07F007F0;
        and.b32 size1, size1, 0x07F007F0;
        lop3.b32 size0, pair0, 0x80008000, size0, 0xEA;
        lop3.b32 size1, pair1, 0x80008000, size1, 0xEA;
        fma.rn.bf16x2 $0, size0, power, zero;
        fma.rn.bf16x2 $1, size1, power, zero;
    }"""
)


def stored_dtype(kv: str) -> torch.dtype:
    """Return the dtype of pages in this format; `kv` may also be the name of a dtype."""
    return CODE_DTYPES.get(kv) or dtype_of(row_array(kv, 1))


def width_of(stored: torch.dtype, dim: int) -> int:
    """Return how many elements of a page a row takes, its scale included."""
    return dim + SCALE_BYTES * (stored in LARGEST_CODE)


def has_codes(pages: Tensor) -> bool:
    """Return whether rows are 8-bit codes."""
    return pages.dtype in LARGEST_CODE


def dim_of(pages: Tensor) -> int:
    """Return the number of elements of a row."""
    return pages.shape[-1] - SCALE_BYTES * has_codes(pages)


def kind_of(pages: Tensor) -> int:
    """Return how a kernel reads these pages: PLAIN, INT8 or FP8."""
    if not has_codes(pages):
        return PLAIN
    return INT8 if pages.dtype == torch.int8 else FP8


def check_pages(op: str, name: str, pages: Tensor, shape: tuple[int, ...], dtype: torch.dtype,
                device: torch.device) -> None:  # fmt: skip
    """Raise ValueError unless `pages` hold rows of `shape[-1]` elements in this shape and dtype.

    Codes are allowed as well, and bf16 where plain torch runs.
    """
    if has_codes(pages):
        shape, dtype = (*shape[:-1], shape[-1] + SCALE_BYTES), pages.dtype
    elif pages.dtype == torch.bfloat16 and not runs_on_triton(pages):
        dtype = pages.dtype
    check(op, name, pages, shape, dtype, device)


# --- plain torch, on any device ---------------------------------------------------------------------------------------


def codes_of(pages: Tensor) -> Tensor:
    """Return a view of the codes, `[.., page_tokens, dim]`, contiguous in the last two axes, of pages `[..,
    page_tokens, dim + 4]`.
    """
    tokens, dim = pages.shape[-2], dim_of(pages)
    return pages.flatten(-2)[..., : tokens * dim].unflatten(-1, (tokens, dim))


def scales_of(pages: Tensor) -> Tensor:
    """Return a view of the scales of such pages: float32 `[.., page_tokens]`."""
    tokens, dim = pages.shape[-2], dim_of(pages)
    return pages.flatten(-2)[..., tokens * dim :].view(torch.float32)


def make_codes(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Encode rows `[.., dim]` as codes of this dtype, with scales float32 `[..]`, in plain torch."""
    rows = rows.float()
    top = LARGEST_CODE[dtype]
    scales = (rows.abs().amax(-1) / top).clamp_min_(SMALLEST_SCALE) + (rows * 0.0).sum(-1)
    steps = (rows / scales[..., None]).clamp_(-top, top)
    if dtype == torch.int8:
        return steps.add_(0.5).floor_().nan_to_num_(0.0).to(torch.int8), scales
    return steps.to(torch.float8_e4m3fn).view(torch.uint8), scales


def read_codes(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode codes `[.., dim]` with scales `[..]` to rows of `dtype`, the reverse of `make_codes`; float64 is exact."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    numbers = codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes
    return (numbers.to(wide) * scales[..., None].to(wide)).to(dtype)


def read_cells(pages: Tensor, page_ids: Tensor, heads: Tensor | int, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows `[.., dim]` of `pages[page_ids, heads, offsets]`, whose indices broadcast, in plain torch."""
    if not has_codes(pages):
        return pages[page_ids, heads, offsets].to(dtype)
    at = (page_ids, heads, offsets)
    return read_codes(codes_of(pages)[at], scales_of(pages)[at], dtype)


# --- in kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def widen(codes, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """Convert codes to numbers of DTYPE, which can represent all of them."""
    if tl.bfloat16 == DTYPE and not _INTERPRETED:
        if KIND == _INT8:
            numbers = tl.inline_asm_elementwise(_INT8_TO_BF16, "=r,=r,r", [codes], tl.bfloat16, is_pure=True, pack=4)
        else:
            numbers = tl.inline_asm_elementwise(_FP8_TO_BF16, "=r,=r,r", [codes], tl.bfloat16, is_pure=True, pack=4)
    elif KIND == _FP8:
        bits = codes.to(tl.int32)
        moved = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        numbers = (moved.to(tl.float32, bitcast=True) * 2.0**120).to(DTYPE)
    else:
        numbers = codes.to(DTYPE)
    return numbers


@triton.jit
def scale_of(largest, broken, KIND: tl.constexpr):
    """Return the scale of rows, float32, from their largest magnitude. broken: the sum of their elements times 0."""
    TOP: tl.constexpr = 127.0 if KIND == _INT8 else 448.0
    return tl.maximum(tl.div_rn(largest, largest * 0.0 + TOP), _SMALLEST) + broken


@triton.jit
def encode_rows(x, scale, KIND: tl.constexpr):
    """Return the codes of float32 rows. scale: of the rows' shape, or broadcast to it."""
    TOP: tl.constexpr = 127.0 if KIND == _INT8 else 448.0
    steps = tl.div_rn(x, scale + x * 0.0)
    steps = tl.minimum(tl.maximum(steps, -TOP), TOP)
    if KIND == _INT8:
        steps = tl.floor(steps + 0.5)
        codes = tl.where(steps == steps, steps, 0.0).to(tl.int8)
    else:
        bits = steps.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        size = magnitude.to(tl.float32, bitcast=True)
        small = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF  # in steps of 2**-9, which the sum rounds to
        codes = (tl.where(size < 0.015625, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return codes


@triton.jit
def floats_of(pages):
    """Return the pages as a pointer to float32 words, through which scales are read and written."""
    return pages.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def _read_rows_kernel(
    pages, rows, out, num_rows,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr, KIND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_DIM)[None, :]
    is_row = at < num_rows
    row = tl.load(rows + at, mask=is_row, other=0)
    page, offset = row // PAGE_TOKENS, row % PAGE_TOKENS
    inside = is_row[:, None] & (column < DIM)
    codes = tl.load(pages + page[:, None] * (PAGE_TOKENS * (DIM + 4)) + offset[:, None] * DIM + column,
                    mask=inside, other=0)  # fmt: skip
    word = page * (PAGE_TOKENS * (DIM + 4) // 4) + PAGE_TOKENS * DIM // 4 + offset
    scale = tl.load(floats_of(pages) + word, mask=is_row, other=0.0)
    x = widen(codes, tl.float32, KIND) * scale[:, None]
    tl.store(out + at[:, None] * DIM + column, x.to(out.dtype.element_ty), mask=inside)


def read_rows(pages: Tensor, rows: Tensor, out: Tensor) -> None:
    """Copy rows of pages `[num_pages, kv_heads, page_tokens, ..]` to out `[rows, dim]`, contiguous.

    rows: int64 `[rows]`, counted through the pages of all KV heads. Raises ValueError for another shape, dtype or
    device.
    """
    op, dim = "read_rows", dim_of(pages)
    check(op, "rows", rows, (len(out),), torch.int64, pages.device)
    check(op, "out", out, (len(rows), dim), out.dtype, pages.device)
    check_contiguous(op, "pages", pages)
    if not has_codes(pages):
        if pages.dtype == out.dtype:
            torch.index_select(pages.view(-1, dim), 0, rows, out=out)
        else:
            out.copy_(pages.view(-1, dim).index_select(0, rows))
        return
    page_tokens, by_head = pages.shape[2], pages.flatten(0, 1)
    if not runs_on_triton(out) or out.numel() == 0:
        page, offset = rows // page_tokens, rows % page_tokens
        out.copy_(read_codes(codes_of(by_head)[page, offset], scales_of(by_head)[page, offset], out.dtype))
        return
    check_contiguous(op, "out", out)
    _read_rows_kernel[(triton.cdiv(len(rows), BLOCK_ROWS),)](
        pages, rows, out, len(rows), DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), PAGE_TOKENS=page_tokens,
        KIND=kind_of(pages), BLOCK_ROWS=BLOCK_ROWS, num_warps=4,
    )  # fmt: skip


@triton.jit
def _write_rows_kernel(
    rows, page_ids, offsets, pages, num_tokens, kv_heads, row_head, row_token,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr, BY_PAGE: tl.constexpr, KIND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK_DIM)[None, :]
    is_token = token < num_tokens
    inside = is_token[:, None] & (column < DIM)
    if BY_PAGE:
        page, offset = tl.load(page_ids + token // PAGE_TOKENS, mask=is_token, other=0), token % PAGE_TOKENS
    else:
        page = tl.load(page_ids + token, mask=is_token, other=0)
        offset = tl.load(offsets + token, mask=is_token, other=0)
    x = tl.load(rows + head * row_head + token[:, None] * row_token + column, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(x), 1), tl.sum(x * 0.0, 1), KIND)
    place = page * kv_heads + head
    to = pages + place[:, None] * (PAGE_TOKENS * (DIM + 4)) + offset[:, None] * DIM + column
    tl.store(to, encode_rows(x, scale[:, None], KIND), mask=inside)
    word = place * (PAGE_TOKENS * (DIM + 4) // 4) + PAGE_TOKENS * DIM // 4 + offset
    tl.store(floats_of(pages) + word, scale, mask=is_token)


def write_rows(rows: Tensor, page_ids: Tensor, offsets: Tensor | None, pages: Tensor) -> None:
    """Write rows `[kv_heads, tokens, dim]` (heads and tokens strided) to `pages[page_ids[t], head, offsets[t]]`.

    page_ids, offsets: int64 `[tokens]`. Without offsets, page_ids is `[tokens / page_tokens]` and names whole pages in
    order. pages: `[num_pages, kv_heads, page_tokens, ..]`, contiguous. Raises ValueError for another shape, dtype or
    device; page ids and offsets are trusted.
    """
    op, (kv_heads, tokens, dim), page_tokens = "write_rows", rows.shape, pages.shape[2]
    places = tokens // page_tokens if offsets is None else tokens
    check(op, "page_ids", page_ids, (places,), torch.int64, rows.device)
    if offsets is not None:
        check(op, "offsets", offsets, (tokens,), torch.int64, rows.device)
    elif tokens % page_tokens:
        raise ValueError(f"{op}: {tokens} tokens; wanted whole pages of {page_tokens}, or offsets")
    check_pages(op, "pages", pages, (len(pages), kv_heads, page_tokens, dim), rows.dtype, rows.device)
    check(op, "rows", rows, (kv_heads, tokens, dim), rows.dtype, pages.device)
    if not has_codes(pages):
        own = rows.to(pages.dtype)
        if offsets is None:
            pages.index_copy_(0, page_ids, own.unflatten(1, (-1, page_tokens)).transpose(0, 1))
        else:
            pages[page_ids, :, offsets] = own.transpose(0, 1)
        return
    if not runs_on_triton(rows) or rows.numel() == 0:
        for own, to in _parts(rows, pages):
            if offsets is None:
                to.index_copy_(0, page_ids, own.unflatten(0, (-1, page_tokens)))
            else:
                to[page_ids, offsets] = own
        return
    check_dtype(op, rows)
    check_contiguous(op, "pages", pages)
    _write_rows_kernel[(triton.cdiv(tokens, BLOCK_ROWS), kv_heads)](
        rows, page_ids, page_ids if offsets is None else offsets, pages, tokens, kv_heads, *rows.stride()[:2],
        DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), PAGE_TOKENS=page_tokens, BY_PAGE=offsets is None,
        KIND=kind_of(pages), BLOCK_ROWS=BLOCK_ROWS, num_warps=4,
    )  # fmt: skip


def _parts(rows: Tensor, pages: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield codes and then scales, `[tokens, ..]`, each with its destination `[pages, page_tokens, ..]`, KV head by KV
    head.
    """
    codes, scales = codes_of(pages), scales_of(pages)
    for head, own in enumerate(rows):
        made = make_codes(own, pages.dtype)
        yield made[0], codes[:, head]
        yield made[1], scales[:, head]
