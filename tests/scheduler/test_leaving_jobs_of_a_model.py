"""Prompts that leave packed jobs of a real runner, tensors and all: the others are answered as if they ran alone."""

from pathlib import Path

import numpy as np
import pytest

from scheduler.engine.engine import Engine
from scheduler.engine.load_engine import load_engine
from server.deployment import Deployment
from server.planning.deployment_plan import resolve_plan
from tests.scheduler.engines import drain, make_request, text
from transfer.machine import load_machine

LAPTOP = Path(__file__).parents[2] / "deploy" / "machines" / "laptop.json"
DEPLOYMENT = Deployment.model_validate({
    "model": {"random_weights": "tiny"},
    "gpu": {"dtype": "float32", "kv": "float32", "kv_cache_gib": 0.02, "graph_batch_sizes": [1]},
    "scheduler": {"max_running": 6, "max_context_tokens": 256, "prefix_cache": False, "prefill": {"chunk_tokens": 64}},
})  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(DEPLOYMENT, resolve_plan(DEPLOYMENT, load_machine(LAPTOP)).memory, lambda *_: None)[0]


def prompt(seed: int) -> list[int]:
    draw = np.random.default_rng(seed)
    return draw.integers(0, 500, draw.integers(5, 40)).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_answers_beside_clients_that_leave_are_those_of_requests_that_are_alone(engine: Engine, seed: int) -> None:
    """Half of the requests are cancelled, in each of the steps that their prefill takes."""
    draw = np.random.default_rng(seed)
    requests = [make_request(f"{seed}-{number}", prompt(100 * seed + number), max_tokens=6) for number in range(24)]
    alone = {}
    for request in requests[::2]:
        engine.submit([request])
        alone[request.request_id] = text(drain(engine)[request.request_id])
    cuts = 0
    told: dict[str, list[int]] = {}
    waiting, leaving = list(requests), []
    while waiting or leaving or engine.has_work:
        engine.submit([waiting.pop(0) for _ in range(min(len(waiting), int(draw.integers(0, 5))))])
        for delta in engine.step():
            told.setdefault(delta.request_id, []).extend(delta.token_ids)
        jobs = engine.scheduler._prefill.jobs
        leaving = [one for entry in jobs for one in entry.sequences if int(one.request_id.split("-")[1]) % 2]
        for one in leaving:
            if draw.random() < 0.6:
                cuts += any(one in entry.sequences and len(entry.sequences) > 1 for entry in jobs)
                engine.cancel([one.request_id])
    assert cuts > 2
    assert {name: tokens for name, tokens in told.items() if name in alone} == alone
    assert engine._runner.num_prefill_jobs == 0
