"""A model that is split over devices says what it says whole; what cannot be split is refused by name."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu.config import GpuConfig, ModelConfig
from gpu.model.architecture import ModelError, load_architecture, named_shape, read_architecture
from gpu.model.matrix_formats import rounded, weight_bytes
from gpu.model.split import split_over
from gpu.runner import Runner
from gpu.step import DecodeGroup, HostRead, StepPlan
from gpu.weights.checkpoint import load_weights
from gpu.weights.drawing import random_weights
from gpu.weights.matrix import as_matrix
from gpu.weights.weight_allocation import allocate_weights
from gpu.weights.weights import Weights
from tests.gpu.family_checkpoints import CONFIGS, checkpoint, draw_prompt, generate, load
from tests.gpu.reference_model import shallow_model
from tests.gpu.small_runner import load_small
from tests.gpu.thread_ranks import ThreadRanks, run_ranks
from tests.tolerances import SPLIT_LOGITS
from transfer.exchange import ExchangeError
from transfer.host_tier import ContextLostError, HostMemoryError

CPU = torch.device("cpu")
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SERVED = {  # with the changes that give two devices heads
    "llama2": {}, "llama3": {}, "llama with biases": {}, "mistral": {}, "ministral": {}, "qwen2": {},
    "qwen2 with yarn": {}, "qwen3": FOUR_HEADS, "qwen3_moe": FOUR_HEADS, "mixtral": {},
    "phi3": FOUR_HEADS | {"hidden_size": 384}, "glm4": FOUR_HEADS, "gemma3": {}, "ministral3": {}, "granite": {},
    "smollm3": {}, "muse_glimmer": {}, "gemma4 with inputs": {}, "granitemoehybrid attending": {},
}  # fmt: skip
EVERY_TIME = ("llama with biases", "phi3", "ministral", "qwen3_moe", "gemma4 with inputs")
REFUSED = {
    "gpt_oss": "the experts of a layer in one tensor", "gemma4": "the experts of a layer in one tensor",
    "olmo3": "norms all heads of a token together", "qwen3_next": "recurrent layers", "qwen3_5": "recurrent layers",
    "qwen3_5_moe": "recurrent layers", "lfm2": "recurrent layers", "nemotron_h": "recurrent layers",
    "glm4_moe_lite": "latent attention",
    "deepseek_v3": "latent attention", "deepseek_v2": "latent attention", "mistral4": "latent attention",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*CONFIGS} - {*SERVED}))
def test_a_family_that_is_not_known_to_be_split_is_refused(name: str) -> None:
    """One that is split belongs in SERVED."""
    with pytest.raises(ModelError, match=r"^gpu\.devices: asked 2, and "):
        split_over(read_architecture(checkpoint(name).folder), 2)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.long) for name in SERVED]
)
def test_a_split_model_says_what_it_says_whole(name: str) -> None:
    folder, prompt = checkpoint(name, **SERVED[name]).folder, draw_prompt(150)
    wanted, logits = generate(load(folder), prompt, 6)
    for tokens, own in run_ranks(2, lambda ranks: generate(load(folder, ranks=ranks), prompt, 6)):
        assert tokens == wanted
        assert (own - logits).abs().max() < SPLIT_LOGITS * logits.abs().max()


def test_residuals_and_biases_that_two_devices_add_are_seen() -> None:
    folder, prompt = checkpoint("llama with biases").folder, draw_prompt(150)
    _, logits = generate(load(folder), prompt, 1)

    def adding_twice(ranks: ThreadRanks) -> torch.Tensor:
        runner = load(folder, ranks=ranks)
        runner._prefill.decoder.projections._is_first = True
        return generate(runner, prompt, 1)[1]

    assert (run_ranks(2, adding_twice)[0] - logits).abs().max() > 100 * SPLIT_LOGITS * logits.abs().max()


def test_a_layer_has_two_sums() -> None:
    folder = checkpoint("llama3").folder

    def count(ranks: ThreadRanks) -> int:
        runner = load(folder, ranks=ranks)
        before = ranks.num_sums
        generate(runner, draw_prompt(20), 1)
        return ranks.num_sums - before

    assert run_ranks(2, count) == [2 * 2 * 3] * 2, "of three layers, of a prompt and of one step"


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_split_says_why(name: str) -> None:
    with pytest.raises(ModelError, match=rf"^gpu.devices: asked 2, and .*{REFUSED[name]}.*; use 1$"):
        split_over(read_architecture(checkpoint(name).folder), 2)


@pytest.mark.parametrize(
    ("changes", "devices", "why"),
    [
        ({}, 3, "has 8 heads, no multiple of it"),
        ({}, 4, "has 2 KV heads, no multiple of it"),
        ({"intermediate": 769}, 2, "has 769 columns of an MLP, no multiple of it"),
    ],
)
def test_sizes_that_no_device_has_a_whole_part_of_are_named(changes: dict, devices: int, why: str) -> None:
    shape = replace(read_architecture(Path(shallow_model(2).name)), **changes)
    with pytest.raises(ModelError, match=f"^gpu.devices: asked {devices}, and .* {why}; use 1$"):
        split_over(shape, devices)


def test_experts_with_biases_or_beside_an_mlp_are_refused_in_tensors_of_their_own_too() -> None:
    for name in ("gpt_oss", "gemma4"):
        shape = replace(read_architecture(checkpoint(name).folder), experts_apart=True)
        with pytest.raises(ModelError, match="has experts with biases, or beside an MLP with norms of its own"):
            split_over(shape, 2)


def test_a_quantised_checkpoint_and_a_library_s_products_are_refused() -> None:
    plain = named_shape("llama-3.1-8b")
    stored = rounded(plain, "int4", "model.weights")
    assert stored.quantisation is not None
    with pytest.raises(ModelError, match=r"is quantised \(gptq\), and of plain checkpoints alone parts are read"):
        split_over(replace(plain, quantisation=replace(stored.quantisation, scheme="gptq")), 2)
    with pytest.raises(ModelError, match=r"model\.products is humming"):
        split_over(replace(plain, quantisation=replace(stored.quantisation, humming=True)), 2)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_a_share_of_rounded_matrices_has_the_numbers_of_the_whole(kind: str) -> None:
    """Groups of columns lie on one device, so they are rounded alike there."""
    model = ModelConfig(path=Path(shallow_model(1).name), weights=kind)
    whole = _load(model)
    shares = [_load(model, rank) for rank in range(2)]
    for name, axis in (("output", 1), ("down", 1)):
        parts = [as_matrix(one.layers[0].matrices[name]).unpack() for one in shares]
        assert torch.equal(torch.cat(parts, axis), as_matrix(whole.layers[0].matrices[name]).unpack())
    gate_up = as_matrix(whole.layers[0].matrices["gate_up"]).unpack().view(2, 2, -1, 384)
    for rank, one in enumerate(shares):
        own = as_matrix(one.layers[0].matrices["gate_up"]).unpack()
        assert torch.equal(own, gate_up[:, rank].flatten(0, 1))


def _load(model: ModelConfig, rank: int | None = None) -> Weights:
    shape = load_architecture(model)
    assert model.path is not None
    return load_weights(
        model.path, shape if rank is None else split_over(shape, 2, rank), torch.float32, CPU, lambda _: None
    )


def test_rows_of_8_bits_and_rounded_weights_are_served_split() -> None:
    model = ModelConfig(path=Path(shallow_model(4).name), weights="int8")
    gpu, prompt = GpuConfig(device="cpu", dtype="float32", kv="int8"), draw_prompt(60, 8192)
    wanted, _ = _generate(load_small(model, gpu, chunk_tokens=128), prompt)
    for tokens, _ in run_ranks(2, lambda ranks: _generate(load_small(model, gpu, ranks=ranks), prompt)):
        assert tokens == wanted


def _generate(runner: Runner, prompt) -> tuple[list[int], torch.Tensor]:
    return generate(runner, prompt, 12)


def test_a_share_s_bytes_are_those_that_are_allocated() -> None:
    for name in ("tiny", "llama-3.1-8b", "qwen3-30b-a3b"):
        share = split_over(named_shape(name), 2)
        weights = allocate_weights(share, torch.bfloat16, torch.device("meta"))
        held = {id(one): one for one in _tensors(weights)}
        assert sum(one.nbytes for one in held.values()) == weight_bytes(share, 2, True)
        assert weight_bytes(share, 2, True) < 0.6 * weight_bytes(named_shape(name), 2, True)


def _tensors(weights: Weights) -> list[torch.Tensor]:
    experts = [one for layer in weights.layers if layer.experts for one in (layer.experts.router,)]
    norms = [one for layer in weights.layers for one in (layer.attention_norm, layer.mlp_norm, layer.query_norm,
                                                         layer.key_norm) if one is not None]  # fmt: skip
    return [weights.embedding, weights.final_norm, *experts, *norms, *weights.matrices]


def test_devices_draw_the_same_of_what_each_has_and_others_of_their_own() -> None:
    first, second = (
        random_weights(split_over(named_shape("tiny"), 2, rank), 7, torch.float32, CPU, lambda _: None)
        for rank in range(2)
    )
    assert torch.equal(first.embedding, second.embedding)
    assert torch.equal(first.final_norm, second.final_norm)
    for name in ("qkv", "output", "gate_up", "down"):
        assert not torch.equal(first.layers[0].matrices[name], second.layers[0].matrices[name])
    assert not torch.equal(first.logits, second.logits)


def test_what_one_host_refuses_ends_all_ranks_by_name() -> None:
    """Others would wait for what this rank no longer computes."""

    def launch(ranks: ThreadRanks) -> str:
        runner = load_small(ModelConfig(random_weights="tiny"), GpuConfig(device="cpu", dtype="float32"), ranks=ranks)
        runner._failures[3] = "host memory: no room"
        with pytest.raises(HostMemoryError) as refused:
            runner.launch(StepPlan(decode=[DecodeGroup([0], [4], [1])]))
        return str(refused.value)

    assert run_ranks(2, launch) == [f"gpu.devices: rank {rank} of 2: host memory: no room" for rank in range(2)]


@pytest.mark.parametrize("error", [ContextLostError(9, "context 9 is lost"), ExchangeError("no request came")])
def test_a_rank_whose_rows_are_lost_does_not_go_on_with_the_others(error: Exception) -> None:
    """Or it would add up other rows than the other ranks."""

    def launch(ranks: ThreadRanks) -> str:
        runner = load_small(ModelConfig(random_weights="tiny"), GpuConfig(device="cpu", dtype="float32"), ranks=ranks)
        rows = []

        def lose(group: DecodeGroup, *given: object) -> None:
            rows.append(len(group.slots))
            raise error

        runner._decode = lose  # type: ignore[method-assign, assignment]
        group = DecodeGroup((0, 1), (4, 4), (1, 1), host_reads=(HostRead(9, 0, 4), None))
        with pytest.raises(HostMemoryError) as refused:
            runner.launch(StepPlan(decode=(group,)))
        assert rows == [2]
        return str(refused.value)

    assert run_ranks(2, launch) == [f"gpu.devices: rank {rank} of 2: {error}" for rank in range(2)]
