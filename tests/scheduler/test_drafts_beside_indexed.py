"""Drafts of requests whose contexts are read by an index, by a real model in float32: rows of a draft take turns in the
ring, so each reads and estimates what it would alone, and the text is that of steps of one token.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from bench.engine_patches import switch_drafts
from gpu.attention.step_rows import StepRows
from gpu.config import Composition, DraftConfig, GpuConfig
from gpu.profiles import ProfileError, resolve_profiles
from scheduler.engine.engine import Engine
from scheduler.engine_config import EngineConfig, SchedulerConfig
from scheduler.messages import ACCEPTED, REJECTED, Delta, EngineRequest
from tests.scheduler.drafting import foresee
from tests.scheduler.engines import drain, text
from tests.scheduler.real_model import (
    ask_variously,
    check_every_number,
    check_preemption,
    check_told,
    load,
    logprobs,
    shallow_config,
)
from transfer.host_config import HostConfig

LENGTH = 5
INDEX = {"method": "indexed", "min_context_tokens": 0, "rings": 3, "index_tokens": 12_288, "budget_share": 0.05,
         "least_tokens": 16}  # fmt: skip
PROFILES = ("by_index", "by_index", "whole", "exact", "exact", "exact")
MOST = 40


def make(device: str, is_counted: bool) -> Engine:
    """Return an engine, which counts in every layer of every step who reads what, or goes without."""
    draft = DraftConfig(most_tokens=LENGTH)
    config = EngineConfig(
        model=shallow_config(),
        gpu=GpuConfig(device=device, dtype="float32", kv_cache_gib=0.05, threads=1, check_coverage=is_counted),
        host=HostConfig(memory_limit_gib=0.05, threads=1, resident_tokens=128, residency="fixed"),
        profiles={
            "by_index": Composition(host=INDEX, draft=draft),
            "whole": Composition(host="offloaded", draft=draft),
        },
        scheduler=SchedulerConfig(max_running=24, max_context_tokens=2600, prefix_cache=False),
    )
    return load(config)


COUNTED = ("cpu", True)
UNCOUNTED = pytest.param(("cpu", False), marks=pytest.mark.long)
CAPTURED = pytest.param(("cuda", False), marks=pytest.mark.gpu)


@pytest.fixture(scope="module")
def loaded() -> Iterator[dict[tuple[str, bool], Engine]]:
    """Engines by their parameters. Tests of one do not stand together, and pytest would load it for each of them."""
    found: dict[tuple[str, bool], Engine] = {}
    yield found
    for engine in found.values():
        engine.shutdown()


@pytest.fixture(scope="module")
def told_alone() -> dict[Engine, dict[str, list[Delta]]]:
    """What each engine told token by token."""
    return {}


@pytest.fixture(scope="module", params=[UNCOUNTED, COUNTED, CAPTURED], ids=["counted by nobody", "counted", "captured"])
def engine(request: pytest.FixtureRequest, loaded: dict[tuple[str, bool], Engine]) -> Engine:
    if request.param not in loaded:
        loaded[request.param] = make(*request.param)
    return loaded[request.param]


def ask(number: int) -> EngineRequest:
    return ask_variously(number, (333, 300, 280, 60), PROFILES, MOST, temperatures=(0.0, 0.6))


def serve(engine: Engine, numbers: Sequence[int] = range(4)) -> dict[str, list[Delta]]:
    engine.submit([ask(number) for number in numbers])
    return drain(engine)


@pytest.fixture(scope="module")
def alone(engine: Engine, told_alone: dict[Engine, dict[str, list[Delta]]]) -> dict[str, list[Delta]]:
    if engine not in told_alone:
        switch_drafts(engine.scheduler.drafts, False)
        told_alone[engine] = serve(engine)
    return told_alone[engine]


def draft(engine: Engine, alone: Mapping[str, list[Delta]], spoilt: float) -> None:
    switch_drafts(engine.scheduler.drafts, True)
    foresee(engine, {name: text(deltas) for name, deltas in alone.items()}, spoilt)


@pytest.mark.parametrize(
    ("engine", "spoilt"),
    [
        pytest.param(("cpu", False), 0.3, marks=pytest.mark.long), (COUNTED, 0.3),
        *(pytest.param(COUNTED, spoilt, marks=pytest.mark.long) for spoilt in (0.0, 1.0)),
        pytest.param(("cuda", False), 0.3, marks=pytest.mark.gpu),
    ],
    indirect=["engine"],
)  # fmt: skip
def test_what_is_drawn_and_told_is_what_it_is_token_by_token(
    engine: Engine, alone: dict[str, list[Delta]], spoilt: float
) -> None:
    draft(engine, alone, spoilt)
    told = serve(engine)
    check_told(told, alone, ask)
    figures = told["0"][-1].figures
    assert (figures.get(ACCEPTED, 0) > 10) is (spoilt < 1.0)
    assert (figures.get(REJECTED, 0) > 2) is (spoilt > 0.0)
    assert figures["index_heads"] >= alone["0"][-1].figures["index_heads"] > 0, "those of refused rows count as well"
    assert all(not side.held for side in engine._runner.ring_sides.values())


@pytest.mark.parametrize("engine", [COUNTED, CAPTURED], indirect=True)
def test_every_number_of_drafted_tokens_is_accepted_and_refused(
    engine: Engine, alone: dict[str, list[Delta]], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_every_number(engine, alone, ask, LENGTH, monkeypatch, "by_index")


@pytest.mark.parametrize("engine", [COUNTED, CAPTURED], indirect=True)
def test_one_that_is_preempted_with_a_draft_goes_on_as_if_it_had_not(
    engine: Engine, alone: dict[str, list[Delta]]
) -> None:
    def switch(is_on: bool) -> None:
        if is_on:
            draft(engine, alone, 0.2)
        else:
            switch_drafts(engine.scheduler.drafts, False)

    check_preemption(engine, ask, switch, alone)
    assert all(not side.held for side in engine._runner.ring_sides.values())


@pytest.mark.parametrize("engine", [UNCOUNTED], indirect=True)
def test_rows_that_do_not_take_turns_are_seen(
    engine: Engine, alone: dict[str, list[Delta]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power: as if the last row of a draft had the ring for all. Captured steps have their turns already."""
    monkeypatch.setattr(StepRows, "list_turns", lambda self, entries: [entries])
    draft(engine, alone, 0.0)
    with_drafts, without = ([one.logprob for one in logprobs(told["1"])] for told in (serve(engine, [1]), alone))
    assert len(with_drafts) == MOST - 1
    assert with_drafts != pytest.approx(without, abs=1e-3)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"resident": "auto"}, "by how many rows a step has"),
        ({"errors": {"epsilon": 0.1}}, "tokens that are not drawn"),
    ],
)
def test_what_would_follow_tokens_that_are_not_drawn_is_refused(index: dict[str, Any], words: str) -> None:
    profiles = {"a": Composition(host=INDEX | index, draft=DraftConfig())}
    with pytest.raises(ProfileError, match=rf"profiles\.a\.draft: is not served with 'indexed': .*{words}"):
        resolve_profiles(profiles, HostConfig(memory_limit_gib=0.05))
