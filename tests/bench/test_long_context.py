"""The benchmark of contexts that outgrow the device runs whole on the CPU device, and counts what it says it counts."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench.cli import app
from bench.long_client import MIN_STEPS
from bench.long_context import LongContextBenchmark, run_long_context_benchmark
from bench.step_trace import STEPS
from server.config import Deployment

DEPLOYMENT = {
    "model": {"random_weights": "tiny", "tokenizer": Path("deploy/models/reference")},
    "gpu": {"device": "cpu", "kv_cache_gib": 0.05, "threads": 1},
    "host": {"memory_limit_gib": 0.5, "resident_tokens": 128, "dense_layers": [0], "threads": 1},
    "scheduler": {"max_running": 2, "max_context_tokens": 4096},
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return tmp_path_factory.mktemp("long") / "trace.json"


@pytest.fixture(scope="module")
def run(trace):
    """What was printed, and the rows after each profile; no time for more than the fewest steps."""
    deployment, printed = Deployment.model_validate(DEPLOYMENT), io.StringIO()
    benchmark = LongContextBenchmark(2304, 2, (1, 2), 8, 0.0, ("sampled", "offloaded"), 2304, trace)
    reported = list(run_long_context_benchmark(benchmark, deployment, Console(file=printed, width=200)))
    return printed.getvalue(), reported


def test_rows_come_after_each_profile_and_the_second_is_the_peer_of_the_first(run):
    first, both = run[1]
    names = [row.name for row in first]
    assert names == ["decode step, sampled"] * 2 + ["prefill, sampled", "second turn, sampled"]
    assert [row.name for row in both[4:]] == ["decode step, offloaded"] * 2 + ["prefill, offloaded"]
    assert all(row.peer_ms is None for row in first[:3])
    assert [row.peer_ms for row in both[:3]] == [row.ms for row in both[4:]]
    assert both[3].peer_ms > 0  # the whole prompt


def test_every_row_has_a_floor_below_what_was_measured(run):
    for row in run[1][-1]:
        assert 0 < row.floor_ms < row.ms, row.name


def test_a_sample_is_a_small_part_of_what_is_down_and_a_batch_reads_more(run):
    alone, both = run[1][0][:2]
    assert 0 < alone.extras["fraction_read"] < 0.5
    assert both.floor_ms > alone.floor_ms
    assert alone.extras["host_gib"] > 0


def test_an_exact_peer_reads_each_row_once_for_a_group(run):
    exact = run[1][-1][4]
    assert exact.extras["fraction_read"] == pytest.approx(1 / 2)  # of two query heads


def test_a_batch_that_has_no_time_is_stepped_the_fewest_times(run):
    assert {row.extras["steps"] for row in run[1][-1] if row.name.startswith("decode")} == {MIN_STEPS}


def test_floors_are_printed_before_the_first_profile_and_the_fraction_read_beside_each_time(run):
    before, after = run[0].split("profile sampled\n")
    assert before.count("at best") == 7
    assert after.count("ms a step (") == after.count("of what heads have down read") == 4


def test_requests_of_the_peer_share_one_prompt(run):
    ours, peer = run[0].split("profile offloaded\n")
    assert (ours.count("  prefill "), ours.count("  again ")) == (2, 0)
    assert (peer.count("  prefill "), peer.count("  again ")) == (1, 1)


def test_the_largest_batch_of_the_first_profile_has_the_parts_of_a_step(run, trace):
    rows = run[1][-1]
    assert ["traced_step" in row.extras for row in rows].index(True) == 1
    parts = rows[1].extras["traced_step"]
    assert "device_busy_ms" not in parts  # there is no such device
    assert parts["step_ms"] > parts["host_attend_ms"] > 0
    assert parts["hop_attention_ms"] >= parts["host_attend_ms"]
    assert "traced step, batch 2" in run[0]
    assert len(json.loads(trace.read_text())["traceEvents"]) > STEPS


def test_a_batch_that_cannot_run_is_refused_before_anything_is_measured(tmp_path):
    config = tmp_path / "two.yaml"
    config.write_text(json.dumps(DEPLOYMENT, default=str))  # which is YAML
    refused = CliRunner().invoke(app, ["long", str(config), "--batch", "1,4"])
    assert refused.exit_code == 2
    assert "max_running 2" in " ".join(refused.output.replace("│", " ").split())
