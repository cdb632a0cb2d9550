"""Experts of few bits for the CPU's kernels, drawn, with the float64 numbers that they stand for."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from gpu.operations.linear.numba_matrix_table import rows_of
from gpu.operations.linear.packed_matrix import Packed
from gpu.operations.linear.word_layout import pack_words
from tests.gpu.packed_oracle import Drawn, draw_packed, poisoned
from transfer.expert_exchange import LayerExperts, PackedRows

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Format:
    """group 0: whole rows. halves: scales in float16."""

    kind: str
    group: int
    has_zeros: bool = False
    row_block: int = 1
    run: int | None = None
    halves: bool = False


FORMATS = {
    "int4 rounded": Format("int4", 128, has_zeros=True),
    "int4 AWQ of 64": Format("int4", 64, has_zeros=True, halves=True),
    "int4 of rows": Format("int4", 0),
    "int4 of 48": Format("int4", 48, has_zeros=True),
    "int4 of 16": Format("int4", 16),
    "Q4_0": Format("int4", 32, halves=True),
    "Q4_1": Format("int4", 32, run=32),
    "Q4_K": Format("int4", 32, run=256),
    "int8 rounded": Format("int8", 128),
    "int8 GPTQ of 32": Format("int8", 32, has_zeros=True, halves=True),
    "int8 of rows": Format("int8", 0, has_zeros=True),
    "Q8_0": Format("int8", 32, halves=True),
    "Q5_K": Format("int8", 32, run=256),
    "Q6_K": Format("int8", 16, run=256),
    "FP8 rows": Format("fp8", 0),
    "FP8 blocks": Format("fp8", 128, row_block=128),
    "FP8 blocks of 32": Format("fp8", 32, row_block=8),
    "MXFP4": Format("fp4", 32),
    "NVFP4": Format("fp4", 16),
    "FP4 of rows": Format("fp4", 0),
}
PLAIN = Format("bfloat16", 0)


@dataclass(frozen=True)
class Experts:
    """gate_up `[count, 2 * width, hidden]`, down `[count, hidden, width]`: float64, as biases are."""

    layer: LayerExperts
    gate_up: np.ndarray
    down: np.ndarray
    gate_up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None


def draw_rows(asked: Format, rows: int, inner: int) -> tuple[torch.Tensor | PackedRows, np.ndarray]:
    """What words have behind the last column is not zero; tensors beside them stand in buffers of NaN, or of ones."""
    if asked is PLAIN:
        plain = torch.from_numpy(np.random.default_rng(rows).normal(size=(rows, inner))).bfloat16()
        return plain, plain.double().numpy()
    group = asked.group or inner
    drawn: Drawn = draw_packed(
        asked.kind, rows, inner, group, asked.row_block, asked.has_zeros, False, torch.float32, "cpu", asked.run
    )  # fmt: skip
    packed: Packed = drawn.packed
    if asked.halves:
        packed = replace(packed, scales=packed.scales.half())
    columns = packed.num_words * 32 // packed.bits
    behind = np.random.default_rng(rows).integers(1, 2**packed.bits, (rows, columns), dtype=np.uint8)
    behind[:, :inner] = 0
    packed.words.bitwise_or_(pack_words(torch.from_numpy(behind), packed.bits))
    found = rows_of(packed)
    assert isinstance(found, PackedRows)
    return found, drawn.wanted


def draw_experts(
    gate_up: Format, down: Format, count: int, hidden: int, width: int, in_integers: bool = False
) -> Experts:
    gates, wanted_gates = draw_rows(gate_up, count * 2 * width, hidden)
    downs, wanted_downs = draw_rows(down, count * hidden, width)
    return Experts(
        LayerExperts(count, gates, downs, in_integers=in_integers), wanted_gates.reshape(count, 2 * width, hidden),
        wanted_downs.reshape(count, hidden, width),
    )  # fmt: skip


def with_biases(experts: Experts) -> Experts:
    """As gpt-oss has them: biases as large as what they are added to, which stand in buffers of NaN, and its SwiGLU."""
    draw, (count, rows, hidden) = np.random.default_rng(9), experts.gate_up.shape
    x = np.linalg.norm(experts.gate_up, axis=2).mean()
    gate_up = (draw.normal(size=(count, rows)) * x).astype(np.float32)
    down = (draw.normal(size=(count, hidden)) * x**2).astype(np.float32)
    layer = replace(
        experts.layer, gate_up_bias=poisoned(torch.tensor(gate_up).flatten(), float("nan")),
        down_bias=poisoned(torch.tensor(down).flatten(), float("nan")), activation="clamped_swiglu",
    )  # fmt: skip
    return replace(experts, layer=layer, gate_up_bias=gate_up.astype(float), down_bias=down.astype(float))


def oracle(experts: Experts, hidden: np.ndarray, ids: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Float64, from the definition: sum over places of share * down @ (silu(gate @ x) * (up @ x)), or with gpt-oss's
    biases and activation, of which a gate is at most 7 and an up within 7 of 0.
    """
    out = np.zeros(hidden.shape)
    for row, x in enumerate(hidden.astype(np.float64)):
        for expert, share in zip(ids[row], shares[row].astype(np.float64), strict=True):
            if 0 <= expert < experts.layer.count:
                both = experts.gate_up[expert] @ x
                if experts.gate_up_bias is None or experts.down_bias is None:
                    gate, up = np.split(both, 2)
                    out[row] += share * (experts.down[expert] @ (gate / (1 + np.exp(-gate)) * up))
                else:
                    gate, up = np.split(both + experts.gate_up_bias[expert], 2)
                    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
                    made = experts.down[expert] @ (gate / (1 + np.exp(-1.702 * gate)) * (up + 1))
                    out[row] += share * (made + experts.down_bias[expert])
    return out
