"""Experts in host memory: which a step lists, and that their numbers arrive, against numpy from the definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.operations.arguments import INTERPRETED
from gpu.operations.experts.fetch_experts import BLOCK_WORDS, Listed, fetch_experts, list_experts, words_of
from tests.gpu.kernel_oracles import DEVICES


def choose(draw: np.random.Generator, tokens: int, per_token: int, num_experts: int) -> np.ndarray:
    """Different experts for a token, int32 `[tokens, per_token]`."""
    return np.stack([draw.permutation(num_experts)[:per_token] for _ in range(tokens)]).astype(np.int32)


def check_listed(listed: Listed, chosen: np.ndarray, live: np.ndarray, num_on_card: int) -> None:
    count = int(listed.count)
    wanted = sorted({int(one) - num_on_card for row in chosen[live] for one in row if one >= num_on_card})
    assert listed.wanted[:count].tolist() == wanted
    for expert, place in enumerate(listed.places.tolist()):
        if expert < num_on_card:
            assert place == expert
        elif expert - num_on_card in wanted:
            assert wanted[~place] == expert - num_on_card
        else:
            assert place == ~0, "an address that there is, whatever stands there"


@pytest.mark.parametrize(
    ("tokens", "per_token", "num_experts", "num_on_card"),
    [(1, 8, 128, 40), (4, 8, 128, 40), (1, 2, 8, 0), (33, 4, 60, 59), (16, 8, 128, 1), (3, 1, 5, 2)],
)
@pytest.mark.parametrize("device", DEVICES)
def test_every_chosen_expert_has_one_slot_and_everyone_finds_it(
    device: str, tokens: int, per_token: int, num_experts: int, num_on_card: int
) -> None:
    chosen = choose(np.random.default_rng(tokens), tokens, per_token, num_experts)
    slots = min(tokens * per_token, num_experts - num_on_card)
    listed = list_experts(torch.tensor(chosen, device=device), num_on_card, num_experts, slots)
    check_listed(listed, chosen, np.ones(tokens, bool), num_on_card)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_not_in_use_want_nothing(device: str) -> None:
    chosen = np.array([[1, 7], [6, 5], [7, 0]], np.int32)
    rows = torch.tensor([3, -1, 0], dtype=torch.int32, device=device)
    listed = list_experts(torch.tensor(chosen, device=device), 4, 8, 4, rows)
    check_listed(listed, chosen, np.array([True, False, True]), 4)
    assert int(listed.count) == 1, "expert 7, which both want; 5 and 6 are of a row of padding"


@pytest.mark.parametrize("device", DEVICES)
def test_where_all_choose_what_is_on_the_card_nothing_is_listed(device: str) -> None:
    chosen = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32, device=device)
    listed = list_experts(chosen, 3, 8, 4)
    assert int(listed.count) == 0
    assert listed.places.tolist() == [0, 1, 2, ~0, ~0, ~0, ~0, ~0]


@settings(max_examples=5 if INTERPRETED else 100, deadline=None)
@given(
    seed=st.integers(0, 2**31), tokens=st.integers(1, 40), per_token=st.integers(1, 4), more=st.integers(0, 20),
    share=st.floats(0, 1),
)  # fmt: skip
def test_any_choice_is_listed(seed: int, tokens: int, per_token: int, more: int, share: float) -> None:
    draw, num_experts = np.random.default_rng(seed), per_token + more + 1
    chosen, live = choose(draw, tokens, per_token, num_experts), draw.random(tokens) < 0.8
    num_on_card = min(num_experts - 1, int(share * num_experts))
    rows = torch.tensor(np.where(live, 0, -1), dtype=torch.int32)
    listed = list_experts(torch.tensor(chosen), num_on_card, num_experts, num_experts - num_on_card, rows)
    check_listed(listed, chosen, live, num_on_card)


@pytest.mark.parametrize(
    ("rows", "inner", "dtype"),
    [
        (6, 40, torch.bfloat16), (3, 7 * 4, torch.uint8), (2, BLOCK_WORDS, torch.float32),
        (1, 2 * BLOCK_WORDS + 2, torch.bfloat16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_fetched_is_the_listed_experts_bit_for_bit(
    device: str, rows: int, inner: int, dtype: torch.dtype
) -> None:
    num_experts, num_on_card = 9, 3
    numbers = np.random.default_rng(1).integers(0, 256, (6 * rows, inner * dtype.itemsize), dtype=np.uint8)
    stack = torch.tensor(numbers).view(dtype)
    source = words_of(stack.pin_memory() if device == "cuda" else stack, 6)
    chosen = torch.tensor([[8, 0], [3, 8], [5, 1]], dtype=torch.int32, device=device)
    listed = list_experts(chosen, num_on_card, num_experts, 6)
    into = torch.full((6, source.shape[1]), 0x7FC00000, dtype=torch.int32, device=device)
    fetch_experts(source, into, listed)
    wanted = numbers.reshape(6, -1)[[0, 2, 5]]
    assert np.array_equal(into[:3].cpu().numpy().view(np.uint8), wanted)
    assert (into[3:] == 0x7FC00000).all(), "an empty slot is written to"


@pytest.mark.gpu
def test_a_replay_fetches_what_its_own_tokens_chose() -> None:
    draw = np.random.default_rng(2)
    stack = torch.tensor(draw.integers(-(2**31), 2**31, (5, 3 * BLOCK_WORDS), dtype=np.int64)).int().pin_memory()
    chosen = torch.zeros(2, 2, dtype=torch.int32, device="cuda")

    def step() -> tuple[torch.Tensor, Listed]:
        listed = list_experts(chosen, 3, 8, 4)
        into = torch.full((4, 3 * BLOCK_WORDS), -1, dtype=torch.int32, device="cuda")
        fetch_experts(stack, into, listed)
        return into, listed

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        into, listed = step()
    for rows in ([[3, 7], [7, 0]], [[1, 2], [0, 1]], [[4, 5], [6, 3]]):
        chosen.copy_(torch.tensor(rows, dtype=torch.int32))
        graph.replay()
        wanted = sorted({expert - 3 for row in rows for expert in row if expert >= 3})
        assert listed.wanted[: int(listed.count)].tolist() == wanted
        assert torch.equal(into[: len(wanted)].cpu(), stack[wanted])


@pytest.mark.parametrize(
    ("chosen", "rows", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.int64), None, "chosen is .* wanted .*int32"),
        (torch.zeros(2, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), "rows is"),
        (torch.zeros(9, 2, dtype=torch.int32), None, "4 slots for 9 tokens of 2 of 5 experts; too few"),
    ],
)
def test_what_cannot_be_listed_is_named(chosen: torch.Tensor, rows: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list_experts(chosen, 3, 8, 4, rows)


def test_what_cannot_be_fetched_is_named() -> None:
    listed = list_experts(torch.tensor([[3, 7]], dtype=torch.int32), 3, 8, 2)
    with pytest.raises(ValueError, match="into is"):
        fetch_experts(torch.zeros(5, 4, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32), listed)
    with pytest.raises(ValueError, match="source is"):
        fetch_experts(torch.zeros(5, 4), torch.zeros(2, 4, dtype=torch.int32), listed)
    with pytest.raises(ValueError, match="70 bytes is no 5 experts of whole words"):
        words_of(torch.zeros(5, 7, dtype=torch.bfloat16), 5)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_listed_is_added_up(device: str) -> None:
    """Each expert in host memory once a step, whatever stood there before."""
    total = torch.full((1,), 2**40, dtype=torch.int64, device=device)
    for rows, wanted in (([[0, 9], [9, 8]], 2), ([[0, 1], [2, 3]], 0), ([[5, 9], [6, 4]], 4)):
        chosen = torch.tensor(rows, dtype=torch.int32, device=device)
        before = int(total)
        assert int(list_experts(chosen, 4, 10, 4, None, total).count) == wanted
        assert int(total) - before == wanted
    with pytest.raises(ValueError, match="total is"):
        list_experts(chosen, 4, 10, 4, None, total.int())
