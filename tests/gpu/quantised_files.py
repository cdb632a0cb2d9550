"""Checkpoints of few bits, written as each format's publishers lay them out, beside the same model in plain float32.

Written from the formats' definitions, with numpy alone; nothing here is shared with what reads them. AWQ: the packing
of its GEMM kernels. GPTQ: words along the input, zero points less one (and not so in its second version). FP8: e4m3
with a scale a tensor, a row, or a block. compressed-tensors: words along the input, from the middle, rows first.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.gpu.packed_oracle import draw_codes, e2m1, e4m3

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight neighbours, whose nibbles a word has from the lowest up
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj",
               "w1", "w2", "w3", "in_proj", "input_linear", "output_linear", "in_proj_qkv", "in_proj_z",
               "in_proj_qkvz", "out_proj")  # fmt: skip


@dataclass(frozen=True)
class Module:
    """tensors: by the ends of their names; wanted: float64 `[out, in]`."""

    tensors: dict[str, np.ndarray | torch.Tensor]
    wanted: np.ndarray


Draw = Callable[[np.random.Generator, int, int], Module]


def words_of(numbers: np.ndarray, bits: int) -> np.ndarray:
    """`[..., n]` below `2**bits` to int32 `[..., n * bits / 32]`, from the lowest bits up."""
    cut = numbers.astype(np.uint64).reshape(*numbers.shape[:-1], -1, 32 // bits)
    return (cut << (bits * np.arange(32 // bits, dtype=np.uint64))).sum(-1).astype(np.uint32).view(np.int32)


def scales_of(generator: np.random.Generator, shape: tuple[int, ...], bits: int, inner: int) -> np.ndarray:
    """float16 exactly; products of few bits have a spread of about one."""
    return (generator.uniform(0.7, 1.4, shape) * 3.5 / 2**bits / inner**0.5).astype(np.float16)


def awq(group: int) -> Draw:
    def draw(generator: np.random.Generator, rows: int, inner: int) -> Module:
        numbers, zeros = (
            draw_codes(generator, "int4", (inner, rows)),
            draw_codes(generator, "int4", (inner // group, rows)),
        )
        zeros = zeros // 2 + 4
        scales = scales_of(generator, zeros.shape, 4, inner)
        spread = (numbers - np.repeat(zeros, group, 0).astype(float)) * np.repeat(scales, group, 0)
        packed = [
            words_of(part.reshape(len(part), -1, 8)[:, :, AWQ_COLUMNS].reshape(part.shape), 4)
            for part in (numbers, zeros)
        ]
        return Module({"qweight": packed[0], "qzeros": packed[1], "scales": scales}, spread.T)

    return draw


def gptq(bits: int, group: int, is_one_less: bool, is_moved: bool) -> Draw:
    orders: dict[int, np.ndarray] = {}  # of the columns that a token has: products of the same tokens share it

    def draw(generator: np.random.Generator, rows: int, inner: int) -> Module:
        kind = "int4" if bits == 4 else "int8"
        size = inner if group == -1 else group
        numbers = draw_codes(generator, kind, (inner, rows))
        zeros = draw_codes(generator, kind, (inner // size, rows)) // 2 + 2 ** (bits - 2)
        zeros[0, 0] = 0  # which is stored as the largest number where one is taken off
        groups = np.arange(inner, dtype=np.int32) // size
        if is_moved:
            groups = orders.setdefault(inner, np.random.default_rng(inner).permutation(groups))
        scales = scales_of(generator, zeros.shape, bits, inner)
        wanted = (numbers - zeros.astype(float)[groups]) * scales[groups]
        stored = (zeros.astype(int) - is_one_less) % 2**bits
        tensors = {
            "qweight": words_of(numbers.T, bits).T,
            "qzeros": words_of(stored, bits),
            "scales": scales,
            "g_idx": groups,
        }
        return Module(tensors, wanted.T)

    return draw


def fp8(scale_name: str, block: tuple[int, int] | None, of_rows: bool, tokens: bool = False) -> Draw:
    def draw(generator: np.random.Generator, rows: int, inner: int) -> Module:
        codes = draw_codes(generator, "fp8", (rows, inner))
        codes = np.where(generator.random(codes.shape) < 0.5, codes, codes & 0xBF)  # mostly of middling size
        shape = (rows, 1) if of_rows else (1,)
        if block is not None:
            shape = (-(-rows // block[0]), -(-inner // block[1]))
        scales = (generator.uniform(0.5, 1.5, shape) / 120 / inner**0.5).astype(np.float32)
        wide = scales.astype(float)
        if block is not None:
            wide = np.repeat(np.repeat(wide, block[0], 0), block[1], 1)[:rows, :inner]
        stored = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        more = {"input_scale": np.ones(1, np.float32)} if tokens else {}
        return Module({"weight": stored, scale_name: scales, **more}, e4m3(codes) * wide)

    return draw


def pack_quantized(bits: int, group: int | None, has_zeros: bool, is_moved: bool = False) -> Draw:
    orders: dict[int, np.ndarray] = {}

    def draw(generator: np.random.Generator, rows: int, inner: int) -> Module:
        kind, size = "int4" if bits == 4 else "int8", group or inner
        numbers, zeros = draw_codes(generator, kind, (rows, inner)), draw_codes(generator, kind, (rows, inner // size))
        zeros = zeros // 2 + 2 ** (bits - 2) if has_zeros else np.full_like(zeros, 2 ** (bits - 1))
        scales = torch.from_numpy(scales_of(generator, zeros.shape, bits, inner)).bfloat16()
        groups = np.arange(inner, dtype=np.int32) // size
        if is_moved:
            groups = orders.setdefault(inner, np.random.default_rng(inner).permutation(groups))
        wanted = (numbers - zeros.astype(float)[:, groups]) * scales.double().numpy()[:, groups]
        tensors: dict[str, Any] = {"weight_packed": words_of(numbers, bits), "weight_scale": scales,
                                   "weight_shape": np.array([rows, inner])}  # fmt: skip
        if has_zeros:
            tensors["weight_zero_point"] = words_of(zeros.T, bits).T  # rows are packed, not groups
        if is_moved:
            tensors["weight_g_idx"] = groups
        return Module(tensors, wanted)

    return draw


def int_quantized(shape: Literal["rows, 1", "rows", "1"], has_zeros: bool = False) -> Draw:
    """shape: of scales and zero points: one for each row, with a second axis and without, and one for all."""

    def draw(generator: np.random.Generator, rows: int, inner: int) -> Module:
        numbers = generator.integers(-128, 128, (rows, inner)).astype(np.int8)
        scales = scales_of(generator, (1,) if shape == "1" else (rows,), 8, inner)
        zeros = generator.integers(-40, 40, scales.shape).astype(np.int8) if has_zeros else np.zeros_like(scales)
        wanted = (numbers - zeros.astype(float)[:, None]) * scales.astype(float)[:, None]
        if shape == "rows, 1":
            scales, zeros = scales[:, None], zeros[:, None]
        more = {"weight_zero_point": zeros} if has_zeros else {}
        return Module({"weight": numbers, "weight_scale": scales, **more}, wanted)

    return draw


def fp4(layout: Literal["modelopt", "nvfp4", "mxfp4"]) -> Draw:
    """NVFP4: an e4m3 scale for 16 columns, and a number for all, which scales are multiplied by, or divided by. MXFP4:
    an exponent for 32.
    """

    def draw(generator: np.random.Generator, rows: int, inner: int) -> Module:
        codes, group = draw_codes(generator, "fp4", (rows, inner)), 32 if layout == "mxfp4" else 16
        pairs = codes[:, ::2] | codes[:, 1::2] << 4
        shape = (rows, inner // group)
        if layout == "mxfp4":
            exponents = generator.integers(121, 125, shape).astype(np.uint8)
            wide = 2.0 ** (exponents - 127.0)
            return Module({"weight_packed": pairs, "weight_scale": exponents}, e2m1(codes) * np.repeat(wide, group, 1))
        scales = torch.from_numpy(generator.uniform(20, 448, shape).astype(np.float32)).to(torch.float8_e4m3fn)
        factor = np.float32(generator.uniform(0.7, 1.4) / 448 / 3 / inner**0.5)
        stored = factor if layout == "modelopt" else np.float32(1 / factor)
        factor = float(stored) if layout == "modelopt" else 1 / float(stored)
        wanted = e2m1(codes) * np.repeat(scales.double().numpy(), group, 1) * factor
        if layout == "modelopt":
            return Module({"weight": pairs, "weight_scale": scales, "weight_scale_2": np.array(stored),
                           "input_scale": np.array(np.float32(0.01))}, wanted)  # fmt: skip
        return Module({"weight_packed": pairs, "weight_scale": scales, "weight_global_scale": np.array([stored]),
                       "input_global_scale": np.array([np.float32(3.0)])}, wanted)  # fmt: skip

    return draw


def write(plain: Path, folder: Path, config: dict[str, Any], draw: Draw, ignored: tuple[str, ...] = ()) -> Path:
    """A folder in this format, and beside it, `folder.name + "-plain"`, its numbers in float32. `plain` lends shapes,
    embeddings and norms; modules whose names hold one of `ignored` stay as they are. Returns the plain one.
    """
    generator = np.random.default_rng(7)
    stored: dict[str, torch.Tensor] = {}
    wide: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module, end = name.rsplit(".", 1)
        is_drawn = (
            end == "weight" and module.rsplit(".", 1)[-1] in PROJECTIONS and not any(i in module for i in ignored)
        )
        if not is_drawn:
            stored[name], wide[name] = tensor, tensor.float()
            continue
        drawn = draw(generator, *tensor.shape)
        for one, value in drawn.tensors.items():
            stored[f"{module}.{one}"] = value if isinstance(value, torch.Tensor) else torch.from_numpy(value.copy())
        wide[name] = torch.from_numpy(drawn.wanted).float()
    written = json.loads((plain / "config.json").read_text())
    beside = folder.with_name(folder.name + "-plain")
    for where, tensors, more in ((folder, stored, {"quantization_config": config}), (beside, wide, {})):
        where.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, where / "model.safetensors")
        (where / "config.json").write_text(json.dumps(written | more))
    return beside


def compressed(weights: dict[str, Any], packing: str, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": packing, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None} | more  # fmt: skip


def _weights(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": None, "symmetric": True,
            "dynamic": False, "observer": "minmax", "observer_kwargs": {}, "block_structure": None} | more  # fmt: skip


# By name: what `quantization_config` says, and what draws a module.
FORMATS: dict[str, tuple[dict[str, Any], Draw]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
             "modules_to_not_convert": None}, awq(32)),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False,
              "damp_percent": 0.01, "true_sequential": True}, gptq(4, 32, True, False)),
    "gptq_v2": ({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True,
                 "checkpoint_format": "gptq_v2", "pack_dtype": "int32", "lm_head": False}, gptq(4, 16, False, False)),
    "gptq-8": ({"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False, "sym": True,
                "checkpoint_format": "gptq"}, gptq(8, -1, True, False)),
    "gptq-order": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True,
                    "checkpoint_format": "gptq"}, gptq(4, 32, True, True)),
    "fp8-blocks": ({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                    "weight_block_size": [32, 32]},
                   fp8("weight_scale_inv", (32, 32), False)),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
                   fp8("weight_scale", None, False, tokens=True)),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
               fp8("weight_scale", None, True)),
    "compressed-fp8": (compressed(_weights(8, "float", "channel"), "float-quantized"), fp8("weight_scale", None, True)),
    "compressed-fp8-block": (compressed(_weights(8, "float", "block", block_structure=[32, 32]), "float-quantized"),
                             fp8("weight_scale", (32, 32), False)),
    "compressed-int4": (compressed(_weights(4, "int", "group", group_size=32), "pack-quantized"),
                        pack_quantized(4, 32, False)),
    "compressed-int4-zeros": (compressed(_weights(4, "int", "group", group_size=32, symmetric=False), "pack-quantized"),
                              pack_quantized(4, 32, True)),
    "compressed-int4-order": (compressed(_weights(4, "int", "group", group_size=32, actorder="group"),
                                         "pack-quantized"), pack_quantized(4, 32, False, is_moved=True)),
    "compressed-int8": (compressed(_weights(8, "int", "channel"), "pack-quantized"), pack_quantized(8, None, False)),
    "compressed-w8a8": (compressed(_weights(8, "int", "channel"), "int-quantized"), int_quantized("rows, 1")),
    "compressed-w8a8-zeros": (compressed(_weights(8, "int", "channel", symmetric=False), "int-quantized"),
                              int_quantized("rows, 1", has_zeros=True)),
    "compressed-w8a8-zeros-flat": (compressed(_weights(8, "int", "channel", symmetric=False), "int-quantized"),
                                   int_quantized("rows", has_zeros=True)),
    "compressed-w8a8-zeros-one": (compressed(_weights(8, "int", "tensor", symmetric=False), "int-quantized"),
                                  int_quantized("1", has_zeros=True)),
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"],
                        "producer": {"name": "modelopt", "version": "0.39"}, "kv_cache_quant_algo": None},
                       fp4("modelopt")),
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"],
                      "config_groups": {"group_0": {"weights": {"dynamic": False, "num_bits": 8, "type": "float"},
                                                    "input_activations": {"num_bits": 8, "type": "float"},
                                                    "targets": ["Linear"]}},
                      "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
                      "producer": {"name": "modelopt", "version": "0.39"}},
                     fp8("weight_scale", None, False, tokens=True)),
    "compressed-nvfp4": (compressed(_weights(4, "float", "tensor_group", group_size=16, zp_dtype=None,
                                             scale_dtype="torch.float8_e4m3fn"), "nvfp4-pack-quantized"), fp4("nvfp4")),
    "compressed-mxfp4": (compressed(_weights(4, "float", "group", group_size=32), "mxfp4-pack-quantized"),
                         fp4("mxfp4")),
    "auto-round": ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "sym": True,
                    "group_size": 32, "data_type": "int", "iters": 200, "autoround_version": "0.9.0",
                    "block_name_to_quantize": "model.layers"}, gptq(4, 32, True, False)),
    "auto-round-awq": ({"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "sym": False,
                        "group_size": 32, "extra_config": {r".*\\.router": {"bits": 16, "data_type": "float"}}},
                       awq(32)),
}  # fmt: skip
