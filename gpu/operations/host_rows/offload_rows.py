"""Convert keys and values to the rows that host memory keeps: keys centred, both in bf16, int8 or int4.

Stored key = key - centre and stored value = value, rounded to bf16, or to the nearest of 255 steps of the scale and
clamped there. Bytes moved: rows read once and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, check_dtype, runs_on_triton
from gpu.operations.host_rows.int4_rows import store_int4
from transfer.tier_shape import int4_row_bytes

INT8_STEPS = 127
BLOCK_TOKENS = 32
PART_TOKENS = 256  # tokens that one program sums
SMALLEST_SCALE = 1e-30  # for rows of zeros


@triton.jit
def _sum_kernel(
    keys, sums, num_tokens, key_head, key_token,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PART_TOKENS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    part, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    element = tl.arange(0, BLOCK_DIM)
    is_element = (element < DIM)[None, :]
    total = tl.zeros([BLOCK_TOKENS, BLOCK_DIM], tl.float32)
    for begin in range(0, PART_TOKENS, BLOCK_TOKENS):
        token = part * PART_TOKENS + begin + tl.arange(0, BLOCK_TOKENS)[:, None]
        address = keys + head * key_head + token * key_token + element[None, :]
        total += tl.load(address, mask=(token < num_tokens) & is_element, other=0.0).to(tl.float32)
    to = sums + (head * tl.num_programs(0) + part) * DIM + element
    tl.store(to, tl.sum(total, 0), mask=element < DIM)


def centre_of(keys: Tensor) -> Tensor:
    """Return the mean over tokens of keys `[kv_heads, tokens, dim]` (heads and tokens strided): float32 `[kv_heads,
    dim]`.

    The mean is summed in float32 by parts of PART_TOKENS tokens, whatever the keys' strides are.
    """
    heads, tokens, dim = keys.shape
    if not runs_on_triton(keys) or keys.numel() == 0 or keys.stride(2) != 1:
        return keys.mean(1, dtype=torch.float32)
    num_parts = triton.cdiv(tokens, PART_TOKENS)
    sums = torch.empty(heads, num_parts, dim, dtype=torch.float32, device=keys.device)
    _sum_kernel[(num_parts, heads)](
        keys, sums, tokens, keys.stride(0), keys.stride(1), DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim),
        PART_TOKENS=PART_TOKENS, BLOCK_TOKENS=BLOCK_TOKENS, num_warps=4,
    )  # fmt: skip
    return sums.sum(1).div_(tokens)


def key_scale_of(keys: Tensor, centre: Tensor) -> Tensor:
    """Return the step of int8 keys, float32 `[kv_heads]`: the largest centred element of any token is 127 steps."""
    low, high = keys.aminmax(dim=1)
    spread = torch.maximum(high.float() - centre, centre - low.float()).amax(-1)
    return spread.div_(INT8_STEPS).clamp_min_(SMALLEST_SCALE)


def value_scale_of(values: Tensor) -> Tensor:
    """Return the step of int8 values by channel, float32 `[kv_heads, dim]`: the largest element of any token is 127
    steps.
    """
    low, high = values.aminmax(dim=1)
    return torch.maximum(high.float(), -low.float()).div_(INT8_STEPS).clamp_min_(SMALLEST_SCALE)


def offload_rows_reference(
    keys: Tensor,
    values: Tensor,
    centre: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    stored_keys: Tensor,
    stored_values: Tensor,
) -> None:
    """Compute `offload_rows` in plain torch."""
    centred = keys - centre[:, None]  # float32, or wider
    if key_scale is None or value_scale is None:
        stored_keys.copy_(centred)
        stored_values.copy_(values)
        return
    stored_keys.copy_(_steps(centred, key_scale[:, None, None]))
    stored_values.copy_(_steps(values, value_scale[:, None]))


def _steps(rows: Tensor, scale: Tensor) -> Tensor:
    return (rows / scale).add_(0.5).floor_().clamp_(-INT8_STEPS, INT8_STEPS)


@triton.jit
def _offload_kernel(
    keys, values, centre, key_scale, value_scale, stored_keys, stored_values, num_tokens,
    key_head, key_token, value_head, value_token, to_key_head, to_key_token, to_value_head, to_value_token,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, IS_INT8: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None]
    element = tl.arange(0, BLOCK_DIM)[None, :]
    is_element = element < DIM
    inside = (token < num_tokens) & is_element
    middle = tl.load(centre + head * DIM + element, mask=is_element, other=0.0)
    key = tl.load(keys + head * key_head + token * key_token + element, mask=inside, other=0.0).to(tl.float32) - middle
    value = tl.load(values + head * value_head + token * value_token + element, mask=inside, other=0.0)
    if IS_INT8:
        key = tl.floor(tl.div_rn(key, tl.load(key_scale + head) + tl.zeros_like(key)) + 0.5)
        step = tl.load(value_scale + head * DIM + element, mask=is_element, other=1.0)
        value = tl.floor(tl.div_rn(value.to(tl.float32), step + tl.zeros_like(key)) + 0.5)
        key = tl.minimum(tl.maximum(key, -127.0), 127.0)
        value = tl.minimum(tl.maximum(value, -127.0), 127.0)
    to_key = stored_keys + head * to_key_head + token * to_key_token + element
    to_value = stored_values + head * to_value_head + token * to_value_token + element
    tl.store(to_key, key.to(stored_keys.dtype.element_ty), mask=inside)
    tl.store(to_value, value.to(stored_values.dtype.element_ty), mask=inside)


def offload_rows(
    keys: Tensor,
    values: Tensor,
    centre: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    stored_keys: Tensor,
    stored_values: Tensor,
) -> None:
    """Write keys and values `[kv_heads, tokens, dim]` (heads and tokens strided) as stored rows of the same shape.

    centre: float32 `[kv_heads, dim]`. key_scale: float32 `[kv_heads]`, and value_scale: float32 `[kv_heads, dim]`; with
    both, rows are int8, with neither, bf16 or int4. Stored rows in uint8 are int4, `[kv_heads, tokens,
    int4_row_bytes(dim)]`. Rows outside a given scale are clamped. Raises ValueError for another shape, dtype or device.
    """
    op, device = "offload_rows", keys.device
    heads, _, dim = shape = tuple(keys.shape)
    is_int8 = key_scale is not None
    check(op, "keys", keys, shape, keys.dtype, device)
    check(op, "values", values, shape, keys.dtype, device)
    check(op, "centre", centre, (heads, dim), torch.float32, device)
    check_stored(op, stored_keys, stored_values, shape, is_int8, device)
    check_scales(op, key_scale, value_scale, heads, dim, device)
    if stored_keys.dtype == torch.uint8:
        store_int4(keys, centre, stored_keys)
        store_int4(values, None, stored_values)
        return
    if not runs_on_triton(keys) or keys.numel() == 0:
        offload_rows_reference(keys, values, centre, key_scale, value_scale, stored_keys, stored_values)
        return
    check_dtype(op, keys)
    _offload_kernel[(triton.cdiv(shape[1], BLOCK_TOKENS), heads)](
        keys, values, centre.contiguous(), centre if key_scale is None else key_scale.contiguous(),
        centre if value_scale is None else value_scale.contiguous(), stored_keys, stored_values, shape[1],
        *keys.stride()[:2], *values.stride()[:2], *stored_keys.stride()[:2], *stored_values.stride()[:2],
        DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), IS_INT8=is_int8, BLOCK_TOKENS=BLOCK_TOKENS, num_warps=4,
    )  # fmt: skip


def check_stored(
    op: str, keys: Tensor, values: Tensor, shape: tuple[int, ...], is_int8: bool, device: torch.device
) -> None:
    """Raise ValueError unless stored rows have the shape and dtype for keys of `shape`."""
    is_int4 = keys.dtype == torch.uint8 and not is_int8
    stored = torch.int8 if is_int8 else torch.uint8 if is_int4 else torch.bfloat16
    shape = (*shape[:2], int4_row_bytes(shape[2])) if is_int4 else shape
    check(op, "stored_keys", keys, shape, stored, device)
    check(op, "stored_values", values, shape, stored, device)


def check_scales(
    op: str, key_scale: Tensor | None, value_scale: Tensor | None, heads: int, dim: int, device: torch.device
) -> None:
    """Raise ValueError unless both scales or neither are given, with the right shapes."""
    if (key_scale is None) != (value_scale is None):
        raise ValueError(f"{op}: one of key_scale and value_scale is None; wanted both (int8 rows) or neither (bf16)")
    if key_scale is not None and value_scale is not None:
        check(op, "key_scale", key_scale, (heads,), torch.float32, device)
        check(op, "value_scale", value_scale, (heads, dim), torch.float32, device)
