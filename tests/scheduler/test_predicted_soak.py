"""Requests whose blocks are predicted, over a real model and a real host tier in little memory: in every step each
token of each row and head is read once, sampled or counted as dropped, and nothing is left behind, whoever leaves,
is preempted or forks.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch

from bench.engine_patches import set_adaptive
from scheduler.engine.engine import Engine
from scheduler.engine_config import SchedulerConfig
from tests.gpu.method_counts import counts_of
from tests.gpu.test_predicted_serving import WEIGHTS, leave_some_late
from tests.scheduler.tiered_engine import (
    ask,
    check_idle,
    check_rings,
    leave_and_preempt,
    prompt_of,
    run,
    running_engine,
    text,
    tiered_config,
)
from transfer.host_config import ErrorsConfig, SampledConfig

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


@pytest.fixture(scope="module", params=["adaptive", pytest.param("fixed", marks=pytest.mark.long)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Pages for two contexts and a half of the longest kind; two rings of either settings."""
    host = {"memory_limit_gib": 0.02, "residency": request.param}
    scheduler = SchedulerConfig(max_running=5, max_context_tokens=800)
    with running_engine(tiered_config(0.0042, host, scheduler, PROFILES)) as engine:
        yield engine


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

    deltas = run(engine, requests, leave_and_preempt(engine, left, ["r2"]))
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


def every_key_engine(both: dict[str, Any], **host: Any) -> AbstractContextManager[Engine]:
    host |= {"memory_limit_gib": 0.05, "sampled": EVERY_KEY}
    scheduler = SchedulerConfig(max_running=2, max_context_tokens=LONG_TOKENS + 64)
    return running_engine(tiered_config(0.02, host, scheduler, {"both": both}, num_layers=3))


def test_where_samples_find_every_key_texts_are_those_of_reading_all_with_epsilon_and_blocks_taken_out() -> None:
    """Sampled for real: a key that is read twice or by nobody, or an answer in full over what is fetched, shows."""
    with every_key_engine(PROFILES["both"], residency="fixed") as engine:
        prompt = prompt_of(LONG_TOKENS, 7)
        texts = [text(run(engine, [ask(name, prompt, 20, name)])[name]) for name in ("both", "offloaded")]
        assert texts[0] == texts[1]
        errors = engine._runner._offloader.tier.stats().errors
        assert errors.estimated > 0
        assert errors.in_full > 0
        counts = counts_of(next(iter(engine._runner._reusing.values())))
        assert 0 < counts.read_tokens < counts.hole_tokens
        assert counts.dropped_tokens == 0


def test_where_blocks_are_late_and_samples_find_every_key_texts_are_those_of_reading_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave_some_late(monkeypatch, 0.5)
    late = {"host": {**PROFILES["both"]["host"], "late": "sample"}}
    with every_key_engine(late) as engine:
        (side,) = engine._runner._reusing.values()
        side._score = lambda layer, choice: torch.rand(layer.scores.shape)
        set_adaptive(engine.scheduler.residence.evictor, False)  # what is offloaded leaves the device at once
        prompt = prompt_of(LONG_TOKENS, 7)
        texts = [text(run(engine, [ask(name, prompt, 20, name)])[name]) for name in ("both", "offloaded")]
        assert texts[0] == texts[1]
        counts = counts_of(next(iter(engine._runner._reusing.values())))
        assert counts.late_blocks > 0
        assert 0 < counts.read_tokens < counts.hole_tokens
        assert counts.dropped_tokens == 0
