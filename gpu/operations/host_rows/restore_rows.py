"""Convert the rows that host memory keeps back to keys and values in the compute dtype.

Key = scale * stored + centre and value = scale * stored (scale 1 for bf16 rows), in float32, rounded once. Bytes moved:
rows read once and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, check_dtype, runs_on_triton
from gpu.operations.host_rows.int4_rows import restore_int4
from gpu.operations.host_rows.offload_rows import check_scales, check_stored

BLOCK_TOKENS = 32


def restore_rows_reference(
    stored_keys: Tensor,
    stored_values: Tensor,
    centre: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Compute `restore_rows` in plain torch."""
    if key_scale is None or value_scale is None:
        keys.copy_(stored_keys + centre[:, None])
        values.copy_(stored_values)
        return
    keys.copy_(stored_keys * key_scale[:, None, None] + centre[:, None])
    values.copy_(stored_values * value_scale[:, None])


@triton.jit
def _restore_kernel(
    stored_keys, stored_values, centre, key_scale, value_scale, keys, values, num_tokens,
    from_key_head, from_key_token, from_value_head, from_value_token, key_head, key_token, value_head, value_token,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, IS_INT8: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None]
    element = tl.arange(0, BLOCK_DIM)[None, :]
    is_element = element < DIM
    inside = (token < num_tokens) & is_element
    from_key = stored_keys + head * from_key_head + token * from_key_token + element
    from_value = stored_values + head * from_value_head + token * from_value_token + element
    key = tl.load(from_key, mask=inside, other=0).to(tl.float32)
    value = tl.load(from_value, mask=inside, other=0).to(tl.float32)
    if IS_INT8:
        key *= tl.load(key_scale + head)
        value *= tl.load(value_scale + head * DIM + element, mask=is_element, other=0.0)
    key += tl.load(centre + head * DIM + element, mask=is_element, other=0.0)
    tl.store(keys + head * key_head + token * key_token + element, key.to(keys.dtype.element_ty), mask=inside)
    to_value = values + head * value_head + token * value_token + element
    tl.store(to_value, value.to(values.dtype.element_ty), mask=inside)


def restore_rows(
    stored_keys: Tensor,
    stored_values: Tensor,
    centre: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Write stored rows `[kv_heads, tokens, dim]`, bf16, int8 with scales, or int4 as uint8, to keys and values.

    Heads and tokens of all four may be strided. keys, values: bf16 or float32 (on the CPU any float type). centre:
    float32 `[kv_heads, dim]`. Scales as in `offload_rows`. Raises ValueError for another shape, dtype or device.
    """
    op, device = "restore_rows", keys.device
    is_int8, is_int4 = key_scale is not None, stored_keys.dtype == torch.uint8
    heads, _, dim = shape = tuple((keys if is_int4 else stored_keys).shape)
    check_stored(op, stored_keys, stored_values, shape, is_int8, device)
    check(op, "centre", centre, (heads, dim), torch.float32, device)
    check(op, "keys", keys, shape, keys.dtype, device)
    check(op, "values", values, shape, keys.dtype, device)
    check_scales(op, key_scale, value_scale, heads, dim, device)
    if is_int4:
        restore_int4(stored_keys, centre, keys)
        restore_int4(stored_values, None, values)
        return
    if not runs_on_triton(keys) or keys.numel() == 0:
        restore_rows_reference(stored_keys, stored_values, centre, key_scale, value_scale, keys, values)
        return
    check_dtype(op, keys)
    _restore_kernel[(triton.cdiv(shape[1], BLOCK_TOKENS), heads)](
        stored_keys, stored_values, centre.contiguous(), centre if key_scale is None else key_scale.contiguous(),
        centre if value_scale is None else value_scale.contiguous(), keys, values, shape[1],
        *stored_keys.stride()[:2], *stored_values.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), IS_INT8=is_int8, BLOCK_TOKENS=BLOCK_TOKENS, num_warps=4,
    )  # fmt: skip
