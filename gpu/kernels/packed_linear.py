"""Products of a few tokens with a matrix of 4 or 8 bits, which is widened in registers; and the matrix, widened.

One token: a stream of words, with RMSNorm, SwiGLU, bias and residual fused in, as `gpu.kernels.linear` has them for
bf16. Up to MOST_TOKENS: tiles are widened and multiplied by tensor cores, with SwiGLU, bias and residual fused in. More
(prefill): the matrix is widened once, to be multiplied by the vendor's product. It refuses to know checkpoints.
Invariant: a program owns whole output rows, so a result does not depend on how programs are scheduled. Bytes moved:
words, scales and zero points once for each tile of tokens; a widened matrix is written, too.

An integer becomes a float without a conversion: put at the top of the mantissa of 1.0 it is `1 + q / 2**bits`, and
`(q - zero) * scale` is that less `1 + zero / 2**bits`, times `scale * 2**bits`. For one token the two are taken off
sums, not off numbers. An FP8 byte, moved to the float's sign, exponent and mantissa, is its number times 2**-120;
subnormal ones, too. No card needs to know FP8.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.kernels.arguments import check, runs_on_triton
from gpu.kernels.packed import Packed, unpack_reference
from gpu.kernels.rms_norm import check_norm, rms_norm
from gpu.kernels.swiglu import gated, swiglu
from gpu.model.spec import Activation

MOST_TOKENS = 256  # beyond, a matrix is widened first; as many rows as logits have at once
# One token: block_rows, num_warps, unroll; of `gated` programs each row is two. A warp's block is WARP_WORDS wide, and
# warps stand side by side: so tokens are loaded as words are, once for all rows, and nothing crosses shared memory.
GEMV_CONFIGS = {False: (4, 2, 1), True: (2, 2, 1)}
WARP_WORDS = 128
# Several: block_rows, block_words, num_warps, num_stages, of products and of `gated` ones. A stage holds words, scales
# and every plane of the tokens, so more than MOST_STAGED tokens at once have one, and half the words.
MOST_STAGED = 16
DOT_CONFIGS = {False: (32, 64, 4, 3), True: (32, 32, 4, 3)}
UNPACK_BLOCK = (16, 64)  # rows, words

Widen = Callable[[Packed], Tensor]

_KINDS = {"int4": 4, "int8": 8, "fp8": 0}


@triton.jit
def _moved(words, SHIFT: tl.constexpr):
    """Left by SHIFT bits, or right."""
    if SHIFT >= 0:
        return words << SHIFT
    return words >> -SHIFT


@triton.jit
def _factor(words, PLANE: tl.constexpr, KIND: tl.constexpr):
    """float32, of a plane of words: `1 + q / 2**bits`, or an FP8 number times 2**-120."""
    if KIND == 4:
        bits = (_moved(words, 19 - 4 * PLANE) & 0x00780000) | 0x3F800000
    elif KIND == 8:
        bits = (_moved(words, 15 - 8 * PLANE) & 0x007F8000) | 0x3F800000
    else:
        bits = (_moved(words, 24 - 8 * PLANE) >> 4) & -0x78100000  # sign, and seven bits below the exponent's top
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _low_half(both):
    """float32 of the float16 in a word's lower bits."""
    return both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _scales(
    scales, zeros, row, column, inside, HAS_ZEROS: tl.constexpr, KIND: tl.constexpr, ROW_BLOCK: tl.constexpr,
    GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_RUNS: tl.constexpr,
):  # fmt: skip
    """What is taken off factors times a gain, and that gain, float32 `[rows, words]`; of FP8 0 and the scale. All three
    have so few bits that the difference is exact. zeros: runs, where there are NUM_RUNS of a row; what is taken off is
    then an offset alone, and factors are less one.
    """
    at = (row // ROW_BLOCK) * NUM_GROUPS + column // GROUP
    if NUM_RUNS > 0:
        HIGHEST: tl.constexpr = 16.0 if KIND == 4 else 256.0
        pair = tl.load(scales + at, mask=inside, other=0).to(tl.int32)
        both = tl.load(zeros + row * NUM_RUNS + column // (GROUP * NUM_GROUPS // NUM_RUNS), mask=inside, other=0)
        gain = _low_half(both) * ((pair << 24) >> 24).to(tl.float32) * HIGHEST
        return _low_half(both >> 16) * (pair >> 8).to(tl.float32), gain
    scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        return scale * 0.0, scale
    BASE: tl.constexpr = 16.0 if KIND == 4 else 256.0
    less = 1.5 * BASE
    if HAS_ZEROS:
        less = BASE + tl.load(zeros + at, mask=inside, other=0).to(tl.float32)
    return less * scale, scale * BASE


@triton.jit
def _packed_gemv_kernel(
    x, words, scales, zeros, norm_weight, residual, out, eps, num_rows,
    INNER: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr,
    NUM_RUNS: tl.constexpr, ROW_BLOCK: tl.constexpr, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr,
    NORMS: tl.constexpr, GATES: tl.constexpr, GELU: tl.constexpr, ADDS_RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_WORDS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = 8 if KIND == 4 else 4
    NUM_WORDS: tl.constexpr = INNER // PLANES
    UNIT_WORDS: tl.constexpr = UNIT // PLANES
    HALF: tl.constexpr = 2.0**60 if KIND == 0 else 1.0  # of FP8's 2**120: both halves keep sums within float32
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    source_row = tl.minimum(row, num_rows - 1).to(tl.int64)[:, None]
    up_row = source_row + num_rows
    word = tl.arange(0, BLOCK_WORDS)[None, :]
    sums = tl.zeros([BLOCK_ROWS, BLOCK_WORDS], tl.float32)
    up_sums = sums
    squares = tl.zeros([1, BLOCK_WORDS], tl.float32)
    for begin in tl.range(0, NUM_WORDS, BLOCK_WORDS, loop_unroll_factor=UNROLL):
        at = begin + word
        inside = at < NUM_WORDS
        column = at // UNIT_WORDS * UNIT + at % UNIT_WORDS  # of plane 0
        packed = tl.load(words + source_row * NUM_WORDS + at, mask=inside, other=0, eviction_policy="evict_first")
        less, gain = _scales(
            scales, zeros, source_row, column, inside, HAS_ZEROS, KIND, ROW_BLOCK, GROUP, NUM_GROUPS, NUM_RUNS
        )  # fmt: skip
        if NUM_RUNS > 0:
            less += gain
        part = tl.zeros([BLOCK_ROWS, BLOCK_WORDS], tl.float32)
        total = tl.zeros([1, BLOCK_WORDS], tl.float32)
        if GATES:
            ups = tl.load(words + up_row * NUM_WORDS + at, mask=inside, other=0, eviction_policy="evict_first")
            up_less, up_gain = _scales(
                scales, zeros, up_row, column, inside, HAS_ZEROS, KIND, ROW_BLOCK, GROUP, NUM_GROUPS, NUM_RUNS
            )  # fmt: skip
            if NUM_RUNS > 0:
                up_less += up_gain
            up_part = part
        for PLANE in tl.static_range(PLANES):
            values = tl.load(x + column + PLANE * UNIT_WORDS, mask=inside, other=0.0).to(tl.float32)
            if NORMS:
                squares += values * values
                norm = tl.load(norm_weight + column + PLANE * UNIT_WORDS, mask=inside, other=0.0)
                values *= norm.to(tl.float32)
            if KIND == 0:
                values *= HALF
            else:
                total += values
            part += _factor(packed, PLANE, KIND) * values
            if GATES:
                up_part += _factor(ups, PLANE, KIND) * values
        sums += (part * gain - less * total) * HALF
        if GATES:
            up_sums += (up_part * up_gain - up_less * total) * HALF
    result = tl.sum(sums, 1)
    scale = 1.0
    if NORMS:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / INNER + eps)
        result *= scale
    if GATES:
        result = gated(result, tl.sum(up_sums, 1) * scale, GELU)
    if ADDS_RESIDUAL:
        result += tl.load(residual + row, mask=row < num_rows, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < num_rows)


@triton.jit
def _widened(packed, less, gain, PLANE: tl.constexpr, KIND: tl.constexpr, NUM_RUNS: tl.constexpr):
    """float32 numbers of a plane."""
    if NUM_RUNS > 0:
        return (_factor(packed, PLANE, KIND) - 1.0) * gain - less  # the product is exact
    if KIND == 0:
        return _factor(packed, PLANE, KIND) * 2.0**120 * gain
    return _factor(packed, PLANE, KIND) * gain - less


@triton.jit
def _packed_dot_kernel(
    x, words, scales, zeros, residual, out, num_tokens, num_rows, x_stride, residual_stride,
    INNER: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr,
    NUM_RUNS: tl.constexpr, ROW_BLOCK: tl.constexpr, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr,
    GATES: tl.constexpr, GELU: tl.constexpr, ADDS_RESIDUAL: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = 8 if KIND == 4 else 4
    NUM_WORDS: tl.constexpr = INNER // PLANES
    UNIT_WORDS: tl.constexpr = UNIT // PLANES
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    source_row = tl.minimum(row, num_rows - 1).to(tl.int64)[:, None]
    up_row = source_row + num_rows
    source_token = tl.minimum(token, num_tokens - 1).to(tl.int64)[:, None] * x_stride
    word = tl.arange(0, BLOCK_WORDS)[None, :]
    sums = tl.zeros([BLOCK_TOKENS, BLOCK_ROWS], tl.float32)
    up_sums = sums
    for begin in tl.range(0, NUM_WORDS, BLOCK_WORDS):
        at = begin + word
        inside = at < NUM_WORDS
        column = at // UNIT_WORDS * UNIT + at % UNIT_WORDS
        packed = tl.load(words + source_row * NUM_WORDS + at, mask=inside, other=0, eviction_policy="evict_first")
        less, gain = _scales(
            scales, zeros, source_row, column, inside, HAS_ZEROS, KIND, ROW_BLOCK, GROUP, NUM_GROUPS, NUM_RUNS
        )  # fmt: skip
        if GATES:
            ups = tl.load(words + up_row * NUM_WORDS + at, mask=inside, other=0, eviction_policy="evict_first")
            up_less, up_gain = _scales(
                scales, zeros, up_row, column, inside, HAS_ZEROS, KIND, ROW_BLOCK, GROUP, NUM_GROUPS, NUM_RUNS
            )  # fmt: skip
        for PLANE in tl.static_range(PLANES):
            values = tl.load(x + source_token + column + PLANE * UNIT_WORDS, mask=inside, other=0.0).to(DTYPE)
            wide = _widened(packed, less, gain, PLANE, KIND, NUM_RUNS).to(DTYPE)
            sums = tl.dot(values, tl.trans(wide), sums, input_precision="ieee")
            if GATES:
                wide = _widened(ups, up_less, up_gain, PLANE, KIND, NUM_RUNS).to(DTYPE)
                up_sums = tl.dot(values, tl.trans(wide), up_sums, input_precision="ieee")
    inside = (token < num_tokens)[:, None] & (row < num_rows)[None, :]
    if GATES:
        sums = gated(sums, up_sums, GELU)
    if ADDS_RESIDUAL:
        place = token.to(tl.int64)[:, None] * residual_stride + row[None, :]
        sums += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    place = token.to(tl.int64)[:, None] * num_rows + row[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _unpack_kernel(
    words, scales, zeros, out, num_rows,
    INNER: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr,
    NUM_RUNS: tl.constexpr, ROW_BLOCK: tl.constexpr, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = 8 if KIND == 4 else 4
    NUM_WORDS: tl.constexpr = INNER // PLANES
    UNIT_WORDS: tl.constexpr = UNIT // PLANES
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
    at = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, :]
    inside = (row < num_rows) & (at < NUM_WORDS)
    column = at // UNIT_WORDS * UNIT + at % UNIT_WORDS
    packed = tl.load(words + row * NUM_WORDS + at, mask=inside, other=0)
    less, gain = _scales(scales, zeros, row, column, inside, HAS_ZEROS, KIND, ROW_BLOCK, GROUP, NUM_GROUPS, NUM_RUNS)
    for PLANE in tl.static_range(PLANES):
        wide = _widened(packed, less, gain, PLANE, KIND, NUM_RUNS)
        place = out + row * INNER + column + PLANE * UNIT_WORDS
        tl.store(place, wide.to(out.dtype.element_ty), mask=inside)


def packed_linear(x: Tensor, packed: Packed, residual: Tensor | None = None, widened: Widen | None = None) -> Tensor:
    """`x @ packed.T (+ residual)`: x `[tokens, inner]` of any float type, residual `[tokens, rows]` of packed.dtype.

    The result, `[tokens, rows]`, is new and of packed.dtype. widened: what widens the matrix for more than MOST_TOKENS,
    None: `widen`. Raises ValueError for another shape, dtype or device.
    """
    x = _ordered("packed_linear", x, packed)
    if residual is not None:
        check("packed_linear", "residual", residual, (len(x), packed.rows), packed.dtype, x.device)
    return _product(x, packed, residual, None, packed.dtype, widened)


def packed_logits(x: Tensor, packed: Packed) -> Tensor:
    """`x @ packed.T` in float32, never rounded to bf16. Raises ValueError for another shape or device."""
    x = _ordered("packed_logits", x, packed)
    if len(x) <= MOST_TOKENS or not runs_on_triton(x):
        return _product(x, packed, None, None, torch.float32, None)
    return torch.cat([_product(part, packed, None, None, torch.float32, None) for part in x.split(MOST_TOKENS)])


def packed_norm_linear(
    x: Tensor, norm: Tensor, eps: float, packed: Packed, bias: Tensor | None, widened: Widen | None = None
) -> Tensor:
    """`rms_norm(x, norm, eps) @ packed.T (+ bias)`: norm `[inner]` of x.dtype or float32, bias `[rows]`.

    Raises ValueError for another shape, dtype or device.
    """
    check_norm("packed_norm_linear", "norm", norm, x)
    if bias is not None:
        check("packed_norm_linear", "bias", bias, (packed.rows,), packed.dtype, x.device)
    if _is_gemv(x, packed) and packed.order is None:
        return _gemv(_ordered("packed_norm_linear", x, packed), packed, norm, eps, bias, None, packed.dtype)
    x = _ordered("packed_norm_linear", rms_norm(x, norm, eps), packed)
    return _product(x, packed, bias, None, packed.dtype, widened)


def packed_norm_gate_up(
    x: Tensor, norm: Tensor, eps: float, packed: Packed, activation: Activation, widened: Widen | None = None
) -> Tensor:
    """`activation(gate) * up` of `rms_norm(x, norm, eps) @ packed.T`, gate first -> `[tokens, rows / 2]`.

    Raises ValueError for another shape, dtype or device.
    """
    check_norm("packed_norm_gate_up", "norm", norm, x)
    if _is_gemv(x, packed) and packed.order is None:
        x = _ordered("packed_norm_gate_up", x, packed)
        return _gemv(x, packed, norm, eps, None, activation, packed.dtype)
    x = _ordered("packed_norm_gate_up", rms_norm(x, norm, eps), packed)
    return _product(x, packed, None, activation, packed.dtype, widened)


def unpack(packed: Packed) -> Tensor:
    """`[rows, inner]` of packed.dtype, each number rounded once, columns as tokens have them."""
    wide = widen(packed)
    if packed.order is None:
        return wide
    placed = torch.empty_like(wide)
    placed[:, packed.order] = wide
    return placed


def _ordered(op: str, x: Tensor, packed: Packed) -> Tensor:
    """Columns of x as the matrix has them."""
    if x.ndim != 2 or x.shape[1] != packed.inner or x.device != packed.words.device:
        got = f"x {tuple(x.shape)} on {x.device}, a matrix {packed.rows, packed.inner} on {packed.words.device}"
        raise ValueError(f"{op}: got {got}; wanted [tokens, in] and [out, in] on one device")
    return x if packed.order is None else x.index_select(1, packed.order)


def _is_gemv(x: Tensor, packed: Packed) -> bool:
    return runs_on_triton(x) and len(x) == 1 and x.stride(1) == 1


def _product(
    x: Tensor, packed: Packed, added: Tensor | None, activation: Activation | None, dtype: torch.dtype,
    widened: Widen | None,
) -> Tensor:  # fmt: skip
    """x in the matrix's order. added: `[tokens, rows]`, or `[rows]` for all."""
    if _is_gemv(x, packed):
        return _gemv(x, packed, None, 0.0, added, activation, dtype)
    if runs_on_triton(x) and 0 < len(x) <= MOST_TOKENS:
        return _dot(x, packed, added, activation, dtype)
    product = x.to(packed.dtype) @ (widened or widen)(packed).t()
    if activation is not None:
        product = swiglu(product, activation)
    return (product if added is None else product.add_(added)).to(dtype)


def _layout(packed: Packed) -> dict[str, object]:
    return {
        "INNER": packed.inner, "UNIT": packed.unit, "GROUP": packed.group, "NUM_GROUPS": packed.scales.shape[1],
        "NUM_RUNS": 0 if packed.runs is None else packed.runs.shape[1], "ROW_BLOCK": packed.row_block,
        "KIND": _KINDS[packed.kind], "HAS_ZEROS": packed.zeros is not None,
    }  # fmt: skip


def _tensors(packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
    beside = packed.zeros if packed.runs is None else packed.runs
    return packed.words, packed.scales, packed.scales if beside is None else beside


def _gemv(
    x: Tensor, packed: Packed, norm: Tensor | None, eps: float, added: Tensor | None, activation: Activation | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    gates = activation is not None
    num_rows = packed.rows // (2 if gates else 1)
    block_rows, num_warps, unroll = GEMV_CONFIGS[gates]
    out = torch.empty(1, num_rows, dtype=dtype, device=x.device)
    _packed_gemv_kernel[(triton.cdiv(num_rows, block_rows),)](
        x, *_tensors(packed), x if norm is None else norm, out if added is None else added.contiguous(), out, eps,
        num_rows, **_layout(packed), NORMS=norm is not None, GATES=gates, GELU=activation == "gelu_tanh",
        ADDS_RESIDUAL=added is not None, BLOCK_ROWS=block_rows, BLOCK_WORDS=WARP_WORDS * num_warps,
        UNROLL=unroll, num_warps=num_warps,
    )  # fmt: skip
    return out


def _dot(x: Tensor, packed: Packed, added: Tensor | None, activation: Activation | None, dtype: torch.dtype) -> Tensor:
    gates = activation is not None
    tokens, num_rows = len(x), packed.rows // (2 if gates else 1)
    x = x if x.stride(1) == 1 else x.contiguous()
    block_rows, block_words, num_warps, num_stages = DOT_CONFIGS[gates]
    block_tokens = min(64, max(16, triton.next_power_of_2(tokens)))
    if block_tokens > MOST_STAGED:
        block_words, num_stages = block_words // 2, 1
    elif packed.runs is not None:
        num_stages -= 1  # a run's numbers take room, too
    out = torch.empty(tokens, num_rows, dtype=dtype, device=x.device)
    residual, stride = (out, 0) if added is None else (added.contiguous(), 0 if added.ndim == 1 else num_rows)
    _packed_dot_kernel[(triton.cdiv(num_rows, block_rows), triton.cdiv(tokens, block_tokens))](
        x, *_tensors(packed), residual, out, tokens, num_rows, x.stride(0), stride, **_layout(packed), GATES=gates,
        GELU=activation == "gelu_tanh", ADDS_RESIDUAL=added is not None,
        DTYPE=tl.bfloat16 if packed.dtype == torch.bfloat16 else tl.float32, BLOCK_TOKENS=block_tokens,
        BLOCK_ROWS=block_rows, BLOCK_WORDS=block_words, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


def widen(packed: Packed) -> Tensor:
    """As `unpack`, columns in the matrix's own order."""
    if not runs_on_triton(packed.words):
        wide = unpack_reference(packed, torch.float32).to(packed.dtype)
        return wide if packed.order is None else wide.index_select(1, packed.order)
    block_rows, block_words = UNPACK_BLOCK
    out = torch.empty(packed.rows, packed.inner, dtype=packed.dtype, device=packed.words.device)
    grid = triton.cdiv(packed.rows, block_rows), triton.cdiv(packed.num_words, block_words)
    _unpack_kernel[grid](
        *_tensors(packed), out, packed.rows, **_layout(packed), BLOCK_ROWS=block_rows, BLOCK_WORDS=block_words,
        num_warps=4,
    )  # fmt: skip
    return out
