"""Where experts lie changes no bit: a model with experts in host memory, fetched as steps want them, and without."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu.config import GpuConfig, ModelConfig
from gpu.layers.projections import Projections
from gpu.model.architecture import Architecture, named_shape, read_architecture
from gpu.model.matrix_formats import OF_EXPERTS, rounded
from gpu.operations.experts.fetch_experts import Listed
from gpu.operations.linear.packed_matrix import Packed, Stored
from gpu.weights.checkpoint import load_packed
from gpu.weights.drawing import random_packed_weights, random_weights
from gpu.weights.host_experts import HostExperts, Slots, tensors_of, with_tensors
from gpu.weights.weight_allocation import allocate_weights
from gpu.weights.weights import LayerWeights, Weights
from tests.gpu.family_checkpoints import checkpoint, draw_prompt, generate, load
from tests.gpu.gguf_files import write as write_gguf
from tests.gpu.kernel_oracles import DEVICES
from tests.gpu.quantised_files import write
from tests.gpu.small_runner import load_small
from tests.gpu.test_expert_models import WIDE
from tests.gpu.test_families import off
from tests.gpu.test_quantised_checkpoints import FORMATS
from tests.tolerances import FAMILY_LOGITS

CPU = torch.device("cpu")
TINY = "tiny-qwen3-moe"


def split(weights: Weights, shape: Architecture, on_card: int) -> Weights:
    """The same numbers, of which the last experts' lie in host memory."""
    layers = [
        layer if spec.experts is None else _split(layer, spec.experts.num_experts, on_card)
        for layer, spec in zip(weights.layers, shape.layers, strict=True)
    ]
    return replace(weights, layers=layers)


def _split(layer: LayerWeights, num_experts: int, on_card: int) -> LayerWeights:
    card, host = [], []
    for name in OF_EXPERTS:
        matrix = layer.matrices[name]
        cut = [tensor.tensor_split([len(tensor) // num_experts * on_card]) for tensor in tensors_of(matrix)]
        card.append(with_tensors(matrix, iter([one.clone() for one, _ in cut])))
        host.append(with_tensors(matrix, iter([_to_host(other) for _, other in cut])))
    assert layer.experts is not None
    experts = replace(
        layer.experts, gate_up=card[0], down=card[1], host=HostExperts(num_experts - on_card, host[0], host[1])
    )
    return replace(layer, experts=experts)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().pin_memory() if tensor.is_cuda else tensor.clone()


def draw_hidden(shape: Architecture, tokens: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    drawn = np.random.default_rng(tokens).normal(size=(tokens, shape.hidden))
    return torch.tensor(drawn, dtype=dtype, device=device)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize("on_card", [0, 1, 3])
def test_texts_and_logits_are_those_of_a_model_that_is_whole(name: str, on_card: int) -> None:
    """Steps of one token, whose experts are listed, and chunks of a prompt, of which a layer is copied."""
    folder = checkpoint(name).folder
    whole, halved = load(folder), load(folder, experts_on_card=on_card)
    for length in (2, 200):
        (tokens, logits), (others, wanted) = (generate(runner, draw_prompt(length), 12) for runner in (halved, whole))
        assert tokens == others
        assert torch.equal(logits, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("weights", [None, "int4", "int8", "fp8"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_number_of_tokens_gives_the_bits_of_a_layer_that_is_whole(
    device: str, weights: str | None, dtype: torch.dtype
) -> None:
    shape = rounded(named_shape(TINY), weights, "weights")
    if device == "cpu" and weights is not None:
        whole = random_packed(shape, dtype)
    else:
        whole = random_weights(shape, 3, dtype, torch.device(device), lambda fraction: None)
    one, other = Projections(whole, shape), Projections(split(whole, shape, 3), shape)
    for tokens in (1, 2, 3, 16, 40, 1):
        hidden = draw_hidden(shape, tokens, dtype, device)
        for layer in range(shape.num_layers):
            assert torch.equal(other.mlp(layer, hidden), one.mlp(layer, hidden)), (tokens, layer)


def random_packed(shape: Architecture, dtype: torch.dtype) -> Weights:
    """On the CPU, where random weights would be unpacked: those of a plain shape, and bytes in packed matrices."""
    plain = random_weights(replace(shape, quantisation=None), 3, dtype, CPU, lambda fraction: None)
    packed, draw = allocate_weights(shape, dtype, CPU), np.random.default_rng(1)
    for layer, known in zip(packed.layers, plain.layers, strict=True):
        for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm"):
            getattr(layer, name).copy_(getattr(known, name))
        if layer.experts is not None and known.experts is not None:
            layer.experts.router.copy_(known.experts.router)
        for matrix in layer.matrices.values():
            assert isinstance(matrix, Packed)
            drawn = draw.integers(0, 256, matrix.words.view(torch.uint8).shape)
            matrix.words.view(torch.uint8).copy_(torch.tensor(drawn & (0xF7 if matrix.kind == "fp8" else 0xFF)))
            if matrix.zeros is not None:
                matrix.zeros.copy_(torch.tensor(draw.integers(0, 16, matrix.zeros.shape)))
            matrix.scales.fill_(0.01 if matrix.kind == "int4" else 0.01 / 16)
    return packed


def test_the_comparison_sees_an_expert_in_anothers_place() -> None:
    shape = named_shape(TINY)
    whole = random_weights(shape, 3, torch.float32, CPU, lambda fraction: None)
    wrong = split(whole, shape, 3)
    layer = next(number for number, one in enumerate(wrong.layers) if one.experts is not None)
    host = wrong.layers[layer].experts.host
    assert isinstance(host.down, torch.Tensor)
    host.down.copy_(host.down.view(host.count, -1).roll(1, 0).view(host.down.shape))
    hidden = draw_hidden(shape, 16, torch.float32, "cpu")
    assert not torch.equal(Projections(wrong, shape).mlp(layer, hidden), Projections(whole, shape).mlp(layer, hidden))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_not_in_use_fetch_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = named_shape(TINY)
    whole = random_weights(shape, 3, torch.float32, torch.device(device), lambda fraction: None)
    one, other = Projections(whole, shape), Projections(split(whole, shape, 1), shape)
    listed: list[int] = []
    fetch = HostExperts.fetch

    def note(self: HostExperts, slots: Slots, asked: Listed) -> None:
        listed.append(int(asked.count))
        fetch(self, slots, asked)

    monkeypatch.setattr(HostExperts, "fetch", note)
    hidden = draw_hidden(shape, 2, torch.float32, device)
    layer = next(number for number, spec in enumerate(shape.layers) if spec.experts is not None)
    in_use = torch.tensor([0, -1], dtype=torch.int32, device=device)
    got = other.mlp(layer, hidden, in_use)
    assert off(got[:1], one.mlp(layer, hidden[:1])) < FAMILY_LOGITS
    other.mlp(layer, hidden[:1])
    other.mlp(layer, hidden, torch.full_like(in_use, -1))
    assert listed[0] == listed[1] > 0
    assert listed[2] == 0


@pytest.mark.parametrize("name", ["gptq-8", "fp8-blocks", "compressed-int4-zeros"])
def test_experts_of_few_bits_are_read_to_where_they_lie(name: str, tmp_path: Path) -> None:
    config, draw = FORMATS[name]
    plain = checkpoint("qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    folder = tmp_path / "model"
    write(plain.folder, folder, config, draw)
    assert_split(folder, None)


@pytest.mark.parametrize("kind", ["BF16", "Q4_K"])
def test_experts_of_a_gguf_file_are_read_to_where_they_lie(kind: str, tmp_path: Path) -> None:
    plain = checkpoint("qwen3_moe", **WIDE["qwen3_moe"])
    assert_split(write_gguf(plain.folder, tmp_path / "model.gguf", lambda name: kind), None)


@pytest.mark.parametrize("asked", [None, "int4", "fp8"])
def test_a_plain_checkpoint_is_read_or_rounded_to_where_its_experts_lie(asked: str | None) -> None:
    assert_split(checkpoint("qwen3_moe", hidden_size=128, moe_intermediate_size=128).folder, asked)


def assert_split(folder: Path, asked: str | None) -> None:
    shape = rounded(read_architecture(folder), asked, "weights")
    whole = load_packed(folder, shape, torch.float32, CPU, lambda fraction: None)
    num_experts = max(spec.experts.num_experts for spec in shape.layers if spec.experts is not None)
    for on_card in (0, num_experts // 2, num_experts - 1):
        got = load_packed(folder, shape, torch.float32, CPU, lambda fraction: None, on_card)
        wanted = split(whole, shape, on_card)
        for ours, theirs in zip(got.layers, wanted.layers, strict=True):
            for name in theirs.matrices:
                stacks = zip(ours.stacks(name), theirs.stacks(name), strict=True)
                assert all(_same(one, other) for one, other in stacks), (on_card, name)
            if ours.experts is not None:
                assert ours.experts.host.count == num_experts - on_card


def _same(one: Stored, other: Stored) -> bool:
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return all(torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)) for ours, theirs in pairs)


def test_numbers_of_a_whole_model_are_put_where_its_parts_lie() -> None:
    shape = rounded(named_shape(TINY), "int4", "weights")
    whole = random_packed(shape, torch.float32)
    parts = random_packed_weights(shape, 7, torch.float32, CPU, lambda fraction: None, 3)
    fill(parts, whole)
    for ours, theirs in zip(parts.layers, split(whole, shape, 3).layers, strict=True):
        for name in theirs.matrices:
            assert all(_same(*pair) for pair in zip(ours.stacks(name), theirs.stacks(name), strict=True)), name


@pytest.mark.gpu
def test_a_captured_step_fetches_what_its_tokens_take_and_says_what_a_whole_model_says() -> None:
    """Graphs of one row, and prompts between: one that is fetched by its tokens, and one that is copied."""
    texts = []
    for on_card in (None, 2):
        runner = load_small(
            ModelConfig(random_weights=TINY),
            GpuConfig(device="cuda", graph_batch_sizes=(1, 4)),
            max_running=4,
            max_context_tokens=1024,
            chunk_tokens=128,
            num_pages=256,
            experts_on_card=on_card,
        )
        if on_card is None:
            whole = runner.weights
        else:
            fill(runner.weights, whole)
        texts.append([generate(runner, draw_prompt(length, 1024), 24)[0] for length in (3, 300, 9)])
    assert texts[0] == texts[1]


def fill(weights: Weights, whole: Weights) -> None:
    """The numbers of a model that is whole: tensors of other sizes are drawn otherwise on CUDA."""
    weights.embedding.copy_(whole.embedding)
    _copy([weights.logits], whole.logits)
    for layer, other in zip(weights.layers, whole.layers, strict=True):
        for name in other.matrices:
            _copy(layer.stacks(name), other.matrices[name])
        if layer.experts is not None and other.experts is not None:
            layer.experts.router.copy_(other.experts.router)


def _copy(stacks: Sequence[Stored], whole: Stored) -> None:
    """Into matrices that are one below the other, with what stands beside their words."""
    for parts in zip(tensors_of(whole), *(tensors_of(stack) for stack in stacks), strict=True):
        begin = 0
        for part in parts[1:]:
            part.copy_(parts[0][begin : begin + len(part)])
            begin += len(part)
