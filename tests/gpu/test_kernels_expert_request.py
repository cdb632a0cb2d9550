"""Asks for experts that the CPU computes: what stands in the slot, whose flags, and the sum of the answer."""

import pytest
import torch

from gpu.operations.exchange.await_answer import await_answer
from gpu.operations.exchange.exchange_pack import catch_up, new_counters
from gpu.operations.exchange.expert_request import add_answer, request_experts
from tests.gpu.kernel_oracles import DEVICES
from transfer.exchange import LAST_STAMP
from transfer.expert_exchange import NOT_HERE, ExpertSlot, new_expert_slot

MOST_ROWS, HIDDEN, PER_TOKEN, ON_CARD, EXPERTS = 5, 96, 3, 4, 11


def new_slot(device: str, hidden: int = HIDDEN) -> ExpertSlot:
    """Filled with what nobody may read."""
    slot = new_expert_slot(MOST_ROWS, hidden, PER_TOKEN, torch.device(device))
    slot.hidden.fill_(float("nan"))
    slot.shares.fill_(float("nan"))
    slot.experts.fill_(-99)
    return slot


def draw(rows: int, device: str, dtype: torch.dtype, hidden: int = HIDDEN) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    normed = torch.randn(rows, hidden, generator=generator).to(device, dtype)
    ids = torch.randint(0, EXPERTS, (rows, PER_TOKEN), generator=generator, dtype=torch.int32).to(device)
    return normed, ids, torch.rand(rows, PER_TOKEN, generator=generator).to(device)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("hidden", [HIDDEN, 4160])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_each_row_leaves_its_state_and_its_experts_that_lie_there(device: str, dtype: torch.dtype, hidden: int) -> None:
    slot = new_slot(device, hidden)
    counters = new_counters(slot, torch.device(device))
    for number, rows in enumerate((1, 3, 5, 2)):
        normed, ids, shares = draw(rows, device, dtype, hidden)
        request_experts(normed, ids, shares, ON_CARD, None, counters, slot)
        synchronise(device)
        assert torch.equal(slot.hidden[:rows], normed.float().cpu())
        assert torch.equal(slot.shares[:rows], shares.cpu())
        wanted = [[one - ON_CARD if one >= ON_CARD else NOT_HERE for one in row] for row in ids.tolist()]
        assert slot.experts[:rows].tolist() == wanted
        assert slot.flags[:rows].tolist() == [number + 1] * rows
        assert counters.tolist() == [number + 1] * MOST_ROWS, "every ask is counted for all rows"
    assert slot.flags.tolist() == [4, 4, 3, 3, 3]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_padding_ask_for_nothing_and_raise_their_flags(device: str) -> None:
    slot = new_slot(device)
    counters, (normed, ids, shares) = new_counters(slot, torch.device(device)), draw(4, device, torch.float32)
    in_use = torch.tensor([7, -1, 0, -1], dtype=torch.int32, device=device)
    request_experts(normed, ids, shares, 0, in_use, counters, slot)
    synchronise(device)
    assert slot.experts[[0, 2]].tolist() == ids[[0, 2]].tolist()
    assert slot.experts[[1, 3]].tolist() == [[NOT_HERE] * PER_TOKEN] * 2
    assert slot.flags.tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_answer_is_added_before_the_sum_is_rounded(device: str, dtype: torch.dtype) -> None:
    slot = new_slot(device, 700)
    generator = torch.Generator().manual_seed(1)
    made = torch.randn(3, 700, generator=generator)
    slot.out.fill_(float("nan"))
    slot.out[:3] = torch.randn(3, 700, generator=generator)
    got = add_answer(made.to(device), slot, dtype)
    assert torch.equal(got.cpu(), (made + slot.out[:3]).to(dtype))
    assert not torch.equal(got.cpu(), (made.to(dtype) + slot.out[:3].to(dtype))) or dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
def test_stamps_begin_anew_and_forgotten_asks_are_behind_both_sides(device: str) -> None:
    slot = new_slot(device)
    slot.stamp = LAST_STAMP - 1
    counters, row = new_counters(slot, torch.device(device)), draw(1, device, torch.float32)
    for wanted in (LAST_STAMP, 0, 1):
        request_experts(*row, ON_CARD, None, counters, slot)
        synchronise(device)
        assert int(slot.flags[0]) == wanted
    catch_up(counters, slot)
    assert (slot.stamp, int(slot.answered)) == (1, 1)
    await_answer(counters, slot)


def test_what_does_not_fit_the_slot_is_named() -> None:
    slot = new_slot("cpu")
    counters, (normed, ids, shares) = new_counters(slot, torch.device("cpu")), draw(2, "cpu", torch.float32)
    cases = [
        ((normed.repeat(3, 1), ids, shares), "got 6 rows of 96; the slot has 5 of 96"),
        ((normed[:, :64], ids, shares), "got 2 rows of 64; the slot has 5 of 96"),
        ((normed, ids.long(), shares), r"ids is \(2, 3\) torch.int64 .*; wanted \(2, 3\) torch.int32"),
        ((normed, ids, shares[:1]), r"shares is \(1, 3\).*; wanted \(2, 3\) torch.float32"),
        ((normed.t().contiguous().t(), ids, shares), "normed has strides .*; wanted contiguous"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=f"^request_experts: {message}"):
            request_experts(*arguments, ON_CARD, None, counters, slot)
    with pytest.raises(ValueError, match="slots is"):
        request_experts(normed, ids, shares, ON_CARD, torch.zeros(3, dtype=torch.int32), counters, slot)
    with pytest.raises(ValueError, match=r"^add_answer: made is .*; wanted .* torch.float32"):
        add_answer(normed.bfloat16(), slot, torch.bfloat16)
