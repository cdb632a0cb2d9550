"""GGUF files: their numbers, names, rotations and texts are those of the checkpoint that they mean, or one line says
what is wrong."""

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from gpu.model.architecture import ModelError, named_shape, read_architecture
from gpu.model.gguf.file import read_gguf
from gpu.model.gguf.kinds import BLOCK_KINDS
from gpu.model.gguf_translation.tensor_names import stored_as
from gpu.model.matrix_formats import rounded, step_weight_bytes, weight_bytes
from gpu.model.spec import NO_ROTATION, Latent, RopeScaling
from gpu.operations.linear.packed_matrix import Packed
from gpu.weights.checkpoint import load_packed, load_weights
from gpu.weights.drawing import draw_packed
from gpu.weights.gguf_blocks import Blocks, widen, widen_blocks
from gpu.weights.matrix import as_matrix
from gpu.weights.weight_allocation import allocate_weights
from gpu.weights.weights import Weights
from tests.gpu.family_checkpoints import CONFIGS, checkpoint, generate, load
from tests.gpu.gguf_files import ARCHITECTURES, BYTES, WIDENED, draw_blocks, wanted_numbers, write
from tests.tolerances import COMPILED_LOGITS_FLOAT32, GGUF_ROPE_LOGITS, SPREAD_OF_DRAWN

CPU = torch.device("cpu")
MATRICES = ("qkv", "output", "gate_up", "down")
WIDE = {"hidden_size": 256, "intermediate_size": 512}


def all_of(kind: str, embedding: str = "F16") -> Any:
    return lambda name: embedding if name.startswith("token_embd") else kind


def mixed(name: str) -> str:
    """As llama.cpp's Q4_K_M: values and half of the down projections are finer, and so is the output matrix."""
    if name.startswith(("output", "token_embd")) or "attn_v" in name or name == "blk.1.ffn_down.weight":
        return "Q6_K"
    return {"blk.2.ffn_down.weight": "Q5_K", "blk.2.attn_k.weight": "Q8_0", "blk.0.attn_output.weight": "BF16",
            "blk.1.ffn_gate.weight": "F16"}.get(name, "Q4_K")  # fmt: skip


SERVED = [kind for kind in BYTES if kind not in WIDENED]
MIXES = {kind: all_of(kind, kind) for kind in (*SERVED, "IQ3_S")} | {
    "mixed": mixed,
    "F16": all_of("F16"),
    "BF16": all_of("BF16"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each written once, when it is asked for."""

    class Files(dict):
        def __missing__(self, name: str) -> Path:
            path = tmp_path_factory.mktemp("gguf") / f"{name}.gguf"
            layers = {} if name in ("mixed", "Q8_0") else {"num_hidden_layers": 1}  # of one kind, all are alike
            self[name] = write(checkpoint("llama2", **WIDE, **layers).folder, path, MIXES[name])
            return self[name]

    return Files()


def plain_of(path: Path) -> Path:
    return path.with_name(path.stem + "-plain")


def packed(path: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_packed(path, read_architecture(path), dtype, CPU, lambda _: None)


def whole(folder: Path) -> Weights:
    return load_weights(folder, read_architecture(folder), torch.float32, CPU, lambda _: None)


@pytest.mark.parametrize("kind", BYTES)
def test_blocks_of_any_bytes_are_the_numbers_of_their_published_layout(kind: str) -> None:
    assert {name: (layout.block, layout.num_bytes) for name, layout in BLOCK_KINDS.items()} == BYTES
    data = draw_blocks(np.random.default_rng(1), kind, 5, 768)
    if kind == "MXFP4":
        data.reshape(-1, 17)[:, 0] = np.random.default_rng(2).permutation(250)[: data.size // 17]
        data.reshape(-1, 17)[:3, 0] = 0, 1, 2
    blocks, wanted = Blocks(kind, torch.from_numpy(data)), wanted_numbers(kind, data, 768)
    got = widen(blocks)
    assert blocks.shape == got.shape == wanted.shape
    assert np.array_equal(got.numpy(), wanted.astype(np.float32))
    place = torch.full((5, 768), float("nan"), dtype=torch.bfloat16)
    widen_blocks(blocks, place)
    assert torch.equal(place, torch.from_numpy(wanted.astype(np.float32)).bfloat16())


@pytest.mark.parametrize("name", MIXES)
def test_every_matrix_holds_the_numbers_of_the_file(name: str, files) -> None:
    got, wanted = packed(files[name]), whole(plain_of(files[name]))
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        for matrix in MATRICES:
            stored = getattr(ours, matrix)
            if name != "mixed":
                assert isinstance(stored, Packed) == (name not in ("F16", "BF16", *WIDENED))
            assert torch.equal(as_matrix(stored).unpack(), getattr(theirs, matrix)), matrix
    assert torch.equal(as_matrix(got.logits).unpack(), wanted.logits)
    assert torch.equal(got.embedding, wanted.embedding)
    assert torch.equal(got.final_norm, wanted.final_norm)


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q4_1", "MXFP4", "IQ3_S"])
def test_a_tied_matrix_of_few_bits_stays_as_the_file_has_it(kind: str, tmp_path: Path) -> None:
    """But for kinds of which no rows are looked up."""
    path = write(
        checkpoint("llama2", **WIDE, tie_word_embeddings=True).folder, tmp_path / "t.gguf", all_of("F16", kind)
    )
    shape, got, wanted = read_architecture(path), packed(path), whole(plain_of(path))
    assert shape.tied_embeddings
    assert got.embedding is got.logits
    assert isinstance(got.embedding, Packed) == (kind not in ("MXFP4", "IQ3_S"))
    assert torch.equal(as_matrix(got.embedding).unpack(), wanted.embedding)
    tensors = [
        tensor for layer in got.layers for part in layer.__slots__ if (tensor := getattr(layer, part)) is not None
    ]
    held = sum(tensor.nbytes for tensor in [*tensors, got.final_norm, got.logits])
    assert weight_bytes(shape, 4, is_packed=True) == step_weight_bytes(shape, 4, True, 1) == held


def test_what_is_one_product_takes_the_finest_groups_of_its_parts(files) -> None:
    got = packed(files["mixed"])
    kinds = [
        {name: isinstance(one, Packed) and (one.kind, one.group, one.run) for name in MATRICES
         if (one := getattr(layer, name)) is not None}
        for layer in got.layers
    ]  # fmt: skip
    four, eight = ("int4", 32, 256), ("int8", 16, 256)
    assert kinds[0] == {"qkv": eight, "output": False, "gate_up": four, "down": four}
    assert kinds[1] == {"qkv": eight, "output": four, "gate_up": False, "down": eight}
    assert kinds[2] == {"qkv": ("int8", 16, 32), "output": four, "gate_up": four, "down": ("int8", 32, 256)}
    assert isinstance(got.logits, Packed)
    assert got.logits.kind == "int8"


@pytest.mark.parametrize("name", MIXES)
def test_bytes_are_those_that_are_held(name: str, files) -> None:
    shape, got = read_architecture(files[name]), packed(files[name], torch.bfloat16)
    tensors = [
        tensor for layer in got.layers for part in layer.__slots__ if (tensor := getattr(layer, part)) is not None
    ]
    held = sum(tensor.nbytes for tensor in [*tensors, got.final_norm, got.logits])
    assert step_weight_bytes(shape, 2, True, 1) == held
    assert weight_bytes(shape, 2, is_packed=True) == held + got.embedding.nbytes


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "mixed"])
def test_text_and_logits_are_those_of_the_numbers_in_float32(name: str, files) -> None:
    prompt = np.random.default_rng(1).integers(0, 320, 200).astype(np.int32)
    (tokens, logits), (others, wanted) = (
        generate(load(path), prompt, 6) for path in (files[name], plain_of(files[name]))
    )
    assert tokens == others
    assert float((logits - wanted).abs().max() / wanted.std()) < COMPILED_LOGITS_FLOAT32
    assert len(set(tokens)) > 2


FAMILIES = {
    "llama3": {}, "llama with biases": {}, "mistral": {}, "qwen2 with yarn": {}, "qwen3": {}, "phi3": {}, "glm4": {},
    "gemma3": {"query_pre_attn_scalar": 256}, "gpt_oss": {}, "gemma4": {}, "gemma4 with inputs": {},
    "smollm3": {"no_rope_layers": (1, 1, 1, 0, 1)}, "granite": {}, "ministral3": {},
    "qwen3_5": {}, "qwen3_5_moe": {}, "qwen3_next": {"mlp_only_layers": ()}, "glm4_moe_lite": {}, "deepseek_v3": {},
    "deepseek_v2": {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    "granitemoehybrid": {}, "granitemoehybrid dense": {}, "nemotron_h": {}, "nemotron_h dense": {},
    "mistral4": {}, "olmo3": {},
    "muse_glimmer": {"post_norm_eps": 1e-8, "layer_rope_theta": (0, 50_000.0, 50_000.0, 50_000.0, 0)},
}  # fmt: skip


# Sizes of which all rows are whole blocks.
BLOCKWISE = {"qwen3_next": {"linear_value_head_dim": 16, "shared_expert_intermediate_size": 64},
             "deepseek_v3": {"qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 64},
             "mistral4": {"qk_nope_head_dim": 96, "qk_rope_head_dim": 64, "v_head_dim": 32, "q_lora_rank": 64},
             "nemotron_h": {"moe_shared_expert_intermediate_size": 64}}  # fmt: skip
# Where products are summed in another order, or rotations are rounded: value heads stand elsewhere in files of Qwen3.5.
# Decays are exponentials in files, whose logarithms may differ from the checkpoint's in the last bit.
GGUF_LOGITS = dict.fromkeys(
    (
        "llama3",
        "qwen3_5",
        "qwen3_5_moe",
        "granitemoehybrid",
        "granitemoehybrid dense",
        "nemotron_h",
        "nemotron_h dense",
    ),
    GGUF_ROPE_LOGITS,
)


def _as_stored(value: object) -> object:
    """Layers without how they lie in files: value heads that share a key head are no neighbours, projections apart."""
    if isinstance(value, Latent):
        return replace(value, is_split=False)
    if not isinstance(value, tuple):
        return value
    return tuple(
        replace(one, recurrent=replace(one.recurrent, is_tiled=False, is_grouped=False))
        if getattr(one, "recurrent", None) else one
        for one in value
    )  # fmt: skip


WAYS = [(family, {}) for family in FAMILIES]
WAYS += [(family, {"is_old": True}) for family in ("qwen3_next", "deepseek_v2", "glm4_moe_lite")]


@pytest.mark.parametrize(("family", "way"), WAYS)
def test_every_family_is_the_checkpoint_that_its_file_was_made_of(family: str, way: dict, tmp_path: Path) -> None:
    """Names, biases, norms, windows, rotations and their scaling; logits beside transformers' own."""
    plain = checkpoint(family, **FAMILIES[family])
    more = {"tokenizer.ggml.pre": "glm4"} if family == "glm4_moe_lite" else {}
    path = write(plain.folder, tmp_path / "model.gguf", lambda name: "F32", more, is_alone=True, **way)
    ours, theirs = read_architecture(path), read_architecture(plain.folder)
    for field in ("family", "num_heads", "num_kv_heads", "dim", "rotary_dim", "layer_pattern", "query_gain",
                  "logit_cap", "layer_inputs", "query_growth", "logit_gain", "latent",
                  "embedding_scale", "norm_weight_offset", "tied_embeddings", "rms_norm_eps",
                  "post_norm_eps", "max_context_tokens"):  # fmt: skip
        assert _as_stored(getattr(ours, field)) == _as_stored(getattr(theirs, field)), field
    prompt = np.random.default_rng(1).integers(0, 320, 150).astype(np.int32)
    (tokens, logits), (others, wanted) = (generate(load(one), prompt, 4) for one in (path, plain.folder))
    assert tokens == others
    assert torch.allclose(logits, wanted, atol=GGUF_LOGITS.get(family, 0), rtol=0)
    assert len(set(tokens)) > 1


@pytest.mark.parametrize(("family", "changes"), [("mixtral", {}), ("qwen3_moe", {"mlp_only_layers": ()})])
def test_experts_with_tensors_of_their_own_are_those_of_one_for_all(family: str, changes: dict, tmp_path: Path) -> None:
    """As llama.cpp wrote Mixtral at first."""
    plain = checkpoint(family, **changes).folder
    one, each = (
        write(plain, tmp_path / f"{each}.gguf", all_of("Q8_0"), one_each=each, is_alone=True) for each in (False, True)
    )
    names = list(read_gguf(each).tensors)
    assert "blk.0.ffn_up.1.weight" in names
    assert not any("_exps" in name for name in names)
    for layer, wanted in zip(packed(each).layers, packed(one).layers, strict=True):
        for name in ("gate_up", "down"):
            got, matrix = getattr(layer.experts, name), getattr(wanted.experts, name)
            assert torch.equal(got.words, matrix.words)
            assert torch.equal(got.scales, matrix.scales)


def test_experts_of_a_gpt_oss_stay_in_fp4_and_its_biases_and_sinks_are_there(tmp_path: Path) -> None:
    plain = checkpoint("gpt_oss").folder
    path, wide = (
        write(plain, tmp_path / f"{kind}.gguf", lambda name, kind=kind: kind if "_exps" in name else "F32",
              is_alone=True)
        for kind in ("MXFP4", "F32")
    )  # fmt: skip
    fp4 = gguf.GGMLQuantizationType.MXFP4
    for layer, whole_layer in zip(packed(path).layers, packed(wide).layers, strict=True):
        for name in ("experts_gate_up", "experts_down"):
            got, matrix = layer.matrices[name], whole_layer.matrices[name]
            assert isinstance(got, Packed)
            assert (got.kind, got.group) == ("fp4", 32)
            meant = gguf.quants.dequantize(gguf.quants.quantize(matrix.numpy(), fp4), fp4)
            assert np.array_equal(as_matrix(got).unpack().numpy(), meant), name
            assert torch.equal(layer.biases[name], whole_layer.biases[name])
        assert torch.equal(layer.sinks, whole_layer.sinks)


def test_matrices_of_a_gemma4_are_those_of_its_file_also_gate_and_up_of_an_expert_in_one(tmp_path: Path) -> None:
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name in ("gemma4", "gemma4 with inputs"):
        plain = checkpoint(name).folder
        path, wide = (
            write(plain, tmp_path / f"{name} {kind}.gguf",
                  lambda tensor, kind=kind: kind if "_exps" in tensor or "attn_" in tensor or "token_embd" in tensor
                  else "F32", is_alone=True)
            for kind in ("Q8_0", "F32")
        )  # fmt: skip
        got, wanted = packed(path), packed(wide)
        for layer, whole_layer in zip(got.layers, wanted.layers, strict=True):
            for matrix in {"qkv", "experts_gate_up", "experts_down"} & layer.matrices.keys():
                numbers = whole_layer.matrices[matrix].numpy()
                meant = gguf.quants.dequantize(gguf.quants.quantize(numbers, q8), q8)
                assert isinstance(layer.matrices[matrix], Packed)
                assert np.array_equal(as_matrix(layer.matrices[matrix]).unpack().numpy(), meant), matrix
        if got.inputs is not None:
            meant = gguf.quants.dequantize(gguf.quants.quantize(wanted.inputs.table.numpy(), q8), q8)
            assert np.array_equal(got.inputs.table.numpy(), meant)
        assert len(set(generate(load(path), np.arange(3, 90, dtype=np.int32), 4)[0])) > 1


@pytest.mark.parametrize(
    ("family", "key", "value", "words"),
    [
        ("gemma4", "attention.head_count_kv", [2, 2, 1, 2, 1, 1], "wanted one number for layers of a kind"),
        ("gemma4", "attention.head_count_kv", [2, 2, 1], "wanted a whole number, or one for each layer"),
        ("gemma4", "feed_forward_length", [96, 96, 96, 96, 96, 192], "wanted one number, or twice as many in layers"),
        ("gemma4", "attention.sliding_window_pattern", 3, "wanted one entry for each layer"),
        ("gemma4", "attention.value_length_swa", 8, "wanted 16, as attention.key_length_swa is"),
        ("ministral3", "attention.temperature_length", 100, "wanted 64, the positions before YaRN"),
        ("ministral3", "attention.temperature_scale", -0.1, "wanted a number"),
        ("ministral3", "rope.scaling.yarn_ext_factor", 0.5, "and this key is not known"),
        ("ministral3", "expert_count", 8, "wanted 0: of its mixtures of experts none is served"),
        ("mistral4", "expert_gating_func", 2, "wanted 1, a softmax"),
        ("mistral4", "attention.temperature_length", 100, "wanted 64, the positions before YaRN"),
        ("mistral4", "rope.scaling.yarn_log_multiplier", None, "wanted a positive number beside YaRN"),
        ("olmo3", "rope.scaling.attn_factor", 1.3, "wanted 1.0 beside 'yarn', or 1.20794"),
        ("olmo3", "rope.scaling.yarn_attn_factor", 1.3, "wanted 1.0 beside 'yarn', or 1.20794"),
        ("muse_glimmer", "attention.sliding_window_pattern", [True, False], "wanted one entry for each layer"),
        ("olmo3", "attention.sliding_window_pattern", 0, "wanted a whole number of 1 or more"),
        ("deepseek_v3", "attention.key_length", 47, "wanted 48, of the rows that tokens leave"),
        ("deepseek_v3", "attention.head_count_kv", 2, "wanted 1 or 4, as many as query heads"),
        ("deepseek_v3", "expert_gating_func", 3, "wanted 1, a softmax, or 2, sigmoids"),
        ("deepseek_v3", "rope.scaling.yarn_log_multiplier", 0.0, "wanted a positive number beside YaRN"),
        ("deepseek_v3", "attention.temperature_scale", 0.5, "and this key is not known"),
        ("nemotron_h", "moe_latent_size", 32, "wanted 0: experts of a latent are not served"),
        ("nemotron_h", "expert_gating_func", 1, "wanted 2, sigmoids"),
        ("nemotron_h", "attention.value_length", 16, "wanted as many as keys have, 32"),
        ("nemotron_h", "attention.head_count_kv", [0, 0, 0, 2, 0, 0, 1, 0, 0], "wanted a positive number, the same in"),
        ("nemotron_h", "ssm.inner_size", 127, "wanted a multiple of 8, ssm.time_step_rank"),
        ("nemotron_h", "ssm.state_size", 0, "wanted a whole number of 1 or more"),
        ("granitemoehybrid", "ssm.inner_size", 120, "wanted a multiple of 64, embedding_length"),
        ("granitemoehybrid", "attention.head_count_kv", [0, 0, 0, 0], "wanted a positive number, the same in all"),
        ("granitemoehybrid", "expert_gating_func", 2, "and this key is not known"),
    ],
)
def test_what_a_file_says_otherwise_than_its_family_is_refused_by_its_key(
    family: str, key: str, value: Any, words: str, tmp_path: Path
) -> None:
    plain = checkpoint(family, **FAMILIES[family]).folder
    prefix = ARCHITECTURES[CONFIGS[family]["model_type"]]
    path = write(plain, tmp_path / "model.gguf", lambda name: "F32", {f"{prefix}.{key}": value}, is_alone=True)
    with pytest.raises(ModelError, match=rf"{prefix}\.{key} is .*{words}") as caught:
        read_architecture(path)
    assert "\n" not in str(caught.value)


def test_a_factor_of_attention_that_is_yarns_own_is_served_and_a_file_without_windows_is_an_olmo_2s(
    tmp_path: Path,
) -> None:
    plain = checkpoint("olmo3").folder
    keys = {"rope.scaling.yarn_attn_factor": None, "rope.scaling.attn_factor": 1.2079441,
            "attention.sliding_window": None, "attention.sliding_window_pattern": None}  # fmt: skip
    path = write(plain, tmp_path / "model.gguf", lambda name: "F32",
                 {f"olmo2.{key}": value for key, value in keys.items()}, is_alone=True)  # fmt: skip
    shape = read_architecture(path)
    assert {spec.window_tokens for spec in shape.layers} == {None}
    assert {spec.rope for spec in shape.layers} == {None}, "that of the model"
    assert shape.rope.kind == "yarn"


@pytest.mark.parametrize("family", ["olmo3", "muse_glimmer"])
def test_one_layer_of_so_many_has_no_window_where_a_file_says_a_number_or_none(family: str, tmp_path: Path) -> None:
    plain = checkpoint(family, **FAMILIES[family]).folder
    prefix = ARCHITECTURES[CONFIGS[family]["model_type"]]
    for said, whole in ((None, [3]), (2, [1, 3])):
        path = write(plain, tmp_path / f"{said}.gguf", lambda name: "F32",
                     {f"{prefix}.attention.sliding_window_pattern": said}, is_alone=True)  # fmt: skip
        layers = read_architecture(path).layers
        assert [place for place, spec in enumerate(layers) if spec.window_tokens is None] == whole
        turns = [place for place, spec in enumerate(layers) if spec.rope == NO_ROTATION]
        assert turns == (whole if family == "muse_glimmer" else [])


def test_a_glimmers_factor_of_queries_is_that_of_all_its_norms_or_refused(tmp_path: Path) -> None:
    plain = checkpoint("muse_glimmer", **FAMILIES["muse_glimmer"]).folder
    path = write(plain, tmp_path / "model.gguf", lambda name: "F32", is_alone=True)
    norm = read_gguf(path).tensors["blk.3.attn_q_norm.weight"]
    data = bytearray(path.read_bytes())
    struct.pack_into("<f", data, norm.offset + 8, 3.5)
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"attn_q_norm\.weight have several numbers; wanted one, the same everywhere"):
        read_architecture(path)
    struct.pack_into("<f", data, norm.offset + 8, float("nan"))
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"blk\.3\.attn_q_norm\.weight holds numbers that are not finite"):
        read_architecture(path)


def test_multipliers_and_growth_that_a_file_does_not_have_are_none(tmp_path: Path) -> None:
    names = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    granite = write(checkpoint("granite").folder, tmp_path / "granite.gguf", lambda name: "F32",
                    {f"granite.{name}": None for name in names}, is_alone=True)  # fmt: skip
    shape = read_architecture(granite)
    assert (shape.embedding_scale, shape.logit_gain, shape.rope.settings["attention_factor"]) == (1.0, 1.0, 1.0)
    names = ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier", "rope.scaling.type",
             "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
             "rope.scaling.yarn_beta_slow")  # fmt: skip
    mistral = write(checkpoint("ministral3").folder, tmp_path / "mistral3.gguf", lambda name: "F32",
                    {f"mistral3.{name}": None for name in names}, is_alone=True)  # fmt: skip
    shape = read_architecture(mistral)
    assert (shape.query_growth, shape.rope.kind) == (None, "default")
    latents = write(checkpoint("mistral4").folder, tmp_path / "mistral4.gguf", lambda name: "F32",
                    {"mistral4.attention.temperature_scale": None}, is_alone=True)  # fmt: skip
    shape = read_architecture(latents)
    assert (shape.query_growth, shape.rope.kind) == (None, "yarn"), "as llama.cpp's converter writes them"


def test_an_expert_too_many_or_too_few_is_told(tmp_path: Path) -> None:
    plain = checkpoint("mixtral").folder
    count = json.loads((plain / "config.json").read_text())["num_local_experts"]
    for said in (count - 1, count + 1):
        path = write(plain, tmp_path / f"{said}.gguf", all_of("Q8_0"), {"llama.expert_count": said}, one_each=True,
                     is_alone=True)  # fmt: skip
        with pytest.raises(ModelError, match=f"expert_count is {said}; wanted {count}, of which the file has tensors"):
            packed(path)


@pytest.mark.parametrize("family", ["qwen3", "phi3", "glm4", "gemma3"])
def test_other_families_rows_are_put_in_order_in_blocks_too(family: str, tmp_path: Path) -> None:
    path = write(checkpoint(family, **FAMILIES[family]).folder, tmp_path / "model.gguf", all_of("Q8_0", "Q8_0"))
    got, wanted = packed(path), whole(plain_of(path))
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        for matrix in MATRICES:
            stored = getattr(ours, matrix)
            assert isinstance(stored, Packed)
            assert torch.equal(as_matrix(stored).unpack(), getattr(theirs, matrix)), matrix
        assert torch.equal(ours.attention_norm, theirs.attention_norm)


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3", "mistral4", "granitemoehybrid", "nemotron_h"])
def test_blocks_of_hybrids_and_latents_give_the_logits_of_their_numbers(family: str, tmp_path: Path) -> None:
    """Of latents what makes keys lies transposed, head by head, so its blocks are widened as it is placed."""
    plain = checkpoint(family, **FAMILIES[family], **BLOCKWISE.get(family, {})).folder
    path = write(plain, tmp_path / "model.gguf", all_of("Q8_0", "Q8_0"), is_alone=True)
    prompt, weights = np.random.default_rng(1).integers(0, 320, 90).astype(np.int32), whole(path)
    for layer, wanted in zip(weights.layers, whole(plain).layers, strict=True):
        for name, matrix in wanted.matrices.items():
            rows = as_matrix(layer.matrices[name]).unpack()
            assert float((rows - matrix).abs().max()) < 0.01 * float(matrix.abs().max()), name
    assert len(set(generate(load(path), prompt, 4)[0])) > 1


@pytest.mark.parametrize("family", ["deepseek_v3", "nemotron_h"])
def test_layers_that_guess_tokens_are_left_out_where_no_head_is_read_and_the_log_names_them(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last layer is said to be one: what is left is the model of the others."""
    plain = checkpoint(family).folder
    name = {"deepseek_v3": "deepseek2", "nemotron_h": "nemotron_h_moe"}[family]
    path, whole_path = (
        write(plain, tmp_path / f"{heads}.gguf", lambda tensor: "F32", {f"{name}.nextn_predict_layers": heads},
              is_alone=True, head_marks=heads)
        for heads in (1, 0)
    )  # fmt: skip
    with caplog.at_level("INFO"):
        shape = read_architecture(path)
    assert "event=heads_left_out" in caplog.text
    assert "layers=1" in caplog.text
    whole_shape = read_architecture(whole_path)
    assert (shape.num_layers, shape.draft_heads) == (whole_shape.num_layers - 1, 0)
    assert shape.layers == whole_shape.layers[:-1]
    (_, logits), (_, others) = (generate(load(one), np.arange(3, 60, dtype=np.int32), 4) for one in (path, whole_path))
    assert not torch.allclose(logits, others), "the last layer is not computed"


@pytest.mark.parametrize(("heads", "marks", "words"), [(1, 0, "of no layer"), (1, 2, "of 1, 2"), (0, 1, "of 2")])
def test_a_count_of_heads_that_is_not_that_of_layers_with_their_tensors_is_refused(
    heads: int, marks: int, words: str, tmp_path: Path
) -> None:
    """Or a layer of the model would go with them."""
    metadata = {"deepseek2.nextn_predict_layers": heads}
    path = write(checkpoint("glm4_moe_lite").folder, tmp_path / "model.gguf", lambda tensor: "F32", metadata,
                 is_alone=True, head_marks=marks)  # fmt: skip
    with pytest.raises(ModelError, match=rf"nextn_predict_layers is {heads}; wanted as many as .*these are {words}"):
        read_architecture(path)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_value_heads_in_blocks_that_are_tiled_give_the_checkpoints_logits(kind: str, tmp_path: Path) -> None:
    """Where they stand is the file's, rows and columns, so weights are compared by what they compute."""
    path = write(checkpoint("qwen3_5").folder, tmp_path / "model.gguf", all_of(kind, "Q8_0"))
    prompt = np.random.default_rng(1).integers(0, 320, 90).astype(np.int32)
    (tokens, logits), (others, wanted) = (generate(load(one), prompt, 4) for one in (path, plain_of(path)))
    assert tokens == others
    assert torch.allclose(logits, wanted, atol=GGUF_ROPE_LOGITS, rtol=0)


def test_rotation_factors_count(tmp_path: Path) -> None:
    """Without them a Llama 3's logits differ by more than their rounding: they are of plain frequencies."""
    plain = checkpoint("llama3")
    path = write(plain.folder, tmp_path / "model.gguf", lambda name: "F32")
    bare = tmp_path / "bare"
    shutil.copytree(plain.folder, bare)
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"rope_scaling": None}))
    prompt = np.random.default_rng(1).integers(0, 320, 150).astype(np.int32)
    (_, logits), (_, wanted) = (generate(load(one), prompt, 1) for one in (path, bare))
    assert (logits - wanted).abs().max() > 10 * GGUF_ROPE_LOGITS


def scaled(tmp_path: Path, family: str, scaling: dict[str, Any]) -> RopeScaling:
    changes = {f"llama.rope.{key}": value for key, value in scaling.items()}
    path = write(checkpoint(family).folder, tmp_path / "model.gguf", lambda _: "F16", changes, is_alone=True)
    return read_architecture(path).rope


@pytest.mark.parametrize("scaling", [
    {"scale_linear": 4.0}, {"scaling.factor": 4.0}, {"scaling.type": "linear", "scaling.factor": 4.0},
    {"scaling.type": "linear", "scale_linear": 4.0}, {"scaling.factor": 4.0, "scale_linear": 2.0},
])  # fmt: skip
def test_a_factor_without_a_name_is_linear_and_may_stand_under_an_older_key(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    """As llama.cpp reads them, which wrote the older one until the autumn of 2023."""
    found = scaled(tmp_path, "llama2", scaling)
    assert (found.kind, found.settings) == ("linear", {"factor": 4.0})


@pytest.mark.parametrize("scaling", [
    {"scaling.factor": 1.0}, {"scaling.factor": 0.0, "scale_linear": 4.0}, {"scaling.type": "linear"},
    {"scaling.type": "none", "scaling.factor": 4.0}, {},
])  # fmt: skip
def test_a_factor_of_one_or_of_no_scaling_scales_nothing(scaling: dict[str, Any], tmp_path: Path) -> None:
    assert scaled(tmp_path, "llama2", scaling).kind == "default"


@pytest.mark.parametrize(("scaling", "words"), [
    ({"scale_linear": 4.0}, "rope.scaling.type is 'linear' beside rope_freqs.weight; wanted none"),
    ({"scaling.type": "longrope", "scaling.factor": 4.0}, "scaling.factor is 4.0; wanted 1 beside rope_freqs.weight"),
])  # fmt: skip
def test_a_factor_beside_those_of_all_frequencies_is_refused(
    scaling: dict[str, Any], words: str, tmp_path: Path
) -> None:
    changes = {f"llama.rope.{key}": value for key, value in scaling.items()}
    path = write(checkpoint("llama3").folder, tmp_path / "model.gguf", lambda _: "F16", changes, is_alone=True)
    assert_refused(path, words)


def test_a_split_file_is_one_model(files, tmp_path: Path) -> None:
    path = tmp_path / "split.gguf"
    write(checkpoint("llama2", **WIDE).folder, path, all_of("Q8_0", "Q8_0"), split_tensors=9, is_alone=True)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) == 4
    assert read_architecture(parts[0]).name == "split"
    got, wanted = packed(parts[0]), packed(files["Q8_0"])
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        assert torch.equal(as_matrix(ours.qkv).unpack(), as_matrix(theirs.qkv).unpack())
    with pytest.raises(ModelError, match=r"split-00002-of-00004\.gguf is part 2 of 4; give the first"):
        read_architecture(parts[1])
    shutil.copy(parts[2], tmp_path / "kept")
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ModelError, match=r"00003-of-00004\.gguf says that it is part 2 of 4; by its name it is 3 of 4"):
        read_architecture(parts[0])
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"00003-of-00004\.gguf is missing; .* is of 4 parts \(1 are missing\)"):
        read_architecture(parts[0])
    shutil.copy(parts[0], tmp_path / "alone.gguf")
    with pytest.raises(ModelError, match=r"alone\.gguf says that it is part 1 of 4; by its name it is 1 of 1"):
        read_architecture(tmp_path / "alone.gguf")


SPLIT = (("split.count", "uint16"), ("split.no", "uint16"), ("split.tensors.count", "int32"))


def write_parts(folder: Path, tensors: int, more: dict[int, dict[str, str]]) -> Path:
    """Write two parts of a tensor each, which say that all parts have so many. more: metadata of a part."""
    for number in range(2):
        path = folder / f"m-0000{number + 1}-of-00002.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for (key, kind), value in zip(SPLIT, (2, number, tensors), strict=True):
            getattr(writer, f"add_{kind}")(key, value)
        for key, text in more.get(number, {}).items():
            writer.add_string(key, text)
        writer.add_tensor(f"t{number}", np.zeros((2, 2), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return folder / "m-00001-of-00002.gguf"


@pytest.mark.parametrize(("tensors", "more", "words"), [
    (2, {}, None),
    (3, {}, r"m-00001-of-00002\.gguf says that all parts have 3 tensors; found 2"),
    (2, {0: {"general.name": "a"}, 1: {"general.name": "b"}},
     r"m-00002-of-00002\.gguf is a part of another model than .*m-00001.*: general\.name is 'b' and not 'a'"),
])  # fmt: skip
def test_parts_are_those_of_one_model_and_all_of_them(tensors: int, more: dict, words: str | None, tmp_path: Path):
    path = write_parts(tmp_path, tensors, more)
    if words is None:
        assert list(read_gguf(path).tensors) == ["t0", "t1"]
        return
    with pytest.raises(ModelError, match=words):
        read_gguf(path)


def test_a_part_of_a_model_of_more_tensors_is_told(tmp_path: Path) -> None:
    path = write_parts(tmp_path, 2, {})
    (tmp_path / "other").mkdir()
    other = write_parts(tmp_path / "other", 5, {}).with_name("m-00002-of-00002.gguf")
    shutil.copy(other, tmp_path)
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf is a part of another model .*count is 5 and not 2"):
        read_gguf(path)


def test_progress_goes_to_the_end_and_rounding_is_of_plain_files_alone(files) -> None:
    told: list[float] = []
    load_weights(files["mixed"], read_architecture(files["mixed"]), torch.float32, CPU, told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    with pytest.raises(ModelError, match=r"model\.weights: asked int4, Q4_K is quantised already \(gguf\)"):
        rounded(read_architecture(files["Q4_K"]), "int4", "model.weights")
    shape = rounded(read_architecture(files["F16"]), "int4", "model.weights")
    got = load_packed(files["F16"], shape, torch.float32, CPU, lambda _: None)
    folder = plain_of(files["F16"])
    wanted = load_packed(
        folder, rounded(read_architecture(folder), "int4", "weights"), torch.float32, CPU, lambda _: None
    )
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        assert torch.equal(as_matrix(ours.qkv).unpack(), as_matrix(theirs.qkv).unpack())


@pytest.mark.parametrize("kind", SERVED)
def test_random_weights_of_a_kind_have_the_spread_of_plain_ones_and_its_bytes(kind: str) -> None:
    shape = stored_as(named_shape("tiny-qwen3"), kind)
    weights = allocate_weights(shape, torch.bfloat16, CPU)
    matrix = weights.layers[0].gate_up
    assert isinstance(matrix, Packed)
    draw_packed(matrix, 0.1, torch.Generator().manual_seed(1))
    drawn = as_matrix(matrix).unpack().float()
    assert abs(float(drawn.std()) - 0.1) < SPREAD_OF_DRAWN
    assert abs(float(drawn.mean())) < SPREAD_OF_DRAWN
    with pytest.raises(ModelError, match=r"has rows of 384; Q4_K has blocks of 256"):
        stored_as(named_shape("tiny-phi3"), "Q4_K")
    with pytest.raises(ModelError, match="IQ3_S is widened at load; wanted a kind of few bits"):
        stored_as(named_shape("tiny-qwen3"), "IQ3_S")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q3_K", "Q4_K", "Q5_K", "IQ4_NL", "IQ4_XS", "MXFP4", "mixed"])
def test_on_a_device_matrices_are_packed_and_hold_the_numbers_of_the_file(name: str, files) -> None:
    device = torch.device("cuda")
    got = load_weights(files[name], read_architecture(files[name]), torch.bfloat16, device, lambda _: None)
    wanted = whole(plain_of(files[name]))
    assert got.is_packed
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        for matrix in MATRICES:
            unpacked = as_matrix(getattr(ours, matrix)).unpack().cpu()
            assert torch.equal(unpacked, getattr(theirs, matrix).bfloat16()), matrix
    assert torch.equal(got.embedding.cpu(), wanted.embedding.bfloat16())


def truncated(share: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    return damage


def overwritten(offset: int, with_bytes: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[offset : offset + len(with_bytes)] = with_bytes
        path.write_bytes(content)

    return damage


BROKEN = {
    "cut data": (truncated(0.9), " bytes, and tensor "),
    "cut header": (truncated(0.001), " bytes are left of the file"),
    "empty": (truncated(0.0), "it is empty; wanted a GGUF file"),
    "magic": (overwritten(0, b"GGML"), "it begins with b'GGML'; wanted b'GGUF', or a folder"),
    "version": (overwritten(4, struct.pack("<I", 9)), "it is of version 9; served: 2, 3"),
    "byte order": (overwritten(4, struct.pack(">I", 3)), "it is of the other byte order; wanted a little-endian file"),
    "endless keys": (overwritten(16, struct.pack("<Q", 2**40)), "it says that it has 1,099,511,627,776 keys, and"),
    "endless tensors": (overwritten(8, struct.pack("<Q", 2**40)), "it says that it has 1,099,511,627,776 tensors"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_cut_or_is_no_gguf_is_told_in_one_line(name: str, tmp_path: Path) -> None:
    damage, words = BROKEN[name]
    path = write(checkpoint("llama2").folder, tmp_path / "model.gguf", lambda _: "F16", is_alone=True)
    damage(path)
    assert_refused(path, words)


def test_what_cannot_be_read_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a file's name, a file that is missing, and one that is another user's."""
    (tmp_path / "folder.gguf").mkdir()
    assert_refused(tmp_path / "folder.gguf", "folder.gguf cannot be read (Is a directory); wanted a GGUF file")
    assert_refused(tmp_path / "none.gguf", "none.gguf cannot be read (No such file or directory); wanted a GGUF file")
    (tmp_path / "theirs.gguf").touch()

    def refuse(path: Path, *_: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    assert_refused(tmp_path / "theirs.gguf", "theirs.gguf cannot be read (Permission denied); wanted a GGUF file")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "falcon"}, "general.architecture is 'falcon'; served: '"),
    "unknown key": ({"llama.logit_scale": 0.5}, "llama.logit_scale is 0.5, and this key is not known"),
    "experts": ({"llama.expert_count": 8, "llama.expert_used_count": 2}, "llama.expert_count is 8; wanted 0, of which"),
    "value heads": ({"llama.attention.value_length": 8}, "llama.attention.value_length is 8; wanted as many as keys"),
    "no layers": ({"llama.block_count": None}, "num_hidden_layers is None; wanted a positive int"),
    "too many layers": ({"llama.block_count": 4}, "llama.block_count is 4; the file has tensors of 3 layers"),
    "fewer layers": ({"llama.block_count": 2}, "llama.block_count is 2; the file has tensors of 3 layers"),
    "sizes": ({"llama.feed_forward_length": 64}, "is [64, 96]; wanted [64, 64] by its metadata"),
    "rows": ({"llama.vocab_size": 300}, "llama.vocab_size says 300 tokens, and token_embd.weight has 320 rows"),
    "text": ({"llama.context_length": "long"}, "llama.context_length is 'long'; wanted a number"),
    "scaling": ({"llama.rope.scaling.type": "spiral"}, "rope scaling 'spiral'; served: default, llama3, linear"),
    "yarn's factor": ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0},
                      "rope.scaling.attn_factor is 2.0; wanted 1.0 beside 'yarn'"),
    "a factor of nothing": ({"llama.rope.scaling.attn_factor": 2.0},
                            "rope.scaling.attn_factor is 2.0; wanted 1.0 beside 'none'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_metadata_that_is_not_understood_is_refused_by_name(name: str, tmp_path: Path) -> None:
    changes, words = WRONG[name]
    path = write(checkpoint("llama2").folder, tmp_path / "model.gguf", lambda _: "F16", changes, is_alone=True)
    assert_refused(path, words)


def test_windows_are_read_layer_by_layer_where_a_file_says_so_and_refused_where_a_model_has_none(
    tmp_path: Path,
) -> None:
    pattern = {"gemma3.attention.sliding_window_pattern": [True, False, True, False]}
    path = write(checkpoint("gemma3").folder, tmp_path / "gemma.gguf", lambda _: "F16", pattern, is_alone=True)
    assert [spec.window_tokens for spec in read_architecture(path).layers] == [32, None, 32, None]
    window = {"qwen3.attention.sliding_window": 64}
    path = write(checkpoint("qwen3").folder, tmp_path / "qwen.gguf", lambda _: "F16", window, is_alone=True)
    assert_refused(path, "qwen3.attention.sliding_window is 64, and this key is not known")


@pytest.mark.parametrize("layers", [4, 62])
def test_gemmas_largest_has_a_scale_of_queries_by_its_width(layers: int, tmp_path: Path) -> None:
    plain = checkpoint("gemma3", num_hidden_layers=layers, hidden_size=128, intermediate_size=32, head_dim=64)
    path = write(plain.folder, tmp_path / "model.gguf", lambda _: "F16", is_alone=True)
    scalar = 128 / 4 if layers == 62 else 64
    assert read_architecture(path).query_gain == (64 / scalar) ** 0.5


@pytest.mark.parametrize("kind", ["TQ1_0", "F64"])
def test_a_kind_that_is_not_served_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    def odd(name: str) -> str:
        return kind if name == "blk.1.ffn_down.weight" else "F16"

    path = write(checkpoint("llama2", **WIDE).folder, tmp_path / "model.gguf", odd, is_alone=True)
    assert_refused(path, f"tensor blk.1.ffn_down.weight is {kind}; served: F32, F16, BF16, Q4_0")


def test_scales_that_are_no_numbers_are_refused_by_name(tmp_path: Path) -> None:
    path = write(checkpoint("llama2", **WIDE).folder, tmp_path / "model.gguf", all_of("Q4_K"), is_alone=True)
    tensor = read_gguf(path).tensors["blk.1.attn_v.weight"]
    overwritten(tensor.offset + 144, np.float16(np.inf).tobytes())(path)
    with pytest.raises(ModelError, match=r"tensor blk\.1\.attn_v\.weight holds scales \(d\) that are"):
        packed(path)


def assert_refused(path: Path, words: str) -> None:
    def read() -> None:
        load_packed(path, read_architecture(path), torch.float32, CPU, lambda _: None)

    with pytest.raises(ModelError) as refused:
        read()
    assert words in str(refused.value), str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
