"""Drafts of requests that a grammar or other rules hold, by a real model in float32: whoever drafts, text, logprobs and
ends are those of steps of one token.
"""

from collections.abc import Iterator

import msgspec
import pytest

from bench.engine_patches import switch_drafts
from gpu.config import Composition, DraftConfig, GpuConfig
from scheduler.engine.engine import Engine
from scheduler.engine_config import EngineConfig, PrefillConfig, SchedulerConfig
from scheduler.messages import ACCEPTED, Delta, EngineRequest
from tests.scheduler.drafting import take_all
from tests.scheduler.engines import drain, text
from tests.scheduler.real_model import ask_variously, check_preemption, check_told, load, shallow_config, small_host
from tests.scheduler.test_drafts_by_a_model import SMALLER
from tests.scheduler.test_jumps_of_a_model import GRAMMAR

PROFILES = ("ngrams", "beside", "verified", "assisted", "exact")
DRAFTING = PROFILES[:-1]
MOST = 64
INDEX = {"method": "indexed", "min_context_tokens": 0, "rings": 4, "index_tokens": 16_384, "budget_share": 1.0,
         "budget_tokens": 8192}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """N-grams on the device and over host memory, an index that reads all, and a smaller model draft."""
    config = EngineConfig(
        model=shallow_config(),
        gpu=GpuConfig(device="cpu", dtype="float32", kv="float32", kv_cache_gib=0.05, threads=1),
        host=small_host(),
        profiles={
            "ngrams": Composition(draft=DraftConfig(least_match=2)),
            "beside": Composition(host="offloaded", draft=DraftConfig(least_match=2)),
            "all": Composition(host=INDEX),
            "verified": Composition(host="offloaded", draft=DraftConfig(profile="all", most_tokens=4)),
            "assisted": Composition(draft=DraftConfig(model=SMALLER, most_tokens=4)),
        },
        scheduler=SchedulerConfig(
            max_running=40, max_context_tokens=1024, prefix_cache=False, prefill=PrefillConfig(chunk_tokens=64)
        ),
    )
    made = load(config)
    take_all(made)
    yield made
    made.shutdown()


def ask(number: int) -> EngineRequest:
    """Grammars for half of them; for the others ends that may not come yet, tokens that are banned behind others, and
    some that alone are allowed.
    """
    asked = ask_variously(
        number, (220, 200, 260, 290), PROFILES, MOST, GRAMMAR if number % 2 == 0 else "",
        frequency_penalty=(0.0, 0.0, 0.4)[number % 3],
    )  # fmt: skip
    if number % 4 == 1:
        asked = msgspec.structs.replace(asked, stop_token_ids=(5, 6), min_tokens=MOST)
    if number == 7:  # of what an index drafts on the device
        asked = msgspec.structs.replace(asked, allowed_token_ids=tuple(range(1000)))
    elif number % 4 == 3:
        pairs = [(first, second) for first in range(100, 140) for second in range(100, 180, 3)]
        asked = msgspec.structs.replace(asked, bad_token_ids=((7,), *pairs), allowed_token_ids=tuple(range(1000)))
    return asked


NUMBERS = range(10)


def serve(engine: Engine, drafts: bool, jumps: bool) -> dict[str, list[Delta]]:
    switch_drafts(engine.scheduler.drafts, drafts)
    engine.scheduler.jumps.is_on = jumps
    engine.submit([ask(number) for number in NUMBERS])
    return drain(engine)


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, list[Delta]]:
    return serve(engine, drafts=False, jumps=False)


@pytest.mark.parametrize("jumps", [pytest.param(False, marks=pytest.mark.long), True])
def test_what_is_drawn_and_told_is_what_it_is_token_by_token(
    engine: Engine, alone: dict[str, list[Delta]], jumps: bool
) -> None:
    told = serve(engine, drafts=True, jumps=jumps)
    check_told(told, alone, ask)
    accepted = {name: one[-1].figures.get(ACCEPTED, 0) for name, one in told.items()}
    by_profile = {name: sum(accepted[f"{at}"] for at in NUMBERS if PROFILES[at % 5] == name) for name in PROFILES}
    assert all(by_profile[name] > 0 for name in DRAFTING), by_profile
    assert by_profile["exact"] == 0
    under_grammars = sum(accepted[f"{at}"] for at in NUMBERS if ask(at).grammar)
    assert under_grammars > MOST // 4
    assert sum(accepted.values()) > under_grammars, "and under other rules"


def test_one_that_is_preempted_with_a_draft_goes_on_as_if_it_had_not(
    engine: Engine, alone: dict[str, list[Delta]]
) -> None:
    """Each source of drafts has one of the four; its rings and its pages come back."""
    engine.scheduler.jumps.is_on = False
    check_preemption(engine, ask, lambda is_on: switch_drafts(engine.scheduler.drafts, is_on), alone)
    model = engine.scheduler.drafts.model
    assert model is not None
    assert model.num_pages_held == 0
    assert not any(side.held or side.resting for side in engine._runner._reusing.values())


def test_texts_of_several_answers_and_their_ends_are_the_same_with_drafts(engine: Engine) -> None:
    """`n`: requests of one prompt, other seeds, whose ends come where a stop token is drawn."""
    told: dict[bool, dict[str, list[int]]] = {}
    for is_on in (False, True):
        switch_drafts(engine.scheduler.drafts, is_on)
        first = msgspec.structs.replace(ask(5), stop_token_ids=list(range(300, 340)), min_tokens=12, max_tokens=60)
        answers = [
            msgspec.structs.replace(
                first,
                request_id=f"{seed}",
                sampling=msgspec.structs.replace(first.sampling, seed=seed, temperature=0.8),
            )
            for seed in range(4)
        ]
        engine.submit(answers)
        told[is_on] = {name: text(deltas) for name, deltas in drain(engine).items()}
    assert told[True] == told[False]
    assert len({tuple(one) for one in told[True].values()}) == 4
    assert all(len(one) >= 12 for one in told[True].values())
