"""What a step moves, by hand: rows in codes with their scales, windows as far as they see, offloaded layers."""

from pathlib import Path
from typing import Any

import pytest

from scheduler.planning.engine_memory import find_tier_shape
from scheduler.planning.step_bytes import StepBytes
from server.deployment import Deployment
from server.planning.deployment_plan import resolve_plan
from transfer.machine import load_machine

MACHINE = load_machine(Path(__file__).parents[2] / "deploy" / "machines" / "a100-80g.json")


def step_of(shape: str, *, host: bool = False, **gpu: Any) -> StepBytes:
    tree = {"model": {"random_weights": shape, "weights": gpu.pop("weights", None)}, "gpu": gpu}
    tree |= {"host": {"rows": "int8"}} if host else {}
    plan = resolve_plan(Deployment.model_validate(tree), MACHINE)
    tier = find_tier_shape(plan.deployment, plan.architecture, plan.memory) if host else None
    return StepBytes(plan.architecture, plan.memory, tier)


@pytest.mark.parametrize(("kv", "row"), [("auto", 256), ("int8", 132), ("fp8", 132)])
def test_a_token_is_read_as_pages_hold_it(kv: str, row: int) -> None:
    step = step_of("llama-3.1-8b", kv=kv)
    assert step.layer_token == 2 * 8 * row
    assert step.device_kv(1000, 0) == 1000 * 32 * 2 * 8 * row


def test_matrices_of_few_bits_are_read_as_they_are_stored_and_the_input_embedding_is_not() -> None:
    layer = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14_336
    groups = layer // 128 * 3  # a scale of two bytes and a zero point
    output = 128_256 * 4096 + 128_256 * 4096 // 128 * 2
    norms = 2 * (32 * 2 * 4096 + 4096)
    assert step_of("llama-3.1-8b", weights="int4").weights(1) == 32 * (layer // 2 + groups) + output + norms


def test_layers_that_are_offloaded_read_nothing_of_it_on_the_device() -> None:
    step = step_of("llama-3.1-8b", host=True)
    assert step.device_kv(10_000, 9000) == (10_000 * 32 - 9000 * 30) * 2 * 8 * 256
    assert step.host_row == 2 * 128
    assert step.host_rows_of_token == 30 * 8


def test_layers_with_a_window_read_it_alone() -> None:
    full = sum(layer % 6 == 5 for layer in range(34))
    assert step_of("gemma-3-4b").device_kv(50_000, 0) == (full * 50_000 + (34 - full) * 1024) * 2 * 4 * 512


def test_of_experts_a_step_reads_those_that_its_rows_take() -> None:
    """By hand: 8 of 128 of 3 * 2048 * 768 weights each; rows that draw by themselves seldom take the same ones."""
    attention = 2048 * (32 + 2 * 4) * 128 + 32 * 128 * 2048 + 2 * 2048 + 2 * 128
    layer, expert, rest = attention + 128 * 2048, 3 * 2048 * 768, 151_936 * 2048 + 2048
    step = step_of("qwen3-30b-a3b")
    assert step.weights(1) == 2 * (48 * (layer + 8 * expert) + rest)
    assert step.weights(4) == pytest.approx(2 * (48 * (layer + 128 * (1 - (15 / 16) ** 4) * expert) + rest), rel=1e-9)
    assert step.weights(10_000) == 2 * (step.architecture.num_weights - 151_936 * 2048)
    per_token = 48 * (layer + 8 * expert)
    assert step.flops(0, 1) == 2 * (per_token + 151_936 * 2048) + 4 * 32 * 128 * 48
    packed = step_of("qwen3-30b-a3b", weights="int4")
    group_bytes = 64 + 3  # of 128 numbers
    few_bits = 48 * (attention - 2 * 2048 - 2 * 128 + 8 * expert) // 128 * group_bytes
    plain = 2 * (48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048)
    assert packed.weights(1) == few_bits + plain + 151_936 * 2048 // 128 * (128 + 2)


def test_experts_on_the_card_are_read_beside_those_that_the_cpu_computes() -> None:
    fetched, computed = (
        step_of("qwen3-30b-a3b", memory_limit_gib=23, experts_gib=12, host_experts=way) for way in ("fetch", "compute")
    )
    expert, on_card = 2 * 3 * 2048 * 768, 12 * 2**30 // (48 * 2 * 3 * 2048 * 768)
    assert fetched.beside(1) == 0
    assert computed.beside(1) == pytest.approx(48 * 8 * on_card / 128 * expert)
    assert computed.beside(1) + computed.fetched(1) == pytest.approx(48 * 8 * expert)
    assert computed.beside(33) == 0  # whose experts are fetched
