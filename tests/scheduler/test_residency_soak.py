"""Contexts that grow, give pages up and get them back, fork, give way and leave, over a real model and a real host tier
in little memory: in every step each token of each row is read once, and nothing is left behind.
"""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from gpu.config import GpuConfig, ModelConfig
from gpu.kv.pool import KvPool
from scheduler import growing_back
from scheduler.config import EngineConfig, SchedulerConfig
from scheduler.engine import Engine
from scheduler.load import load_engine
from tests.gpu.reference_model import shallow_model
from tests.scheduler.test_host_failures import ask, check_idle, plan_here, prompt_of, run
from transfer.config import HostConfig, SampledConfig

NUM_REQUESTS = 12
AT_ONCE = 4  # so that sometimes nobody waits, and pages come back
LONGEST = 800


@pytest.fixture(scope="module", params=["adaptive", "fixed"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Pages for a context and a half of the longest kind, and host memory for a few."""
    config = EngineConfig(
        model=ModelConfig(path=Path(shallow_model(4).name)),
        gpu=GpuConfig(device="cpu", dtype="float32", kv_cache_gib=0.0052, threads=1, check_coverage=True),
        host=HostConfig(
            memory_limit_gib=0.02,
            threads=1,
            resident_tokens=128,
            residency=request.param,
            sampled=SampledConfig(bits_per_table=6, num_tables=20),
        ),
        scheduler=SchedulerConfig(max_running=5, max_context_tokens=1100),
    )
    engine, _ = load_engine(config, plan_here(config), lambda *_: None)
    yield engine
    engine.shutdown()


def test_every_token_is_read_once_whoever_needs_the_pages(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(6)
    documents = [prompt_of(LONGEST, salt) for salt in range(3)]
    requests = []
    for index in range(NUM_REQUESTS):
        document = documents[int(draw.integers(3))][: int(draw.integers(100, LONGEST))]
        profile = ("exact", "sampled", "offloaded", "offloaded")[index % 4]
        prompt = (document[:300] if profile == "exact" else document) + prompt_of(int(draw.integers(1, 40)), index)
        requests.append(ask(f"r{index}", prompt, int(draw.integers(40, 220)), profile))
    released: list[int] = []
    release = KvPool.release
    monkeypatch.setattr(KvPool, "release", lambda pool, one: (released.append(len(one.page_ids)), release(pool, one)))
    restored: list[int] = []
    restore = KvPool.restore
    monkeypatch.setattr(KvPool, "restore", lambda pool, one: (restored.append(len(one.page_ids)), restore(pool, one)))
    monkeypatch.setattr(growing_back, "QUIET_STEPS", 2)
    left = [f"r{index}" for index in (2, 5, 9)]

    residence = engine.scheduler.residence
    steps = count()

    def leave() -> None:
        if next(steps) % 5 == 0:  # somebody needs pages, for a moment
            residence._free_pages(residence.pages.num_available + 12, [])
        running = {sequence.request_id: sequence for sequence in engine.scheduler.roster.running}
        for name in list(left):
            if name in running and running[name].num_drawn > 5:
                engine.cancel([name])
                left.remove(name)

    deltas: dict[str, list] = {}
    for begin in range(0, NUM_REQUESTS, AT_ONCE):
        deltas |= run(engine, requests[begin : begin + AT_ONCE], leave)
    ended = [request.request_id for request in requests if request.request_id not in ("r2", "r5", "r9")]
    assert not left
    assert {deltas[name][-1].finish_reason for name in ended} == {"length"}
    assert not [delta.error for name in ended for delta in deltas[name] if delta.error]
    assert sum(released) > (150 if residence.is_adaptive else 0)
    assert (sum(restored) > 100) == residence.is_adaptive
    check_idle(engine)
