"""A model with recurrent layers behind the engine: turns, forks and preemptions give the text of a cold server."""

import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from gpu.config import Composition, GpuConfig, ModelConfig
from gpu.memory.demand import PlanError
from gpu.model.architecture import load_architecture
from gpu.sampling_params import SamplingParams
from scheduler.engine.engine import Engine
from scheduler.engine_config import EngineConfig
from scheduler.messages import Delta, EngineRequest, pack_tokens
from scheduler.planning.engine_memory import plan_engine
from tests.scheduler.drafting import foresee
from tests.scheduler.engines import drain, text
from tests.scheduler.real_model import load_small
from transfer.host_config import HostConfig
from transfer.machine import probe_machine

GREEDY = SamplingParams(temperature=0.0)
ANSWERS = (70, 20)
FEW_TOKENS = (24, 8)  # of answers where no snapshots are taken on the way: they pass the ends of pages


def make_engine(
    pages_gib: float = 0.3, states_gib: float | None = None, snapshot_tokens: int = 64, name: str = "tiny-qwen3.5",
    device: str = "cpu", folder: Path | None = None, host_states_gib: float | None = None, drafts: bool = False,
    **more: Any,
) -> Engine:  # fmt: skip
    gpu = {"device": device, "kv_cache_gib": pages_gib, "states_gib": states_gib, "snapshot_tokens": snapshot_tokens,
           "host_states_gib": host_states_gib}  # fmt: skip
    profiles = {"drafting": Composition.model_validate({"draft": "ngram"})} if drafts else {}
    return load_small(name if folder is None else ModelConfig(path=folder), gpu, profiles=profiles, **more)


def test_a_plan_says_how_many_tokens_a_step_drafts() -> None:
    config = EngineConfig(
        model=ModelConfig(random_weights="tiny-qwen3.5"), gpu=GpuConfig(device="cpu", dtype="float32", threads=1),
        profiles={"quick": Composition.model_validate({"draft": "ngram"})},
    )  # fmt: skip
    plan = plan_engine(config, load_architecture(config.model), probe_machine())
    assert "up to 5 rows of a sequence, so it drafts up to 4 tokens for it and not 7" in " ".join(plan.notes)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (
            {"states_gib": 1e-5},
            r"states_gib: asked 1e-05 GiB, a state of .* takes 245,760 bytes; raise it to 0.000229 GiB",
        ),
        (
            {"states_gib": 9000.0},
            r"states_gib: asked 9000 GiB, there are .* GiB beside weights and workspaces; lower it",
        ),
        (
            {"host_states_gib": 1e-5},
            r"host_states_gib: asked 1e-05 GiB, a state of .* takes 245,760 bytes; raise it to 0.000229 GiB",
        ),
        ({"states_gib": 0.5, "kv_cache_gib": 0.25}, r"asked 0\.5 GiB, there are 0\.25 GiB of gpu\.kv_cache_gib; lower"),
    ],
)
def test_a_budget_of_states_that_holds_none_or_does_not_fit_is_refused_by_name(
    budget: dict[str, float], message: str
) -> None:
    config = EngineConfig(
        model=ModelConfig(random_weights="tiny-qwen3.5"),
        gpu=GpuConfig.model_validate({"device": "cpu", "dtype": "float32", "threads": 1} | budget),
    )
    with pytest.raises(PlanError, match=message):
        plan_engine(config, load_architecture(config.model), probe_machine())


@pytest.mark.parametrize("key", ["states_gib", "host_states_gib"])
def test_states_of_a_model_that_has_none_are_refused_by_name(key: str) -> None:
    config = EngineConfig(
        model=ModelConfig(random_weights="tiny"),
        gpu=GpuConfig.model_validate({"device": "cpu", "dtype": "float32", "threads": 1, key: 0.5}),
    )
    with pytest.raises(PlanError, match=rf"gpu\.{key}: asked 0\.5 GiB, tiny has no recurrent layers; leave it out"):
        plan_engine(config, load_architecture(config.model), probe_machine())


def ask(name: str, prompt: list[int], max_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt=pack_tokens(prompt), max_tokens=max_tokens, stop_token_ids=(), sampling=GREEDY,
        attention_profile="exact", arrival_s=time.monotonic(),
    )  # fmt: skip


def draw(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 1000, length).tolist()


def serve(engine: Engine, requests: list[EngineRequest]) -> list[tuple[list[int], int]]:
    """Each one's text, and its tokens that were not computed."""
    engine.submit(requests)
    deltas = drain(engine)
    return [(text(deltas[request.request_id]), deltas[request.request_id][0].num_cached_tokens) for request in requests]


def converse(
    engine: Engine, heard: list[list[int]] | None = None, answers: tuple[int, int] = ANSWERS
) -> tuple[list[list[int]], list[int]]:
    """Two agents with one system prompt take turns; one forks, and one takes a turn back. Return the texts, and of each
    prompt the tokens that were not computed. heard: what the agents take for the answers, None: the answers;
    answers: tokens of each agent's.

    Turns are 120 tokens long. One agent's answers pass the end of a snapshot, the other's are short, as steps are dear.
    """
    system, texts, cached = draw(200, 0), [], []
    histories = {name: [*system, *draw(40, 1 + number)] for number, name in enumerate("ab")}
    for turn in range(3):
        for number, name in enumerate("ab"):
            told = serve(engine, [ask(f"{name}{turn}", histories[name], answers[number])])[0]
            texts.append(told[0])
            cached.append(told[1])
            answer = told[0] if heard is None else heard[len(texts) - 1]
            histories[name] = [*histories[name], *answer, *draw(120 - answers[number], 100 + 10 * turn + number)]
    forks = [ask(f"f{number}", [*histories["a"], *draw(5 * number, 50)], 20) for number in range(3)]
    for told, found in serve(engine, forks):
        texts.append(told)
        cached.append(found)
    told, found = serve(engine, [ask("back", [*histories["b"][:500], *draw(20, 7)], 20)])[0]
    return [*texts, told], [*cached, found]


@cache
def converse_cold() -> tuple[list[list[int]], list[int]]:
    return converse(make_engine(prefix_cache=False))


@cache
def converse_warm() -> tuple[list[list[int]], list[int]]:
    return converse(make_engine(states_gib=0.02))


@cache
def converse_with_few_states() -> tuple[list[list[int]], list[int]]:
    """Three states on the card: turns of two conversations push each other's snapshots out."""
    return converse(make_engine(states_gib=0.0008, max_running=2))


def test_turns_forks_and_a_turn_taken_back_give_the_text_of_a_cold_server() -> None:
    cold, warm = converse_cold(), converse_warm()
    assert warm[0] == cold[0]
    assert cold[1] == [0] * 10
    later = warm[1][2:6]
    lengths = [200 + 40 + 120 * turn for turn in (1, 1, 2, 2)]
    computed = [length - found for length, found in zip(lengths, later, strict=True)]
    assert all(count <= 120 - ANSWERS[place % 2] + 64 + 32 for place, count in enumerate(computed))


def test_few_states_and_few_pages_change_no_text() -> None:
    assert converse_with_few_states()[0] == converse_cold()[0]
    assert converse(make_engine(pages_gib=0.02, max_running=3))[0] == converse_cold()[0]


def test_snapshots_that_the_card_gave_up_come_back_from_host_memory_and_change_no_text() -> None:
    cold = converse_cold()
    engine = make_engine(states_gib=0.0008, host_states_gib=0.02, max_running=2)
    windows = engine.scheduler.residence.windows
    assert windows.count == 3
    texts, cached = converse(engine)
    assert texts == cold[0]
    assert sum(cached) > sum(converse_with_few_states()[1]) + 300
    assert cached[2:6] == converse_warm()[1][2:6], "as if the card had room for all"


def test_a_snapshot_in_host_memory_that_is_stale_gives_another_text() -> None:
    """Power: what lies in host memory is changed."""
    first, second = ask("a", draw(300, 3), 4), ask("b", [*draw(300, 3), *draw(3, 4)], 30)
    wanted = serve(make_engine(prefix_cache=False), [second])[0][0]
    for factor in (1.0, -1.0):
        engine = make_engine(states_gib=0.0005, host_states_gib=0.01)
        serve(engine, [first])
        serve(engine, [ask(f"other {number}", draw(100, 10 + number), 4) for number in range(3)])
        states = engine._runner.pool.states
        assert states is not None
        for rows, _ in states.host.places:
            rows.mul_(factor)
        told, found = serve(engine, [second])[0]
        assert found == 288
        assert (told == wanted) is (factor > 0)


def test_a_state_that_is_stale_gives_another_text() -> None:
    """Power: what is kept is changed under the engine's feet."""
    engine, cold = make_engine(), make_engine(prefix_cache=False)
    first, second = ask("a", draw(300, 3), 4), ask("b", [*draw(300, 3), *draw(3, 4)], 30)
    serve(engine, [first])
    states = engine._runner.pool.states
    assert states is not None
    with torch.inference_mode():
        states.arenas[0].mul_(-1.0)
    told, found = serve(engine, [second])[0]
    assert found == 288
    assert told != serve(cold, [ask("b", second.prompt_token_ids, 30)])[0][0]


def test_many_at_once_are_each_served_as_alone() -> None:
    requests = [ask(f"r{number}", draw(20 + 37 * number, number), 40) for number in range(6)]
    cold = make_engine(prefix_cache=False, max_running=1)
    alone = [serve(cold, [request])[0][0] for request in requests]
    for pages_gib in (0.3, 0.02):
        assert [told for told, _ in serve(make_engine(pages_gib=pages_gib), requests)] == alone


def preempt_often(engine: Engine, requests: list[EngineRequest], num_steps: int) -> list[list[int]]:
    """Each one's text, where a request is preempted every so many steps."""
    engine.submit(requests)
    told: dict[str, list[Delta]] = {}
    for step in range(20_000):
        if not engine.has_work:
            break
        for delta in engine.step():
            told.setdefault(delta.request_id, []).append(delta)
        running = engine.scheduler.roster.running
        if step % num_steps == num_steps - 1 and running:
            engine.scheduler.roster.preempt_last([running[step % len(running)]])
    return [text(told[request.request_id]) for request in requests]


@pytest.mark.parametrize("name", ["tiny-qwen3.5", "tiny-lfm2", "tiny-nemotron-h"])  # a kind of state each
def test_one_that_is_preempted_goes_on_with_its_live_state_and_no_text_changes(name: str) -> None:
    """And choices of one prompt compute no more than its last block."""
    requests = [ask(f"r{number}", draw(21 + 50 * number, number), 50) for number in range(3)]
    requests += [ask(f"n{number}", draw(150, 9), 30) for number in range(3)]
    cold = make_engine(prefix_cache=False, max_running=1, name=name)
    wanted = [serve(cold, [request])[0][0] for request in requests]
    engine = make_engine(name=name, states_gib=0.01)
    assert preempt_often(engine, requests, 4) == wanted
    stats = engine.stats()
    assert stats.preemptions > 10
    assert stats.recomputed_tokens == 0
    assert serve(engine, [ask(f"m{number}", draw(150, 9), 30) for number in range(2)]) == 2 * [(wanted[3], 144)]


def test_a_live_state_that_is_stale_gives_another_text() -> None:
    """Power: what a preempted request left is changed while it waits."""
    request = ask("a", draw(70, 5), 50)
    wanted = serve(make_engine(prefix_cache=False), [request])[0][0]
    for arena in (0, 1):
        engine = make_engine()
        engine.submit([request])
        told = [delta for _ in range(20) for delta in engine.step()]
        engine.scheduler.roster.preempt_last([*engine.scheduler.roster.running])
        states = engine._runner.pool.states
        assert states is not None
        with torch.inference_mode():
            states.arenas[arena].mul_(-1.0)
        said = text(told + drain(engine)["a"])
        assert engine.stats().recomputed_tokens == 0
        assert len(said) == 50
        assert said != wanted


def converse_at_length(engine: Engine, profile: str) -> tuple[list[list[int]], list[int]]:
    """Four turns of a conversation that outgrows the device: texts, and tokens that each turn computed."""
    history, texts, computed = draw(1500, 0), [], []
    for turn in range(4):
        told, found = serve(engine, [structs.replace(ask(f"t{turn}", history, 40), attention_profile=profile)])[0]
        texts.append(told)
        computed.append(len(history) - found)
        history = [*history, *told, *draw(60, 5 + turn)]
    return texts, computed


@cache
def converse_at_length_cold(name: str = "tiny-qwen3.5") -> tuple[list[list[int]], list[int]]:
    return converse_at_length(make_engine(prefix_cache=False, max_context_tokens=4096, name=name), "exact")


@pytest.mark.parametrize(
    ("name", "residency"),
    [
        ("tiny-qwen3.5", "fixed"),
        ("tiny-qwen3.5", "adaptive"),
        pytest.param("tiny-nemotron-h", "fixed", marks=pytest.mark.long),
    ],
)
def test_contexts_that_lie_in_host_memory_go_on_from_snapshots_and_give_the_same_text(
    name: str, residency: str
) -> None:
    host = HostConfig(memory_limit_gib=0.25, resident_tokens=256, residency=residency, threads=1)
    engine = make_engine(host=host, max_context_tokens=4096, name=name)
    texts, computed = converse_at_length(engine, "offloaded")
    engine.shutdown()
    assert texts == converse_at_length_cold(name)[0]
    assert max(computed[1:]) <= 100 + 64 + 64 + 16, "what is new, a window and an offload block"


def test_drafts_over_contexts_in_host_memory_change_no_text() -> None:
    texts = converse_at_length_cold()[0]
    host = HostConfig(memory_limit_gib=0.25, resident_tokens=256, threads=1)
    engine = make_engine(host=host, max_context_tokens=4096, drafts=True, max_running=12)
    foresee(engine, {f"t{turn}": told for turn, told in enumerate(texts)}, 0.3)
    assert converse_at_length(engine, "drafting")[0] == texts
    assert engine.stats().drafts.accepted > 40
    engine.shutdown()
