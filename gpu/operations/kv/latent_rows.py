"""Read and write latent rows as 8-bit codes, as in `kv_rows`, but with two scales: of the latent and of the rotated
part.

A page is `page_tokens` rows of `rank + rotated` codes and, behind them all, `page_tokens` pairs of float32 scales. Its
tensor has the shape `[pages, 1, page_tokens, rank + rotated + 8]`. Bytes moved: rows read once and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, check_contiguous, runs_on_triton
from gpu.operations.kv.kv_rows import floats_of, has_codes, kind_of, make_codes, read_codes, widen
from gpu.page_layout import LATENT_SCALES, SCALE_BYTES

BLOCK = 2048


def latent_row_of(pages: Tensor) -> int:
    """Return how many numbers a latent row has in these pages."""
    return pages.shape[-1] - LATENT_SCALES * SCALE_BYTES * has_codes(pages)


def check_latent_pages(op: str, pages: Tensor, row: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless pages hold rows of so many numbers, in this dtype or in codes."""
    width = row + LATENT_SCALES * SCALE_BYTES * has_codes(pages)
    shape = (len(pages), 1, pages.shape[2], width)
    check(op, "pages", pages, shape, pages.dtype if has_codes(pages) else dtype, device)


def latent_codes(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the codes, `[pages, page_tokens, row]`, and of the scales, float32 `[pages, page_tokens, 2]`."""
    tokens, row = pages.shape[2], latent_row_of(pages)
    flat = pages.flatten(1)
    codes, scales = flat[:, : tokens * row], flat[:, tokens * row :]
    return codes.unflatten(1, (tokens, row)), scales.view(torch.float32).unflatten(1, (tokens, LATENT_SCALES))


def put_latents(rows: Tensor, page_ids: Tensor, offsets: Tensor, pages: Tensor, rank: int) -> None:
    """Write rows `[tokens, row]` to their cells, in codes or plain, in plain torch."""
    if not has_codes(pages):
        pages[page_ids, 0, offsets] = rows.to(pages.dtype)
        return
    codes, scales = latent_codes(pages)
    made = [make_codes(part, pages.dtype) for part in (rows[:, :rank], rows[:, rank:])]
    codes[page_ids, offsets] = torch.cat([own for own, _ in made], 1)
    scales[page_ids, offsets] = torch.stack([scale for _, scale in made], 1)


def read_latents(pages: Tensor, page_ids: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """Return the rows of whole pages, `[pages * page_tokens, row]` in `dtype`, in plain torch."""
    if not has_codes(pages):
        return pages[page_ids, 0].flatten(0, 1).to(dtype)
    codes, scales = (part[page_ids].flatten(0, 1) for part in latent_codes(pages))
    parts = codes[:, :rank], codes[:, rank:]
    return torch.cat([read_codes(part, scales[:, place], dtype) for place, part in enumerate(parts)], 1)


@triton.jit
def _gather_latents_kernel(
    pages, page_ids, rows, PAGE_TOKENS: tl.constexpr, ROW: tl.constexpr, RANK: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    page = tl.load(page_ids + place).to(tl.int64)
    numbers: tl.constexpr = PAGE_TOKENS * ROW
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < numbers
    codes = tl.load(pages + page * (numbers + 8 * PAGE_TOKENS) + element, mask=inside, other=0)
    word = page * ((numbers + 8 * PAGE_TOKENS) // 4) + numbers // 4
    own = 2 * (element // ROW) + (element % ROW >= RANK).to(tl.int32)
    values = widen(codes, tl.float32, KIND) * tl.load(floats_of(pages) + word + own, mask=inside, other=0.0)
    tl.store(rows + place * numbers + element, values.to(rows.dtype.element_ty), mask=inside)


def gather_latents(pages: Tensor, page_ids: Tensor, rows: Tensor, rank: int) -> None:
    """Copy whole pages of codes, decoded, to rows `[pages, page_tokens, row]`, contiguous, of any floating dtype.

    page_ids: an integer type `[pages]`. Raises ValueError for another shape or device.
    """
    op, row, page_tokens = "gather_latents", latent_row_of(pages), pages.shape[2]
    check_latent_pages(op, pages, row, rows.dtype, rows.device)
    check(op, "rows", rows, (len(page_ids), page_tokens, row), rows.dtype, pages.device)
    if not runs_on_triton(rows) or rows.numel() == 0:
        rows.copy_(read_latents(pages, page_ids.long(), rank, rows.dtype).view_as(rows))
        return
    for name, tensor in (("pages", pages), ("page_ids", page_ids), ("rows", rows)):
        check_contiguous(op, name, tensor)
    _gather_latents_kernel[(len(page_ids), triton.cdiv(page_tokens * row, BLOCK))](
        pages, page_ids, rows, PAGE_TOKENS=page_tokens, ROW=row, RANK=rank, KIND=kind_of(pages), BLOCK=BLOCK,
        num_warps=4,
    )  # fmt: skip
