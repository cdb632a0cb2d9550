"""GGUF files of checkpoints, written with `gguf`'s writer as llama.cpp's converter lays them out, and what they mean.

Q4_0 to Q8_0 and MXFP4 are rounded by `gguf`; other kinds are blocks of random bytes. What blocks of Q4_0 to Q6_K mean
is read in float64 here, number by number, from the published layouts (ggml's `block_q4_K` and the others), and that of
other kinds by `gguf`. It is written as a plain checkpoint beside the file. Names, the order of a Llama's rows and
Gemma's norms are spelled out, and shared with no reader.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file, save_file
from torch import from_numpy

BYTES = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144),
         "Q5_K": (256, 176), "Q6_K": (256, 210), "Q2_K": (256, 84), "Q3_K": (256, 110), "IQ4_NL": (32, 18),
         "IQ4_XS": (256, 136), "MXFP4": (32, 17), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ2_S": (256, 82),
         "IQ3_XXS": (256, 98), "IQ3_S": (256, 110)}  # fmt: skip
WIDENED = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")  # which are plain here
READ_BY_GGUF = ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4", *WIDENED)
# Where a block has d, 0 for others; and of random bytes the deviation of numbers, as multiples of d.
D_AT = {"Q6_K": 208, "Q2_K": 80, "Q3_K": 108}
STEPS = {"Q4_0": 5, "Q4_1": 5, "Q5_0": 10, "Q5_1": 10, "Q8_0": 70, "Q4_K": 5 * 30, "Q5_K": 10 * 30, "Q6_K": 20 * 70,
         "Q2_K": 10, "Q3_K": 42, "IQ4_NL": 70, "IQ4_XS": 70 * 18,
         "IQ2_XXS": 60, "IQ2_XS": 60, "IQ2_S": 60, "IQ3_XXS": 100, "IQ3_S": 400}  # fmt: skip
# What takes the mean off, of kinds that have least behind d, as multiples of d.
LEAST = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5, "Q2_K": 1.5}
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up", "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm", "self_attn.sinks": "attn_sinks",
}  # fmt: skip
GEMMA_NAMES = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
               "post_feedforward_layernorm": "post_ffw_norm"}  # fmt: skip
GEMMA4_NAMES = {
    "layer_scalar": "layer_output_scale", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm", "router.proj": "ffn_gate_inp", "router": "ffn_gate_inp",
    "experts.gate_up_proj": "ffn_gate_up_exps", "experts.down_proj": "ffn_down_exps",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}  # fmt: skip
GEMMA4_WHOLE = {
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}  # fmt: skip
QWEN35_NAMES = {
    "post_attention_layernorm": "post_attention_norm", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "linear_attn.dt_bias": "ssm_dt", "linear_attn.A_log": "ssm_a", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.in_proj_qkvz": "ssm_in",
    "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}  # fmt: skip
HEAD_NAMES = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
              "norm": "shared_head.norm"}  # fmt: skip
MLA_NAMES = {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "self_attn.k_b_proj": "attn_k_b", "self_attn.v_b_proj": "attn_v_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp", "mlp.gate.e_score_correction_bias": "exp_probs_b",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
}  # fmt: skip
MAMBA_NAMES = {
    "in_proj": "ssm_in", "conv1d": "ssm_conv1d", "A_log": "ssm_a", "D": "ssm_d", "norm": "ssm_norm",
    "dt_bias": "ssm_dt.bias", "out_proj": "ssm_out",
}  # fmt: skip
GRANITE_NAMES = {f"mamba.{ours}": theirs for ours, theirs in MAMBA_NAMES.items()} | {
    "block_sparse_moe.router.layer": "ffn_gate_inp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
NEMOTRON_NAMES = {f"mixer.{ours}": theirs for ours, theirs in MAMBA_NAMES.items()} | {
    "norm": "attn_norm", "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k", "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output", "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp", "mixer.gate.e_score_correction_bias": "exp_probs_b",
    "mixer.experts.up_proj": "ffn_up_exps", "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.shared_experts.up_proj": "ffn_up_shexp", "mixer.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
MAMBA_ENDS = (".A_log", ".D", ".dt_bias")  # which end without `.weight`, as in files
QWEN35_ENDS = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
EXPERT_NAMES = {"mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
                "mlp.experts.down_proj": "ffn_down_exps", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
                "block_sparse_moe.experts.w1": "ffn_gate_exps", "block_sparse_moe.experts.w3": "ffn_up_exps",
                "block_sparse_moe.experts.w2": "ffn_down_exps", "block_sparse_moe.gate": "ffn_gate_inp"}  # fmt: skip
# `general.architecture` of a `model_type`; a new family with a GGUF form gets an entry.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
                 "qwen3_moe": "qwen3moe", "phi3": "phi3", "glm4": "glm4", "gemma3_text": "gemma3",
                 "gpt_oss": "gpt-oss", "gemma4_text": "gemma4", "smollm3": "smollm3", "granite": "granite",
                 "ministral3": "mistral3", "granitemoehybrid": "granitehybrid", "nemotron_h": "nemotron_h_moe",
                 "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next",
                 "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe_lite": "deepseek2",
                 "mistral4": "mistral4", "olmo3": "olmo2", "muse_glimmer_text": "muse-glimmer"}  # fmt: skip
OFFSET = ("gemma3", "qwen35", "qwen35moe", "qwen3next", "muse-glimmer")  # architectures whose norms have one added
OFFSET_NORMS = {"muse-glimmer": "layernorm.weight"}  # not the last one
NEIGHBOUR_PAIRS = {
    "llama",
    "smollm3",
    "granite",
    "granitehybrid",
    "nemotron_h",
    "nemotron_h_moe",
    "mistral3",
    "muse-glimmer",
}  # architectures whose query and key rows are in the order of neighbours
Kinds = Callable[[str], str]


def draw_blocks(generator: np.random.Generator, kind: str, rows: int, inner: int) -> np.ndarray:
    """uint8 `[rows, bytes]`: any bytes, but scales of which numbers have a spread of about `inner**-0.5`."""
    block, num_bytes = BYTES[kind]
    data = generator.integers(0, 256, (rows, inner // block * num_bytes), dtype=np.uint8)
    cut = data.reshape(-1, num_bytes)
    if kind == "MXFP4":
        cut[:, 0] = 127 + np.log2(inner**-0.5).round() - generator.integers(0, 3, len(cut))
        return data
    at = D_AT.get(kind, 0)
    d = generator.uniform(0.7, 1.4, len(cut)) / STEPS[kind] * inner**-0.5
    cut[:, at : at + 2] = d.astype(np.float16)[:, None].view(np.uint8)
    if kind in LEAST:
        least = LEAST[kind] * d * generator.uniform(0.8, 1.2, len(d))
        cut[:, at + 2 : at + 4] = least.astype(np.float16)[:, None].view(np.uint8)
    return data


def wanted_numbers(kind: str, data: np.ndarray, inner: int) -> np.ndarray:
    """float64 `[rows, inner]`, by the definition of each kind."""
    num_bytes = BYTES[kind][1]
    if kind in READ_BY_GGUF:
        return gguf.quants.dequantize(data, getattr(gguf.GGMLQuantizationType, kind)).astype(np.float64)
    return np.ascontiguousarray(_numbers(kind, data.reshape(-1, num_bytes))).reshape(len(data), inner)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float64)


def _six_bits(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets of the eight groups, of ggml's `get_scale_min_k4`."""
    low, middle, high = (blocks[:, at : at + 4].astype(np.int64) for at in (4, 8, 12))
    scales = low & 63, (high & 15) | (low >> 6) << 4
    offsets = middle & 63, (high >> 4) | (middle >> 6) << 4
    return np.concatenate(scales, 1), np.concatenate(offsets, 1)


def _numbers(kind: str, blocks: np.ndarray) -> np.ndarray:
    if kind == "Q8_0":
        return _half(blocks, 0) * blocks[:, 2:].view(np.int8)
    if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        has_least, is_five = kind.endswith("1"), kind.startswith("Q5")
        at = 2 + 2 * has_least
        quarters = blocks[:, at + 4 * is_five :].astype(np.int64)
        numbers = np.concatenate((quarters & 15, quarters >> 4), 1)
        if is_five:
            numbers |= np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little").astype(np.int64) << 4
        d = _half(blocks, 0)
        return d * numbers + _half(blocks, 2) if has_least else d * (numbers - (16 if is_five else 8))
    whole, i = blocks.astype(np.int64), np.arange(256)
    if kind == "Q6_K":
        half, j = divmod(i, 128)
        low = whole[:, 64 * half + j % 64] >> 4 * (j // 64) & 15
        high = whole[:, 128 + 32 * half + j % 32] >> 2 * (j // 32) & 3
        scales = blocks[:, 192:208].view(np.int8)[:, i // 16]
        return _half(blocks, 208) * scales * ((low | high << 4) - 32)
    group, j = divmod(i, 32)
    low = whole[:, (48 if kind == "Q5_K" else 16) + 32 * (group // 2) + j] >> 4 * (group % 2) & 15
    high = (whole[:, 16 + j] >> group & 1) << 4 if kind == "Q5_K" else 0
    scales, offsets = (one[:, group] for one in _six_bits(blocks))
    return _half(blocks, 0) * scales * (low + high) - _half(blocks, 2) * offsets


def write(plain: Path, path: Path, kinds: Kinds, metadata: Mapping[str, Any] | None = None, seed: int = 3,
          split_tensors: int = 0, is_alone: bool = False, one_each: bool = False,
          is_old: bool = False, head_marks: int = 0) -> Path:  # fmt: skip
    """A file of a plain checkpoint whose matrices are of `kinds` of their names in the file; beside it, in a folder of
    the same name with `-plain`, the checkpoint that it means, unless it is to be alone. Returns the file. metadata: in
    place of what is derived, None: left out. split_tensors: of a part, 0: there is one. one_each: experts have tensors
    of their own, as in files of early 2024. is_old: what makes keys and values of latents is one matrix, and so are a
    Qwen3-Next's projections, as in files of early 2025. head_marks: so many last layers have a tensor of a head that
    guesses tokens.
    """
    config = json.loads((plain / "config.json").read_text())
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(plain / "model.safetensors").items()}
    if config.get("tie_word_embeddings", False):
        tensors.pop("lm_head.weight", None)
    generator, meant = np.random.default_rng(seed), {}
    assert config["model_type"] in ARCHITECTURES, f"add {config['model_type']!r} to gguf_files.ARCHITECTURES"
    architecture = ARCHITECTURES[config["model_type"]]
    if architecture == "nemotron_h_moe" and not any(".experts." in name for name in tensors):
        architecture = "nemotron_h"
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_tensors)
    tensors, heads = _behind_the_layers(tensors, config)
    tensors = tensors if is_old else _split_latents(_ungrouped(tensors, config), config)
    if heads:
        further = {"block_count": config["num_hidden_layers"] + heads, "nextn_predict_layers": heads}
        metadata = {f"{architecture}.{key}": value for key, value in further.items()} | dict(metadata or {})
    for key, value in (_metadata(config, tensors, architecture, is_old) | dict(metadata or {})).items():
        _add(writer, key, value)
    for name, array in _rope_factors(config).items():
        writer.add_tensor(name, array)
    for layer in range(config["num_hidden_layers"] - head_marks, config["num_hidden_layers"]):
        writer.add_tensor(f"blk.{layer}.nextn.enorm.weight", np.ones(4, np.float32))
    tensors = _apart(tensors) if architecture == "gpt-oss" else tensors
    tensors = _apart_granite(tensors, config) if architecture == "granitehybrid" else tensors
    tensors = _canonical(tensors) if architecture.startswith("nemotron") else tensors
    tensors = _muse(tensors, config) if architecture == "muse-glimmer" else tensors
    if architecture in ("gemma4", "mistral4"):
        tensors = {_with_end(name): array for name, array in tensors.items()}
    for name, array in sorted(_stacked(tensors).items()):
        module, end = name.rsplit(".", 1)
        is_own_end = name.split(".", 3)[-1] in QWEN35_ENDS
        is_own_end = is_own_end or name.endswith(("e_score_correction_bias", *MAMBA_ENDS))
        theirs = _name(name if is_own_end else module, architecture) + ("" if is_own_end else "." + end)
        theirs = theirs + ".bias" if theirs.endswith(("ssm_dt", "exp_probs_b")) else theirs
        if ".linear_attn." in name and architecture != "qwen3next":
            stored, numbers, kind = _tiled(generator, kinds(theirs), name, array, config)
            meant[name] = from_numpy(numbers.astype(np.float32))
            block_type = None if kind in ("F32", "F16") else getattr(gguf.GGMLQuantizationType, kind)
            writer.add_tensor(theirs, np.ascontiguousarray(stored), raw_dtype=block_type)
            continue
        if name.endswith(("A_log", "conv1d.weight")):
            array = -np.exp(array) if name.endswith("A_log") else array.squeeze(1)
        if name.endswith(MAMBA_ENDS[:2]) and "linear_attn" not in name:
            array = array[:, None]
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            array = array.reshape(config.get("mamba_n_groups", config.get("n_groups")), -1)
        kind = (
            kinds(theirs)
            if array.ndim > 1
            and end == "weight"
            and not any(part in theirs for part in ("conv1d", "ffn_gate_inp", "ssm_norm"))
            else "F32"
        )
        if array.ndim == 3:
            stored = np.stack([_store(generator, kind, one) for one in array])
            for expert, (one, rows) in enumerate(zip(stored, array, strict=True)):
                numbers = _meant(kind, one, rows.shape).astype(np.float32)
                meant[name.replace(".experts.", f".experts.{expert}.")] = from_numpy(numbers)
        else:
            stored = _store(generator, kind, array)
        if not is_alone and array.ndim < 3:
            meant[name] = from_numpy(_meant(kind, stored, array.shape).astype(np.float32))
        if name.endswith("shared_expert_gate.weight"):
            stored = stored.reshape(-1)
        is_offset = architecture in OFFSET and ".linear_attn." not in name
        if array.ndim == 1 and is_offset and name.endswith(OFFSET_NORMS.get(architecture, "norm.weight")):
            stored = stored + 1
        if architecture in NEIGHBOUR_PAIRS and module.endswith(("q_proj", "k_proj")):
            heads = config["num_attention_heads" if module.endswith("q_proj") else "num_key_value_heads"]
            stored = stored.reshape(heads, 2, -1, *stored.shape[1:]).swapaxes(1, 2).reshape(stored.shape)
        block_type = None if kind in ("F32", "F16") else getattr(gguf.GGMLQuantizationType, kind)
        whole = {theirs: stored}
        if one_each and array.ndim == 3:
            whole = {theirs.replace("_exps.", f".{expert}."): one for expert, one in enumerate(stored)}
        for name_there, data in whole.items():
            writer.add_tensor(name_there, np.ascontiguousarray(data), raw_dtype=block_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if is_alone:
        return path
    folder = path.with_name(path.stem + "-plain")
    folder.mkdir()
    for file in plain.glob("*.json"):
        shutil.copy(file, folder)
    save_file(meant, folder / "model.safetensors")
    return path


def _behind_the_layers(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> tuple[dict[str, np.ndarray], int]:
    """With a head that guesses tokens as one more layer, and how many there are."""
    found, heads = {}, 0
    for name, array in tensors.items():
        if not name.startswith("mtp."):
            found[name] = array
            continue
        heads, layer = 1, f"model.layers.{config['num_hidden_layers']}."
        own = name.removeprefix("mtp.")
        if own.startswith("layers.0."):
            found[layer + own.removeprefix("layers.0.")] = array
        else:
            found[f"{layer}{HEAD_NAMES[own.removesuffix('.weight')]}.weight"] = array
    return found, heads


def _tiled(
    generator: np.random.Generator, kind: str, name: str, array: np.ndarray, config: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, str]:  # fmt: skip
    """A recurrent layer's tensor with value heads that share a key head as far apart as there are key heads, decays as
    they are multiplied with, and what it means in a checkpoint's order; and its kind.
    """
    shared = config["linear_num_value_heads"] // config["linear_num_key_heads"]
    of_value, part = config["linear_value_head_dim"], name.split(".linear_attn.")[1].split(".")[0]
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads = np.arange(config["linear_num_value_heads"]).reshape(-1, shared).T.ravel()
    values = (heads[:, None] * of_value + np.arange(of_value)).ravel()
    rows = np.concatenate([np.arange(keys), keys + values])
    order = {"in_proj_qkv": rows, "conv1d": rows, "in_proj_z": values, "norm": np.arange(of_value)}.get(part, heads)
    axis = 1 if part == "out_proj" else 0
    moved = np.take(array, values if part == "out_proj" else order, axis)
    kind = kind if part in ("in_proj_qkv", "in_proj_z", "out_proj") else "F32"
    moved = -np.exp(moved) if part == "A_log" else moved.squeeze()
    stored = _store(generator, kind, moved)
    means = array if kind == "F32" else _meant(kind, stored, moved.shape)
    if kind != "F32":
        means = np.take(means, np.argsort(values if part == "out_proj" else order), axis)
    return stored, means, kind


def _with_end(name: str) -> str:
    """With an end for Gemma 4's names that have none, and factors where llama.cpp has them."""
    for theirs, instead in (("router.per_expert_scale", "experts.down_proj.scale"), ("router.scale", "router.scale")):
        if name.endswith(theirs):
            return name.removesuffix(theirs) + instead
    return name if name.endswith(".weight") else name + ".weight"


def _apart(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With gpt-oss's gate and up apart, whose rows come in turns in a checkpoint, and rows of experts first."""
    found = {}
    for name, array in tensors.items():
        stem, what = (name + ".weight").rsplit(".", 2)[0], name.rsplit(".", 1)[1]
        if ".experts." not in name:
            found[name + ".weight" if what == "sinks" else name] = array
            continue
        end = "bias" if what.endswith("_bias") else "weight"
        array = array if end == "bias" else array.swapaxes(1, 2)
        if what.startswith("gate_up"):
            found |= {f"{stem}.gate_proj.{end}": array[:, ::2], f"{stem}.up_proj.{end}": array[:, 1::2]}
        else:
            found[f"{stem}.down_proj.{end}"] = array
    return found


def _apart_granite(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """With a Granite's gate and up apart, of all experts and of the MLP beside them, or of the MLP alone."""
    shared = "mlp.shared_expert" if config["num_local_experts"] else "mlp"
    found = {}
    for name, array in tensors.items():
        begin, _, part = name.partition(".block_sparse_moe." if ".block_sparse_moe." in name else ".shared_mlp.")
        module = shared if ".shared_mlp." in name else "mlp.experts"
        if part == "input_linear.weight":
            gate, up = np.split(array, 2, axis=-2)
            found |= {f"{begin}.{module}.gate_proj.weight": gate, f"{begin}.{module}.up_proj.weight": up}
        elif part == "output_linear.weight":
            found[f"{begin}.{module}.down_proj.weight"] = array
        else:
            found[name] = array
    return found


def _muse(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """A Muse Glimmer's decoder alone, with norms of queries and keys that have its factor of queries and ones."""
    found = {name.replace("language_model.", ""): array for name, array in tensors.items() if ".vision_" not in name}
    for layer in range(config["num_hidden_layers"]):
        for what, gain in (("q", config["qk_scale_factor"]), ("k", 1.0)):
            norm = np.full(config["head_dim"], gain, np.float32)
            found[f"model.layers.{layer}.self_attn.{what}_norm.weight"] = norm
    return found


def _canonical(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By the names that other checkpoints have."""
    instead = {"backbone.embeddings": "model.embed_tokens", "backbone.norm_f": "model.norm", "backbone.": "model."}
    return {
        next((new + name.removeprefix(old) for old, new in instead.items() if name.startswith(old)), name): array
        for name, array in tensors.items()
    }


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With one tensor, `[experts, rows, columns]`, for those of all experts of a layer."""
    found, experts = {}, {}
    for name, array in tensors.items():
        if ".experts." not in name or not name.split(".experts.")[1][0].isdigit():
            found[name] = array
            continue
        before, after = name.split(".experts.")
        number, part = after.split(".", 1)
        experts.setdefault(f"{before}.experts.{part}", {})[int(number)] = array
    return found | {name: np.stack([one[n] for n in range(len(one))]) for name, one in experts.items()}


def _store(generator: np.random.Generator, kind: str, array: np.ndarray) -> np.ndarray:
    """As a file has it."""
    if kind == "BF16":
        return (array.view(np.uint32) + 0x8000 >> 16).astype(np.uint16).view(np.uint8)
    if kind in ("F16", "F32"):
        return array.astype(np.float16 if kind == "F16" else np.float32)
    if kind == "F64":
        return array.astype(np.float64)
    if kind.endswith("_K") or kind.startswith("IQ"):
        return draw_blocks(generator, kind, *array.shape)
    return gguf.quants.quantize(array, getattr(gguf.GGMLQuantizationType, kind))


def _meant(kind: str, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if kind == "BF16":
        return (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return stored if kind in ("F16", "F32") else wanted_numbers(kind, stored, shape[1])


def _name(module: str, architecture: str) -> str:
    if module in WHOLE | GEMMA4_WHOLE:
        return (WHOLE | GEMMA4_WHOLE)[module]
    _, _, layer, part = module.split(".", 3)
    names = (
        NAMES | EXPERT_NAMES | (GEMMA_NAMES if architecture in ("gemma3", "gemma4", "olmo2", "muse-glimmer") else {})
    )
    if architecture == "gemma4":
        names |= GEMMA4_NAMES
    if architecture.startswith("qwen3"):
        names |= QWEN35_NAMES if architecture.startswith(("qwen35", "qwen3next")) else {}
    if architecture in ("deepseek2", "mistral4"):
        names |= MLA_NAMES
    if architecture == "muse-glimmer":
        names |= {"self_attn.gate_proj": "attn_gate"}
    if architecture == "granitehybrid":
        names |= GRANITE_NAMES
    if architecture.startswith("nemotron"):
        names = NEMOTRON_NAMES
    if architecture == "gpt-oss":
        names |= {"post_attention_layernorm": "post_attention_norm"}
    return f"blk.{layer}.{names[part]}"


def _ungrouped(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """With a Qwen3-Next's queries, keys and values in one matrix and gates in another, each kind's heads together."""
    found = {}
    for name, array in tensors.items():
        if not name.endswith("in_proj_qkvz.weight"):
            found[name] = array
            continue
        heads, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
        value = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
        cut = np.split(array.reshape(heads, -1, array.shape[1]), np.cumsum([key, key, value]), axis=1)
        *qkv, z = (part.reshape(-1, array.shape[1]) for part in cut)
        found |= {name.replace("qkvz", "qkv"): np.concatenate(qkv), name.replace("qkvz", "z"): z}
    return found


def _split_latents(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """With what makes keys of latents, each head's transposed, and what makes values apart."""
    found = {}
    for name, array in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = array
            continue
        heads = array.reshape(config["num_attention_heads"], -1, array.shape[1])
        plain = config["qk_nope_head_dim"]
        found[name.replace("kv_b", "k_b")] = heads[:, :plain].swapaxes(1, 2)
        found[name.replace("kv_b", "v_b")] = heads[:, plain:]
    return found


def _latent_metadata(config: dict[str, Any], is_old: bool) -> dict[str, Any]:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    own = {"key_length": config["qk_nope_head_dim"] + rotated, "value_length": config["v_head_dim"]}
    rows = own if is_old else {"key_length": rank + rotated, "value_length": rank}
    found = {f"attention.{name}": size for name, size in rows.items()}
    found |= {} if is_old else {f"attention.{name}_mla": size for name, size in own.items()}
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    is_sigmoid = config["model_type"] not in ("deepseek_v2", "mistral4")
    return found | {
        "attention.head_count_kv": config["num_attention_heads"] if is_old else 1,
        "attention.kv_lora_rank": rank, "attention.q_lora_rank": config["q_lora_rank"],
        "rope.dimension_count": rotated, "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"], "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["n_shared_experts"], "expert_weights_scale": config["routed_scaling_factor"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"],
        "expert_weights_norm": True if config["norm_topk_prob"] else None,
        "expert_gating_func": 2 if is_sigmoid else None if is_old or config["model_type"] == "mistral4" else 1,
        "rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"] if scaling else None,
    }  # fmt: skip


def _metadata(
    config: dict[str, Any], tensors: dict[str, np.ndarray], architecture: str, is_old: bool
) -> dict[str, Any]:  # fmt: skip
    """What llama.cpp's converter writes of such a configuration."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config.get("rope_theta"),
        "rope.dimension_count": int(dim * config.get("partial_rotary_factor", 1)),
        "vocab_size": config["vocab_size"],
    }
    if "head_dim" in config:
        found |= {"attention.key_length": dim, "attention.value_length": dim}
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        found["attention.sliding_window"] = config["sliding_window"]
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        taken = config.get("num_experts_per_tok") or config["top_k_experts"]
        found |= {"expert_count": experts, "expert_used_count": taken}
    if config["model_type"] == "qwen3_moe":
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if config["model_type"].startswith("qwen3_5"):
        rope = config["rope_parameters"]
        rotated = int(dim * rope["partial_rotary_factor"])
        found |= {"rope.freq_base": rope["rope_theta"], "rope.dimension_count": rotated,
                  "rope.dimension_sections": [*rope["mrope_section"], 0]}  # fmt: skip
    if architecture in ("deepseek2", "mistral4"):
        found |= _latent_metadata(config, is_old)
    if config["model_type"].startswith(("qwen3_5", "qwen3_next")):
        found |= {
            "full_attention_interval": 4,
            "ssm.conv_kernel": config["linear_conv_kernel_dim"], "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"], "ssm.time_step_rank": config["linear_num_value_heads"],
            "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        }  # fmt: skip
    if config["model_type"] in ("qwen3_5_moe_text", "qwen3_next"):
        found |= {"expert_feed_forward_length": config["moe_intermediate_size"],
                  "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"]}  # fmt: skip
        del found["feed_forward_length"]
    if config["model_type"] == "gpt_oss":
        found["expert_feed_forward_length"] = config["intermediate_size"]
    if config["model_type"] == "gemma4_text":
        found |= _gemma4_metadata(config)
    if config["model_type"] == "gemma3_text":
        found["attention.sliding_window_pattern"] = config["sliding_window_pattern"]
    if config["model_type"] in ("granitemoehybrid", "nemotron_h"):
        found |= _mamba_metadata(config, tensors)
    if config["model_type"].startswith("granite"):
        found |= {"attention.scale": config["attention_multiplier"], "embedding_scale": config["embedding_multiplier"],
                  "residual_scale": config["residual_multiplier"], "logit_scale": config["logits_scaling"]}  # fmt: skip
    scaling = config.get("rope_scaling") or {}
    if config["model_type"] in ("ministral3", "mistral4"):
        scaling = config["rope_parameters"]
        found |= {"rope.freq_base": scaling["rope_theta"], "rope.scaling.yarn_beta_fast": scaling["beta_fast"],
                  "rope.scaling.yarn_beta_slow": scaling["beta_slow"],
                  "attention.temperature_scale": scaling["llama_4_scaling_beta"]}  # fmt: skip
    if config["model_type"] == "ministral3":
        found["rope.scaling.yarn_log_multiplier"] = scaling["mscale_all_dim"]
    if config["model_type"] in ("olmo3", "muse_glimmer_text"):
        types = config["layer_types"]
        found["attention.sliding_window_pattern"] = [one == "sliding_attention" for one in types]
    if config["model_type"] == "olmo3":
        found |= {"rope.scaling.yarn_beta_fast": scaling["beta_fast"],
                  "rope.scaling.yarn_beta_slow": scaling["beta_slow"],
                  "rope.scaling.yarn_attn_factor": scaling["attention_factor"]}  # fmt: skip
    if config["model_type"] == "muse_glimmer_text":
        found |= {"final_logit_softcapping": config["final_logit_softcapping"],
                  "logit_scale": config["output_multiplier"],
                  "rope.freq_base": config["rope_parameters"]["rope_theta"]}  # fmt: skip
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": scaling["factor"]}
    if kind in ("yarn", "longrope"):
        original = scaling.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
        found["rope.scaling.original_context_length"] = original
    if kind == "longrope":
        stretch = config["max_position_embeddings"] / config["original_max_position_embeddings"]
        factor = (
            1.0
            if stretch <= 1
            else (1 + np.log(stretch) / np.log(found["rope.scaling.original_context_length"])) ** 0.5
        )
        found["rope.scaling.attn_factor"] = float(factor)
    return {f"{architecture}.{key}": value for key, value in found.items()}


def _mamba_metadata(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    attends = [any(f".layers.{layer}." in name and ".q_proj." in name for name in tensors) for layer in layers]
    heads = config["num_key_value_heads"]
    found = {"attention.head_count_kv": [heads if one else 0 for one in attends]}
    if config["model_type"] == "granitemoehybrid":
        sizes = {"time_step_rank": "mamba_n_heads", "group_count": "mamba_n_groups", "state_size": "mamba_d_state",
                 "conv_kernel": "mamba_d_conv"}  # fmt: skip
        return found | {f"ssm.{theirs}": config[ours] for theirs, ours in sizes.items()} | {
            "ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
            "rope.scaling.finetuned": config["position_embedding_type"] == "rope",
        }  # fmt: skip
    sizes = {"time_step_rank": "mamba_num_heads", "group_count": "n_groups", "state_size": "ssm_state_size",
             "conv_kernel": "conv_kernel"}  # fmt: skip
    found |= {f"ssm.{theirs}": config[ours] for theirs, ours in sizes.items()}
    is_moe = [any(f".layers.{layer}.mixer.experts." in name for name in tensors) for layer in layers]
    is_mlp = [any(f".layers.{layer}.mixer.up_proj." in name for name in tensors) for layer in layers]
    width = config["moe_intermediate_size"] if any(is_moe) else config["intermediate_size"]
    found |= {
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "rope.scaling.finetuned": False, "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "feed_forward_length": [width if one else 0 for one in (is_moe if any(is_moe) else is_mlp)],
    }  # fmt: skip
    if not any(is_moe):
        return found
    return found | {
        "expert_count": config["n_routed_experts"], "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["n_shared_experts"], "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"], "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
    }  # fmt: skip


def _gemma4_metadata(config: dict[str, Any]) -> dict[str, Any]:
    is_window = [one == "sliding_attention" for one in config["layer_types"]]
    own, dim, shared = config["head_dim"], config["global_head_dim"], config["num_kv_shared_layers"]
    width, first = config["intermediate_size"], len(is_window) - shared
    whole_heads = config["num_global_key_value_heads"] or config["num_key_value_heads"]
    widths = [width * (1 + (config["use_double_wide_mlp"] and layer >= first)) for layer in range(len(is_window))]
    found = {
        "attention.key_length": dim, "attention.value_length": dim, "attention.key_length_swa": own,
        "attention.value_length_swa": own, "rope.dimension_count": dim, "rope.dimension_count_swa": own,
        "rope.freq_base": config["rope_parameters"]["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "attention.sliding_window_pattern": is_window, "attention.shared_kv_layers": shared,
        "attention.head_count_kv": [config["num_key_value_heads"] if one else whole_heads for one in is_window],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }  # fmt: skip
    if config["use_double_wide_mlp"]:
        found["feed_forward_length"] = widths
    return found | ({"expert_feed_forward_length": config["moe_intermediate_size"]} if config["num_experts"] else {})


def _rope_factors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if config["model_type"] == "gemma4_text":
        dim, share = config["global_head_dim"], config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
        turning = int(dim * share / 2)
        return {"rope_freqs.weight": np.array([1.0] * turning + [1e30] * (dim // 2 - turning), np.float32)}
    if kind == "longrope":
        return {f"rope_factors_{length}.weight": np.array(scaling[f"{length}_factor"], np.float32)
                for length in ("long", "short")}  # fmt: skip
    if kind != "llama3":
        return {}
    dim, factor = config["head_dim"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = 2 * np.pi * config["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    turns = scaling["original_max_position_embeddings"] / waves
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if value < 2**32 else writer.add_uint64)(key, value)
    elif isinstance(value, float):
        (writer.add_float64 if 1e38 < abs(value) < float("inf") else writer.add_float32)(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def vocabulary(folder: Path, **changes: Any) -> dict[str, Any]:
    """The metadata of a folder's byte-level tokenizer.json, cut as `smollm` cuts."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    ids = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    tokens = sorted(ids, key=lambda text: ids[text])
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in tokenizer["model"]["merges"]]
    found = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if ids[token] in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges, "tokenizer.ggml.bos_token_id": ids[settings["bos_token"]],
        "tokenizer.ggml.eos_token_id": ids[settings["eos_token"]],
        "tokenizer.ggml.padding_token_id": ids[settings["pad_token"]], "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": settings["chat_template"],
    }  # fmt: skip
    return found | {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}
