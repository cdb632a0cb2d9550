"""Drafts by a small model, of real models in float32: text, logprobs and ends are those of steps of one token, and what
the small one has in its pages are rows of accepted tokens alone.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, product
from pathlib import Path

import numpy as np
import pytest

import scheduler.drafts.draft_model
from bench.engine_patches import switch_drafts
from gpu.config import Composition, DraftConfig, GpuConfig
from gpu.memory.plan import PlanError
from gpu.model.architecture import load_architecture
from gpu.model.family import family_folders
from scheduler.drafts.draft_model import DraftModel
from scheduler.engine.engine import Engine
from scheduler.engine_config import EngineConfig, PrefillConfig, SchedulerConfig
from scheduler.messages import ACCEPTED, REJECTED, Delta, EngineRequest
from scheduler.planning.engine_memory import plan_engine
from scheduler.sequences.sequence import Sequence as Running
from scheduler.sequences.sequence import State
from tests.gpu.reference_model import shallow_model
from tests.scheduler.drafting import note_drafts, take_all
from tests.scheduler.engines import drain, prompt_of
from tests.scheduler.real_model import ask_variously, check_told, load, shallow_config
from transfer.machine import probe_machine

MOST = 40
SAME, SMALLER = Path(shallow_model(4).name), Path(shallow_model(3).name)


def config_of(draft: DraftConfig, **scheduler: int) -> EngineConfig:
    return EngineConfig(
        model=shallow_config(),
        gpu=GpuConfig(device="cpu", dtype="float32", kv="float32", kv_cache_gib=0.05, threads=1),
        profiles={"drafting": Composition(draft=draft)},
        scheduler=SchedulerConfig(
            max_running=16,
            max_context_tokens=1024,
            prefix_cache=False,
            prefill=PrefillConfig(chunk_tokens=64),
            **scheduler,
        ),
    )


@pytest.fixture(scope="module", params=[False, True], ids=["one behind another", "launched ahead"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """It drafts by a model of fewer layers."""
    made = load(config_of(DraftConfig(model=SMALLER, most_tokens=5)))
    made._is_pipelined = request.param
    take_all(made)
    yield made
    made.shutdown()


def ask(number: int) -> EngineRequest:
    return ask_variously(
        number, (60, 300, 130, 17), ("drafting", "drafting", "exact", "drafting"), MOST,
        frequency_penalty=(0.0, 0.1)[number // 3 % 2],
    )  # fmt: skip


def serve(engine: Engine, is_on: bool, numbers: Sequence[int] = range(5)) -> dict[str, list[Delta]]:
    switch_drafts(engine.scheduler.drafts, is_on)
    engine.submit([ask(number) for number in numbers])
    return drain(engine)


def model_of(engine: Engine) -> DraftModel:
    model = engine.scheduler.drafts.model
    assert model is not None
    return model


@dataclass(eq=False)
class Told:
    """A request's tokens, as a draft model asks for them."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    request: EngineRequest = field(default_factory=lambda: ask(1))
    state: State = State.RUNNING
    num_in_flight: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def tokens_from(self, begin: int) -> np.ndarray:
        return np.array([*self.prompt, *self.output][begin:], np.int32)


def draft(model: DraftModel, told: Told, number: int) -> list[int]:
    """Return a draft, behind as many looks as taking in takes."""
    drafted: tuple[int, ...] = ()
    while not drafted:
        (drafted,) = model.draft([(told, number)])  # type: ignore[list-item]
    return list(drafted)


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, list[Delta]]:
    return serve(engine, is_on=False)


def test_what_is_drawn_and_told_is_what_it_is_token_by_token(engine: Engine, alone: dict[str, list[Delta]]) -> None:
    before = engine.stats().drafts
    told, after = serve(engine, is_on=True), engine.stats().drafts
    check_told(told, alone, ask)
    proposed, accepted = after.proposed - before.proposed, after.accepted - before.accepted
    assert proposed > accepted > 10
    assert after.model_seconds > before.model_seconds
    figures = [one[-1].figures for one in told.values()]
    assert sum(one.get(ACCEPTED, 0) for one in figures) == accepted
    assert sum(one.get(ACCEPTED, 0) + one.get(REJECTED, 0) for one in figures) == proposed
    assert model_of(engine).num_pages_held == 0


@pytest.mark.parametrize("is_right", [True, False])
def test_rows_follow_accepted_tokens_alone_and_such_that_do_not_are_seen(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_right: bool
) -> None:
    """Behind a draft of which each number is accepted, and some tokens that were not drafted, few or many."""
    if engine._is_pipelined:
        pytest.skip("once is enough: it is asked by itself")
    if not is_right:  # as if all that it drafted had been drawn
        monkeypatch.setattr(scheduler.drafts.draft_model, "count_equal", lambda new, tail: len(tail))
    model, most, num_other = model_of(engine), 6, 0
    for accepted, others in product(range(most + 1), (1, 5, 20)):
        told = Told(prompt_of(24, accepted), [3])
        drafted = draft(model, told, most)
        told.output += [*drafted[:accepted], *prompt_of(others, 77)]
        again = draft(model, told, most)
        model.forget(told)  # type: ignore[arg-type]
        num_other += draft(model, told, most) != again
        model.forget(told)  # type: ignore[arg-type]
    assert (num_other == 0) is is_right
    assert model.num_pages_held == 0


def test_the_same_model_is_right_and_every_number_is_accepted_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(config_of(DraftConfig(model=SAME)))
    take_all(engine)
    drafts, most = engine.scheduler.drafts, DraftConfig().most_tokens
    alone = serve(engine, is_on=False, numbers=(0, 1))
    check_told(serve(engine, is_on=True, numbers=(0, 1)), alone, ask)
    stats = drafts.stats()
    assert stats.accepted == stats.proposed > MOST
    model, turns, seen = model_of(engine), cycle(range(most + 1)), note_drafts(engine, monkeypatch)
    draft = model.draft

    def spoilt(asked: Sequence[tuple[Running, int]]) -> list[tuple[int, ...]]:
        right = next(turns)
        return [(*one[:right], *((token ^ 1) for token in one[right:])) for one in draft(asked)]

    monkeypatch.setattr(model, "draft", spoilt)
    for number in (0, 1):
        check_told(serve(engine, is_on=True, numbers=(number,)), {f"{number}": alone[f"{number}"]}, ask)
    engine.shutdown()
    assert {accepted for length, accepted in seen if length == most} >= set(range(most + 1))


def test_contexts_that_have_no_room_go_without_and_their_texts_are_the_same() -> None:
    engine = load(config_of(DraftConfig(model=SAME, cache_tokens=192)))
    take_all(engine)
    alone = serve(engine, is_on=False)
    told = serve(engine, is_on=True)
    figures = {name: one[-1].figures for name, one in told.items()}
    pages = model_of(engine).num_pages_held
    engine.shutdown()
    check_told(told, alone, ask)
    assert figures["0"].get(ACCEPTED)
    assert not figures["1"].get(ACCEPTED)
    assert pages == 0


def plan_of(config: EngineConfig) -> object:
    return plan_engine(config, load_architecture(config.model), probe_machine())


def test_its_memory_is_planned_and_the_others_pages_are_fewer() -> None:
    config = config_of(DraftConfig(model=SMALLER))
    config = config.model_copy(update={"gpu": GpuConfig(device="cpu", dtype="float32", threads=1, memory_limit_gib=2)})
    without = config.model_copy(update={"profiles": {}})
    plans = [plan_engine(one, load_architecture(one.model), probe_machine()) for one in (without, config)]
    items = [item for item in plans[1].items if item.name.startswith("draft model")]
    assert [item.name for item in items] == ["draft model", "draft model's steps", "draft model's KV"]
    assert all(item.bytes > 0 for item in items)
    pages = plans[0].num_pages - plans[1].num_pages
    page_bytes = plans[0].kv_bytes // plans[0].num_pages
    assert pages * page_bytes == pytest.approx(sum(item.bytes for item in items), abs=2 * page_bytes)
    assert plans[1].used_bytes("host") <= plans[1].limit_bytes["host"]


def test_what_cannot_draft_is_refused_by_name(tmp_path: Path) -> None:
    size = load_architecture(shallow_config()).vocab_size
    hybrid = family_folders()["qwen3_5"].shapes["tiny-qwen3.5"] | {"model_type": "qwen3_5_text", "vocab_size": size}
    smaller = json.loads((SMALLER / "config.json").read_text()) | {"vocab_size": size - 1}
    for shape, wanted in ((hybrid, "recurrent layers"), (smaller, "tokens, the model has")):
        (tmp_path / "config.json").write_text(json.dumps(shape))
        with pytest.raises(PlanError, match=rf"profiles\.drafting\.draft\.model.*{wanted}"):
            plan_of(config_of(DraftConfig(model=tmp_path)))
    two = config_of(DraftConfig(model=SAME)).model_copy(
        update={
            "profiles": {
                "a": Composition(draft=DraftConfig(model=SAME)),
                "b": Composition(draft=DraftConfig(model=SMALLER)),
            }
        }
    )
    with pytest.raises(PlanError, match=r"profiles\.b\.draft: model .* one model drafts for all"):
        plan_of(two)
    for given, wanted in (
        ({"model": SAME, "profile": "indexed"}, "together with `profile`"),
        ({"model": SAME, "least_match": 3}, "together with `model`"),
        ({"cache_tokens": 128}, "there is no `model`"),
    ):
        with pytest.raises(ValueError, match=wanted):
            DraftConfig(**given)
