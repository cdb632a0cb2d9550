"""`tandem bench kernel host-experts` on a tiny mixture: its numbers have their floors, and wrong experts give none."""

from dataclasses import replace

import pytest
import torch
from rich.console import Console

from bench import host_experts
from bench.host_experts import HostExpertsBenchmark, host_expert_rows
from bench.rows import GateError
from gpu.model.host_experts import HostExperts, Slots

CPU = torch.device("cpu")
TINY = HostExpertsBenchmark("tiny-qwen3-moe", None, 2.0, 5, (1, 2), (40,), 16, 8)


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"host_to_device_gb_s": 10.0, "bf16_matmul_tflop_s": 1.0}
    monkeypatch.setattr(host_experts, "measure_floor_rates", lambda *_: (rates, 100.0))


def test_steps_and_prompts_stand_beside_what_they_fetched() -> None:
    one, two, prompt = host_expert_rows(TINY, CPU, Console(quiet=True))
    expert_bytes = 3 * 256 * 128 * 2
    for row, rows in ((one, 1), (two, 2)):
        assert row.extras["fetched_bytes"] % (expert_bytes / TINY.steps) == 0
        assert 0 < row.extras["fetched_bytes"] <= 3 * 4 * rows * expert_bytes
        assert row.floor_ms is not None
        assert row.floor_ms > row.extras["fetched_bytes"] / 10e6
    assert one.extras["has_same_bits"]
    assert two.extras["fetched_bytes"] > one.extras["fetched_bytes"]
    assert one.extras["expected_bytes"] == pytest.approx(3 * 4 * 11 / 16 * expert_bytes)
    assert prompt.floor_ms == pytest.approx(max(3 * 11 * expert_bytes / 10e6, prompt.extras["products_ms"]))


def test_wrong_experts_give_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = HostExperts.copy

    def twist(self: HostExperts, slots: Slots) -> None:
        copy(self, slots)
        slots.words[1].copy_(slots.words[1].roll(1, 0))

    monkeypatch.setattr(HostExperts, "copy", twist)
    with pytest.raises(GateError, match=r"200 tokens are .* off what all experts"):
        host_expert_rows(TINY, CPU, Console(quiet=True))


def test_a_model_whose_experts_all_lie_where_it_computes_has_nothing_to_measure() -> None:
    with pytest.raises(GateError, match="give --on-card"):
        host_expert_rows(replace(TINY, on_card=None), CPU, Console(quiet=True))
