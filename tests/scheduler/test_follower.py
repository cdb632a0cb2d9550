"""A rank whose host fails, or whose tokens are not rank 0's, ends by name: nothing it computes is of use any more."""

import os
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from gpu.config import GpuConfig, ModelConfig
from gpu.model.architecture import ModelError
from gpu.ranks import RankError
from gpu.step import Collected, SampledToken, StepPlan, StepResult
from scheduler.engine import rank_process
from scheduler.engine.follower import Follower, PartedError
from tests.gpu.family_checkpoints import draw_prompt, generate
from tests.gpu.small_runner import load_small
from tests.gpu.thread_ranks import ThreadRanks, run_ranks
from transfer.host_tier import HostMemoryError


class Launched:
    """A step of a runner that only notes what is asked of it."""

    def __init__(self, tokens: dict[int, int], failures: dict[int, str]) -> None:
        self.is_collected = False
        self._tokens, self._failures = tokens, failures

    def collect(self) -> StepResult:
        self.is_collected = True
        drawn = tuple(SampledToken(slot, token, None) for slot, token in self._tokens.items())
        return StepResult(tokens=drawn, prompt_logprobs={}, unit_seconds=0, decode_seconds=0, failures=self._failures)


def follow(*steps: Launched, most: int = 2) -> Follower:
    coming = iter(steps)
    follower = Follower(SimpleNamespace(launch=lambda plan: next(coming), shutdown=lambda: None), most)  # type: ignore[arg-type]
    for _ in steps:
        follower.take(StepPlan())
    return follower


def test_a_step_is_looked_at_once_rank_0_has_its_tokens() -> None:
    steps = [Launched({0: 7, 2: 9}, {}), Launched({0: 8}, {})]
    follower = follow(*steps)
    follower.take(Collected(1, ((0, 7), (2, 9))))
    assert [step.is_collected for step in steps] == [True, False]
    follower.take(Collected(2, ((0, 8),)))
    assert steps[1].is_collected


def test_tokens_of_a_step_that_was_collected_before_are_compared() -> None:
    follower = follow(Launched({0: 7}, {}), Launched({0: 8}, {}), most=1)
    with pytest.raises(PartedError, match=r"^step 1: drew token 7 in slot 0 \(1 tokens in all\), and rank 0 drew "):
        follower.take(Collected(1, ((0, 6),)))


def test_slots_that_failed_at_rank_0_are_not_compared() -> None:
    follow(Launched({0: 7, 2: 9}, {})).take(Collected(1, ((2, 9),)))


def test_what_the_host_failed_to_answer_is_said_though_the_step_was_the_last() -> None:
    follower = follow(Launched({0: -1}, {0: "exchange: layer 3 is late"}))
    with pytest.raises(HostMemoryError, match=r"^exchange: layer 3 is late$"):
        follower.take(Collected(1, ((0, 5),)))


def test_a_runner_that_leads_tells_what_it_drew_in_each_step() -> None:
    def run(ranks: ThreadRanks) -> list[Any]:
        runner = load_small(ModelConfig(random_weights="tiny"), GpuConfig(device="cpu", dtype="float32"), ranks=ranks)
        told: list[Any] = []
        runner.lead(told.append)
        tokens, _ = generate(runner, draw_prompt(20), 3)
        collected = [one for one in told if isinstance(one, Collected)]
        assert [one.number for one in collected] == [1 + step for step in range(len(collected))]
        assert sum(isinstance(one, StepPlan) for one in told) == len(collected)
        assert [token for one in collected for _, token in one.tokens] == tokens
        return collected

    first, second = run_ranks(2, run)
    assert first == second


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RankError("lost another one\n  (NCCL error\nLast error: no route)"),
         "lost another one (NCCL error Last error: no route)"),
        (PartedError("step 3: another token"), "step 3: another token"),
        (ModelError("no such tensor"), "no such tensor"),
        (RuntimeError("CUDA error:\nout of memory"), "RuntimeError: CUDA error: out of memory"),
    ],
)  # fmt: skip
def test_a_rank_says_why_it_ends(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise error

    for name in ("be_killed_with_parent", "end_with_parent", "_set_loggers"):
        monkeypatch.setattr(rank_process, name, lambda *given: None)
    monkeypatch.setattr(rank_process.signal, "signal", lambda *given: None)
    monkeypatch.setattr(rank_process.sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setattr(rank_process.EngineStart, "model_validate_json", lambda text: None)
    monkeypatch.setattr(rank_process, "_ROOT_CAUSE_S", 0.0)
    monkeypatch.setattr(rank_process, "_load", fail)
    ours, theirs = Pipe()
    ours.send(SimpleNamespace(start_json="{}"))
    assert rank_process.main(str(os.dup(theirs.fileno())), "1") == 1
    assert ours.recv() == said
