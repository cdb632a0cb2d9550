"""Requests whose blocks are predicted, over a real model and a real host tier in little memory: in every step each
token of each row and head is read once, sampled or counted as dropped, and nothing is left behind, whoever leaves,
gives way or forks.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu.config import Composition, GpuConfig, ModelConfig
from scheduler.engine.engine import Engine
from scheduler.engine.load_engine import load_engine
from scheduler.engine_config import EngineConfig, SchedulerConfig
from tests.gpu.method_counts import counts_of
from tests.gpu.reference_model import shallow_model
from tests.gpu.test_predicted_serving import WEIGHTS, leave_some_late
from tests.scheduler.test_host_failures import ask, check_idle, plan_here, prompt_of, run, text
from transfer.host_config import ErrorsConfig, HostConfig, SampledConfig

BLOCKS = {"weights": str(WEIGHTS), "budget_tokens": 64, "history": 8, "look_stride_blocks": 8, "min_context_tokens": 0,
          "sink_tokens": 16, "local_tokens": 32, "exempt_layers": 1, "rings": 2}  # fmt: skip
PROFILES = {
    "predicted": {"host": {"method": "predicted", **BLOCKS}},
    "both": {"host": {"method": "predicted+sampled", **BLOCKS}},
    "wide": {"host": {"method": "predicted", **BLOCKS, "budget_tokens": 512}},
}
DOCUMENT_TOKENS = 420
LONG_TOKENS = 2_300  # of which there are hash tables
EVERY_KEY = SampledConfig(  # two of 60 tables of two buckets hold any key; some heads read in full all the same
    bits_per_table=1, num_tables=60, errors=ErrorsConfig(epsilon=0.3, audit_steps=8, full_share=0.2)
)


@pytest.fixture(scope="module", params=["adaptive", "fixed"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Pages for two contexts and a half of the longest kind; two rings of either settings."""
    config = EngineConfig(
        model=ModelConfig(path=Path(shallow_model(4).name)),
        gpu=GpuConfig(device="cpu", dtype="float32", kv_cache_gib=0.0042, threads=1, check_coverage=True),
        host=HostConfig(
            memory_limit_gib=0.02,
            threads=1,
            resident_tokens=128,
            residency=request.param,
            sampled=SampledConfig(bits_per_table=6, num_tables=20),
        ),
        profiles={name: Composition.model_validate(tree) for name, tree in PROFILES.items()},
        scheduler=SchedulerConfig(max_running=5, max_context_tokens=800),
    )
    engine, _ = load_engine(config, plan_here(config), lambda *_: None)
    yield engine
    engine.shutdown()


def check_rings(engine: Engine) -> None:
    assert set(engine.scheduler.rings.num_free.values()) == {2}
    assert all(not side.held for side in engine._runner._reusing.values())


def test_every_token_is_read_sampled_or_dropped_whoever_else_runs(engine: Engine) -> None:
    draw = np.random.default_rng(12)
    documents = [prompt_of(DOCUMENT_TOKENS, salt) for salt in range(2)]
    names = [*PROFILES, "exact", "sampled", "offloaded"]
    requests = []
    for index in range(8):
        document = documents[index % 2][: int(draw.integers(200, DOCUMENT_TOKENS))]
        prompt = document + prompt_of(int(draw.integers(1, 40)), index)
        requests.append(ask(f"r{index}", prompt, int(draw.integers(25, 50)), names[index % len(names)]))
    left = ["r1", "r6"]

    def leave() -> None:
        running = {sequence.request_id: sequence for sequence in engine.scheduler.roster.running}
        for name in [name for name in left if name in running and running[name].num_drawn > 5]:
            engine.cancel([name])
            left.remove(name)
        if "r2" in running and running["r2"].num_drawn == 12:
            engine.scheduler.roster.preempt_youngest([running["r2"]])

    deltas = run(engine, requests, leave)
    ended = [request.request_id for request in requests if request.request_id not in ("r1", "r6")]
    assert not left
    assert {deltas[name][-1].finish_reason for name in ended} == {"length"}
    assert engine.scheduler.roster.num_preemptions > 0
    counts = {part: one for part, one in engine._runner.method_counts().items() if one}
    assert sum(one["fetch_read_tokens"][0] for one in counts.values()) > 0
    assert sum(one["fetch_dropped_tokens"][0] for part, one in counts.items() if "sampled" in part.method) == 0
    check_rings(engine)
    check_idle(engine)


def test_where_all_blocks_are_fetched_texts_are_those_of_reading_all(engine: Engine) -> None:
    prompt = prompt_of(300, 5)
    texts = [text(run(engine, [ask(name, prompt, 30, name)])[name]) for name in ("wide", "offloaded")]
    assert texts[0] == texts[1]
    check_rings(engine)
    check_idle(engine)


def test_forks_of_one_prompt_each_have_blocks_of_their_own(engine: Engine) -> None:
    prompts = [prompt_of(310, 6) + prompt_of(4, number) for number in range(2)]
    wanted = [text(run(engine, [ask("o", prompt, 30, "offloaded")])["o"]) for prompt in prompts]
    names = ("first", "second")
    deltas = run(engine, [ask(name, prompt, 30, "wide") for name, prompt in zip(names, prompts, strict=True)])
    assert [text(deltas[name]) for name in names] == wanted
    check_rings(engine)
    check_idle(engine)


def test_where_samples_find_every_key_texts_are_those_of_reading_all_with_epsilon_and_blocks_taken_out() -> None:
    """Sampled for real: a key that is read twice or by nobody, or an answer in full over what is fetched, shows."""
    config = EngineConfig(
        model=ModelConfig(path=Path(shallow_model(3).name)),
        gpu=GpuConfig(device="cpu", dtype="float32", kv_cache_gib=0.02, threads=1, check_coverage=True),
        host=HostConfig(memory_limit_gib=0.05, threads=1, resident_tokens=128, residency="fixed", sampled=EVERY_KEY),
        profiles={"both": Composition.model_validate(PROFILES["both"])},
        scheduler=SchedulerConfig(max_running=2, max_context_tokens=LONG_TOKENS + 64),
    )
    engine, _ = load_engine(config, plan_here(config), lambda *_: None)
    try:
        prompt = prompt_of(LONG_TOKENS, 7)
        texts = [text(run(engine, [ask(name, prompt, 20, name)])[name]) for name in ("both", "offloaded")]
        assert texts[0] == texts[1]
        assert engine._runner._offload is not None
        errors = engine._runner._offload.tier.stats().errors
        assert errors.estimated > 0
        assert errors.in_full > 0
        counts = counts_of(next(iter(engine._runner._reusing.values())))
        assert 0 < counts.read_tokens < counts.hole_tokens
        assert counts.dropped_tokens == 0
    finally:
        engine.shutdown()


def test_where_blocks_are_late_and_samples_find_every_key_texts_are_those_of_reading_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave_some_late(monkeypatch, 0.5)
    config = EngineConfig(
        model=ModelConfig(path=Path(shallow_model(3).name)),
        gpu=GpuConfig(device="cpu", dtype="float32", kv_cache_gib=0.02, threads=1, check_coverage=True),
        host=HostConfig(memory_limit_gib=0.05, threads=1, resident_tokens=128, sampled=EVERY_KEY),
        profiles={"both": Composition.model_validate({"host": {**PROFILES["both"]["host"], "late": "sample"}})},
        scheduler=SchedulerConfig(max_running=2, max_context_tokens=LONG_TOKENS + 64),
    )
    engine, _ = load_engine(config, plan_here(config), lambda *_: None)
    try:
        (side,) = engine._runner._reusing.values()
        side._score = lambda layer, choice: torch.rand(layer.scores.shape)
        engine.scheduler.residence.evictor.is_adaptive = False  # what goes down leaves the device at once
        prompt = prompt_of(LONG_TOKENS, 7)
        texts = [text(run(engine, [ask(name, prompt, 20, name)])[name]) for name in ("both", "offloaded")]
        assert texts[0] == texts[1]
        counts = counts_of(next(iter(engine._runner._reusing.values())))
        assert counts.late_blocks > 0
        assert 0 < counts.read_tokens < counts.hole_tokens
        assert counts.dropped_tokens == 0
    finally:
        engine.shutdown()
