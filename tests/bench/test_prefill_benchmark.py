"""Run the benchmark of prefills whole on the CPU device."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.prefill import PrefillBenchmark, run_prefill_benchmark
from server.deployment import Deployment
from tests.bench.test_long_context import DEPLOYMENT, measure_little


def test_the_benchmark_times_prompts_and_the_next_turn_of_each_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_little(monkeypatch)
    deployment, printed = Deployment.model_validate(DEPLOYMENT), io.StringIO()
    benchmark = PrefillBenchmark((150, 300, 10_000), ("exact", "sampled"), 200, 40, peers=True)
    *_, rows = run_prefill_benchmark(benchmark, deployment, Console(file=printed, width=200))
    assert [(row.name, row.shape) for row in rows] == [
        (f"{what}, {profile}", shape)
        for profile in benchmark.profiles
        for what, shape in [
            ("prefill, launches", "64 tokens"),
            ("prefill", "150 tokens"),
            ("prefill", "300 tokens"),
            ("next turn", "40 tokens over 200"),
        ]
    ]
    for row in rows:
        assert row.ms > 0
        assert row.floor_ms is not None
        assert row.peer is None, "the CPU has one kernel"
    assert rows[1].extras["first_prompt_ms"] > 0
    assert "sampled, 300 tokens: first" in printed.getvalue()
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
