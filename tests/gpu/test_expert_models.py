"""Models with experts: what is loaded is what the file means, and what is counted of it is what is held and read."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu.layers.expert_mlp import ExpertMlp
from gpu.layers.projections import Projections
from gpu.model.architecture import ModelError, named_shape, read_architecture
from gpu.model.gguf.kinds import BLOCK_KINDS
from gpu.model.gguf_translation.tensor_names import stored_as
from gpu.model.humming_formats import multiplied
from gpu.model.matrix_format import MatrixFormat, Quantisation
from gpu.model.matrix_formats import (
    describe_formats,
    layer_formats,
    matrix_shapes,
    rounded,
    step_weight_bytes,
    weight_bytes,
)  # fmt: skip
from gpu.model.spec import Experts
from gpu.operations.experts.experts_reference import experts_reference, route_reference
from gpu.operations.experts.mixture_matrices import ExpertMatrices
from gpu.operations.linear.packed_matrix import Packed, unpack_reference
from gpu.weights.checkpoint import load_packed, load_weights
from gpu.weights.drawing import random_weights
from gpu.weights.matrix import as_matrix
from gpu.weights.weight_allocation import allocate_weights
from gpu.weights.weights import Weights
from tests.gpu import kernel_oracles
from tests.gpu.family_checkpoints import checkpoint, generate, load
from tests.gpu.gguf_files import write as write_gguf
from tests.gpu.quantised_files import FORMATS, write
from tests.tolerances import FAMILY_LOGITS, HOST_EXPERTS_FLOAT32, HOST_EXPERTS_INTEGERS, HOST_EXPERTS_SHARE

CPU = torch.device("cpu")
WIDE = {"qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 256, "mlp_only_layers": None, "num_experts": 3,
                      "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 2},
        "mixtral": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_local_experts": 2,
                    "num_hidden_layers": 2}}  # fmt: skip
SERVED = [name for name, (_, draw) in FORMATS.items() if not name.endswith("order")]
NAMES = {"qwen3_moe": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj", "mlp.gate"),
         "mixtral": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3",
                     "block_sparse_moe.experts.{}.w2", "block_sparse_moe.gate")}  # fmt: skip


def packed(folder: Path, asked: str | None = None) -> Weights:
    shape = rounded(read_architecture(folder), asked, "weights")
    return load_packed(folder, shape, torch.float32, CPU, lambda _: None)


def whole(folder: Path) -> Weights:
    return load_weights(folder, read_architecture(folder), torch.float32, CPU, lambda _: None)


def assert_bytes(folder: Path, got: Weights, asked: str | None = None) -> None:
    """All that is held; and of a step, all but the input embedding and those experts that its tokens leave out."""
    shape = rounded(read_architecture(folder), asked, "weights")
    held, of_experts = 0, 0.0
    for layer, spec in zip(got.layers, shape.layers, strict=True):
        parts = [getattr(layer, name) for name in layer.__dataclass_fields__ if name != "experts"]
        held += sum(part.nbytes for part in parts if part is not None)
        if layer.experts is not None and spec.experts is not None:
            stacked = layer.experts.gate_up.nbytes + layer.experts.down.nbytes
            held += stacked + layer.experts.router.nbytes
            of_experts += stacked * (1 - spec.experts.per_token / spec.experts.num_experts) ** 3
    held += got.final_norm.nbytes + got.logits.nbytes
    assert weight_bytes(shape, 4, is_packed=True) == held + got.embedding.nbytes
    assert step_weight_bytes(shape, 4, True, 3) == pytest.approx(held - of_experts, abs=2)
    assert weight_bytes(shape, 4, is_packed=False) == 4 * shape.num_weights


@pytest.mark.parametrize("family", NAMES)
def test_experts_stand_below_each_other_gate_before_up(family: str) -> None:
    folder = checkpoint(family).folder
    stored, weights = load_file(folder / "model.safetensors"), whole(folder)
    experts = weights.layers[2].experts
    gate, up, down, router = (f"model.layers.2.{name}.weight" for name in NAMES[family])
    count = len(experts.router)
    gate_up = [stored[name.format(expert)] for expert in range(count) for name in (gate, up)]
    assert torch.equal(experts.gate_up, torch.cat(gate_up))
    assert torch.equal(experts.down, torch.cat([stored[down.format(expert)] for expert in range(count)]))
    assert torch.equal(experts.router, stored[router])
    assert_bytes(folder, weights)


def test_layers_without_experts_are_those_that_the_configuration_leaves_out(tmp_path: Path) -> None:
    weights = whole(checkpoint("qwen3_moe").folder)
    assert [layer.experts is None for layer in weights.layers] == [False, True, False]
    assert [layer.gate_up is None for layer in weights.layers] == [True, False, True]
    config = json.loads((checkpoint("qwen3_moe").folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"decoder_sparse_step": 3, "mlp_only_layers": []}))
    assert [spec.experts is None for spec in read_architecture(tmp_path).layers] == [True, True, False]


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("family", NAMES)
def test_experts_of_few_bits_hold_the_numbers_of_the_file(family: str, name: str, tmp_path: Path) -> None:
    config, draw = FORMATS[name]
    plain = write(checkpoint(family).folder, tmp_path / "model", config, draw)
    got, wanted = packed(tmp_path / "model"), whole(plain)
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        for matrix, stored in ours.matrices.items():
            assert isinstance(stored, Packed)
            numbers, in_file = as_matrix(stored).unpack(), theirs.matrices[matrix]
            most_off = 2**-11 * in_file.abs() if name.endswith("nvfp4") else 0  # whose scales are rounded to float16
            assert bool(((numbers - in_file).abs() <= most_off).all()), matrix
        assert (ours.experts is None) == (theirs.experts is None)
        assert ours.experts is None or torch.equal(ours.experts.router, theirs.experts.router)
    assert_bytes(tmp_path / "model", got)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "MXFP4", "BF16"])
@pytest.mark.parametrize("family", NAMES)
def test_a_gguf_file_has_all_experts_of_a_layer_in_one_tensor(family: str, kind: str, tmp_path: Path) -> None:
    """The last one's down is finer, as files have it."""
    plain = checkpoint(family, **WIDE[family])
    kinds = {"blk.1.ffn_down_exps.weight": "Q6_K" if kind.endswith("_K") else kind, "token_embd.weight": "F16"}
    file = write_gguf(plain.folder, tmp_path / "model.gguf", lambda name: kinds.get(name, kind))
    got, wanted = packed(file), whole(tmp_path / "model-plain")
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        assert "experts_down" in ours.matrices
        for matrix, stored in ours.matrices.items():
            assert isinstance(stored, Packed) == (kind != "BF16")
            assert torch.equal(as_matrix(stored).unpack(), theirs.matrices[matrix]), matrix
        assert torch.equal(ours.experts.router, theirs.experts.router)
    assert_bytes(file, got)
    if kind == "Q6_K":
        assert "of Q6_K" in describe_formats(read_architecture(file))
        assert "15 of Q6_K" in describe_formats(read_architecture(file)), "an expert is no tensor of the file"


@pytest.mark.parametrize("family", NAMES)
def test_the_text_of_a_gguf_file_is_that_of_its_numbers(family: str, tmp_path: Path) -> None:
    plain = checkpoint(family, **WIDE[family])
    file = write_gguf(plain.folder, tmp_path / "model.gguf", lambda name: "Q4_K")
    prompt = np.random.default_rng(1).integers(0, 320, 60).astype(np.int32)
    (tokens, logits), (others, wanted) = (generate(load(one), prompt, 4) for one in (file, tmp_path / "model-plain"))
    assert tokens == others
    assert float((logits - wanted).abs().max() / wanted.abs().max()) < FAMILY_LOGITS


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qwen3moe.expert_count": 0}, "qwen3moe.expert_count is 0; wanted a positive number"),
        ({"qwen3moe.expert_count": 4}, "qwen3moe.expert_count is 4; wanted 8, of which the file has tensors"),
        ({"qwen3moe.expert_used_count": None}, "qwen3moe.expert_used_count is None; wanted a whole number"),
        ({"qwen3moe.expert_shared_count": 1}, "qwen3moe.expert_shared_count is 1, and this key is not known"),
    ],
)  # fmt: skip
def test_a_gguf_file_whose_experts_disagree_is_refused(change: dict, words: str, tmp_path: Path) -> None:
    plain = checkpoint("qwen3_moe", mlp_only_layers=None)
    file = write_gguf(plain.folder, tmp_path / "model.gguf", lambda name: "F16", change, is_alone=True)
    with pytest.raises(ModelError, match=words) as caught:
        packed(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("asked", ["int4", "int8", "fp8"])
def test_experts_are_rounded_as_they_are_loaded(asked: str) -> None:
    folder = checkpoint("qwen3_moe").folder
    got, wanted = packed(folder, asked), whole(folder)
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        for matrix, stored in ours.matrices.items():
            right = theirs.matrices[matrix]
            assert 0 < float((as_matrix(stored).unpack() - right).norm() / right.norm()) < 0.14
    assert_bytes(folder, got, asked)


def _widened(stored: torch.Tensor | Packed) -> torch.Tensor:
    return as_matrix(stored).unpack()


@pytest.mark.parametrize("name", ["gptq-order", "compressed-int4-order"])
def test_experts_with_columns_out_of_order_are_refused_by_name(name: str, tmp_path: Path) -> None:
    config, draw = FORMATS[name]
    write(checkpoint("qwen3_moe").folder, tmp_path / "model", config, draw)
    words = r"^model: model\.layers\.0\.mlp\.experts\.0\.gate_proj has columns in an order of its own \(act-order\)"
    with pytest.raises(ModelError, match=words) as caught:
        packed(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_experts_of_which_some_are_plain_are_refused(tmp_path: Path) -> None:
    config, draw = FORMATS["awq"]
    config = config | {"modules_to_not_convert": ["mlp.experts.3", "mlp.gate"]}
    write(checkpoint("qwen3_moe").folder, tmp_path / "model", config, draw, ("mlp.experts.3",))
    words = r"layers\.0\.mlp\.experts\.3\.gate_proj is not quantised and .*experts\.0\.gate_proj is; wanted both alike"
    with pytest.raises(ModelError, match=words):
        packed(tmp_path / "model")


def test_a_router_of_few_bits_is_refused(tmp_path: Path) -> None:
    config, draw = FORMATS["awq"]
    write(checkpoint("qwen3_moe").folder, tmp_path / "model", config, draw)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.gate.qweight"] = torch.zeros(64, 1, dtype=torch.int32)
    del tensors["model.layers.0.mlp.gate.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.0\.mlp\.gate\.qweight is not one of a qwen3_moe"):
        packed(tmp_path / "model")


def test_a_tokens_mlp_is_the_same_in_every_batch() -> None:
    """On the CPU, where a step takes as many tokens as there are: to a rounding of the library's products."""
    shape = named_shape("tiny-qwen3-moe")
    projections = Projections(random_weights(shape, 3, torch.float32, CPU, lambda _: None), shape)
    x = torch.randn(40, shape.hidden, generator=torch.Generator().manual_seed(2))
    together = projections.mlp(0, x)
    for token in (0, 17, 39):
        alone = projections.mlp(0, x[token : token + 1])
        assert kernel_oracles.distance(alone, kernel_oracles.wide(together[token : token + 1])) < 1e-6


def test_experts_that_a_step_reads_are_counted_as_draws_say() -> None:
    """Against drawing them."""
    experts, generator = Experts(32, 4, 8, True), np.random.default_rng(5)
    for tokens in (1, 3, 16):
        draws = [
            len({one for _ in range(tokens) for one in generator.permutation(32)[:4].tolist()}) for _ in range(2000)
        ]
        assert experts.taken(tokens) == pytest.approx(np.mean(draws), rel=0.01)
    assert experts.taken(1) == pytest.approx(4)


def test_every_kind_of_experts_is_compiled_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a file may have groups with offsets in one layer, and without in another."""
    shape, plain, offsets = named_shape("tiny-qwen3-moe"), MatrixFormat("int8", 32), MatrixFormat("int8", 32, run=64)
    formats = {
        (layer, name): offsets if (layer, name) == (2, "experts_down") else plain
        for layer, spec in enumerate(shape.layers)
        for name in matrix_shapes(shape, spec)
    }
    shape = replace(shape, quantisation=Quantisation("gguf", plain, None, matrices=formats))
    warmed: list[ExpertMlp] = []
    monkeypatch.setattr(ExpertMlp, "warm_up", lambda self, most_tokens, norm: warmed.append(self))
    Projections(allocate_weights(shape, torch.bfloat16, torch.device("meta")), shape).warm_up(64)
    assert [isinstance(one.weights.down, Packed) and one.weights.down.run for one in warmed] == [0, 64]


def test_random_experts_of_few_bits_are_drawn_as_they_are_counted() -> None:
    shape = rounded(named_shape("tiny-qwen3-moe"), "int4", "weights")
    formats = [layer_formats(shape, layer) for layer in range(2)]
    assert set(formats[0]) == {"qkv", "output", "experts_gate_up", "experts_down"}
    assert set(formats[1]) == {"qkv", "output", "gate_up", "down"}
    weights = random_weights(replace(shape, num_layers=2), 5, torch.float32, CPU, lambda _: None)
    assert isinstance(weights.layers[0].experts.gate_up, Packed)
    assert weights.layers[0].experts.gate_up.rows == 16 * 2 * 128


@pytest.mark.parametrize("kind", ["Q4_1", "MXFP4", "int4", "fp8"])
def test_experts_of_few_bits_on_the_cpu_device_give_what_their_numbers_give(kind: str) -> None:
    """In integers and in floats, of one token and of many, beside float64 of the same numbers."""
    base = named_shape("tiny-qwen3-moe")
    shape = stored_as(base, kind) if kind in BLOCK_KINDS else rounded(base, kind, "weights")
    x = torch.randn(40, shape.hidden, generator=torch.Generator().manual_seed(2))
    for asked in ("own", "integers"):
        multiplied_as = multiplied(shape, asked, "products")
        weights = random_weights(multiplied_as, 3, torch.float32, CPU, lambda _: None)
        held, spec = weights.layers[0].experts, shape.layers[0]
        assert isinstance(held.gate_up, Packed)
        assert held.gate_up.in_tiles == held.down.in_tiles == (asked == "integers" and kind != "fp8")
        ids, shares = route_reference(x, held.router, spec.experts)
        wide = ExpertMatrices(*(unpack_reference(one, torch.float64) for one in (held.gate_up, held.down)))
        wanted = experts_reference(x.double(), ids, shares.double(), wide, spec.experts, spec.activation)
        got = experts_reference(x, ids, shares, ExpertMatrices(held.gate_up, held.down), spec.experts, spec.activation)
        bound = HOST_EXPERTS_INTEGERS if held.gate_up.in_tiles else HOST_EXPERTS_FLOAT32
        assert float((got - wanted).abs().max() / wanted.abs().max()) < bound
        other = experts_reference(x, ids.roll(1, 0), shares, ExpertMatrices(held.gate_up, held.down), spec.experts,
                                  spec.activation)  # fmt: skip
        assert float((other - wanted).abs().max() / wanted.abs().max()) > HOST_EXPERTS_SHARE, "power: others' experts"
        alone = experts_reference(x[7:8], ids[7:8], shares[7:8], ExpertMatrices(held.gate_up, held.down), spec.experts,
                                  spec.activation)  # fmt: skip
        assert torch.equal(alone[0], got[7])
