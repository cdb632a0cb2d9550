"""Contexts that grow, lose and get back pages, fork, are preempted and leave, over a real model and a real host tier
in little memory: in every step each token of each row is read once, texts are those of lone runs, and nothing is left
behind. Where residence is adaptive, sampled texts may depend on load.
"""

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
from msgspec import structs

from cpu.cpu_tier import CpuTier
from gpu.kv.pool import KvPool
from gpu.sampling_params import SamplingParams
from scheduler.engine.engine import Engine
from scheduler.engine_config import SchedulerConfig
from scheduler.messages import Delta, EngineRequest
from scheduler.residence import evictions
from tests.scheduler.tiered_engine import (
    ask,
    check_idle,
    leave_and_preempt,
    prompt_of,
    run,
    running_engine,
    text,
    tiered_config,
)
from tests.tolerances import FLIP_LOGIT_GAP, PLACED_LOGPROB_ATOL

NUM_REQUESTS = 12
AT_ONCE = 4  # so that sometimes nobody waits, and pages come back
LONGEST = 800
LONE_TOKENS = 20  # of a text, that are held against its lone run


@pytest.fixture(scope="module", params=["adaptive", "fixed"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Pages for a context and a half of the longest kind, and host memory for a few."""
    host = {"memory_limit_gib": 0.02, "residency": request.param}
    scheduler = SchedulerConfig(max_running=5, max_context_tokens=1100)
    with running_engine(tiered_config(0.0052, host, scheduler)) as engine:
        yield engine


def test_every_token_is_read_once_whoever_needs_the_pages(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(6)
    documents = [prompt_of(LONGEST, salt) for salt in range(3)]
    requests = []
    for index in range(NUM_REQUESTS):
        document = documents[int(draw.integers(3))][: int(draw.integers(100, LONGEST))]
        profile = ("exact", "sampled", "offloaded", "offloaded")[index % 4]
        prompt = (document[:300] if profile == "exact" else document) + prompt_of(int(draw.integers(1, 40)), index)
        request = ask(f"r{index}", prompt, int(draw.integers(40, 180)), profile)
        requests.append(structs.replace(request, sampling=SamplingParams(temperature=0.0, num_logprobs=2)))
    released: list[int] = []
    release = KvPool.evict
    monkeypatch.setattr(KvPool, "evict", lambda pool, one: (released.append(len(one.page_ids)), release(pool, one)))
    restored: list[int] = []
    restore = KvPool.reload
    monkeypatch.setattr(KvPool, "reload", lambda pool, one: (restored.append(len(one.page_ids)), restore(pool, one)))
    monkeypatch.setattr(evictions, "QUIET_STEPS", 2)
    left = [f"r{index}" for index in (2, 5, 9)]

    residence = engine.scheduler.residence
    assert engine._tier._growth._is_adaptive == residence.is_adaptive
    steps = count()

    forks: list[int] = []
    fork = CpuTier.fork
    monkeypatch.setattr(CpuTier, "fork", lambda tier, *rest: (forks.append(rest[1]), fork(tier, *rest)))

    before_step = leave_and_preempt(engine, left, [f"r{index}" for index in (0, 1, 3)])

    def leave() -> None:
        if next(steps) % 5 == 0:  # somebody needs pages, for a moment
            residence.room.free_pages(residence.pages.num_available + 12, [])
        before_step()

    deltas: dict[str, list] = {}
    for begin in range(0, NUM_REQUESTS, AT_ONCE):
        deltas |= run(engine, requests[begin : begin + AT_ONCE], leave)
    ended = [request.request_id for request in requests if request.request_id not in ("r2", "r5", "r9")]
    assert not left
    assert {deltas[name][-1].finish_reason for name in ended} == {"length"}
    assert not [delta.error for name in ended for delta in deltas[name] if delta.error]
    assert sum(released) > (150 if residence.is_adaptive else 0)
    assert (sum(restored) > 100) == residence.is_adaptive
    assert engine.scheduler.roster.num_preemptions > 0
    assert forks
    check_idle(engine)
    for request in requests:
        if request.request_id in ended and (request.attention_profile != "sampled" or not residence.is_adaptive):
            check_text(engine, request, deltas[request.request_id])


def check_text(engine: Engine, request: EngineRequest, deltas: list[Delta]) -> None:
    """It begins as the lone run's, with its logprobs, or parts from it where the two best choices are near."""
    lone = structs.replace(request, max_tokens=min(request.max_tokens, LONE_TOKENS))
    alone = run(engine, [lone])[lone.request_id]
    check_idle(engine)
    said, own = text(deltas)[: lone.max_tokens], text(alone)
    got, wanted = ([one for delta in some for one in delta.logprobs or []] for some in (deltas, alone))
    alike = next((index for index, pair in enumerate(zip(said, own, strict=True)) if pair[0] != pair[1]), len(own))
    differences = [abs(one.logprob - other.logprob) for one, other in zip(got[:alike], wanted[:alike], strict=True)]
    assert max(differences) <= PLACED_LOGPROB_ATOL, f"{request.request_id} has other logprobs than its lone run"
    if alike < len(own):
        (_, best), (_, second) = wanted[alike].top
        assert best - second <= FLIP_LOGIT_GAP, f"{request.request_id} differs from its lone run at {alike}"
