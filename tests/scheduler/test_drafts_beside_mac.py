"""Drafts of requests whose heads reuse what earlier queries read, by a real model in float32: rings follow what was
accepted alone, so the text is that of steps of one token with the same settings.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from bench.engine_patches import switch_drafts
from gpu.methods.mac import Mac
from gpu.profiles import ProfileError, resolve_profiles
from scheduler.engine.engine import Engine
from scheduler.engine_config import SchedulerConfig
from scheduler.messages import ACCEPTED, REJECTED, Delta, EngineRequest
from tests.scheduler.drafting import foresee
from tests.scheduler.engines import drain, text
from tests.scheduler.real_model import ask_variously, check_every_number, check_preemption, check_told, logprobs
from tests.scheduler.tiered_engine import running_engine, tiered_config

LENGTH = 4
MAC = {
    "method": "mac", "max_prefix_share": 1.0, "capacity": 48, "band": 16, "min_context_tokens": 0, "rings": 3,
    "max_age": 200, "tau": 0.3, "stops_matching": False, "min_gap": LENGTH + 1, "max_gap": 48 - LENGTH - 1,
}  # fmt: skip
DRAFT = {"source": "ngram", "most_tokens": LENGTH}
PROFILES: dict[str, Any] = {
    "reusing": {"reuse": MAC, "draft": DRAFT},
    "whole": {"reuse": MAC, "host": "offloaded", "draft": DRAFT},
}
MOST = 40


def make(profiles: Mapping[str, Any], **more: Any) -> Any:
    scheduler = SchedulerConfig(max_running=24, max_context_tokens=640, prefix_cache=False)
    host = {"memory_limit_gib": 0.02, "residency": "fixed"}
    return running_engine(tiered_config(0.02, host, scheduler, dict(profiles), **more))


@pytest.fixture(scope="module", params=[False, True], ids=["counted by nobody", "counted"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """It counts in every layer of every step who reads what, or goes without."""
    with make(PROFILES, check_coverage=request.param) as made:
        yield made


def ask(number: int) -> EngineRequest:
    return ask_variously(number, (180, 260, 60), ("reusing", "whole", "exact"), MOST, temperatures=(0.0, 0.6))


def serve(engine: Engine, numbers: Sequence[int] = range(4)) -> dict[str, list[Delta]]:
    engine.submit([ask(number) for number in numbers])
    return drain(engine)


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, list[Delta]]:
    switch_drafts(engine.scheduler.drafts, False)
    before = hits_of(engine)
    told = serve(engine)
    assert hits_of(engine) - before > 100, "without matches this says nothing"
    return told


def hits_of(engine: Engine) -> int:
    engine.step()  # counters are those of steps that are over
    return sum(sum(counts["reuse_hits"]) for counts in engine._runner.method_counts().values() if counts)


def draft(engine: Engine, alone: Mapping[str, list[Delta]], spoilt: float) -> None:
    switch_drafts(engine.scheduler.drafts, True)
    foresee(engine, {name: text(deltas) for name, deltas in alone.items()}, spoilt)


@pytest.mark.parametrize(
    ("engine", "spoilt"),
    [(True, 0.0), (True, 0.3), (True, 1.0), pytest.param(False, 0.3, marks=pytest.mark.long)],
    indirect=["engine"],
)
def test_what_is_drawn_and_told_is_what_it_is_token_by_token(
    engine: Engine, alone: dict[str, list[Delta]], spoilt: float
) -> None:
    draft(engine, alone, spoilt)
    before = hits_of(engine)
    told = serve(engine)
    check_told(told, alone, ask)
    assert hits_of(engine) - before > 100
    for name in ("0", "1"):
        figures = told[name][-1].figures
        assert (figures.get(ACCEPTED, 0) > 10) is (spoilt < 1.0)
        assert (figures.get(REJECTED, 0) > 2) is (spoilt > 0.0)
    assert all(not side.held for side in engine._runner.ring_sides.values())


@pytest.mark.parametrize("engine", [False], indirect=True)
def test_every_number_of_drafted_tokens_is_accepted_and_refused(
    engine: Engine, alone: dict[str, list[Delta]], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_every_number(engine, alone, ask, LENGTH, monkeypatch)


@pytest.mark.parametrize("engine", [True], indirect=True)
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


def test_rows_that_match_one_another_or_what_was_refused_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power: as if near and far matches were right beside drafts. Log probabilities tell before texts do."""
    monkeypatch.setattr(Mac, "why_no_draft", lambda self, settings, most_tokens: "")
    changed = {"reusing": {"reuse": MAC | {"min_gap": 1, "max_gap": 48}, "draft": DRAFT}}
    with make(changed) as engine:
        asked = ask_variously(1, (180,), ("reusing",), MOST, temperatures=(0.6,))
        told = {}
        for is_on in (False, True):
            if is_on:
                draft(engine, told[False], 0.3)
            else:
                switch_drafts(engine.scheduler.drafts, False)
            engine.submit([asked])
            told[is_on] = drain(engine)
        with_drafts, without = ([one.logprob for one in logprobs(told[is_on]["1"])] for is_on in (True, False))
        assert with_drafts != pytest.approx(without, abs=1e-3)


@pytest.mark.parametrize(
    ("reuse", "draft", "words"),
    [
        ({"min_gap": LENGTH}, DRAFT, r"set min_gap to 5 and max_gap to 43 at most"),
        ({"max_gap": 44}, DRAFT, r"set min_gap to 5 and max_gap to 43 at most"),
        ({}, {"source": "ngram"}, r"set min_gap to 8 and max_gap to 40 at most"),
    ],
)
def test_gaps_that_drafts_would_reach_are_refused_with_what_to_set(
    reuse: dict[str, Any], draft: dict[str, Any], words: str
) -> None:
    config = tiered_config(0.02, {}, SchedulerConfig(), {"a": {"reuse": MAC | reuse, "draft": draft}})
    with pytest.raises(ProfileError, match=rf"profiles\.a\.draft: is not served with 'mac': .*{words}"):
        resolve_profiles(config.all_profiles, config.host)
