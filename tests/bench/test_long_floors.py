"""Floors of long contexts count what must be moved and multiplied, once."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.long_floors import LongFloors
from gpu.model.architecture import load_architecture
from gpu.profiles import resolve_profiles
from scheduler.planning.engine_memory import find_tier_shape, plan_engine
from scheduler.sequences.capacity import host_capacity
from server.deployment import Deployment
from server.planning.deployment_plan import find_architecture
from transfer.machine import load_machine, probe_machine

RATES = {
    "host_stream_gb_s": 10.0,
    "host_attend_gb_s": 4.0,
    "device_to_host_gb_s": 1e-3,  # a link that is always the slower one, unless a test mends it
    "host_to_device_gb_s": 1e-3,
    "bf16_matmul_tflop_s": 1.0,
}
TOKENS = 2304
DOWN = TOKENS - 16 - 64  # without sink and window


def floors_of(dtype, rows):
    deployment = Deployment.model_validate(
        {
            "model": {"random_weights": "tiny", "tokenizer": Path("deploy/models/reference")},
            "gpu": {"device": "cpu", "dtype": dtype, "kv_cache_gib": 0.05},
            "host": {"memory_limit_gib": 0.5, "resident_tokens": 128, "dense_layers": [0], "rows": rows},
            "scheduler": {"max_running": 2, "max_context_tokens": 4096},
        }
    )
    architecture = load_architecture(deployment.model)
    plan = plan_engine(deployment, architecture, probe_machine())
    shape = find_tier_shape(deployment, architecture, plan)
    floors = LongFloors(architecture, plan, shape, host_capacity(plan, shape), RATES, 1.0)
    return floors, *(resolve_profiles({}, deployment.host)[name] for name in ("sampled", "offloaded", "exact"))


@pytest.fixture(scope="module")
def tiny():
    return floors_of("float32", "bfloat16")


def test_a_step_reads_weights_and_kv_in_their_own_dtype(tiny):
    halved, sampled, *_ = floors_of("bfloat16", "bfloat16")
    whole = tiny[0].decode(sampled, TOKENS, 2, None).ms
    assert halved.decode(sampled, TOKENS, 2, None).ms == pytest.approx(whole / 2)


def test_a_context_that_is_offloaded_has_its_window_and_its_dense_layer_on_the_device(tiny):
    floors, sampled, _, exact = tiny
    a_layer_token = 2 * 2 * 64 * 4  # key and value, KV heads, dim, float32
    kept = floors.decode(exact, TOKENS, 1, None).ms - floors.decode(sampled, TOKENS, 1, None).ms
    assert kept == pytest.approx(3 * DOWN * a_layer_token / 1e6)
    a_context = floors.decode(exact, TOKENS, 2, None).ms - floors.decode(exact, TOKENS, 1, None).ms
    assert a_context == pytest.approx(4 * TOKENS * a_layer_token / 1e6)


@pytest.mark.parametrize(("rows", "itemsize"), [("bfloat16", 2), ("int8", 1)])
def test_rows_that_the_cpu_reads_come_on_top_as_they_are_kept(rows, itemsize):
    floors, sampled, *_ = floors_of("float32", rows)
    without = floors.decode(sampled, TOKENS, 1, None)
    assert "come on top" in without.text
    more = floors.decode(sampled, TOKENS, 1, 1000.0).ms - without.ms
    assert more == pytest.approx(1000 * 2 * 64 * itemsize / 10 / 1e6)
    attended = floors.decode_as_attended(sampled, TOKENS, 1, 1000.0, 0)
    assert "over 4 GB/s" in attended.text
    assert attended.ms - without.ms == pytest.approx(1000 * 2 * 64 * itemsize / 4 / 1e6)


def test_what_is_offloaded_has_codes_only_where_it_is_sampled(tiny):
    floors, sampled, offloaded, exact = tiny
    rows = DOWN * 3 * 2  # layers, KV heads
    assert floors.prefill(offloaded, TOKENS).ms == pytest.approx(rows * 2 * 64 * 2 / 1e3)
    assert floors.prefill(sampled, TOKENS).ms == pytest.approx(rows * (2 * 64 * 2 + 150 * 2) / 1e3)
    assert "TFLOP" in floors.prefill(exact, TOKENS).text


def test_a_prompt_that_stays_on_the_device_has_nothing_to_copy(tiny):
    floors, sampled, *_ = tiny
    assert "TFLOP" in floors.prefill(sampled, 128).text


def test_a_turn_brings_rows_up_without_codes(tiny):
    floors, sampled, *_ = tiny
    turn = floors.next_turn(sampled, TOKENS, TOKENS + 16, TOKENS + 272)
    assert "up" in turn.text
    assert turn.ms == pytest.approx(DOWN * 3 * 2 * 2 * 64 * 2 / 1e3)


def test_attention_is_counted_causally_and_over_the_prefix(tiny):
    floors = replace(tiny[0], rates={"host_matmul_tflop_s": 1.0})  # no link: products bound all
    _, sampled, *_ = tiny
    model = floors.architecture
    weights = 2 * 4 * model.num_layer_weights  # FLOPs of one token in four layers
    logits = 2 * model.num_embedding_weights
    pairs = sum(position + 1 for position in range(300, 400))
    attention = 4 * 4 * 4 * 64 * pairs  # scores and values, layers, heads, dim
    turn = floors.next_turn(sampled, TOKENS, 300, 400)
    assert turn.ms == pytest.approx((100 * weights + logits + attention) / 1e9)
    both = floors.prefill(sampled, 300).ms + turn.ms
    assert floors.prefill(sampled, 400).ms == pytest.approx(both - logits / 1e9)


def test_experts_that_the_cpu_computes_and_those_on_the_device_are_read_side_by_side():
    machine = load_machine(Path("deploy/machines/rtx4090.json"))
    deployment = Deployment.model_validate({
        "model": {"random_weights": "qwen3-30b-a3b"},
        "gpu": {"device": "cuda", "memory_limit_gib": 23, "experts_gib": 12, "host_experts": "compute"},
        "host": {"memory_limit_gib": 4}, "scheduler": {"max_running": 2, "max_context_tokens": 4096},
    })  # fmt: skip
    architecture = find_architecture(deployment.model)[0]
    plan = plan_engine(deployment, architecture, machine)
    shape, profile = find_tier_shape(deployment, architecture, plan), resolve_profiles({}, deployment.host)["exact"]

    def floor(host_gb_s, device_gb_s):
        rates = RATES | {"host_stream_gb_s": host_gb_s}
        return LongFloors(architecture, plan, shape, host_capacity(plan, shape), rates, device_gb_s)

    step = floor(1.0, 1.0).step
    read = step.weights(1) + step.device_kv(1000, 0)
    slow = floor(10.0, 1000.0).decode(profile, 1000, 1, None)
    assert slow.ms == pytest.approx((read - step.beside(1)) / 1e9 + step.fetched(1) / 1e7)
    assert floor(1e9, 1000.0).decode(profile, 1000, 1, None).ms == pytest.approx(read / 1e9)
    assert "of experts on the CPU at 10" in slow.text
