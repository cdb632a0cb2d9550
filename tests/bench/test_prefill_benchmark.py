"""The benchmark of prefills runs whole on the CPU device, and a trace's kernels fall into their groups."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.prefill import PrefillBenchmark, run_prefill_benchmark
from bench.prefill_trace import group_events, most_kernels, tabulate_groups
from bench.trace_events import DeviceEvent
from server.deployment import Deployment
from tests.bench.test_long_context import DEPLOYMENT, SMALL_GIB

EVENTS = [
    DeviceEvent("void flash_fwd_kernel<...>", 0, 1000),
    DeviceEvent("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", 1000, 1000),
    DeviceEvent("nvjet_tst_256x128_64x4", 2000, 500),
    DeviceEvent("Memcpy DtoH (Device -> Pinned)", 2000, 2000),
    DeviceEvent("_merge_kernel", 2500, 100),
    DeviceEvent("nvjet_tst_256x128_64x4", 2400, 100),
    DeviceEvent("void at::native::reduce_kernel<512, 1>", 3500, 200),
    DeviceEvent("void at::native::index_elementwise_kernel<128, 4>", 4000, 250),
    DeviceEvent("somebody_elses_kernel", 5000, 50),
]


def test_kernels_fall_into_groups_that_are_lengths_of_time() -> None:
    assert group_events(EVENTS, 6000) == {
        "whole": 6.0,
        "link": 2.0,
        "merge": 0.1,
        "deposit": 0.2,
        "attention": 2.0,
        "products": 0.5,
        "gathers and copies": 0.25,
        "other": 0.05,
        "idle": pytest.approx(1.7),
    }


def test_kernels_that_take_most_come_first_with_their_launches() -> None:
    kernels = most_kernels(EVENTS)
    assert kernels[0] == ("Memcpy DtoH (Device -> Pinned)", 2.0, 1)
    assert ("nvjet_tst_256x128_64x4", 0.6, 2) in kernels
    printed = io.StringIO()
    Console(file=printed, width=120).print(tabulate_groups(group_events(EVENTS, 6000), kernels))
    assert "33%" in printed.getvalue()


def test_the_benchmark_times_prompts_and_the_next_turn_of_each_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpu.rates.default_gib", lambda: SMALL_GIB)
    deployment, printed = Deployment.model_validate(DEPLOYMENT), io.StringIO()
    benchmark = PrefillBenchmark((300, 600, 10_000), ("exact", "sampled"), 500, 40, traces=True, peers=True)
    *_, rows = run_prefill_benchmark(benchmark, deployment, Console(file=printed, width=200))
    assert [(row.name, row.shape) for row in rows] == [
        (f"{what}, {profile}", shape)
        for profile in benchmark.profiles
        for what, shape in [
            ("prefill, launches", "64 tokens"),
            ("prefill", "300 tokens"),
            ("prefill", "600 tokens"),
            ("next turn", "40 tokens over 500"),
        ]
    ]
    for row in rows:
        assert row.ms > 0
        assert row.floor_ms is not None
        assert row.peer is None, "the CPU has one kernel"
    assert rows[1].extras["first_prompt_ms"] > 0
    assert "sampled, 600 tokens: first" in printed.getvalue()
    assert "exact: 10,000 tokens do not fit" in printed.getvalue()
    assert json.dumps([row.model_dump(mode="json") for row in rows])


def test_the_command_wants_a_host_section(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from bench.cli import app

    path = tmp_path / "deployment.yaml"
    path.write_text("model: {random_weights: tiny, tokenizer: deploy/models/reference}\n")
    done = CliRunner().invoke(app, ["prefill", str(path)])
    assert done.exit_code == 2
    assert "has no `host` section" in done.output
