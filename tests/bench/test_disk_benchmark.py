"""Run the benchmark of contexts on disk whole on the CPU device."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench.cli import app
from bench.disk import DiskBenchmark, run_disk_benchmark
from server.deployment import Deployment
from tests.bench.test_long_context import DEPLOYMENT


def test_the_benchmark_times_prompts_from_the_disk_and_computed_of_each_profile(tmp_path: Path) -> None:
    tree = DEPLOYMENT | {"disk": {"folder": tmp_path, "block_tokens": 64}}
    benchmark, printed = DiskBenchmark((256, 512, 10_000), ("exact", "offloaded"), 20, 2), io.StringIO()
    deployment = Deployment.model_validate(tree)
    *_, rows = run_disk_benchmark(benchmark, deployment, Console(file=printed, width=200))
    assert [(row.name, row.shape) for row in rows] == [
        (f"from disk, {profile}", f"20 tokens over {length}") for profile in benchmark.profiles for length in (256, 512)
    ]
    for row in rows:
        assert row.ms > 0
        assert row.peer_ms is not None
        assert row.floor_ms is not None
        assert row.extras["cached_tokens"] >= 192
        assert row.extras["written_bytes"] > 0
    assert "exact: 10,000 tokens do not fit" in printed.getvalue()
    assert list(tmp_path.iterdir()) == [], "its blocks are gone"
    assert json.dumps([row.model_dump(mode="json") for row in rows])


def test_the_command_wants_a_disk_section(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text("model: {random_weights: tiny, tokenizer: deploy/models/reference}\n")
    done = CliRunner().invoke(app, ["disk", str(path)])
    assert done.exit_code == 2
    assert "has no `disk` section" in done.output


@pytest.mark.parametrize("value", [63, 0, 100])
def test_a_block_of_other_than_whole_pages_is_refused_by_name(value: int) -> None:
    with pytest.raises(ValueError, match="wanted a multiple of 64"):
        Deployment.model_validate(DEPLOYMENT | {"disk": {"block_tokens": value}})
