"""Compute SimHash codes of keys and queries: products with all hyperplanes, packed to codes without being written.

MagicPIG (arXiv 2410.16179), section 4.2; paper: K = bits, L = num_tables. Invariant: bit `i` of a code is set exactly
if the product is above zero. Keys and queries are multiplied by the same hyperplanes, products of bf16 numbers are
exact, and sums are float32. So only a product within their rounding of zero can get the wrong bit, and a kernel gives
it the same bit in every run. Bytes moved: rows and codes once each; every program reads its hyperplanes from L2. The
work is 2 * rows * dim * columns on tensor cores where rows are bf16 or int8.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.sampled.hyperplanes import PROJECTION_SEED, Projections, draw_projections
from gpu.operations.arguments import check, runs_on_triton
from transfer.allocation import allocate, dtype_name
from transfer.host_config import SampledConfig
from transfer.tier_shape import hyperplane_array

KEY_CONFIG = (128, 32, 4, 3)  # block_rows, block_tables, num_warps, num_stages
QUERY_CONFIG = (32, 16, 4, 4)
WIDE_CONFIG = (32, 32, 4, 2)  # float32 rows, which are multiplied without tensor cores
REFERENCE_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Hyperplanes:
    """Hyperplanes in the order in which codes are computed: bit by bit.

    planes: `[bits, dim, columns]`, contiguous; columns = tables, rounded up and filled with zeros.
    """

    planes: Tensor
    num_tables: int

    @property
    def dim(self) -> int:
        return self.planes.shape[1]


def arrange(projections: Projections) -> Hyperplanes:
    """Arrange hyperplanes for the kernel, once, on their own device.

    If rows are bf16 on CUDA, projections must be in bf16, and then everywhere.
    """
    bits, tables, matrix = projections.bits_per_table, projections.num_tables, projections.matrix
    planes = allocate(hyperplane_array(projections.dim, bits, tables, dtype_name(matrix.dtype)), matrix.device)
    planes[:, :, :tables] = matrix.view(projections.dim, tables, bits).permute(2, 0, 1)
    return Hyperplanes(planes, tables)


def draw_hyperplanes(settings: SampledConfig, dim: int, dtype: torch.dtype, device: torch.device) -> Hyperplanes:
    """Draw the hyperplanes, which are the same in every engine run."""
    bits, tables = settings.bits_per_table, settings.num_tables
    return arrange(draw_projections(dim, bits, tables, PROJECTION_SEED, dtype, device))


def encode_rows_reference(rows: Tensor, hyperplanes: Hyperplanes, codes: Tensor) -> None:
    """Encode in plain torch: rows `[tokens, dim]`, any float or int8; codes uint16 `[tokens, tables]`, any strides."""
    wide = torch.float64 if torch.float64 in (rows.dtype, hyperplanes.planes.dtype) else torch.float32
    planes = hyperplanes.planes.to(wide)
    signed = codes.view(torch.int16)
    for begin in range(0, len(rows), REFERENCE_ROWS):
        block = rows[begin : begin + REFERENCE_ROWS].to(wide)
        packed = torch.zeros(len(block), planes.shape[2], dtype=torch.int16, device=rows.device)
        for bit, plane in enumerate(planes):
            packed.add_(block @ plane > 0, alpha=1 << bit if bit < 15 else -(1 << 15))
        signed[begin : begin + REFERENCE_ROWS] = packed[:, : hyperplanes.num_tables]


@triton.jit
def _encode_kernel(
    rows, planes, codes, num_rows, head_stride, row_stride, code_head_stride, code_row_stride, code_table_stride,
    BITS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TABLES: tl.constexpr, COLUMNS: tl.constexpr,
    IS_WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TABLES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.program_id(2).to(tl.int64)
    table = tl.program_id(1) * BLOCK_TABLES + tl.arange(0, BLOCK_TABLES)
    element = tl.arange(0, BLOCK_DIM)
    is_row = row < num_rows
    is_element = element < DIM
    from_rows = rows + head * head_stride + row[:, None] * row_stride + element[None, :]
    block = tl.load(from_rows, mask=is_row[:, None] & is_element[None, :], other=0)
    block = block.to(tl.float32) if IS_WIDE else block.to(planes.dtype.element_ty)
    plane = planes + element[:, None] * COLUMNS + table[None, :]
    code = tl.zeros([BLOCK_ROWS, BLOCK_TABLES], tl.int32)
    for bit in range(BITS):
        normals = tl.load(plane) if BLOCK_DIM == DIM else tl.load(plane, mask=is_element[:, None], other=0.0)
        if IS_WIDE:
            normals = normals.to(tl.float32)
        products = tl.dot(block, normals, input_precision="ieee")
        code |= (products > 0.0).to(tl.int32) << bit
        plane += DIM * COLUMNS
    to_codes = codes + head * code_head_stride + row[:, None] * code_row_stride
    to_codes += table.to(tl.int64)[None, :] * code_table_stride
    tl.store(to_codes, code.to(tl.int16), mask=is_row[:, None] & (table < TABLES)[None, :])


def encode_keys(keys: Tensor, hyperplanes: Hyperplanes, codes: Tensor) -> None:
    """Write the codes of keys to `codes`, in the layout that the CPU's hash tables use.

    keys: `[kv_heads, tokens, dim]` (bf16, float32 or int8, heads and tokens strided). codes: uint16 `[kv_heads, tables,
    tokens]` (heads and tables strided); on CUDA they may be pinned host memory. Raises ValueError for another shape,
    dtype or device.
    """
    heads, tokens, _ = keys.shape
    check("encode_keys", "keys", keys, (heads, tokens, hyperplanes.dim), keys.dtype, hyperplanes.planes.device)
    check("encode_keys", "codes", codes, (heads, hyperplanes.num_tables, tokens), torch.uint16, codes.device)
    if not runs_on_triton(keys) or keys.numel() == 0:
        for head in range(heads):
            encode_rows_reference(keys[head], hyperplanes, codes[head].t())
        return
    _launch(keys, hyperplanes, codes.transpose(1, 2), KEY_CONFIG)


def encode_queries(queries: Tensor, hyperplanes: Hyperplanes) -> Tensor:
    """Return the codes of queries `[requests, heads, dim]` (bf16 or float32): uint16 `[requests, heads, tables]`, new.

    Raises ValueError for another dim or device.
    """
    requests, heads, _ = queries.shape
    check("encode_queries", "queries", queries, (requests, heads, hyperplanes.dim), queries.dtype,
          hyperplanes.planes.device)  # fmt: skip
    codes = torch.empty(requests * heads, hyperplanes.num_tables, dtype=torch.uint16, device=queries.device)
    rows = queries.reshape(requests * heads, hyperplanes.dim)
    if not runs_on_triton(queries) or queries.numel() == 0:
        encode_rows_reference(rows, hyperplanes, codes)
    else:
        _launch(rows.unsqueeze(0), hyperplanes, codes.unsqueeze(0), QUERY_CONFIG)
    return codes.view(requests, heads, hyperplanes.num_tables)


def _launch(rows: Tensor, hyperplanes: Hyperplanes, codes: Tensor, config: tuple[int, int, int, int]) -> None:
    """Launch the kernel for rows `[heads, tokens, dim]`, codes `[heads, tokens, tables]` of any strides."""
    planes = hyperplanes.planes
    bits, dim, columns = planes.shape
    heads, num_rows, _ = rows.shape
    if dim < 16:
        raise ValueError(f"simhash_encode: dim is {dim}; on {rows.device} wanted 16 or more")
    is_wide = torch.float32 in (rows.dtype, planes.dtype)
    block_rows, block_tables, num_warps, num_stages = WIDE_CONFIG if is_wide else config
    _encode_kernel[(triton.cdiv(num_rows, block_rows), triton.cdiv(hyperplanes.num_tables, block_tables), heads)](
        rows, planes, codes.view(torch.int16), num_rows, rows.stride(0), rows.stride(1), *codes.stride(),
        BITS=bits, DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), TABLES=hyperplanes.num_tables, COLUMNS=columns,
        IS_WIDE=is_wide, BLOCK_ROWS=block_rows, BLOCK_TABLES=block_tables, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
