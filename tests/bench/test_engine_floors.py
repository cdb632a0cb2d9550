"""What the engine's numbers are held against: the bytes of its weights, a peer of the same batch, context and steps."""

from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import bench.engine_steps
from bench.agreement import Agreement, agree, require_agreement
from bench.benchmark_rows import GateError, Row
from bench.engine_steps import EngineBenchmark, measure_floor_rates, run_engine_benchmark
from bench.plain_decode import PlainDecode
from gpu.weights.drawing import random_weights
from gpu.weights.weights import Weights
from tests.bench.test_engine_benchmark import TINY

RATE_GB_S = 4.0
PROMPT, STEPS, ROUNDS, BATCHES = 12, 10, 2, (1, 3)
BENCHMARK = EngineBenchmark(None, "tiny", BATCHES, PROMPT, STEPS, ROUNDS, 1, "cpu", "float32")


class RecordedPeer(PlainDecode):
    """The peer, and what it was made with and fed."""

    made: list["RecordedPeer"] = []

    def __init__(self, architecture: Any, weights: Weights, batch: int, context: int, device: torch.device) -> None:
        super().__init__(architecture, weights, batch, context, device)
        self.batch, self.context = batch, context
        self.positions: list[int] = []
        self.made.append(self)

    def step(self) -> None:
        self.positions.append(int(self.position))
        super().step()


@pytest.fixture(scope="module")
def run() -> tuple[list[Row], list[RecordedPeer]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            bench.engine_steps, "measure_floor_rates", lambda *_: ({"host_stream_gb_s": RATE_GB_S}, RATE_GB_S)
        )
        patch.setattr(bench.engine_steps, "PlainDecode", RecordedPeer)
        RecordedPeer.made = []
        return run_engine_benchmark(BENCHMARK, Console(quiet=True)), RecordedPeer.made


def test_the_floor_is_the_time_to_read_every_weight_of_a_step_once(run: tuple[list[Row], list[RecordedPeer]]) -> None:
    weights = random_weights(TINY, 0, torch.float32, torch.device("cpu"), lambda fraction: None)
    layers = [getattr(layer, name) for layer in weights.layers for name in layer.__dataclass_fields__]
    read = [tensor for tensor in (*layers, weights.final_norm, weights.logits) if isinstance(tensor, torch.Tensor)]
    num_bytes = sum(tensor.nbytes for tensor in read)
    for row in run[0]:
        assert row.floor_ms == pytest.approx(1e3 * num_bytes / (RATE_GB_S * 1e9))
        assert f"{num_bytes / 1e9:.3f} GB of weights over 4 GB/s" in row.floor


def test_the_peer_has_our_batch_our_context_and_our_positions(run: tuple[list[Row], list[RecordedPeer]]) -> None:
    rows, peers = run
    assert [peer.batch for peer in peers] == list(BATCHES)
    for peer, row in zip(peers, rows, strict=True):
        assert peer.context == PROMPT + STEPS + 1
        assert f"batch {peer.batch}, context {peer.context}" in row.shape
        timed = peer.positions[-ROUNDS * STEPS :]
        assert timed == list(range(PROMPT, PROMPT + STEPS)) * ROUNDS


def test_rates_of_tokens_are_of_the_whole_batch(run: tuple[list[Row], list[RecordedPeer]]) -> None:
    for batch, row in zip(BATCHES, run[0], strict=True):
        assert row.peer_ms is not None
        assert row.extras["tokens_per_s"] == pytest.approx(1e3 * batch / row.ms)
        assert row.extras["peer_tokens_per_s"] == pytest.approx(1e3 * batch / row.peer_ms)


def test_the_floor_has_the_better_rate_of_memory_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(bench.engine_steps, "measure_host_rates", lambda threads: {"host_stream_gb_s": 10.0})
    monkeypatch.setattr(
        bench.engine_steps, "measure_read_rate", lambda threads, num_bytes: asked.append((threads, num_bytes)) or 30.0
    )
    rates, rate = measure_floor_rates(12345, 3, torch.device("cpu"))
    assert rates == {"host_stream_gb_s": 10.0, "host_weights_gb_s": 30.0}
    assert (rate, asked) == (30.0, [(3, 12345)])


@pytest.mark.parametrize(
    ("dtype", "enough", "too_little"),
    [
        (torch.float32, Agreement(0.995, 0.001), Agreement(0.98, 0.001)),
        (torch.bfloat16, Agreement(0.3, 0.2), Agreement(0.9, 0.6)),
    ],
)
def test_a_peer_that_chooses_other_tokens_yields_no_number(
    dtype: torch.dtype, enough: Agreement, too_little: Agreement
) -> None:
    require_agreement(enough, dtype)
    with pytest.raises(GateError, match="the peer chooses"):
        require_agreement(too_little, dtype)


def test_tokens_of_another_model_are_far_behind_and_near_ties_are_not() -> None:
    logits = torch.randn(64, 10_000, generator=torch.Generator().manual_seed(0))
    rounded = logits + 0.02 * torch.randn(64, 10_000, generator=torch.Generator().manual_seed(1))
    assert agree(logits, logits.argmax(-1)) == Agreement(1.0, 0.0)
    assert agree(logits, rounded.argmax(-1)).behind < 0.01
    others = agree(logits, torch.arange(64))
    assert others.share == 0.0
    assert 3 < others.behind < 5
    wanted = (logits.max(1).values - logits[torch.arange(64), torch.arange(64)]) / logits.std(1)
    assert others.behind == pytest.approx(float(wanted.mean()), rel=1e-5)


def test_prompts_are_different_texts_of_the_length_that_was_asked() -> None:
    prompts = bench.engine_steps.draw_prompts(4, 50, 1000)
    assert prompts.shape == (4, 50)
    assert len(np.unique(prompts, axis=0)) == 4
