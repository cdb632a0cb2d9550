"""Decoding through the host tier equals decoding with the whole context on the device, deposits in between included."""

import math
from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from gpu.decode.hop_segments import HopInputs
from gpu.decode.hop_steps import halve, most_half_rows
from gpu.host.simhash import draw_projections
from gpu.host.slot_exchange import SlotExchange
from gpu.kernels.simhash_encode import arrange, encode_rows_reference
from gpu.runner import PROJECTION_SEED
from gpu.step import HostPrompt, PageWrite, PrefillJob, PrefillPrompt, StepPlan
from tests.gpu.reference_model import GREEDY, document_prompt, layer_units
from tests.gpu.twin_runners import BITS, DIM, NUM_HEADS, NUM_LAYERS, NUM_TABLES, Twins, check_steps, furthest
from tests.reference_tier import ReferenceAttention
from tests.tolerances import BF16_LOGPROB_ATOL, HOP_LOGITS_FLOAT32, LSE_CHECKSUM
from transfer.exchange import ExchangeError
from transfer.tier import Ask

PROMPTS = [document_prompt(length, length) for length in (300, 190, 411, 257, 130)]
NUM_STEPS = 64


@pytest.mark.parametrize("num_rows", [1, 5])
def test_logits_equal_those_of_the_exact_profile_over_64_steps(num_rows: int) -> None:
    twins = Twins()
    twins.prefill(PROMPTS[:num_rows])
    slots = list(range(num_rows))
    check_steps(twins, slots, NUM_STEPS)
    assert all(twins.sequences[slot].run_end for slot in slots)
    assert twins.tier.num_tokens(100) == twins.sequences[0].run_end - 16
    assert twins.deposits.pool.num_deposited_tokens(0) == twins.tier.num_tokens(100)
    times = twins.deposits.hop_times
    assert times.asks >= NUM_STEPS * (NUM_LAYERS - 2)
    assert min(times.launch_s, times.attention_s, times.ready_s) > 0


def test_that_comparison_sees_one_deposited_token_lost_and_one_shifted_window() -> None:
    twins = Twins()
    twins.prefill(PROMPTS[:1])
    check_steps(twins, [0], 1)
    with pytest.MonkeyPatch.context() as patch:
        ask_all = twins.tier.attention
        patch.setattr(twins.tier, "attention", lambda asks: ask_all([Ask(asks[0].context_id, asks[0].num_tokens - 1)]))
        twins.step([0])
    assert furthest(twins, [0]) > HOP_LOGITS_FLOAT32
    twins.deposits.pool.resident_table[0, 1:-1] = twins.deposits.pool.resident_table[0, 2:].clone()
    twins.step([0])
    assert not furthest(twins, [0]) <= HOP_LOGITS_FLOAT32


@pytest.mark.parametrize("dense_layers", [(), (0,), (0, NUM_LAYERS // 2), tuple(range(NUM_LAYERS - 1))])
def test_any_set_of_dense_layers_decodes_the_same(dense_layers: tuple[int, ...]) -> None:
    twins = Twins(dense_layers=dense_layers)
    twins.prefill(PROMPTS[:3])
    check_steps(twins, [2, 0, 1], 20)


@pytest.mark.parametrize("page_tokens", [16, 32, 64])
@pytest.mark.parametrize("window_tokens", [64, 65])
def test_borders_of_sink_and_window_fall_right_for_every_page_size(page_tokens: int, window_tokens: int) -> None:
    twins = Twins(page_tokens=page_tokens, window_tokens=window_tokens)
    twins.prefill(PROMPTS[:1])
    check_steps(twins, [0], page_tokens + 2)


def test_sampled_steps_leave_the_codes_of_the_rotated_query_in_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    queries: list[torch.Tensor] = []
    ask = SlotExchange.ask
    monkeypatch.setattr(SlotExchange, "ask", lambda self, query: (queries.append(query.clone()), ask(self, query))[1])
    twins = Twins(is_sampled=True)
    twins.prefill(PROMPTS[:1])
    check_steps(twins, [0], 2)
    slot = twins.deposits._offload.decode_steps(True).halves[0].exchange.slot
    wanted = torch.empty(NUM_HEADS, NUM_TABLES, dtype=torch.uint16)
    hyperplanes = arrange(draw_projections(DIM, BITS, NUM_TABLES, PROJECTION_SEED, torch.float32, torch.device("cpu")))
    encode_rows_reference(queries[-1][0], hyperplanes, wanted)
    assert torch.equal(slot.codes[0].int(), wanted.int())
    assert torch.equal(slot.queries[0], queries[-1][0])
    assert len(wanted.int().unique()) > NUM_TABLES
    assert twins.deposits._offload.decode_steps(False).halves[0].exchange.slot.codes is None


def test_resident_and_deposited_tokens_make_up_the_whole_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where logits are flat, exp(lse) counts the tokens that were covered."""
    merged: list[torch.Tensor] = []
    merge_answer = SlotExchange.merge_answer

    def recording(self, resident):
        answer = merge_answer(self, resident)
        merged.append(answer.lse[: self.slot.rows].clone())
        return answer

    twins = Twins()
    twins.prefill(PROMPTS[:3])
    monkeypatch.setattr(SlotExchange, "merge_answer", recording)
    for layer in twins.deposits.weights.layers:
        layer.qkv[: NUM_HEADS * DIM].zero_()
    for _ in range(3):
        merged.clear()
        twins.step([0, 1, 2])
        contexts = [twins.sequences[slot].num_tokens for slot in (0, 1, 2)]
        wanted = torch.tensor([math.log(context) for context in contexts])
        for ask in range(NUM_LAYERS - 2):  # half batches of slots 0 and 1, and of slot 2
            lse = torch.cat(merged[2 * ask : 2 * ask + 2])
            torch.testing.assert_close(lse, wanted[:, None].expand_as(lse), rtol=0, atol=LSE_CHECKSUM)


@torch.inference_mode()
def test_rows_of_padding_write_nothing_and_change_nothing() -> None:
    twins = Twins(max_running=4)
    twins.prefill(PROMPTS[:1])
    check_steps(twins, [0], 1)
    runner, sequence = twins.deposits, twins.sequences[0]
    half = runner._offload.decode_steps(False).halves[0]
    pages = [pages.clone() for pages in (*runner.pool.key_pages, *runner.pool.value_pages)]
    logits = []
    for size in (1, 2):
        packed = HopInputs.pack([0], [sequence.num_tokens], [runner.pool.num_deposited_tokens(0)], size, 4)
        inputs = HopInputs(torch.from_numpy(packed), size)
        half.exchange.slot.out[1:] = half.exchange.slot.lse[1:] = torch.nan
        half.exchange.slot.advance(1)
        carry = half.segments.begin(inputs, half.exchange)
        attention = twins.tier.attention([Ask(100, twins.tier.num_tokens(100))])
        for ask in range(half.segments.num_asks):
            attention.run(ask, half.exchange.slot)
            if ask + 1 < half.segments.num_asks:
                half.exchange.slot.advance(1)
                carry = half.segments.go_on(ask, carry, inputs, half.exchange)
        logits.append(half.segments.end(carry, inputs, half.exchange)[0])
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=HOP_LOGITS_FLOAT32)
    changed = sum(
        int((~torch.isclose(before, after, rtol=0, atol=0, equal_nan=True)).any(-1).sum())
        for before, after in zip(pages, (*runner.pool.key_pages, *runner.pool.value_pages), strict=True)
    )
    assert changed <= 2 * NUM_LAYERS * runner.architecture.num_kv_heads  # the row's own token


def test_a_refused_deposit_fails_its_slot_alone_until_it_is_released() -> None:
    twins = Twins(capacity_tokens=430)  # the second slot's first deposit is one too many
    twins.prefill([PROMPTS[0], PROMPTS[2]])
    result = twins.step([0, 1])
    assert list(result.failures) == [1]
    assert "host memory: asked" in result.failures[1]
    assert {token.slot: token.token_id for token in result.tokens}[1] == -1
    assert sorted(token.slot for token in result.tokens) == [0, 1]
    assert furthest(twins, [0]) < HOP_LOGITS_FLOAT32
    again = twins.deposits.launch(twins.plan([0, 1], [])).collect()
    assert list(again.failures) == [1]
    assert [token.token_id for token in again.tokens if token.slot == 1] == [-1]
    twins.deposits.launch(StepPlan(released_slots=[1], closed_contexts=[101])).collect()
    assert twins.deposits._failures == {}
    assert 101 not in twins.tier.contexts
    check_steps(twins, [0], 4)


def test_forks_share_their_front_and_part_ways() -> None:
    twins = Twins()
    twins.prefill([PROMPTS[0], PROMPTS[0]])
    check_steps(twins, [0], 1)
    twins.fork(0, 1)
    twins.step([1])
    first, second = twins.tier.contexts[100], twins.tier.contexts[101]
    assert first[0].chunk is second[0].chunk
    twins.exact._last_tokens[1] += 1
    check_steps(twins, [0, 1], NUM_STEPS + 8)
    assert first[-1].chunk is not second[-1].chunk
    assert twins.tier.num_tokens(100) > first[0].end


def test_a_deposit_of_several_chunks_goes_down_layer_by_layer() -> None:
    twins = Twins()
    twins.prefill([PROMPTS[2]])
    check_steps(twins, [0], 3)
    sizes = [piece.end for piece in twins.tier.contexts[100]]
    assert len(sizes) == 2
    assert sum(sizes) == twins.sequences[0].run_end - 16


def test_a_prompt_that_went_down_as_it_was_computed_is_decoded_the_same() -> None:
    twins = Twins()
    twins.prefill_down(0, PROMPTS[0])
    twins.prefill_down(1, PROMPTS[2])
    check_steps(twins, [0, 1], NUM_STEPS + 1)
    assert twins.sequences[0].run_end > 16 + twins.tier.contexts[100][0].end


def test_a_refused_prompt_gets_no_token_and_its_neighbour_goes_on() -> None:
    twins = Twins(capacity_tokens=300)
    twins.prefill_down(0, PROMPTS[0])
    prompt = PrefillPrompt(
        1, PROMPTS[2], 0, len(PROMPTS[2]), GREEDY, "offloaded", HostPrompt(101, None, 16, 256, False)
    )
    job = PrefillJob(1, [prompt])
    pages = [PageWrite(1, 0, list(range(len(PROMPTS[2]) // 16 + 1)))]
    plan = replace(twins.plan([0], []), new_jobs=[job], units=layer_units(job, 512, NUM_LAYERS))
    plan.page_writes.extend(pages)
    result = twins.deposits.launch(plan).collect()
    assert list(result.failures) == [1]
    assert {token.slot: token.token_id == -1 for token in result.tokens} == {0: False, 1: True}


def test_warming_up_leaves_nothing_in_the_tier() -> None:
    twins = Twins()
    assert twins.tier.contexts == {}
    assert twins.deposits.hop_times.steps == 2  # one of each kind
    assert twins.deposits.pool.deposited_tokens.tolist() == [0] * 5
    assert twins.exact.hop_times.steps == 0


def test_a_batch_is_cut_into_two_halves_and_a_row_is_not() -> None:
    assert halve(1) == [slice(0, 1)]
    assert halve(2) == [slice(0, 1), slice(1, 2)]
    assert halve(5) == [slice(0, 3), slice(3, 5)]
    assert [most_half_rows(rows) for rows in (1, 2, 5)] == [[1], [1, 1], [3, 2]]


def test_inputs_are_packed_and_padded() -> None:
    packed = HopInputs.pack([3, 0], [97, 85], [48, 64], 3, 9)
    inputs = HopInputs(torch.from_numpy(packed), 3)
    assert inputs.rows.context_lens.tolist() == [98, 86, 0]
    assert inputs.rows.slots.tolist() == [3, 0, -1]
    assert inputs.resident_lens.tolist() == [50, 22, 0]


def test_a_step_after_one_that_failed_waits_for_its_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that stays released, or a stamp that is one behind, would merge an old answer or wait for ever."""
    twins = Twins()
    twins.prefill(PROMPTS[:2])
    check_steps(twins, [0, 1], 1)
    steps = twins.deposits._offload.decode_steps(False)
    fails = MagicMock(side_effect=ExchangeError("the device is behind"))
    positions = [twins.sequences[slot].num_tokens for slot in (0, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceAttention, "run", fails)
        with torch.inference_mode(), pytest.raises(ExchangeError):
            steps.run([0, 1], positions, [100, 101])
    assert all(half.exchange.slot.is_released for half in steps.halves)
    check_steps(twins, [0, 1], 3)


@pytest.mark.gpu
@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("sizes", [(), (1, 4, 5)])
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_on_cuda_graphs_and_eager_segments_equal_the_exact_profile(
    is_sampled: bool, sizes: tuple[int, ...], num_rows: int
) -> None:
    twins = Twins(device="cuda", is_sampled=is_sampled, graph_batch_sizes=sizes)
    twins.prefill(PROMPTS[:num_rows])
    check_steps(twins, list(range(num_rows)), NUM_STEPS)


@pytest.mark.gpu
def test_on_cuda_graphs_give_the_bits_of_eager_segments() -> None:
    logits = []
    for sizes in ((), (2, 3)):
        twins = Twins(device="cuda", dtype="bfloat16", graph_batch_sizes=sizes)
        twins.prefill(PROMPTS[:3])
        for _ in range(8):
            twins.step([0, 1, 2])
            assert furthest(twins, [0, 1, 2]) < BF16_LOGPROB_ATOL
        logits.append(np.stack([twins.logits(slot)[0].numpy() for slot in range(3)]))
    np.testing.assert_array_equal(logits[0], logits[1])
