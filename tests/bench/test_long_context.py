"""The benchmark of contexts that outgrow the device runs whole on the CPU device, and counts what it says it counts."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from bench.long_context import LongContextBenchmark, run_long_context_benchmark
from server.config import Deployment

DEPLOYMENT = {
    "model": {"random_weights": "tiny", "tokenizer": Path("deploy/models/reference")},
    "gpu": {"device": "cpu", "kv_cache_gib": 0.05},
    "host": {"memory_limit_gib": 0.5, "resident_tokens": 128, "dense_layers": [0], "threads": 1},
    "scheduler": {"max_running": 2, "max_context_tokens": 4096},
}


@pytest.fixture(scope="module")
def rows():
    deployment = Deployment.model_validate(DEPLOYMENT)
    benchmark = LongContextBenchmark(2304, (1, 2), 8, ("sampled", "offloaded"), 2304)
    return run_long_context_benchmark(benchmark, deployment, Console(file=io.StringIO()))


def test_every_batch_the_prefill_and_the_second_turn_have_a_row(rows):
    names = [row.name for row in rows]
    assert names[:2] == ["decode step, sampled"] * 2
    assert names[2] == "prefill"
    assert names[3].startswith("second turn")


def test_a_sample_is_a_small_part_of_what_is_down_and_a_batch_reads_more(rows):
    alone, both = rows[:2]
    assert 0 < alone.extras["fraction_read"] < 0.5
    assert alone.peer_ms is not None
    assert both.floor_ms > alone.floor_ms
    assert alone.extras["host_gib"] > 0
