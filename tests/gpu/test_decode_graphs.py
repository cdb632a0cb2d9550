"""Decode steps: padding rows are harmless, steps may be launched ahead, and CUDA graphs equal the eager step."""

import gc

import numpy as np
import pytest
import torch

from gpu.attention.step_rows import StepRows
from gpu.batching.capture import capture
from gpu.batching.captured_steps import StepKind
from gpu.runner import Runner
from gpu.sampling_params import SamplingParams
from gpu.step import DecodeGroup, HostRead, StepPlan
from tests.gpu.reference_model import (
    Generated,
    document_prompt,
    generate,
    needle_prompt,
    prefill_plans,
    prefill_prompts,
    reference_runner,
)
from tests.tolerances import BF16_LOGPROB_ATOL, CHUNKING_LOGPROB_ATOL

NUM_TOKENS = 12
PROMPTS = [document_prompt(length, length) for length in (10, 47, 120)]
LOGPROBS = SamplingParams(temperature=0.0, num_logprobs=0, num_prompt_logprobs=0)


def prefilled(runner: Runner) -> list[int]:
    """First tokens of PROMPTS in slots 0 .. 2."""
    plans = prefill_plans(runner, prefill_prompts(PROMPTS, LOGPROBS), NUM_TOKENS)
    return [runner.launch(plan).collect().tokens[0].token_id for plan in plans]


def group(slots: list[int], drawn: int) -> DecodeGroup:
    return DecodeGroup(slots, [len(PROMPTS[slot]) + drawn - 1 for slot in slots], [drawn] * len(slots))


def small_runner(device: str = "cpu", dtype: str = "float32", sizes: tuple[int, ...] = ()) -> Runner:
    return reference_runner(dtype, device, max_running=4, num_pages=64, max_context_tokens=512, graph_batch_sizes=sizes)


def test_inputs_are_packed_and_padded() -> None:
    packed = StepRows.pack([3, 0], [3, 8], [17, 5], [HostRead(7, 2, 12), None], 4, 9)
    rows = StepRows(torch.from_numpy(packed), 4)
    assert rows.positions.tolist() == [17, 5, 0, 0]
    assert rows.token_slots.tolist() == [3, 8, 9, 9]
    assert rows.slots.tolist() == [3, 0, -1, -1]
    assert rows.context_lens.tolist() == [18, 6, 0, 0]
    skip_begin, skip_end, cut = rows.bounds(2)
    assert skip_begin.tolist() == [[2, 2], [0, 0], [0, 0], [0, 0]]
    assert skip_end.tolist() == cut.tolist() == [[12, 12], [0, 0], [0, 0], [0, 0]]
    assert rows.of_slots(torch.tensor([40, 41, 42, 43, -1])).tolist() == [43, 40, -1, -1]


def rows_of(size: int) -> StepRows:
    """Slot 1 at position 47, and padding."""
    return StepRows(torch.from_numpy(StepRows.pack([1], [1], [47], [None], size, 4)), size)


@torch.inference_mode()
def test_padding_rows_write_nothing_and_change_nothing() -> None:
    runner = small_runner()
    prefilled(runner)
    steps = runner.decode_steps
    (logits,) = steps.compute([rows_of(1)], [None], StepKind(0, False))
    pages = [pages.clone() for pages in (*runner.pool.key_pages, *runner.pool.value_pages)]
    (padded,) = steps.compute([rows_of(4)], [None], StepKind(0, False))
    torch.testing.assert_close(padded[:1], logits, rtol=0, atol=CHUNKING_LOGPROB_ATOL)
    for before, after in zip(pages, (*runner.pool.key_pages, *runner.pool.value_pages), strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=CHUNKING_LOGPROB_ATOL, equal_nan=True)


def test_steps_launched_ahead_give_the_same_tokens() -> None:
    wanted = generate(small_runner(), PROMPTS, NUM_TOKENS).tokens
    runner = small_runner()
    got = [[token] for token in prefilled(runner)]
    in_flight = [runner.launch(StepPlan(decode=[group([0, 1, 2], drawn)])) for drawn in range(1, NUM_TOKENS)]
    runner.launch(StepPlan(released_slots=[0, 1, 2]))
    for step in in_flight:
        for token in step.collect().tokens:
            got[token.slot].append(token.token_id)
    assert got == wanted


def test_groups_of_one_step_are_stepped_apart() -> None:
    wanted = generate(small_runner(), PROMPTS, NUM_TOKENS).tokens
    runner = small_runner()
    got = [[token] for token in prefilled(runner)]
    for drawn in range(1, NUM_TOKENS):
        plan = StepPlan(decode=[group([2, 0], drawn), group([1], drawn)])
        for token in runner.launch(plan).collect().tokens:
            got[token.slot].append(token.token_id)
    assert got == wanted


def decoded_logprobs(runner: Runner) -> tuple[list[list[int]], np.ndarray]:
    """Tokens of PROMPTS, and the logprobs of all but the first, `[prompts, tokens - 1]`."""
    tokens = [[token] for token in prefilled(runner)]
    logprobs = np.zeros((len(PROMPTS), NUM_TOKENS - 1))
    for drawn in range(1, NUM_TOKENS):
        for token in runner.launch(StepPlan(decode=[group([0, 1, 2], drawn)])).collect().tokens:
            tokens[token.slot].append(token.token_id)
            logprobs[token.slot, drawn - 1] = token.logprob.logprob
    return tokens, logprobs


@pytest.mark.parametrize(
    ("device", "dtype", "atol"),
    [
        ("cpu", "float32", CHUNKING_LOGPROB_ATOL),
        ("cpu", "bfloat16", BF16_LOGPROB_ATOL),
        pytest.param("cuda", "float32", CHUNKING_LOGPROB_ATOL, marks=pytest.mark.gpu),
        pytest.param("cuda", "bfloat16", BF16_LOGPROB_ATOL, marks=pytest.mark.gpu),
    ],
)
def test_decoding_gives_the_logprobs_of_prefilling_the_same_tokens(device: str, dtype: str, atol: float) -> None:
    tokens, logprobs = decoded_logprobs(small_runner(device, dtype))
    whole = [np.array([*ids, *drawn], dtype=np.int32) for ids, drawn in zip(PROMPTS, tokens, strict=True)]
    prefilled_logprobs = generate(small_runner(device, dtype), whole, 1, LOGPROBS).prompt_logprobs
    for slot, ids in enumerate(PROMPTS):
        wanted = [entry.logprob for entry in prefilled_logprobs[slot][len(ids) :]]
        np.testing.assert_allclose(logprobs[slot], wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("atol", [CHUNKING_LOGPROB_ATOL, BF16_LOGPROB_ATOL])
def test_that_comparison_sees_a_shift_of_one_position(atol: float) -> None:
    _, logprobs = decoded_logprobs(small_runner())
    assert np.abs(logprobs[:, 1:] - logprobs[:, :-1]).max() > atol


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("products_by_library")
def test_cuda_graphs_equal_the_eager_step(dtype: str) -> None:
    eager, eager_logprobs = decoded_logprobs(small_runner("cuda", dtype))
    captured, captured_logprobs = decoded_logprobs(small_runner("cuda", dtype, (1, 2, 3)))
    assert captured == eager
    np.testing.assert_array_equal(captured_logprobs, eager_logprobs)


@pytest.mark.gpu
def test_cuda_generates_what_the_cpu_does_in_float32() -> None:
    prompts = [needle_prompt(200, 0), *PROMPTS]
    cpu, cuda = (
        generate(small_runner(device, "float32", (1, 4)), prompts, 32).tokens for device in ("cpu", "cuda")
    )  # fmt: skip
    assert cpu == cuda


@pytest.mark.gpu
def test_a_graph_padded_to_its_size_leaves_other_slots_alone() -> None:
    wanted = generate(small_runner("cuda", "float32"), PROMPTS, NUM_TOKENS).tokens
    got: Generated = generate(small_runner("cuda", "float32", (4,)), PROMPTS, NUM_TOKENS)
    assert got.tokens == wanted


@pytest.mark.gpu
def test_a_graph_that_became_garbage_is_not_destroyed_while_another_is_captured() -> None:
    """CUDA ends the capture there, and Python collects cycles whenever enough objects were made."""

    def make_many() -> torch.Tensor:
        total = torch.zeros(8, device="cuda")
        for _ in range(200):
            total = total + 1.0
            [[] for _ in range(50)]
        return total

    was = gc.get_threshold()
    try:
        for _ in range(3):
            gc.set_threshold(5, 1, 1)
            garbage: list[object] = [capture(make_many, None)]
            garbage.append(garbage)
            del garbage
            graph, total = capture(make_many, None)
            graph.replay()
            assert total.tolist() == [200.0] * 8
    finally:
        gc.set_threshold(*was)
