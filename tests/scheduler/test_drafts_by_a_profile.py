"""Drafts by a profile that reads the same context for less, of a real model in float32: whatever it drafts, the text is
the one that full attention writes token by token.
"""

from collections.abc import Iterator
from itertools import cycle
from random import Random

import pytest
import torch

from bench.engine_patches import replace_guesses, switch_drafts
from gpu.config import Composition, DraftConfig, GpuConfig
from gpu.methods.device_side import RingSide
from scheduler.engine.engine import Engine
from scheduler.engine_config import EngineConfig, SchedulerConfig
from scheduler.messages import ACCEPTED, REJECTED, Delta, EngineRequest
from tests.gpu.test_predicted_serving import WEIGHTS
from tests.scheduler.drafting import note_drafts, take_all
from tests.scheduler.engines import drain, text
from tests.scheduler.real_model import ask_variously, check_told, load, logprobs, shallow_config
from transfer.host_config import HostConfig

PROFILES = ("checked", "rough", "rough", "checked", "offloaded")
MOST = 48
BLOCKS = {"method": "predicted", "weights": str(WEIGHTS), "budget_tokens": 32, "min_context_tokens": 0,
          "local_tokens": 32, "history": 8, "rings": 4}  # fmt: skip


@pytest.fixture(
    scope="module", params=[pytest.param(False, marks=pytest.mark.long), True], ids=["counted by nobody", "counted"]
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Two profiles verify what others draft: one by an index, which reads all, and one by a few tokens, those that the
    index chooses or blocks that are predicted.
    """
    index = {"method": "indexed", "min_context_tokens": 0, "rings": 4, "index_tokens": 16_384}
    config = EngineConfig(
        model=shallow_config(),
        gpu=GpuConfig(device="cpu", dtype="float32", kv_cache_gib=0.05, threads=1, check_coverage=request.param),
        host=HostConfig(memory_limit_gib=0.05, threads=1, resident_tokens=128, residency="fixed"),
        profiles={
            "all": Composition(host=index | {"budget_share": 1.0, "budget_tokens": 8192}),
            "few": Composition(host=BLOCKS if request.param else index | {"budget_share": 0.05, "least_tokens": 16}),
            "checked": Composition(host="offloaded", draft=DraftConfig(profile="all")),
            "rough": Composition(host="offloaded", draft=DraftConfig(profile="few", most_tokens=5)),
        },
        scheduler=SchedulerConfig(max_running=32, max_context_tokens=2600, prefix_cache=False),
    )
    made = load(config)
    take_all(made)
    yield made
    made.shutdown()


def ask(number: int) -> EngineRequest:
    penalty = (0.0, 0.4)[number // 2 % 2]
    return ask_variously(number, (333, 300, 60, 280), PROFILES, MOST, frequency_penalty=penalty)


def switch(engine: Engine, is_on: bool) -> None:
    switch_drafts(engine.scheduler.drafts, is_on)


def spoil(engine: Engine, rate: float) -> None:
    """Have each token that is drafted be another with this chance."""
    draw, vocab_size = Random(3), engine._runner.limits.vocab_size

    def spoilt(tokens: torch.Tensor) -> torch.Tensor:
        wrong = torch.tensor([draw.random() < rate for _ in tokens], dtype=torch.int64)
        return (tokens + wrong) % vocab_size

    replace_guesses(engine._runner, spoilt)


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, list[Delta]]:
    switch(engine, False)
    engine.submit([ask(number) for number in range(5)])
    return drain(engine)


@pytest.mark.parametrize(
    ("engine", "rate"),
    [(True, 0.0), *(pytest.param(*one, marks=pytest.mark.long) for one in ((True, 0.3), (False, 0.3), (True, 1.0)))],
    indirect=["engine"],
)
def test_what_is_drawn_and_told_is_what_full_attention_draws(
    engine: Engine, alone: dict[str, list[Delta]], rate: float
) -> None:
    """Drafts that read all of a context are drawn: they stand where the tokens will, and draw as these."""
    switch(engine, True)
    spoil(engine, rate)
    before = engine.stats().drafts
    numbers = range(5 if rate < 1.0 else 2)  # of both kinds; steps of one token are dear
    engine.submit([ask(number) for number in numbers])
    told = drain(engine)
    replace_guesses(engine._runner, None)
    after = engine.stats().drafts
    check_told(told, {f"{number}": alone[f"{number}"] for number in numbers}, ask)
    proposed, accepted = after.proposed - before.proposed, after.accepted - before.accepted
    assert proposed > MOST
    assert (accepted > 0) == (rate < 1.0)
    whole = told["0"][-1].figures  # its drafts read all, and have no penalty to miss
    assert whole[REJECTED] <= 0.1 * whole[ACCEPTED] or rate > 0.0
    figures = [one[-1].figures for one in told.values()]
    assert sum(one.get(ACCEPTED, 0) for one in figures) == accepted
    assert sum(one.get(ACCEPTED, 0) + one.get(REJECTED, 0) for one in figures) == proposed


@pytest.mark.parametrize("engine", [True], indirect=True)
def test_every_number_of_drafted_tokens_is_accepted_and_refused(
    engine: Engine, alone: dict[str, list[Delta]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one request, whose drafts are spoilt behind each number of tokens in turn."""
    tell, turns = engine.scheduler.drafts.tell, cycle(range(DraftConfig().most_tokens + 1))
    right = [next(turns)]

    def turn(*told: object) -> None:
        right[0] = next(turns)
        tell(*told)  # type: ignore[arg-type]

    def spoilt(tokens: torch.Tensor) -> torch.Tensor:
        right[0] -= 1
        return (tokens + (right[0] < 0)) % engine._runner.limits.vocab_size

    monkeypatch.setattr(engine.scheduler.drafts, "tell", turn)
    seen = note_drafts(engine, monkeypatch)
    replace_guesses(engine._runner, spoilt)
    switch(engine, True)
    engine.submit([ask(0)])
    told = drain(engine)
    replace_guesses(engine._runner, None)
    check_told(told, {"0": alone["0"]}, ask)
    most = DraftConfig().most_tokens
    assert {accepted for length, accepted in seen if length == most} >= set(range(most + 1))


def test_a_draft_that_was_verified_with_its_ring_awake_is_seen(
    engine: Engine, alone: dict[str, list[Delta]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If rings took part in what verifies, the text would be the index's, not full attention's."""
    switch(engine, True)
    monkeypatch.setattr(RingSide, "rest", lambda self, slot: self.resting.setdefault(slot, self.held[slot]))
    monkeypatch.setattr(RingSide, "wake", lambda self, slot: self.resting.pop(slot))
    number = 1
    assert PROFILES[number] == "rough"
    engine.submit([ask(number)])
    told = drain(engine)
    assert text(told[f"{number}"]) != text(alone[f"{number}"]) or logprobs(told[f"{number}"]) != pytest.approx(
        logprobs(alone[f"{number}"])
    )
