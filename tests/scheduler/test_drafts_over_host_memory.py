"""Drafts over contexts in host memory, of a real model in float32: the text is that of steps of one token, the host
reads a context once for all rows of a draft, and every row reads all of its own.
"""

from collections.abc import Iterator
from functools import cache

import pytest

from bench.engine_patches import has_drafts, switch_drafts
from gpu.config import Composition, DraftConfig, GpuConfig
from scheduler.engine.engine import Engine
from scheduler.engine_config import EngineConfig, SchedulerConfig
from scheduler.messages import Delta, EngineRequest
from tests.scheduler.drafting import foresee
from tests.scheduler.engines import drain, text
from tests.scheduler.real_model import ask_variously, check_every_number, check_told, load, shallow_config, small_host

PROFILES = ("whole", "sample", "whole", "offloaded", "exact")
MOST = 64
DRAFT = DraftConfig()


@pytest.fixture(
    scope="module", params=[pytest.param(False, marks=pytest.mark.long), True], ids=["counted by nobody", "counted"]
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """It counts in every layer of every step who reads what, or goes without."""
    config = EngineConfig(
        model=shallow_config(),
        gpu=GpuConfig(device="cpu", dtype="float32", kv_cache_gib=0.05, threads=1, check_coverage=request.param),
        host=small_host(),
        profiles={
            "whole": Composition(host="offloaded", draft=DRAFT),
            "sample": Composition(host="sampled", draft=DRAFT),
        },
        scheduler=SchedulerConfig(max_running=24, max_context_tokens=2600, prefix_cache=False),
    )
    made = load(config)
    yield made
    made.shutdown()


def ask(number: int) -> EngineRequest:
    penalty = (0.0, 0.4)[number // 2 % 2]
    return ask_variously(number, (480, 500, 60, 333), PROFILES, MOST, frequency_penalty=penalty)


def switch(engine: Engine, is_on: bool, spoilt: float = 0.3) -> None:
    """Have drafts, of the texts that come without them, spoilt; or none."""
    drafts = engine.scheduler.drafts
    if is_on and not has_drafts(drafts):
        foresee(engine, {name: text(deltas) for name, deltas in drain_without(engine).items()}, spoilt)
    switch_drafts(drafts, is_on)


def drain_without(engine: Engine) -> dict[str, list[Delta]]:
    switch_drafts(engine.scheduler.drafts, False)
    return drain_once(engine)


@cache
def drain_once(engine: Engine) -> dict[str, list[Delta]]:
    engine.submit([ask(number) for number in range(6)])
    return drain(engine)


@pytest.mark.parametrize(
    ("engine", "spoilt"),
    [(True, 0.3), (False, 0.3), (True, 0.0), (True, 1.0)],
    indirect=["engine"],
)
@pytest.mark.long
def test_what_is_drawn_and_told_is_what_it_is_token_by_token(engine: Engine, spoilt: float) -> None:
    alone = drain_without(engine)
    before = engine.stats()
    switch(engine, True, spoilt)
    engine.submit([ask(number) for number in range(6)])
    told = drain(engine)
    after = engine.stats()
    check_told(told, alone, ask)
    proposed, accepted = (
        getattr(after.drafts, name) - getattr(before.drafts, name) for name in ("proposed", "accepted")
    )
    assert proposed > MOST
    assert (accepted == proposed, accepted == 0) == (spoilt == 0.0, spoilt == 1.0)


@pytest.mark.parametrize("engine", [True], indirect=True)
def test_every_number_of_drafted_tokens_is_accepted_and_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_every_number(engine, drain_without(engine), ask, 5, monkeypatch)


@pytest.mark.parametrize("engine", [True], indirect=True)
def test_the_host_reads_a_context_once_for_all_rows_of_a_draft(engine: Engine) -> None:
    """Of a draft that is right throughout: rows read of contexts go by steps, not by tokens."""
    read, tokens = {}, {}
    for is_on in (False, True):
        switch_drafts(engine.scheduler.drafts, False)
        switch(engine, is_on, 0.0)
        before = engine.stats().host
        engine.submit([ask(0)])
        tokens[is_on] = len(text(drain(engine)["0"]))
        after = engine.stats().host
        assert before is not None
        assert after is not None
        read[is_on] = after.rows_read - before.rows_read
    assert tokens[True] == tokens[False] == MOST
    assert 0 < read[True] < read[False] / 3
