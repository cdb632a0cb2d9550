"""Copy keys and values of one context out of their pages, into buffers contiguous in tokens, in one launch.

Whole pages are copied, so cells behind the context in its last page are copied, too. 8-bit codes are converted to the
numbers that they stand for. Bytes moved: rows read once and written once.
"""

import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, check_contiguous, runs_on_triton
from gpu.operations.kv.kv_rows import (
    PLAIN,
    check_pages,
    codes_of,
    dim_of,
    floats_of,
    has_codes,
    kind_of,
    read_codes,
    scales_of,
    widen,
)

BLOCK = 2048
_PLAIN = tl.constexpr(PLAIN)


def gather_pages_reference(
    key_pages: Tensor, value_pages: Tensor, page_ids: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Compute `gather_pages` in plain torch."""
    for pages, gathered in ((key_pages, keys), (value_pages, values)):
        if not has_codes(pages):
            gathered.copy_(pages.index_select(0, page_ids).transpose(0, 1))
            continue
        for head, rows in enumerate(gathered):  # head by head: widened rows take four times the memory
            own = pages[:, head].index_select(0, page_ids)
            rows.copy_(read_codes(codes_of(own), scales_of(own), rows.dtype))


@triton.jit
def _gather_pages_kernel(
    key_pages, value_pages, page_ids, keys, values, page_stride, head_stride,
    PAGE_TOKENS: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    page_elements: tl.constexpr = PAGE_TOKENS * DIM
    page_width: tl.constexpr = PAGE_TOKENS * (DIM if KIND == _PLAIN else DIM + 4)
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    page = tl.load(page_ids + place).to(tl.int64)
    for begin in range(0, page_elements, BLOCK):
        element = begin + tl.arange(0, BLOCK)
        inside = element < page_elements
        source = page * page_stride + head * page_width + element
        target = head * head_stride + place * page_elements + element
        key = tl.load(key_pages + source, mask=inside)
        value = tl.load(value_pages + source, mask=inside)
        if KIND != _PLAIN:
            word = page * (page_stride // 4) + (head * page_width + page_elements) // 4 + element // DIM
            key = widen(key, tl.float32, KIND) * tl.load(floats_of(key_pages) + word, mask=inside)
            value = widen(value, tl.float32, KIND) * tl.load(floats_of(value_pages) + word, mask=inside)
        tl.store(keys + target, key.to(keys.dtype.element_ty), mask=inside)
        tl.store(values + target, value.to(values.dtype.element_ty), mask=inside)


def gather_pages(key_pages: Tensor, value_pages: Tensor, page_ids: Tensor, keys: Tensor, values: Tensor) -> None:
    """Copy pages `[num_pages, kv_heads, page_tokens, dim]` to keys and values `[kv_heads, pages, page_tokens, dim]`.

    Pages are contiguous, except that heads may be left out. keys, values: heads strided, with equal strides; of the
    pages' dtype, or of any if pages are codes (`kv_rows`). page_ids: an integer type, `[pages]`, contiguous. Raises
    ValueError if shapes, dtypes or devices do not fit.
    """
    num_pages, kv_heads, page_tokens = key_pages.shape[:3]
    dim, dtype, device = dim_of(key_pages), keys.dtype, key_pages.device
    shape, all_pages = (kv_heads, len(page_ids), page_tokens, dim), (num_pages, kv_heads, page_tokens, dim)
    check_pages("gather_pages", "key_pages", key_pages, all_pages, dtype, device)
    check("gather_pages", "value_pages", value_pages, tuple(key_pages.shape), key_pages.dtype, device)
    check("gather_pages", "keys", keys, shape, dtype, device)
    check("gather_pages", "values", values, shape, dtype, device)
    if not runs_on_triton(keys) or keys.numel() == 0:
        gather_pages_reference(key_pages, value_pages, page_ids, keys, values)
        return
    check_contiguous("gather_pages", "page_ids", page_ids)
    width = key_pages.shape[3]
    for name, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        if pages.stride() != (key_pages.stride(0), page_tokens * width, width, 1):
            raise ValueError(f"gather_pages: {name} have strides {pages.stride()}; wanted whole pages, alike in both")
    for name, tensor in (("keys", keys), ("values", values)):
        check_contiguous("gather_pages", f"a head of {name}", tensor.select(0, 0))
    if keys.stride() != values.stride():
        raise ValueError(f"gather_pages: keys have strides {keys.stride()}, values {values.stride()}; wanted the same")
    _gather_pages_kernel[(len(page_ids), kv_heads)](
        key_pages, value_pages, page_ids, keys, values, key_pages.stride(0), keys.stride(0),
        PAGE_TOKENS=page_tokens, DIM=dim, KIND=kind_of(key_pages), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
