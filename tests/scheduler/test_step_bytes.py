"""What a step moves, by hand: rows in codes with their scales, windows as far as they see, layers that are down."""

from pathlib import Path

import pytest

from scheduler.memory import find_tier_shape
from scheduler.step_bytes import StepBytes
from server.config import Deployment
from server.plan import resolve_plan
from transfer.machine import load_machine

MACHINE = load_machine(Path(__file__).parents[2] / "deploy" / "machines" / "a100-80g.json")


def step_of(shape: str, *, host: bool = False, **gpu: str) -> StepBytes:
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
    assert step_of("llama-3.1-8b", weights="int4").weights == 32 * (layer // 2 + groups) + output + norms


def test_layers_that_are_down_read_nothing_of_it_on_the_device() -> None:
    step = step_of("llama-3.1-8b", host=True)
    assert step.device_kv(10_000, 9000) == (10_000 * 32 - 9000 * 30) * 2 * 8 * 256
    assert step.host_row == 2 * 128
    assert step.host_rows_of_token == 30 * 8


def test_layers_with_a_window_read_it_alone() -> None:
    full = sum(layer % 6 == 5 for layer in range(34))
    assert step_of("gemma-3-4b").device_kv(50_000, 0) == (full * 50_000 + (34 - full) * 1024) * 2 * 4 * 512
