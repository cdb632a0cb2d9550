"""Drafts by the head of a checkpoint, behind the engine: text, logprobs and ends are those of steps of one token."""

from collections.abc import Iterator

import pytest
import torch
from msgspec import structs

from bench.engine_patches import replace_guesses, switch_drafts
from gpu.config import Composition, GpuConfig, ModelConfig
from gpu.memory.demand import PlanError
from gpu.model.architecture import load_architecture
from scheduler.engine.engine import Engine
from scheduler.engine_config import EngineConfig, SchedulerConfig
from scheduler.messages import ACCEPTED, REJECTED, Delta, EngineRequest
from scheduler.planning.engine_memory import plan_engine
from tests.scheduler.drafting import take_all
from tests.scheduler.engines import drain, text
from tests.scheduler.real_model import ask_variously, check_preemption, check_told, load
from tests.scheduler.test_states_of_a_model import ask as request
from tests.scheduler.test_states_of_a_model import draw
from transfer.disk.disk_config import DiskConfig
from transfer.host_config import HostConfig
from transfer.machine import probe_machine

MOST = 36
DRAFTING = {"drafting": Composition.model_validate({"draft": "mtp"})}


def configure(name: str = "tiny-qwen3.5", **more: object) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(random_weights=name),
        gpu=GpuConfig(device="cpu", dtype="float32", kv_cache_gib=0.1, threads=1, check_coverage=True),
        profiles=DRAFTING,
        scheduler=SchedulerConfig(max_running=16, max_context_tokens=640),
        **more,
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = load(configure())
    take_all(made)
    yield made
    made.shutdown()


def ask(number: int) -> EngineRequest:
    return ask_variously(
        number, (60, 120, 33), ("drafting", "drafting", "exact"), MOST, temperatures=(0.0, 0.7),
        frequency_penalty=(0.0, 0.1)[number // 3 % 2],
    )  # fmt: skip


def foresee(engine: Engine, text: list[int], name: str) -> None:
    """Have drafted tokens of the one request be of this text, but for each third."""
    drawn, guessed = [0], [0]
    step = engine.step

    def stepping() -> list:
        told = step()
        drawn[0] += sum(len(delta.token_ids) for delta in told if delta.request_id == name)
        guessed[0] = 0
        return told

    def replace(tokens: torch.Tensor) -> torch.Tensor:
        at = drawn[0] + guessed[0]
        guessed[0] += 1
        return tokens if at % 3 == 2 or at >= len(text) else torch.full_like(tokens, text[at])

    engine.step = stepping  # type: ignore[method-assign]
    replace_guesses(engine._runner, replace)


def serve(engine: Engine, is_on: bool) -> tuple[dict[str, list[Delta]], int]:
    """What is told, and how many tokens were drafted."""
    switch_drafts(engine.scheduler.drafts, is_on)
    before = engine.stats().drafts.proposed
    engine.submit([ask(number) for number in range(6)])
    told = drain(engine)
    return told, engine.stats().drafts.proposed - before


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, list[Delta]]:
    told, proposed = serve(engine, is_on=False)
    assert proposed == 0
    return told


def test_what_is_drawn_and_told_is_what_it_is_token_by_token(engine: Engine, alone: dict[str, list[Delta]]) -> None:
    told, proposed = serve(engine, is_on=True)
    assert proposed > MOST
    check_told(told, alone, ask)
    assert any(deltas[-1].figures.get(REJECTED) for deltas in told.values())


def test_drafts_that_are_right_take_no_step_and_are_told(engine: Engine) -> None:
    drafts, texts = engine.scheduler.drafts, []
    for is_on in (False, True):
        switch_drafts(drafts, is_on)
        before, step = engine.stats(), engine.step
        if is_on:
            foresee(engine, texts[0], ask(0).request_id)
        engine.submit([ask(0)])
        deltas = drain(engine)[ask(0).request_id]
        engine.step = step  # type: ignore[method-assign]
        replace_guesses(engine._runner, None)
        texts.append(text(deltas))
    after = engine.stats()
    assert texts[0] == texts[1]
    assert deltas[-1].figures[ACCEPTED] == after.drafts.accepted - before.drafts.accepted > MOST // 2
    assert after.steps - before.steps < MOST - MOST // 3


def test_one_that_is_preempted_with_a_draft_goes_on_as_if_it_had_not(
    engine: Engine, alone: dict[str, list[Delta]]
) -> None:
    check_preemption(engine, ask, lambda is_on: switch_drafts(engine.scheduler.drafts, is_on), alone)


@pytest.mark.parametrize("name", ["tiny-qwen3.5-moe", pytest.param("tiny-qwen3-next", marks=pytest.mark.long)])
def test_experts_and_other_orders_change_no_text(name: str) -> None:
    engine, told = load(configure(name)), {}
    take_all(engine)
    for is_on in (False, True):
        switch_drafts(engine.scheduler.drafts, is_on)
        engine.submit([ask(number) for number in range(2)])
        told[is_on] = {key: text(deltas) for key, deltas in drain(engine).items()}
    engine.shutdown()
    assert told[True] == told[False]
    assert engine.stats().drafts.proposed > MOST


def test_over_contexts_in_host_memory_the_heads_rows_stay_on_the_card() -> None:
    host = HostConfig(memory_limit_gib=0.1, resident_tokens=128, residency="fixed", threads=1)
    profiles = {"drafting": Composition.model_validate({"host": "offloaded", "draft": "mtp"})}
    engine, told = load(configure(host=host).model_copy(update={"profiles": profiles})), {}
    take_all(engine)
    head = engine._runner.decode_steps.loop.head
    assert head is not None
    assert head.layer in engine._runner.pool.dense_layers
    prompt = draw(500, 3)
    for profile in ("exact", "drafting"):
        engine.submit([structs.replace(request(profile, prompt, 30), attention_profile=profile)])
        told[profile] = text(drain(engine)[profile])
    assert told["drafting"] == told["exact"]
    assert engine.stats().drafts.proposed > 60
    assert engine._runner.host_read_times.steps > 20
    engine.shutdown()


def test_the_plan_counts_the_head_its_rows_and_what_it_keeps() -> None:
    plans = []
    for profiles in ({}, DRAFTING):
        config = configure().model_copy(update={"profiles": profiles})
        plans.append(plan_engine(config, load_architecture(config.model), probe_machine()))
    shape = load_architecture(ModelConfig(random_weights="tiny-qwen3.5"))
    plain, drafting = ({item.name: item.bytes for item in plan.items} for plan in plans)
    whole = load_architecture(ModelConfig(random_weights="tiny-qwen3.5"), drafts=True)
    assert drafting["weights"] - plain["weights"] == 4 * (whole.num_weights - shape.num_weights)
    assert whole.num_weights - shape.num_weights > 2 * shape.hidden**2
    assert drafting["decode workspace"] - plain["decode workspace"] == 2 * 17 * 32 * shape.hidden * 4
    pages = [plan.num_pages for plan in plans]
    assert drafting["KV pages"] * pages[0] == 2 * plain["KV pages"] * pages[1], "one layer of four attends"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (configure("tiny"), r"profiles\.drafting\.draft: mtp: tiny has no head that guess tokens; want a checkpoint"),
        (configure(disk=DiskConfig(folder="/tmp/none")), r"disk: contexts there have no rows of a head that drafts"),
    ],
)
def test_what_has_no_head_and_what_keeps_none_is_refused_by_name(config: EngineConfig, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_engine(config, load_architecture(config.model), probe_machine())
