"""Steps whose draws come behind their launch, from some tokens alone: the same draws, and no wait for the device."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from gpu.in_flight import InFlight
from gpu.runner import Runner
from gpu.step import StepPlan
from tests.gpu.reference_model import generate, prefill_plans, prefill_prompts
from tests.gpu.test_decode_graphs import LOGPROBS, NUM_TOKENS, PROMPTS, group, small_runner

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SLOTS = [0, 1, 2]


@cache
def runner_on(device: str) -> Runner:
    return small_runner(device, *(("bfloat16", (4,)) if device == "cuda" else ()))


def words(runner: Runner, banned: list[int]) -> np.ndarray:
    bits = np.ones(-(-runner.limits.vocab_size // 32) * 32, np.uint8)
    bits[banned] = 0
    return np.packbits(bits, bitorder="little").view(np.uint32)


def run_masked(runner: Runner, carry_out: Callable[[Runner, StepPlan], InFlight]) -> list[list[int]]:
    """What PROMPTS in slots 0 .. 2 draw, prefilled and decoded."""
    tokens = [list[int]() for _ in PROMPTS]
    steps = [StepPlan(decode=[group(SLOTS, drawn)]) for drawn in range(1, NUM_TOKENS)]
    prompts = prefill_prompts(PROMPTS, LOGPROBS)
    for plan in [*prefill_plans(runner, prompts, NUM_TOKENS), *steps]:
        for token in carry_out(runner, plan).collect().tokens:
            tokens[token.slot].append(token.token_id)
            assert token.logprob is not None
    runner.launch(StepPlan(released_slots=SLOTS)).collect()
    return tokens


@cache
def unmasked(device: str) -> list[list[int]]:
    return generate(runner_on(device), PROMPTS, NUM_TOKENS).tokens


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_is_drawn_behind_its_launch_draws_the_same(device: str) -> None:
    """Slots of which none has a mask, and slots whose masks ban what nobody would draw."""
    wanted = unmasked(device)
    for masked in ([], [1], SLOTS):

        def later(runner: Runner, plan: StepPlan, masked: list[int] = masked) -> InFlight:
            step = runner.launch(replace(plan, masked_slots=SLOTS))
            runner.draw(step, {slot: words(runner, []) for slot in masked})
            return step

        assert run_masked(runner_on(device), later) == wanted


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_changes_its_own_row_and_what_that_row_goes_on_with(device: str) -> None:
    wanted = unmasked(device)
    banned = sorted(set(wanted[1]))

    def one_masked(runner: Runner, plan: StepPlan) -> InFlight:
        step = runner.launch(replace(plan, masked_slots=[1]))
        runner.draw(step, {1: words(runner, banned)})
        return step

    got = run_masked(runner_on(device), one_masked)
    assert got[0] == wanted[0]
    assert got[2] == wanted[2]
    assert not set(got[1]) & set(banned)
    assert len(set(got[1])) > 1  # it goes on with what it drew, not with one token for ever


def test_rows_of_two_groups_cannot_be_drawn_later() -> None:
    runner = runner_on("cpu")
    with pytest.raises(AssertionError, match="a second group"):
        runner.launch(StepPlan(decode=[group([0], 1), group([1], 1)], masked_slots=[0]))


@pytest.mark.gpu
def test_neither_launch_nor_draw_waits_for_the_device() -> None:
    runner = runner_on("cuda")
    unmasked("cuda")
    mask = words(runner, [3, 4])
    for plan in prefill_plans(runner, prefill_prompts(PROMPTS, LOGPROBS), NUM_TOKENS):
        runner.launch(plan).collect()
    steps = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for drawn in range(1, 4):
            steps.append(runner.launch(StepPlan(decode=[group(SLOTS, drawn)], masked_slots=[1])))
            runner.draw(steps[-1], {1: mask})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    runner.launch(StepPlan(released_slots=SLOTS))
    for step in steps:
        assert {token.slot for token in step.collect().tokens} == set(SLOTS)
