"""The benchmark of streams beside one another runs whole on the CPU device: three rows, each next to itself alone."""

import io
from itertools import pairwise

import pytest
from rich.console import Console

from lab.speed.beside import BesideBenchmark, _Clock, run_beside_benchmark
from scheduler.messages import Delta
from server.deployment import Deployment
from tests.bench.test_long_context import DEPLOYMENT, measure_little


def test_rows_are_of_each_kind_next_to_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_little(monkeypatch)
    deployment = Deployment.model_validate({**DEPLOYMENT, "scheduler": {"max_running": 4, "max_context_tokens": 4096}})
    benchmark = BesideBenchmark(2, 20, 1, 2000, "sampled", 0.3)
    rows = run_beside_benchmark(benchmark, deployment, Console(file=io.StringIO()))
    assert [row.name for row in rows] == [
        "a token beside long streams", "a token beside short streams", "prefill beside streams",
    ]  # fmt: skip
    for row in rows:
        assert row.peer == "alone"
        assert row.floor_ms > 0
        assert row.peer_ms > 0
    for row in rows[:2]:
        assert row.extras["tokens_per_s_of_alone"] == pytest.approx(row.peer_ms / row.ms)
        assert row.extras["no_core_left_ms"] > 0
    together, alone = rows[1].extras["lanes"], rows[1].extras["alone_lanes"]
    assert set(alone["steps"]) == {"device rows"}, "the CPU device has one lane"
    assert 0 < alone["steps"]["device rows"]["rows"] <= 1 < together["steps"]["device rows"]["rows"] <= 3
    assert rows[2].extras["lanes"]["units"] > 0 == together["units"]
    assert all(lanes["rows_left_out"] == 0 for lanes in (together, alone)), "nothing is timed before tables stand"
    extras = rows[2].extras
    assert extras["beside_alone"] == pytest.approx(rows[2].ms / rows[2].peer_ms)
    assert extras["median_gap_ms"] <= extras["p99_gap_ms"] <= extras["longest_gap_ms"]
    assert extras["alone_median_gap_ms"] > 0
    assert extras["longest_piece_tokens"] is None, "nothing is measured on a CPU"


def test_gaps_are_between_tokens_of_one_stream() -> None:
    class Told:
        def __init__(self) -> None:
            self.turns = [["a"], ["b", "a"], ["c"], ["a", "b"]]

        def advance(self) -> list[Delta]:
            return [Delta(request_id=name, token_ids=[1]) for name in self.turns.pop(0)]

    client, clock = Told(), _Clock([["a", "b"], ["d"]])
    told = [clock.advance(client, "c") for _ in range(4)]
    assert told == [False, False, True, False]
    assert clock.num_tokens() == [5, 0]
    gaps = clock.gaps_ms()
    assert [len(group) for group in gaps] == [3, 0]
    times = clock._times["a"]
    assert gaps[0][:2] == [1e3 * (after - before) for before, after in pairwise(times)]
