"""Experts computed on the CPU: a float64 oracle, every way rows take them, and asks that come, come late or never."""

import threading
import time
from dataclasses import asdict

import numpy as np
import pytest
import torch

from cpu.experts import GATED, MADE, ROUNDED, HostExperts
from gpu.model.architecture import named_shape
from gpu.weights.expert_shares import ExpertShares, experts_of
from tests.cpu.packed_experts import Experts
from tests.cpu.packed_experts import oracle as expert_oracle
from tests.tolerances import HOST_EXPERTS_FLOAT32, HOST_EXPERTS_SHARE
from transfer.exchange import LAST_STAMP, ExchangeError
from transfer.expert_exchange import NOT_HERE, ExpertRequests, ExpertSlot, LayerExperts, new_expert_slot

HIDDEN, WIDTH, COUNT, PER_TOKEN, MOST_ROWS = 96, 64, 11, 4, 9
CPU = torch.device("cpu")
PATIENCE_S = 5


def draw_layer(
    seed: int, dtype: torch.dtype, count: int = COUNT, hidden: int = HIDDEN, width: int = WIDTH
) -> LayerExperts:
    draw = np.random.default_rng(seed)
    gate_up, down = draw.normal(size=(count * 2 * width, hidden)), draw.normal(size=(count * hidden, width))
    return LayerExperts(count, torch.tensor(gate_up).to(dtype), torch.tensor(down).to(dtype))


def oracle(layer: LayerExperts, hidden: np.ndarray, experts: np.ndarray, shares: np.ndarray) -> np.ndarray:
    gate_up, down = layer.gate_up.double().numpy(), layer.down.double().numpy()
    sizes = layer.count, -1, gate_up.shape[1]
    plain = Experts(layer, gate_up.reshape(sizes), down.reshape(layer.count, sizes[2], -1))
    return expert_oracle(plain, hidden, experts, shares)


def fill(slot: ExpertSlot, seed: int, experts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and shares of so many rows, drawn; what stands behind them is NaN."""
    rows, draw = len(experts), np.random.default_rng(seed)
    slot.hidden.fill_(float("nan"))
    slot.shares.fill_(float("nan"))
    slot.out.fill_(float("nan"))
    slot.hidden[:rows] = torch.tensor(draw.normal(size=(rows, slot.hidden.shape[1])))
    slot.shares[:rows] = torch.tensor(draw.uniform(size=experts.shape))
    slot.experts[:rows] = torch.tensor(experts)
    return slot.hidden[:rows].numpy().copy(), slot.shares[:rows].numpy().copy()


def answer(worker: HostExperts, slot: ExpertSlot, layer: int, rows: int) -> None:
    slot.advance(rows)
    slot.flags[:rows] = slot.stamp
    worker.answer([(ExpertRequests(np.array([[layer, rows]])), slot)])
    assert int(slot.answered) == slot.stamp


def off(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-30))


TAKEN = {
    "one row": [[3, 0, 10, 7]],
    "one expert for all": [[5, NOT_HERE, NOT_HERE, NOT_HERE]] * 9,
    "nobody takes any": [[NOT_HERE] * 4] * 3,
    "a row takes none": [[1, 2, 3, 4], [NOT_HERE] * 4, [4, NOT_HERE, 0, 1]],
    "an expert of three, five and two rows": [[0, 1, 2, 3], [1, 2, 0, 10], [1, 0, 4, 5], [1, 6, 7, 8], [9, 1, 2, 3]],
    "the same expert twice": [[6, 6, 6, 6], [6, 2, 6, 2]],
    "numbers that name none": [[COUNT, -7, 2**31 - 1, -(2**31)], [2, COUNT + 1, 9, -2]],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", TAKEN)
def test_rows_get_the_weighed_sum_of_what_their_experts_make_of_them(name: str, dtype: torch.dtype) -> None:
    layers = [draw_layer(0, dtype), None, draw_layer(1, dtype, count=COUNT)]
    worker, experts = HostExperts(layers, MOST_ROWS, PER_TOKEN, 2), np.array(TAKEN[name])
    slot = new_expert_slot(MOST_ROWS, HIDDEN, PER_TOKEN, CPU)
    for number in (0, 2, 0):
        hidden, shares = fill(slot, number, experts)
        answer(worker, slot, number, len(experts))
        layer = layers[number]
        assert layer is not None
        assert off(slot.out[: len(experts)].numpy(), oracle(layer, hidden, experts, shares)) < HOST_EXPERTS_FLOAT32
        assert bool(slot.out[len(experts) :].isnan().all())  # rows without host reads are not touched


def test_the_comparison_sees_an_expert_that_is_left_out_and_another_rows_share() -> None:
    layer, experts = draw_layer(0, torch.bfloat16), np.array(TAKEN["an expert of three, five and two rows"])
    worker, slot = HostExperts([layer], MOST_ROWS, PER_TOKEN, 1), new_expert_slot(MOST_ROWS, HIDDEN, PER_TOKEN, CPU)
    hidden, shares = fill(slot, 0, experts)
    answer(worker, slot, 0, 5)
    got, fewer = slot.out[:5].numpy(), experts.copy()
    fewer[4, 3] = NOT_HERE
    assert off(got, oracle(layer, hidden, fewer, shares)) > HOST_EXPERTS_SHARE
    assert off(got, oracle(layer, hidden, experts, shares[[1, 0, 2, 3, 4]])) > HOST_EXPERTS_SHARE
    assert off(got, oracle(layer, hidden, experts, shares)) < HOST_EXPERTS_FLOAT32


def test_two_lanes_that_compute_side_by_side_do_not_mix() -> None:
    """Each has a worker, and both share the layers and numba's threads."""
    layer, sums = draw_layer(0, torch.bfloat16), {}

    def run(lane: int, name: str) -> None:
        worker, slot = HostExperts([layer], 4, PER_TOKEN, 2), new_expert_slot(4, HIDDEN, PER_TOKEN, CPU)
        draw, sums[lane, name] = np.random.default_rng(lane), []
        for ask in range(50):
            fill(slot, ask + 100 * lane, np.array([draw.permutation(COUNT)[:PER_TOKEN] for _ in range(4)]))
            answer(worker, slot, 0, 4)
            sums[lane, name].append(slot.out.clone())

    for lane in (0, 1):
        run(lane, "alone")
    threads = [threading.Thread(target=run, args=(lane, "beside")) for lane in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10 * PATIENCE_S)
    for lane in (0, 1):
        assert len(sums[lane, "beside"]) == 50
        assert torch.equal(torch.stack(sums[lane, "beside"]), torch.stack(sums[lane, "alone"]))


def test_a_step_is_answered_ask_by_ask_as_the_device_comes_to_them() -> None:
    """The device stands in another thread: it asks the next layer of the sum of the last."""
    layers = [draw_layer(seed, torch.bfloat16) for seed in range(3)]
    worker = HostExperts(layers, MOST_ROWS, PER_TOKEN, 2, limit_s=PATIENCE_S)
    slot = new_expert_slot(MOST_ROWS, HIDDEN, PER_TOKEN, CPU)
    slot.stamp = LAST_STAMP - 2  # stamps begin anew within the step
    slot.answered.fill_(slot.stamp)
    first = slot.stamp
    table = np.array([[0, 2], [1, 2], [2, 3], [0, 3]])
    experts = np.array([[0, 1, 2, NOT_HERE], [3, 1, NOT_HERE, NOT_HERE], [5, 6, 7, 8]])
    states, wrong = fill(slot, 0, experts)[0] / 8, []

    deadline = time.monotonic() + 2 * PATIENCE_S

    def device() -> None:
        x = states
        for number, (layer, rows) in enumerate(table.tolist()):
            slot.hidden[:3] = torch.tensor(x)
            slot.flags[:rows] = (first + 1 + number) & LAST_STAMP
            while int(slot.answered) != (first + 1 + number) & LAST_STAMP:
                if time.monotonic() > deadline:
                    return
                time.sleep(1e-4)
            got = slot.out[:rows].numpy().copy()
            wanted = oracle(layers[layer], x[:rows], experts[:rows], slot.shares[:rows].numpy())
            wrong.append(off(got, wanted))
            x = states + np.pad(got, ((0, 3 - rows), (0, 0))) / np.abs(got).max()
            x = x.astype(np.float32)

    thread = threading.Thread(target=device)
    thread.start()
    slot.advance(2)
    answered = worker.answer([(ExpertRequests(table), slot)])
    thread.join()
    assert len(wrong) == 4
    assert max(wrong) < HOST_EXPERTS_FLOAT32
    assert answered.waited_s > 0
    assert answered.attended_s > 0
    assert (slot.rows, slot.stamp) == (3, (first + 4) & LAST_STAMP)
    counts, expert_bytes = worker.counts, 3 * HIDDEN * WIDTH * 2
    assert (counts.host_requests, counts.experts, counts.pairs) == (4, 4 + 4 + 8 + 8, 5 + 5 + 9 + 9)
    assert counts.bytes_read == 24 * expert_bytes


def test_an_ask_that_does_not_come_is_named_and_nothing_hangs() -> None:
    layers = [draw_layer(seed, torch.bfloat16) for seed in range(2)]
    worker = HostExperts(layers, MOST_ROWS, PER_TOKEN, 2, limit_s=0.05)
    slot, experts = new_expert_slot(MOST_ROWS, HIDDEN, PER_TOKEN, CPU), np.array(TAKEN["one row"] * 2)
    fill(slot, 0, experts)
    slot.advance(2)
    slot.flags[:2] = 1
    began = time.monotonic()
    with pytest.raises(ExchangeError, match=r"layer 1: row 0 of 2 has stamp 1 after 0.05 s, wanted 2; the device is"):
        worker.answer([(ExpertRequests(np.array([[0, 2], [1, 2]])), slot)])
    assert time.monotonic() - began < 5
    assert int(slot.answered) == 1
    assert worker.counts.host_requests == 1
    slot.flags[:2] = 2
    worker.answer([(ExpertRequests(np.array([[1, 2]])), slot)])
    assert int(slot.answered) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 80}, "gate_up has rows of 80; wanted a multiple of 32"),
        ({"width": 40}, "down has rows of 40; wanted a multiple of 32"),
        ({"dtype": torch.float16}, "gate_up is torch.float16; wanted torch.bfloat16, or torch.float32"),
    ],
)
def test_experts_that_there_is_no_code_for_are_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^experts on the CPU: .*{message}"):
        HostExperts([None, draw_layer(0, **{"dtype": torch.bfloat16, **change})], 1, 1, 1)


def test_layers_that_differ_and_matrices_of_another_size_are_refused_by_name() -> None:
    one = draw_layer(0, torch.bfloat16)
    with pytest.raises(ValueError, match="layers of 2 shapes; wanted one"):
        HostExperts([one, draw_layer(0, torch.bfloat16, width=32)], 1, 1, 1)
    with pytest.raises(ValueError, match="layers of 0 shapes"):
        HostExperts([None], 1, 1, 1)
    with pytest.raises(ValueError, match=r"down is \(1056, 64\) on cpu.*; wanted \(1152, 64\) in host memory"):
        HostExperts([LayerExperts(COUNT + 1, draw_layer(0, torch.bfloat16, COUNT + 1).gate_up, one.down)], 1, 1, 1)


def test_a_lane_that_asks_the_cpu_takes_what_is_planned() -> None:
    model = named_shape("tiny-mixtral")
    experts, hidden = experts_of(model), model.hidden
    slot = new_expert_slot(MOST_ROWS, hidden, experts.per_token, CPU)
    layer = draw_layer(3, torch.float32, experts.num_experts, hidden, experts.intermediate)
    worker = HostExperts([layer], MOST_ROWS, experts.per_token, 1)
    taken = sum(tensor.nbytes for tensor in asdict(slot).values() if isinstance(tensor, torch.Tensor))
    taken += sum(worker._arrays[part].nbytes for part in (GATED, MADE, ROUNDED))
    assert taken == ExpertShares(model, 4, 0).expert_slot_bytes(MOST_ROWS)
