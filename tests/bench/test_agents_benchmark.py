"""Run the benchmark of agents whole on the CPU device."""

import io

import pytest
from rich.console import Console

from bench.agents import AgentsBenchmark, run_agents_benchmark
from bench.benchmark_rows import GateError
from server.deployment import Deployment
from tests.bench.test_long_context import DEPLOYMENT


def test_later_turns_compute_what_is_new_and_say_where_the_rest_was() -> None:
    printed, benchmark = io.StringIO(), AgentsBenchmark(2, 300, 100, 20, 8, 2, None)
    deployment = Deployment.model_validate(DEPLOYMENT)
    *_, rows = run_agents_benchmark(benchmark, deployment, Console(file=printed, width=200))
    first, second = rows
    assert first.name == "first token, turn 1"
    assert second.shape.startswith("2 agents of 328 tokens, ")
    assert second.ms < second.peer_ms
    assert first.extras["prompt_tokens"] == [300, 300]
    assert sum(first.extras["cached"].values()) < 100, "the second agent finds what all begin with"
    assert sum(second.extras["cached"].values()) > 2 * 280
    assert "turn 2: first tokens at the median" in printed.getvalue()


def test_histories_that_do_not_fit_are_refused() -> None:
    with pytest.raises(GateError, match=r"tokens of a .* request fit the deployment"):
        next(run_agents_benchmark(AgentsBenchmark(1, 10**6, 10, 1, 1, 1, None), Deployment.model_validate(DEPLOYMENT),
                                  Console(file=io.StringIO())))  # fmt: skip
