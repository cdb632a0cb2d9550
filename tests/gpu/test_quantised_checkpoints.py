"""Checkpoints of 4 and 8 bits, laid out as their publishers do: what is loaded is what the file means, or refused."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu.model.architecture import ModelError, read_architecture
from gpu.model.matrix_format import ROUNDED
from gpu.model.matrix_formats import rounded, step_weight_bytes, weight_bytes
from gpu.operations.linear.packed_matrix import Packed
from gpu.weights import placing, rounding, stored
from gpu.weights.checkpoint import load_packed, load_weights
from gpu.weights.file_reader import NUM_BUFFERS
from gpu.weights.host_experts import tensors_of
from gpu.weights.matrix import as_matrix
from gpu.weights.stored import ModuleRows, stored_tensors
from gpu.weights.weight_allocation import allocate_packed
from gpu.weights.weights import Weights
from tests.gpu.family_checkpoints import checkpoint, generate, load
from tests.gpu.live_bytes import LiveBytes
from tests.gpu.quantised_files import FORMATS, awq, write
from tests.tolerances import COMPILED_LOGITS_FLOAT32

CPU = torch.device("cpu")
MATRICES = ("qkv", "output", "gate_up", "down")
NVFP4_SCALES = 2.0**-11  # of a number: scales of a file are rounded to float16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each written once, when it is asked for."""

    class Folders(dict):
        def __missing__(self, name: str) -> Path:
            config, draw = FORMATS[name]
            self[name] = tmp_path_factory.mktemp("formats") / name
            write(checkpoint("llama2").folder, self[name], config, draw)
            return self[name]

    return Folders()


def packed(folder: Path, asked: str | None = None, dtype: torch.dtype = torch.float32) -> Weights:
    return load_packed(folder, rounded(read_architecture(folder), asked, "weights"), dtype, CPU, lambda _: None)


def plain_of(folder: Path) -> Path:
    return folder.with_name(folder.name + "-plain")


def whole(folder: Path) -> Weights:
    return load_weights(folder, read_architecture(folder), torch.float32, CPU, lambda _: None)


def assert_numbers(name: str, numbers: torch.Tensor, wanted: torch.Tensor, matrix: str) -> None:
    """Hold a matrix against the file's numbers: equal, but for NVFP4, whose scales are rounded to float16."""
    if name.endswith("nvfp4"):
        assert bool(((numbers - wanted).abs() <= NVFP4_SCALES * wanted.abs()).all()), matrix
    else:
        assert torch.equal(numbers, wanted), matrix


@pytest.mark.parametrize("name", FORMATS)
def test_every_matrix_is_packed_and_holds_the_numbers_of_the_file(name: str, folders) -> None:
    got, wanted = packed(folders[name]), whole(plain_of(folders[name]))
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        for matrix in MATRICES:
            stored = getattr(ours, matrix)
            assert isinstance(stored, Packed)
            numbers, theirs_are = as_matrix(stored).unpack(), getattr(theirs, matrix)
            assert_numbers(name, numbers, theirs_are, matrix)
            if not name.endswith("nvfp4"):
                continue
            assert float((numbers - theirs_are.roll(1, 1)).abs().max()) > 0.1 * float(theirs_are.abs().max()), "power"
            assert not torch.equal(numbers, theirs_are), "power: a difference is seen"
    assert torch.equal(got.embedding, wanted.embedding)


@pytest.mark.parametrize("name", ["awq", "gptq-order", "fp8-blocks", "compressed-int4-zeros", "compressed-mxfp4"])
def test_text_and_logits_are_those_of_the_numbers_in_float32(name: str, folders) -> None:
    prompt = np.random.default_rng(1).integers(0, 320, 200).astype(np.int32)
    (tokens, logits), (others, wanted) = (
        generate(load(folder), prompt, 6) for folder in (folders[name], plain_of(folders[name]))
    )
    assert tokens == others
    assert float((logits - wanted).abs().max() / wanted.std()) < COMPILED_LOGITS_FLOAT32
    assert len(set(tokens)) > 2


@pytest.mark.parametrize("name", ["awq", "compressed-w8a8", "fp8-blocks"])
def test_biases_of_all_projections_are_added_to_products_of_few_bits(name: str, tmp_path: Path) -> None:
    config, draw = FORMATS[name]
    plain = write(checkpoint("llama with biases").folder, tmp_path / "model", config, draw)
    prompt = np.random.default_rng(1).integers(0, 320, 40).astype(np.int32)
    (tokens, logits), (others, wanted) = (generate(load(one), prompt, 6) for one in (tmp_path / "model", plain))
    assert tokens == others
    assert float((logits - wanted).abs().max() / wanted.std()) < COMPILED_LOGITS_FLOAT32
    assert_bytes(tmp_path / "model", packed(tmp_path / "model"))


@pytest.mark.parametrize("family", ["phi3", "glm4", "qwen2", "gemma3", "llama with biases"])
@pytest.mark.parametrize("name", ["gptq_v2", "fp8-blocks", "compressed-w8a8"])
def test_other_families_rows_are_put_in_order_and_keep_their_biases(family: str, name: str, tmp_path: Path) -> None:
    """Fused projections, heads that are rotated in part, prefixes of names."""
    config, draw = FORMATS[name]
    folder = tmp_path / "model"
    plain = write(checkpoint(family).folder, folder, config, draw)
    got, wanted = packed(folder), whole(plain)
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        for matrix in MATRICES:
            assert torch.equal(as_matrix(getattr(ours, matrix)).unpack(), getattr(theirs, matrix)), matrix
        assert ours.biases.keys() == theirs.biases.keys()
        assert all(torch.equal(bias, theirs.biases[matrix]) for matrix, bias in ours.biases.items())


# Rows of each family where a word has eight of them, and where a block of scales has many; words along columns with
# experts and without. Experts with columns in an order of their own are refused.
WITH_STATES = [
    *product(["qwen3_5", "qwen3_next", "qwen3_5_moe", "granitemoehybrid dense", "nemotron_h"], ["awq", "fp8-blocks"]),
    *product(["qwen3_next", "granitemoehybrid dense"], ["gptq_v2", "compressed-int4-zeros"]),
    *product(["qwen3_5", "granitemoehybrid dense"], ["gptq-order"]),
    *product(["qwen3_5", "qwen3_5_moe"], ["modelopt-nvfp4"]),
]


@pytest.mark.parametrize(("family", "name"), WITH_STATES)
def test_layers_with_states_are_loaded_from_few_bits(family: str, name: str, tmp_path: Path) -> None:
    """Rows of query and gate head by head, of recurrent layers as one matrix or key head by key head; experts apart."""
    config, draw = FORMATS[name]
    folder, whole_groups = tmp_path / "model", {
        "qwen3_next": {"shared_expert_intermediate_size": 64}, "nemotron_h": {"moe_shared_expert_intermediate_size": 64}
    }  # fmt: skip
    plain = write(checkpoint(family, **whole_groups.get(family, {})).folder, folder, config, draw)
    got, wanted = packed(folder), whole(plain)
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        for matrix in ours.matrices:
            assert isinstance(ours.matrices[matrix], Packed), matrix
            assert_numbers(name, as_matrix(ours.matrices[matrix]).unpack(), theirs.matrices[matrix], matrix)
    prompt = np.random.default_rng(1).integers(0, 320, 70).astype(np.int32)
    (tokens, logits), (others, right) = (generate(load(one), prompt, 6) for one in (folder, plain))
    assert tokens == others
    most = 32 * NVFP4_SCALES if name.endswith("nvfp4") else COMPILED_LOGITS_FLOAT32
    assert float((logits - right).abs().max() / right.std()) < most


def test_modules_that_are_left_alone_are_plain_and_so_is_what_is_said_of_their_bytes(tmp_path: Path) -> None:
    config, draw = FORMATS["awq"]
    config = config | {"modules_to_not_convert": ["mlp", "layers.1.self_attn"]}
    plain = write(checkpoint("llama2").folder, tmp_path / "model", config, draw, ("mlp", "layers.1.self_attn"))
    got, wanted = packed(tmp_path / "model"), whole(plain)
    assert isinstance(got.layers[0].qkv, Packed)
    assert isinstance(got.layers[2].output, Packed)
    for layer, matrix in ((0, "gate_up"), (2, "down"), (1, "qkv"), (1, "output")):
        assert torch.equal(getattr(got.layers[layer], matrix), getattr(wanted.layers[layer], matrix))
    assert_bytes(tmp_path / "model", got)


def assert_bytes(folder: Path, got: Weights, asked: str | None = None) -> None:
    shape = rounded(read_architecture(folder), asked, "weights")
    layers = [getattr(layer, name) for layer in got.layers for name in layer.__dataclass_fields__]
    read = sum(held.nbytes for held in (*layers, got.final_norm, got.logits) if held is not None)
    assert step_weight_bytes(shape, 4, True, 1) == read
    assert weight_bytes(shape, 4, is_packed=True) == read + (0 if got.logits is got.embedding else got.embedding.nbytes)
    assert weight_bytes(shape, 4, is_packed=False) == 4 * shape.num_weights


BYTES_OF = ["awq", "gptq-8", "fp8-blocks", "fbgemm", "compressed-int4-zeros", "compressed-w8a8", "compressed-nvfp4",
            "compressed-mxfp4"]  # fmt: skip


@pytest.mark.parametrize("name", BYTES_OF)
def test_bytes_are_those_that_are_held(name: str, folders) -> None:
    assert_bytes(folders[name], packed(folders[name]))


@pytest.mark.parametrize(("asked", "most"), [("int4", 0.14), ("int8", 0.012), ("fp8", 0.04)])
def test_a_plain_checkpoint_is_rounded_as_it_is_loaded(asked: str, most: float) -> None:
    folder = checkpoint("llama2").folder
    got, wanted = packed(folder, asked), whole(folder)
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        for matrix in MATRICES:
            stored, right = getattr(ours, matrix), getattr(theirs, matrix)
            error = float((as_matrix(stored).unpack() - right).norm() / right.norm())
            assert 0 < error < most
    assert isinstance(got.logits, Packed)
    assert got.logits.kind == "int8"
    assert torch.equal(got.embedding, wanted.embedding)
    assert_bytes(folder, got, asked)


@pytest.mark.parametrize("asked", ["int4", "fp8"])
@pytest.mark.parametrize("family", ["llama2", "glm4", "phi3"])
def test_numbers_are_the_same_in_parts_of_any_length(asked: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are put in order among them; and words are packed in other parts than numbers are rounded in."""
    folder = checkpoint(family).folder
    whole = packed(folder, asked)
    monkeypatch.setattr(rounding, "NUMBERS_AT_ONCE", 101 * 64 + 5)
    monkeypatch.setattr(stored, "_NUMBERS_AT_ONCE", 11 * 64)
    in_parts = packed(folder, asked)
    pairs = list(zip(matrices_of(in_parts), matrices_of(whole), strict=True))
    assert sum(isinstance(wanted, Packed) for _, wanted in pairs) > 2
    for ours, wanted in pairs:
        for one, other in zip(tensors_of(ours), tensors_of(wanted), strict=True):
            assert torch.equal(one, other)


def matrices_of(weights: Weights) -> list[torch.Tensor | Packed]:
    return [*(matrix for layer in weights.layers for matrix in layer.matrices.values()), weights.logits]


@pytest.mark.parametrize("asked", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_rounding_takes_no_more_than_so_many_bytes_a_number(asked: str, dtype: torch.dtype) -> None:
    """What is read of the matrix among them, and no more for a larger matrix."""
    form, rows, inner = ROUNDED[asked].layers, 512, 256
    place = ModuleRows(allocate_packed(rows, inner, form, torch.bfloat16, CPU, torch.bfloat16), 0, rows, None)
    with LiveBytes() as live:
        drawn = torch.randn(rows, inner).to(dtype)
        before = live.now - drawn.nbytes
        live.peak = 0
        stored_tensors("rounded", form, place, 1)[".weight"].fill_rows(0, drawn)
    assert live.peak - before <= rounding.BYTES_A_NUMBER * rows * inner


def test_a_load_holds_no_more_beside_the_weights_than_a_part_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where files are read ahead into the next two parts; the output matrix has ten, of rows that are half
    a group, which take as much as whole ones.
    """
    numbers = 32 * 64
    monkeypatch.setattr(rounding, "NUMBERS_AT_ONCE", numbers)
    monkeypatch.setattr(stored, "_NUMBERS_AT_ONCE", numbers)
    monkeypatch.setattr(placing, "RANGE_BYTES", numbers * 4 // NUM_BUFFERS)
    with LiveBytes() as live:
        got = packed(checkpoint("llama2").folder, "fp8")
        held = live.now
    assert got.logits.rows * got.logits.inner == 10 * numbers
    assert live.peak - held <= (2 * rounding.BYTES_A_NUMBER + 2 * 4) * numbers


CONFIG_REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("awq", {"version": "gemv"}, r"quantization_config\.version is 'gemv'; served: 'gemm'"),
    ("awq", {"bits": 3}, r"\.bits is 3; served: 4"),
    (
        "auto-round",
        {"packing_format": "auto_round:tritonv2"},
        r"packing_format is 'auto_round:tritonv2'; served: 'auto_",
    ),
    ("auto-round", {"bits": 2}, r"\.bits is 2; served: 4, 8"),
    ("auto-round", {"data_type": "mx_fp4"}, r"data_type is 'mx_fp4'; served: 'int'"),
    ("auto-round", {"act_bits": 8}, r"act_bits is 8; served: 16"),
    (
        "auto-round",
        {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}},
        r"extra_config is .*; served of a mod",
    ),
    ("modelopt-nvfp4", {"quant_algo": "MIXED_PRECISION"}, r"quant_algo is 'MIXED_PRECISION'; served: 'NVFP4'"),
    ("modelopt-nvfp4", {"group_size": 32}, r"group_size is 32; served: 16"),
    ("modelopt-fp8", {"group_size": 16}, r"group_size is 16; served: None"),
    ("modelopt-fp8", {"quant_algo": "FP8_PB_WO"}, r"quant_algo is 'FP8_PB_WO'; served: .*'FP8'"),
    (
        "modelopt-fp8",
        {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}}},
        r"config_groups is .*; served: weights of type float, num_bits 8",
    ),
    (
        "modelopt-nvfp4",
        {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
        r"config_groups is .*; served: weig",
    ),
    ("awq", {"group_size": 12}, r"group_size is 12; served: -1 and multiples of 8"),
    (
        "awq",
        {"quant_method": "hqq"},
        r"quant_method is 'hqq'; served: 'auto-round', 'intel/auto-round', 'awq'",
    ),
    ("awq", {"mystery": 1}, r"mystery is 1, and this key is not known"),
    ("gptq", {"bits": 2}, r"\.bits is 2; served: 4, 8"),
    ("gptq", {"checkpoint_format": "marlin"}, r"checkpoint_format is 'marlin'; served: 'gptq', 'gptq_v2'"),
    ("gptq", {"dynamic": {"-:lm_head": {}}}, r"dynamic is .*; served: none"),
    ("fp8-blocks", {"weight_block_size": [96, 128]}, r"weight_block_size is \[96, 128\]; wanted two powers of two"),
    ("fp8-blocks", {"fmt": "e5m2"}, r"fmt is 'e5m2'; served: 'e4m3'"),
    ("compressed-int4", {"format": "marlin-24"}, r"format is 'marlin-24'; served of these weights: 'pack-quantized'"),
    ("compressed-int4", {"config_groups": {}}, r"config_groups is \[\]; served: one"),
    ("compressed-int4", {"sparsity_config": {"format": "sparse-24"}}, r"sparsity_config is .*; served: none"),
    ("compressed-int4", {"transform_config": {"a": 1}}, r"transform_config is .*; served: none"),
]


@pytest.mark.parametrize(("name", "change", "words"), CONFIG_REFUSALS)
def test_a_configuration_that_is_not_understood_is_refused_in_one_line(name, change, words, folders, tmp_path) -> None:
    config = json.loads((folders[name] / "config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=words) as caught:
        read_architecture(tmp_path)
    assert "\n" not in str(caught.value)


def broken(name: str):
    module = "model.layers.1.self_attn.k_proj"

    def lost(tensors):
        del tensors[f"{module}.scales"]

    def cut_short(tensors):
        tensors[f"{module}.qweight"] = tensors[f"{module}.qweight"][:-1].clone()

    def of_another_format(tensors):
        tensors[f"{module}.weight"] = torch.zeros(2, 2)

    def of_another_type(tensors):
        tensors[f"{module}.qweight"] = tensors[f"{module}.qweight"].long()

    def not_finite(tensors):
        tensors[f"{module}.scales"][1, 5] = float("inf")

    def of_two_types(tensors):
        tensors[f"{module}.scales"] = tensors[f"{module}.scales"].bfloat16()

    def out_of_order(tensors):
        tensors[f"{module}.g_idx"] = tensors[f"{module}.g_idx"].flip(0).contiguous()

    def of_uneven_groups(tensors):
        tensors[f"{module}.g_idx"][0] = 1

    def with_a_bias(tensors):
        tensors[f"{module}.bias"] = torch.ones(len(tensors[f"{module}.scales"][0]))

    def holding_nan(tensors):
        tensors[f"{module}.weight"].view(torch.uint8)[0, 0] = 0xFF

    return {one.__name__: one for one in (
        lost, cut_short, of_another_format, of_another_type, not_finite, of_two_types, out_of_order, of_uneven_groups,
        with_a_bias, holding_nan,
    )}[name]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "words"), [
    ("awq", "lost", r"tensor model\.layers\.1\.self_attn\.k_proj\.scales is missing \(1 of "),
    ("awq", "cut_short", r"k_proj\.qweight is \[63, 8\]; wanted \[64, 8\] by config\.json"),
    ("awq", "of_another_format", r"tensor .*k_proj\.weight is not one of a llama"),
    ("awq", "of_another_type", r"k_proj\.qweight is I64; wanted I32"),
    ("awq", "not_finite", r"k_proj\.scales holds scales that are not finite"),
    ("awq", "of_two_types", r"tensor .* is (BF16|F16), .* is (BF16|F16); wanted one type"),
    ("gptq", "out_of_order", r"k_proj\.g_idx has columns out of order; wanted them in order, since"),
    ("gptq", "of_uneven_groups", r"k_proj\.g_idx does not hold groups of 32 columns"),
    ("gptq", "with_a_bias", r"k_proj\.bias is not zero; wanted zeros, since this model has no bias here"),
    ("gptq-order", "out_of_order", r"g_idx has another column order than the other modules of its product"),
    ("fp8-blocks", "holding_nan", r"k_proj\.weight holds NaN"),
])  # fmt: skip
def test_a_file_that_is_not_what_its_configuration_says_is_refused(name, damage, words, folders, tmp_path) -> None:
    shutil.copy(folders[name] / "config.json", tmp_path)
    tensors = load_file(folders[name] / "model.safetensors")
    broken(damage)(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=words) as caught:
        packed(tmp_path)
    assert "\n" not in str(caught.value)


KV_SCALES = ("k_scale", "v_scale", "k_zero_point", "k_proj.k_scale", "v_proj.output_scale", "kv_scale")
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def with_kv_scales(folder: Path, to: Path, names: tuple[str, ...]) -> Path:
    """The same model, whose makers had a KV cache of 8 bits in mind."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        for name in names:
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.full((1,), 0.125, dtype=torch.bfloat16)
    save_file(tensors, to / "model.safetensors")
    if "quantization_config" in config:
        config["quantization_config"]["kv_cache_scheme"] = KV_SCHEME
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_scales_of_a_kv_cache_are_passed_over(folders, tmp_path: Path) -> None:
    got, wanted = (
        packed(with_kv_scales(folders["compressed-fp8"], tmp_path, KV_SCALES)),
        packed(folders["compressed-fp8"]),
    )
    for ours, theirs in zip(matrices_of(got), matrices_of(wanted), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(tensors_of(ours), tensors_of(theirs), strict=True))


@pytest.mark.parametrize(("name", "scale"), [("compressed-fp8", "q_scale"), ("compressed-fp8-plain", "k_scale")])
def test_other_scales_and_those_of_plain_files_are_refused(name: str, scale: str, folders, tmp_path: Path) -> None:
    folder = folders["compressed-fp8"].with_name(name)
    with pytest.raises(ModelError, match=rf"tensor .*self_attn\.{scale} is not one of a llama"):
        packed(with_kv_scales(folder, tmp_path, (scale,)))


def test_an_fp8_nemotron_h_is_read_as_its_makers_write_it(tmp_path: Path) -> None:
    """Some mixers are left alone by the names of the files; scales are numbers; attention has some of a KV cache."""
    config, draw = FORMATS["modelopt-fp8"]
    left = {2: ("in_proj", "out_proj", "conv1d"), 3: ("q_proj", "k_proj", "v_proj", "o_proj")}
    names = [f"backbone.layers.{layer}.mixer.{name}" for layer, found in left.items() for name in found]
    folder = tmp_path / "model"
    plain = write(checkpoint("nemotron_h").folder, folder, config | {"ignore": ["lm_head", *names]}, draw,
                  ("layers.2.mixer", "layers.3.mixer"))  # fmt: skip
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensor.reshape(()) for name, tensor in tensors.items() if name.endswith("t_scale")}
    for name in ("3.mixer.k_proj.k_scale", "3.mixer.v_proj.v_scale", "6.mixer.k_proj.k_scale"):
        tensors[f"backbone.layers.{name}"] = torch.ones(())
    save_file(tensors, folder / "model.safetensors")
    got, wanted = packed(folder), whole(plain)
    for number, (ours, theirs) in enumerate(zip(got.layers, wanted.layers, strict=True)):
        for matrix, held in ours.matrices.items():
            assert isinstance(held, Packed) == (number not in left), (number, matrix)
            assert torch.equal(as_matrix(held).unpack(), theirs.matrices[matrix]), (number, matrix)


def test_parts_of_one_product_that_differ_are_refused(tmp_path: Path) -> None:
    config = FORMATS["awq"][0] | {"modules_to_not_convert": ["v_proj"]}
    write(checkpoint("llama2").folder, tmp_path / "model", config, awq(32), ("v_proj",))
    with pytest.raises(ModelError, match=r"v_proj is not quantised and .*q_proj is; wanted both alike"):
        packed(tmp_path / "model")
