"""`python -m lab kernel host-experts` on a tiny mixture: its numbers have their floors, and wrong experts give none."""

from dataclasses import replace

import pytest
import torch
import typer
from rich.console import Console

from bench.benchmark_rows import GateError
from cpu.experts import HostExperts
from gpu.model.architecture import named_shape
from gpu.model.matrix_formats import step_weight_bytes
from gpu.weights.expert_shares import ExpertShares
from gpu.weights.host_experts import HostExperts as StoredExperts
from gpu.weights.host_experts import Slots
from lab.kernels import host_expert_steps
from lab.kernels.host_expert_steps import HostExpertsBenchmark, host_expert_rows, parse_ways
from transfer.host_tier import Answered

CPU = torch.device("cpu")
TINY = HostExpertsBenchmark("tiny-qwen3-moe", None, 2.0, 5, (1, 2), (40,), 16, 8, threads=2)


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"host_to_device_gb_s": 10.0, "bf16_matmul_tflop_s": 1.0, "host_stream_gb_s": 20.0}
    monkeypatch.setattr(host_expert_steps, "measure_floor_rates", lambda *_: (rates, 100.0))
    monkeypatch.setattr(host_expert_steps, "measure_core_rates", core_rates)


def core_rates(threads: int, stored: list[str]) -> dict[str, float]:
    return {f"core_{kind}_gflop_s": {"bf16": 3.0, "int4": 4.0, "int8": 5.0}[kind] / threads for kind in stored}


def test_steps_and_prompts_stand_beside_what_they_fetched() -> None:
    one, two, prompt, *computed = host_expert_rows(TINY, CPU, Console(quiet=True))
    expert_bytes = 3 * 256 * 128 * 2
    for row, rows, gb_s in ((one, 1, 10), (two, 2, 10), (computed[0], 1, 20), (computed[1], 2, 20)):
        assert row.extras["moved_bytes"] % (expert_bytes / TINY.steps) == 0
        assert 0 < row.extras["moved_bytes"] <= 3 * 4 * rows * expert_bytes
        assert row.floor_ms is not None
        assert row.floor_ms > row.extras["moved_bytes"] / (gb_s * 1e6)
    assert one.extras["has_same_bits"]
    assert two.extras["moved_bytes"] > one.extras["moved_bytes"]
    assert [row.name for row in computed] == ["decode step, compute, experts in host memory"] * 2
    assert "on 2 threads of the CPU at 20.0 GB/s" in computed[0].floor
    assert computed[1].extras["compute_gb_s"] > 0
    assert "products_ms" not in one.extras
    shape = named_shape(TINY.shape)
    shares, read = ExpertShares(shape, 2, TINY.on_card or 0), step_weight_bytes(shape, 2, True, 1)
    here = read - shares.fetched_bytes(1) - shares.near_bytes(1)  # experts on the card are read while the CPU computes
    assert computed[0].floor_ms == pytest.approx(computed[0].extras["moved_bytes"] / 20e6 + here / 100e6)
    products_ms = 3 * 4 * 11 / 16 * expert_bytes / 3e6  # two operations a number of two bytes
    assert computed[0].extras["products_ms"] == pytest.approx(products_ms)
    assert f"; products by the threads' own rate {products_ms:.2f} ms (core_bf16_gflop_s 1.5)" in computed[0].floor
    assert one.floor_ms == pytest.approx(one.extras["moved_bytes"] / 10e6 + read / 100e6)
    assert shares.near_bytes(1) == pytest.approx(3 * 4 * 5 / 16 * expert_bytes)
    assert one.extras["expected_bytes"] == pytest.approx(3 * 4 * 11 / 16 * expert_bytes)
    assert prompt.floor_ms == pytest.approx(max(3 * 11 * expert_bytes / 10e6, prompt.extras["products_ms"]))


@pytest.mark.parametrize(("weights", "expert_bytes"), [("int4", 49_152 + 2304), ("Q8_0", 98_304 + 6144)])
def test_bytes_of_few_bits_are_those_that_are_stored(weights: str, expert_bytes: int) -> None:
    """3 * 256 * 128 numbers, and a scale of two bytes and a zero point of 128 of them, or a scale of 32; both ways."""
    fetched, _, computed = host_expert_rows(replace(TINY, weights=weights, batches=(1,)), CPU, Console(quiet=True))
    for row in (fetched, computed):
        assert row.extras["moved_bytes"] % (expert_bytes / TINY.steps) == 0
        assert row.extras["expected_bytes"] == pytest.approx(3 * 4 * 11 / 16 * expert_bytes)
        assert row.extras["has_same_bits"]
        assert f" {weights}, 5 of 16" in row.shape
    assert f"core_{'int4' if weights == 'int4' else 'int8'}_gflop_s" in computed.floor
    assert computed.extras["compute_gb_s"] > 0


def test_wrong_experts_give_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = StoredExperts.copy

    def twist(self: StoredExperts, slots: Slots) -> None:
        copy(self, slots)
        slots.words[1].copy_(slots.words[1].roll(1, 0))

    monkeypatch.setattr(StoredExperts, "copy", twist)
    with pytest.raises(GateError, match=r"200 tokens are .* off what all experts"):
        host_expert_rows(TINY, CPU, Console(quiet=True))


def test_a_model_whose_experts_all_lie_where_it_computes_has_nothing_to_measure() -> None:
    with pytest.raises(GateError, match="give --on-card"):
        host_expert_rows(replace(TINY, on_card=None), CPU, Console(quiet=True))


@pytest.mark.parametrize("on_card", [16, 17])
def test_experts_that_all_lie_on_the_card_are_told_by_the_option(on_card: int) -> None:
    words = (
        f"--on-card: asked {on_card}, a layer of tiny-qwen3-moe has 16 experts and none lies in host memory; lower it"
    )
    with pytest.raises(GateError, match=words):
        host_expert_rows(replace(TINY, on_card=on_card), CPU, Console(quiet=True))


def test_wrong_experts_of_the_cpu_give_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = HostExperts.answer

    def twist(self: HostExperts, parts: list) -> Answered:
        ((_, slot),) = parts
        slot.experts.copy_(slot.experts.roll(1, 1))
        return answer(self, parts)

    monkeypatch.setattr(HostExperts, "answer", twist)
    with pytest.raises(GateError, match=r"tokens, computed, are .* off what all on the card"):
        host_expert_rows(replace(TINY, ways=("compute",)), CPU, Console(quiet=True))


def test_a_large_batch_beside_short_prompts_is_measured() -> None:
    rows = host_expert_rows(replace(TINY, batches=(16,), ways=("fetch",)), CPU, Console(quiet=True))
    assert [row.name.split(",")[0] for row in rows] == ["decode step", "prefill"]


def test_ways_are_named() -> None:
    assert parse_ways("fetch,compute") == ("fetch", "compute")
    assert parse_ways("compute") == ("compute",)
    with pytest.raises(typer.BadParameter, match="got 'stay'; wanted fetch, compute, or both with a comma"):
        parse_ways("fetch,stay")
    with pytest.raises(GateError, match="tiny has no experts; leave compute out of --ways"):
        host_expert_rows(replace(TINY, shape="tiny"), CPU, Console(quiet=True))
    with pytest.raises(GateError, match=r"up to 32 rows, asked 33; lower --batch, or leave compute out of --ways"):
        host_expert_rows(replace(TINY, batches=(1, 33)), CPU, Console(quiet=True))
