"""Keys and values of one context copied out of their pages, into buffers contiguous in tokens: one launch for both.

It refuses to know slots and layers. Invariant: whole pages are copied, so what stands behind a context in its last page
comes along. Bytes moved: rows read once and written once.
"""

import triton
import triton.language as tl
from torch import Tensor

from gpu.kernels.arguments import check, check_contiguous, runs_on_triton

BLOCK = 2048


def gather_pages_reference(
    key_pages: Tensor, value_pages: Tensor, page_ids: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Plain torch; see `gather_pages`."""
    for pages, gathered in ((key_pages, keys), (value_pages, values)):
        gathered.copy_(pages.index_select(0, page_ids).transpose(0, 1))


@triton.jit
def _gather_pages_kernel(
    key_pages, value_pages, page_ids, keys, values, kv_heads, page_elements, head_stride, BLOCK: tl.constexpr
):
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    page = tl.load(page_ids + place).to(tl.int64)
    for begin in range(0, page_elements, BLOCK):
        element = begin + tl.arange(0, BLOCK)
        inside = element < page_elements
        source = (page * kv_heads + head) * page_elements + element
        target = head * head_stride + place * page_elements + element
        tl.store(keys + target, tl.load(key_pages + source, mask=inside), mask=inside)
        tl.store(values + target, tl.load(value_pages + source, mask=inside), mask=inside)


def gather_pages(key_pages: Tensor, value_pages: Tensor, page_ids: Tensor, keys: Tensor, values: Tensor) -> None:
    """Pages `[num_pages, kv_heads, page_tokens, dim]`, contiguous, to keys and values `[kv_heads, pages, page_tokens,
    dim]` (heads strided, alike); page_ids: an integer type, `[pages]`, contiguous. Raises ValueError where shapes,
    dtypes or devices do not fit.
    """
    _, kv_heads, page_tokens, dim = key_pages.shape
    shape, dtype, device = (kv_heads, len(page_ids), page_tokens, dim), key_pages.dtype, key_pages.device
    check("gather_pages", "value_pages", value_pages, tuple(key_pages.shape), dtype, device)
    check("gather_pages", "keys", keys, shape, dtype, device)
    check("gather_pages", "values", values, shape, dtype, device)
    if not runs_on_triton(keys) or keys.numel() == 0:
        gather_pages_reference(key_pages, value_pages, page_ids, keys, values)
        return
    for name, tensor in (("key_pages", key_pages), ("value_pages", value_pages), ("page_ids", page_ids)):
        check_contiguous("gather_pages", name, tensor)
    for name, tensor in (("keys", keys), ("values", values)):
        check_contiguous("gather_pages", f"a head of {name}", tensor.select(0, 0))
    if keys.stride() != values.stride():
        raise ValueError(f"gather_pages: keys have strides {keys.stride()}, values {values.stride()}; wanted the same")
    _gather_pages_kernel[(len(page_ids), kv_heads)](
        key_pages, value_pages, page_ids, keys, values, kv_heads, page_tokens * dim, keys.stride(0), BLOCK=BLOCK,
        num_warps=4,
    )  # fmt: skip
