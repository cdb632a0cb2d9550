"""Drafts by n-grams, of a real model in float32: text, logprobs and ends are those that steps of one token have."""

from collections.abc import Iterator

import pytest

from bench.engine_patches import switch_drafts
from gpu.config import Composition, DraftConfig, GpuConfig, ModelConfig
from gpu.sampling_params import SamplingParams
from scheduler.drafts.ngrams import NGrams
from scheduler.engine.engine import Engine
from scheduler.engine_config import EngineConfig, SchedulerConfig
from scheduler.messages import ACCEPTED, Delta, EngineRequest, pack_tokens
from tests.scheduler.drafting import foresee, take_all
from tests.scheduler.engines import drain, prompt_of, text
from tests.scheduler.real_model import ask_variously, check_told, load, shallow_config

MOST = 120


@pytest.fixture(scope="module", params=[False, True], ids=["compiled", "in a loop"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """It counts in every layer of every step who reads what, or goes without a loop where it can."""
    config = EngineConfig(
        model=shallow_config(),
        gpu=GpuConfig(
            device="cpu", dtype="float32", kv="float32", kv_cache_gib=0.05, threads=1, check_coverage=request.param
        ),
        profiles={"drafting": Composition(draft=DraftConfig(least_match=2))},
        scheduler=SchedulerConfig(max_running=24, max_context_tokens=2600, prefix_cache=False),
    )
    made = load(config)
    take_all(made)
    yield made
    made.shutdown()


def ask(number: int) -> EngineRequest:
    """Prompts that repeat themselves, whose texts do so too after a while."""
    return ask_variously(
        number, (60, 480, 500, 33), ("drafting", "drafting", "exact", "drafting", "drafting"), MOST,
        temperatures=(0.0, 0.3, 0.7), logit_bias=({}, {5: 2.0})[number // 2 % 2],
        frequency_penalty=(0.0, 0.1)[number // 3 % 2],
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, list[Delta]]:
    """What is told token by token."""
    switch_drafts(engine.scheduler.drafts, False)
    engine.submit([ask(number) for number in range(9)])
    told, stats = drain(engine), engine.stats()
    assert (stats.drafts.accepted, stats.steps > MOST - 2) == (0, True)
    return told


def test_what_is_drawn_and_told_is_what_it_is_token_by_token(engine: Engine, alone: dict[str, list[Delta]]) -> None:
    switch_drafts(engine.scheduler.drafts, True)
    engine.submit([ask(number) for number in range(9)])
    told = drain(engine)
    assert engine.stats().drafts.accepted > MOST
    check_told(told, alone, ask)
    assert any(deltas[-1].figures.get(ACCEPTED) for deltas in told.values())


SAME_STATES = [pytest.param(name, 0.2, marks=pytest.mark.long) for name in ("tiny-qwen3.5-moe", "tiny-qwen3-next")]


@pytest.mark.parametrize(
    ("shape", "spoilt"),
    [
        *((shape, 0.2) for shape in ("tiny-glm4-moe-lite", "tiny-gemma3", "tiny-gpt-oss", "tiny-qwen3.5")),
        ("tiny-qwen3.5", 1.0),
        *SAME_STATES,
    ],
)
def test_texts_of_other_layers_are_the_same_with_drafts(shape: str, spoilt: float) -> None:
    """Latent rows, windows, experts with attention sinks, and states that take in no more than what is drawn."""
    config = EngineConfig(
        model=ModelConfig(random_weights=shape),
        gpu=GpuConfig(device="cpu", dtype="float32", kv="float32", kv_cache_gib=0.05, threads=1),
        profiles={"drafting": Composition(draft=DraftConfig())},
        scheduler=SchedulerConfig(max_running=16, max_context_tokens=512, prefix_cache=False),
    )
    engine = load(config)
    told: dict[bool, dict[str, list[int]]] = {}
    for is_on in (False, True):
        switch_drafts(engine.scheduler.drafts, is_on)
        if is_on:
            foresee(engine, told[False], spoilt)
        engine.submit([
            EngineRequest(
                request_id=f"{number}",
                prompt=pack_tokens(prompt_of(40 + number, number)),
                sampling=SamplingParams(temperature=0.5 * number, seed=number),
                max_tokens=40,
                stop_token_ids=(),
                attention_profile="drafting",
                arrival_s=float(number),
            )
            for number in range(3)
        ])  # fmt: skip
        told[is_on] = {name: text(deltas) for name, deltas in drain(engine).items()}
    stats = engine.stats().drafts
    engine.shutdown()
    assert told[True] == told[False]
    assert stats.accepted > 40 or spoilt == 1.0
    assert stats.proposed > stats.accepted + 20


@pytest.mark.parametrize("drafts", [False, True])
def test_what_a_first_draft_would_have_others_wait_for_is_compiled_at_the_start(
    drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposed: list[NGrams] = []
    monkeypatch.setattr(NGrams, "propose", lambda self, _: proposed.append(self))
    config = EngineConfig(
        model=ModelConfig(random_weights="tiny"),
        gpu=GpuConfig(device="cpu", dtype="float32", kv="float32", kv_cache_gib=0.05, threads=1),
        profiles={"drafting": Composition(draft=DraftConfig())} if drafts else {},
    )
    load(config).shutdown()
    assert bool(proposed) is drafts
