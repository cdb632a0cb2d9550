"""Experts in host memory that the CPU computes: the numbers of a model that is whole, in every kind of step, and no
failure that leaves anybody waiting. On the CPU device both sides are one thread's; graphs are faked there, or real.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cpu.experts import HostExperts
from gpu.exchange.device_experts import ExpertExchange
from gpu.layers.computed_experts import open_exchanges
from gpu.layers.projections import Projections
from gpu.model.architecture import Architecture, named_shape
from gpu.model.humming_formats import multiplied
from gpu.model.matrix_format import MatrixFormat, Quantisation
from gpu.model.matrix_formats import rounded
from gpu.model.spec import ModelError
from gpu.weights.checkpoint import load_packed
from gpu.weights.drawing import random_weights
from gpu.weights.expert_shares import MOST_COMPUTED_ROWS, why_not_computed
from gpu.weights.host_experts import tensors_of
from gpu.weights.weights import Weights
from tests.gpu.family_checkpoints import checkpoint, draw_prompt, generate, load
from tests.gpu.gguf_files import write as write_gguf
from tests.gpu.kernel_oracles import DEVICES
from tests.gpu.quantised_files import FORMATS, write
from tests.gpu.test_expert_models import WIDE
from tests.gpu.test_families import off
from tests.gpu.test_mxfp4 import folders
from tests.gpu.test_split_experts import draw_hidden, random_packed, split
from tests.tolerances import COMPUTED_EXPERTS_BFLOAT16, FAMILY_LOGITS
from transfer.expert_exchange import LayerExperts

TINY = "tiny-qwen3-moe"
CPU = torch.device("cpu")
__all__ = ["folders"]


def open_experts(layers: list[LayerExperts | None], max_rows: int, per_token: int) -> HostExperts:
    return HostExperts(layers, max_rows, per_token, 2)


def make(
    on_card: int, dtype: torch.dtype, device: str, few_bits: str | None = None
) -> tuple[Architecture, Weights, Weights, ExpertExchange]:
    shape = rounded(named_shape(TINY), few_bits, "weights")
    if device == "cpu" and few_bits is not None:
        whole = random_packed(shape, dtype)
    else:
        whole = random_weights(shape, 3, dtype, torch.device(device), lambda fraction: None)
    halved = split(whole, shape, on_card)
    (exchange,) = open_exchanges(halved, shape, 40, torch.device(device), open_experts, 1)
    return shape, whole, halved, exchange


def compute(projections: Projections, layer: int, hidden: torch.Tensor, slots: torch.Tensor | None,
            exchange: ExpertExchange) -> torch.Tensor:  # fmt: skip
    """A layer's MLP; on a card, where the launch comes back before the answer, somebody else's thread gives it."""
    exchange.take_requests()
    if exchange.is_at_once:
        return projections.mlp(layer, hidden, slots, exchange)
    exchange.slot.release()  # while modules are loaded nobody may wait for who loads them
    projections.mlp(layer, hidden, slots, exchange)
    exchange.forget_requests()
    exchange.take_requests()
    got = projections.mlp(layer, hidden, slots, exchange)
    asks = exchange.take_requests()
    if len(asks.table):  # a layer without experts asks nothing
        exchange.slot.advance(len(hidden))
        exchange.worker.answer([(asks, exchange.slot)])
    torch.cuda.synchronize()
    return got


@pytest.mark.parametrize(
    ("asked", "few_bits", "expected"), [("auto", "int4", True), ("own", "int4", False), ("auto", None, False)]
)
def test_experts_of_few_bits_are_multiplied_in_integers_unless_asked_for_floats(
    asked: str, few_bits: str | None, expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[bool] = []

    def noting(layers: list[LayerExperts | None], max_rows: int, per_token: int) -> HostExperts:
        told.extend(layer.in_integers for layer in layers if layer is not None)
        return open_experts(layers, max_rows, per_token)

    shape = multiplied(rounded(named_shape(TINY), few_bits, "weights"), asked, "model.products")
    drawn = (
        random_packed(shape, torch.float32)
        if few_bits
        else random_weights(shape, 3, torch.float32, CPU, lambda _: None)
    )
    with caplog.at_level("INFO", "gpu.layers.computed_experts"):
        open_exchanges(split(drawn, shape, 3), shape, 8, CPU, noting, 1)
    assert told
    assert set(told) == {expected}
    assert f"by={'integers' if expected else 'floats'}" in caplog.text


SPLITS = [(0, None), (3, None), (15, None), (0, "int4"), (3, "int4"), (3, "int8"), (15, "fp8")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("on_card", "few_bits"), SPLITS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_of_few_rows_gives_what_a_whole_layer_gives(
    device: str, on_card: int, few_bits: str | None, dtype: torch.dtype
) -> None:
    shape, whole, halved, exchange = make(on_card, dtype, device, few_bits)
    one, other = Projections(whole, shape), Projections(halved, shape)
    bound = FAMILY_LOGITS if dtype == torch.float32 else COMPUTED_EXPERTS_BFLOAT16
    for tokens in (1, 2, 4, 5, MOST_COMPUTED_ROWS, 1):
        hidden = draw_hidden(shape, tokens, dtype, device)
        for layer in range(shape.num_layers):
            wanted = one.mlp(layer, hidden)
            assert off(compute(other, layer, hidden, None, exchange), wanted) < bound, (tokens, layer)
    assert exchange.worker.counts.host_requests == 6 * sum(spec.experts is not None for spec in shape.layers)
    host = halved.layers[-1].experts.host
    down = tensors_of(host.down)[0]
    down.copy_(down.view(host.count, -1).flip(1).view(down.shape))
    hidden = draw_hidden(shape, 16, dtype, device)
    layer = shape.num_layers - 1
    wrong = compute(other, layer, hidden, None, exchange)
    assert off(wrong, one.mlp(layer, hidden)) > COMPUTED_EXPERTS_BFLOAT16, "power: other weights"


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_not_in_use_are_computed_for_nobody(device: str) -> None:
    shape, whole, halved, exchange = make(0, torch.float32, device)
    one, other = Projections(whole, shape), Projections(halved, shape)
    hidden, layer = draw_hidden(shape, 3, torch.float32, device), shape.num_layers - 1
    in_use = torch.tensor([0, -1, 5], dtype=torch.int32, device=device)
    got = compute(other, layer, hidden, in_use, exchange)
    assert off(got[[0, 2]], one.mlp(layer, hidden)[[0, 2]]) < FAMILY_LOGITS
    assert exchange.worker.counts.pairs == 2 * 4
    compute(other, layer, hidden, torch.full_like(in_use, -1), exchange)
    assert exchange.worker.counts.pairs == 2 * 4


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_texts_are_those_of_a_model_that_is_whole_and_prompts_are_fetched(name: str) -> None:
    """Steps through the runner: decode computes, prefill copies, and counts say so."""
    shape = {"hidden_size": 128, "moe_intermediate_size": 64} if name == "qwen3_moe" else {
        "hidden_size": 128, "intermediate_size": 64}  # fmt: skip
    folder = checkpoint(name, **shape).folder
    whole, halved = load(folder), load(folder, experts_on_card=1, open_experts=open_experts)
    fetching = load(folder, experts_on_card=1)
    for length in (2, 200):
        (tokens, logits), (others, wanted) = (generate(runner, draw_prompt(length), 12) for runner in (halved, whole))
        assert tokens == others
        assert off(logits, wanted) < FAMILY_LOGITS
        generate(fetching, draw_prompt(length), 12)
    counts, fetched, none = halved.expert_counts(), fetching.expert_counts(), whole.expert_counts()
    assert none is None
    assert counts.computed > 0
    assert fetched.computed == 0
    assert fetched.fetched > counts.fetched
    assert fetched.copied == counts.copied > 0


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "MXFP4"])
def test_texts_of_a_gpt_oss_are_those_of_a_model_that_is_whole(
    is_packed: bool, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts with biases and a clamped SwiGLU, of which the card has one and the CPU computes five."""
    whole = load(folders[0])
    if is_packed:
        monkeypatch.setattr("gpu.load.load_weights", load_packed)
    halved = load(folders[is_packed], experts_on_card=1, open_experts=open_experts)
    for length in (2, 200):
        (tokens, logits), (others, wanted) = (generate(runner, draw_prompt(length), 8) for runner in (halved, whole))
        assert tokens == others
        assert off(logits, wanted) < FAMILY_LOGITS
    counts = halved.expert_counts()
    assert counts is not None
    assert counts.computed > 0
    for layer in halved.weights.layers:  # those on the card alone: the CPU has copies of the others'
        layer.experts.gate_up_bias.zero_()
    _, other = generate(halved, draw_prompt(200), 8)
    assert off(other, wanted) > FAMILY_LOGITS, "power: biases count"


PACKED = {"awq": (2, 200), "fp8-blocks": (2,), "Q4_K": (2,), "Q8_0": (2,)}
LONG = ("fp8-blocks", "Q8_0")  # whose products `tests/cpu/test_packed_experts.py` has


@pytest.mark.parametrize("name", ["awq", "Q4_K", *(pytest.param(one, marks=pytest.mark.long) for one in LONG)])
def test_texts_of_experts_of_few_bits_are_those_of_their_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the file to the last token, through the runner, with matrices as a card has them."""
    folder = tmp_path / "model"
    if name in FORMATS:
        plain = checkpoint("qwen3_moe", hidden_size=128, moe_intermediate_size=128)
        write(plain.folder, folder, *FORMATS[name])
    else:
        plain = checkpoint("qwen3_moe", **WIDE["qwen3_moe"])
        folder = write_gguf(plain.folder, tmp_path / "model.gguf", lambda _: name)
    whole = load(folder)
    monkeypatch.setattr("gpu.load.load_weights", load_packed)
    halved = load(folder, experts_on_card=1, open_experts=open_experts)
    for length in PACKED[name]:
        (tokens, logits), (others, wanted) = (generate(runner, draw_prompt(length), 8) for runner in (halved, whole))
        assert tokens == others
        assert off(logits, wanted) < FAMILY_LOGITS
    host = next(layer.experts.host for layer in halved.weights.layers if layer.experts is not None)
    stored = [*tensors_of(host.gate_up), *tensors_of(host.down)]
    (exchange,) = halved.decode_steps._experts
    counts, one_bytes = exchange.worker.counts, sum(tensor.nbytes for tensor in stored) // host.count
    assert len(stored) > 2, "words, and what stands beside them"
    assert counts.bytes_read == counts.experts * one_bytes > 0


def test_more_rows_than_the_slot_has_are_fetched() -> None:
    folder = checkpoint("qwen3_moe", hidden_size=128, moe_intermediate_size=64).folder
    runner = load(folder, experts_on_card=1, open_experts=open_experts, computed_rows=1)
    steps = runner.decode_steps
    assert steps._eager_experts(1) is not None
    assert steps._eager_experts(2) is None


def test_what_the_cpu_has_no_code_for_is_refused_by_name() -> None:
    moe, plain = named_shape(TINY), named_shape("tiny")
    gelu = replace(moe, layer_pattern=tuple(replace(spec, activation="gelu_tanh") for spec in moe.layer_pattern))
    narrow = replace(moe, layer_pattern=tuple(
        replace(spec, experts=spec.experts and replace(spec.experts, intermediate=48)) for spec in moe.layer_pattern
    ))  # fmt: skip
    cases = {
        "tiny has no experts": plain,
        "groups of multiples of 16 columns, and these have 8": replace(
            moe, quantisation=Quantisation("awq", MatrixFormat("int4", 8, has_zeros=True), None)
        ),
        "another activation": gelu,
        "multiples of 32 columns, and these have 256 and 48": narrow,
    }
    for words, shape in cases.items():
        reason = why_not_computed(shape)
        assert reason is not None
        assert words in reason
    assert why_not_computed(moe) is None
    for few_bits in ("int4", "int8", "fp8"):
        assert why_not_computed(rounded(moe, few_bits, "weights")) is None
    split_weights = random_weights(moe, 3, torch.float32, CPU, lambda fraction: None, 3)
    with pytest.raises(ModelError, match=r"^gpu.host_experts: asked compute, but .* and these have 8; use fetch"):
        open_exchanges(
            split_weights, cases["groups of multiples of 16 columns, and these have 8"], 4, CPU, open_experts, 1
        )

    def refuse(*_: object) -> HostExperts:
        raise RuntimeError("processor: lacks avx2; attention on the host needs an x86-64 with AVX2 and FMA")

    with pytest.raises(ModelError, match=r"^gpu.host_experts: asked compute, but processor: lacks avx2"):
        open_exchanges(split_weights, moe, 4, CPU, refuse, 1)
    whole = random_weights(moe, 3, torch.float32, CPU, lambda fraction: None)
    assert open_exchanges(whole, moe, 4, CPU, open_experts, 1) == []
