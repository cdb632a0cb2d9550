"""Steps that predict, on CUDA: captured as eager, rows of other profiles beside, and slots that hold what they say."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from gpu.methods.predicted.held_blocks import Blocks
from lab.speed.step_trace import trace_steps
from lab.speed.trace_lanes import COMPUTE, EXCHANGE, FETCH, PREDICTION
from tests.gpu.method_counts import counts_of
from tests.gpu.reference_model import document_prompt
from tests.gpu.test_predicted_serving import NARROW, WIDE, PredictedTwins
from tests.gpu.twin_runners import check_steps

PROMPTS = [document_prompt(300, 1), document_prompt(280, 3), document_prompt(60, 2)]
LOOKS = 1 << 21  # at a counter: a second or two, if what is computed waited for a wish, which waits for it


@triton.jit
def _await_end_kernel(open_parts, looks):
    """Until no part of a step is open, or after so many looks."""
    while (tl.load(open_parts, volatile=True) > 0) & (looks > 0):
        looks -= 1


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(), (1, 3)])
@pytest.mark.parametrize("method", ["predicted", "predicted+sampled"])
def test_on_cuda_where_nothing_is_dropped_the_logits_are_the_exact_profiles(
    sizes: tuple[int, ...], method: str
) -> None:
    settings = WIDE if method == "predicted" else NARROW
    twins = PredictedTwins(settings, method, ringed=(0, 2), device="cuda", graph_batch_sizes=sizes)
    twins.prefill(PROMPTS)
    check_steps(twins, [0, 1, 2], 40)
    torch.cuda.synchronize()
    twins.check_slots(0)
    assert counts_of(twins.side).read_tokens > 0


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["predicted", "predicted+sampled"])
def test_on_cuda_every_cell_is_covered_once_or_counted_as_dropped(method: str) -> None:
    twins = PredictedTwins(NARROW, method, ringed=(0, 2), device="cuda", check_coverage=True)
    twins.prefill(PROMPTS)
    for _ in range(30):
        assert not twins.step([0, 1, 2]).failures
    torch.cuda.synchronize()
    twins.check_slots(0)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("sizes", [(), (1, 3)])
def test_on_cuda_blocks_that_are_late_are_left_to_the_sample(sizes: tuple[int, ...], parts: int) -> None:
    """Others are wished for at every step, and each layer's wish is there when all parts of its step are computed.

    No time would do: the host of these tests answers in Python, and a step of two parts takes as long as it does.
    """
    settings = NARROW | {"late": "sample"}
    twins = PredictedTwins(settings, "predicted+sampled", ringed=(0, 2), device="cuda")
    side, steps = twins.side, twins.offloading.decode_steps
    steps.host_reader.halving.always = parts

    def wish(layer: Blocks, choice: object) -> torch.Tensor:
        _await_end_kernel[(1,)](side._open_parts, LOOKS, num_warps=1)
        return torch.rand(layer.scores.shape, device="cuda")

    side._score = wish
    with torch.inference_mode():
        steps.capture(sizes, lambda done: None)
    twins.prefill(PROMPTS)
    check_steps(twins, [0, 1, 2], 20)
    torch.cuda.synchronize()
    twins.check_slots(0)
    counts = counts_of(side)
    assert counts.late_blocks > 0
    assert counts.dropped_tokens == 0
    assert int(side._open_parts) == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("products_by_library")
def test_on_cuda_graphs_give_the_bits_of_eager_steps_and_leave_the_same_blocks() -> None:
    logits, ids, histories = [], [], []
    for sizes in ((), (3,)):
        twins = PredictedTwins(
            NARROW, ringed=(0, 2), device="cuda", dtype="bfloat16", graph_batch_sizes=sizes
        )  # fmt: skip
        twins.offloading.decode_steps.host_reader.halving.always = 1
        twins.prefill(PROMPTS)
        for _ in range(20):
            twins.step([0, 1, 2])
        torch.cuda.synchronize()
        twins.check_slots(0)
        logits.append(np.stack([twins.logits(slot)[0].numpy() for slot in range(3)]))
        ids.append(twins.ids(0).sort(-1).values.cpu())
        histories.append(twins.side.blocks.history.cpu())
    np.testing.assert_array_equal(logits[0], logits[1])
    assert torch.equal(*ids)
    assert torch.equal(*histories)


@pytest.mark.gpu
def test_on_cuda_two_half_batches_fetch_what_one_does() -> None:
    chosen = []
    for parts in (1, 2):
        twins = PredictedTwins(NARROW, ringed=(0, 1), device="cuda", graph_batch_sizes=(1, 3))
        twins.offloading.decode_steps.host_reader.halving.always = parts
        twins.prefill(PROMPTS)
        for _ in range(12):
            assert not twins.step([0, 1, 2]).failures
        torch.cuda.synchronize()
        for slot in (0, 1):
            twins.check_slots(slot)
        chosen.append(counts_of(twins.side).read_tokens)
    assert chosen[0] == chosen[1] > 0


@pytest.mark.gpu
def test_on_cuda_a_trace_of_captured_steps_has_a_lane_for_fetching_beside_what_computes(tmp_path: Path) -> None:
    twins = PredictedTwins(NARROW, "predicted+sampled", device="cuda", graph_batch_sizes=(1,))
    twins.prefill(PROMPTS[:1])
    for _ in range(3):
        twins.step([0])

    def step() -> None:
        assert not twins.step([0]).failures
        torch.cuda.synchronize()

    path = tmp_path / "steps.json"
    trace_steps(step, dict, torch.device("cuda"), path)
    told = json.loads((tmp_path / "steps.lanes.json").read_text())
    lanes = {event["cat"] for event in told["traceEvents"] if event["ph"] == "X"}
    assert {COMPUTE, EXCHANGE, FETCH, PREDICTION} <= lanes
