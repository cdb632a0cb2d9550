"""Decoding through the host tier equals decoding with the whole context on the device, offloads in between included."""

from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from gpu.decode.loop import check_coverage
from gpu.decode.steps import Batch, HostReader, _context_read
from gpu.exchange.device_slots import SlotExchange
from gpu.methods.device_side import LayerReads, RingSide
from gpu.methods.sampled.encode import arrange, encode_rows_reference
from gpu.methods.sampled.hyperplanes import PROJECTION_SEED, draw_projections
from gpu.operations.decode_attention.paged_decode_attention import DevicePartials
from gpu.step import StepPlan
from tests.gpu.reference_model import document_prompt
from tests.gpu.twin_runners import BITS, DIM, NUM_HEADS, NUM_LAYERS, NUM_TABLES, Twins, check_steps, furthest
from tests.reference_tier import ReferenceAttention
from tests.tolerances import BF16_LOGPROB_ATOL, HOP_LOGITS_FLOAT32, LSE_CHECKSUM
from transfer.exchange import ExchangeError
from transfer.host_tier import ContextRead
from transfer.partial import CoverageError, Partial, merge_all
from transfer.reading import Reading

PROMPTS = [document_prompt(length, length) for length in (300, 190, 411, 257, 130)]
NUM_STEPS = 64
PAGE = 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def host_reader_of(twins: Twins) -> HostReader:
    """Of the runner that offloads."""
    found = twins.offloading.decode_steps.host_reader
    assert found is not None
    return found


def batch_of(twins: Twins, slots: list[int], change: int = 0) -> Batch:
    """The next step of these slots; `change`: by so many cells the device's skipped range is longer."""
    group = twins.group(slots)
    asks = [replace(ask, end=ask.end + change) for ask in group.host_reads]
    return Batch(group.slots, group.positions, asks)


def test_logits_equal_those_of_the_exact_profile_over_many_steps() -> None:
    twins = Twins(offload_block_tokens=32)
    twins.prefill(PROMPTS)
    slots = list(range(len(PROMPTS)))
    check_steps(twins, slots, 40)
    assert all(twins.sequences[slot].run_end for slot in slots)
    assert twins.tier.num_tokens(100) == twins.sequences[0].run_end - 16
    times = twins.offloading.host_read_times
    assert times.requests >= 40 * (NUM_LAYERS - 2)
    assert min(times.launch_s, times.attention_s, times.ready_s) > 0


def test_that_comparison_sees_one_token_that_is_not_asked_for() -> None:
    twins = Twins()
    twins.prefill(PROMPTS[:1])
    check_steps(twins, [0], 1)
    attention = twins.tier.attention
    with pytest.MonkeyPatch.context() as patch:
        fewer = lambda asks: attention([replace(ask, num_tokens=ask.num_tokens - 1) for ask in asks])  # noqa: E731
        patch.setattr(twins.tier, "attention", fewer)
        twins.step([0])
    assert furthest(twins, [0]) > HOP_LOGITS_FLOAT32


@pytest.mark.parametrize(("page_tokens", "window_tokens"), [(32, 65), (64, 64)])
def test_borders_of_sink_and_window_fall_right_for_every_page_size(page_tokens: int, window_tokens: int) -> None:
    twins = Twins(page_tokens=page_tokens, window_tokens=window_tokens)
    twins.prefill(PROMPTS[:1])
    check_steps(twins, [0], page_tokens + 2)


def test_sampled_steps_leave_the_codes_of_the_rotated_query_in_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    queries: list[torch.Tensor] = []
    ask = SlotExchange.request
    monkeypatch.setattr(
        SlotExchange, "request", lambda self, query, *rest: (queries.append(query.clone()), ask(self, query, *rest))[1]
    )
    twins = Twins(reading=Reading.SAMPLE)
    twins.prefill(PROMPTS[:1])
    check_steps(twins, [0], 2)
    slot = host_reader_of(twins).exchanges[0].slot
    wanted = torch.empty(NUM_HEADS, NUM_TABLES, dtype=torch.uint16)
    hyperplanes = arrange(draw_projections(DIM, BITS, NUM_TABLES, PROJECTION_SEED, torch.float32, torch.device("cpu")))
    encode_rows_reference(queries[-1][0], hyperplanes, wanted)
    assert torch.equal(slot.codes[0].int(), wanted.int())
    assert torch.equal(slot.queries[0], queries[-1][0])
    assert len(wanted.int().unique()) > NUM_TABLES


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_on_the_device_and_in_host_memory_is_the_whole_context(device: str) -> None:
    """Counted where it is read; where logits are flat, exp(lse) counts as well."""
    twins = Twins(device=device, check_coverage=True)
    twins.prefill(PROMPTS[:4])
    host_reader_of(twins).halving.always = 2
    checked: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in twins.offloading.weights.layers:
        layer.qkv[: NUM_HEADS * DIM].zero_()

    def recording(reads: LayerReads, on_device: DevicePartials, filled: list[Partial], reusing: list[RingSide]) -> None:
        check_coverage(reads, on_device, filled, reusing)
        checked.append((reads.rows.context_lens.cpu(), merge_all([on_device.near, *filled]).lse.cpu()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu.decode.loop.check_coverage", recording)
        for _ in range(3):
            twins.step([0, 1, 2, 3])
    assert len(checked) == 2 * 3 * NUM_LAYERS  # half batches
    for contexts, lse in checked:
        torch.testing.assert_close(lse, contexts.log()[:, None].expand_as(lse), rtol=0, atol=LSE_CHECKSUM)


def test_a_token_that_nobody_or_everybody_reads_is_named() -> None:
    twins = Twins(check_coverage=True)
    twins.prefill(PROMPTS[:2])
    check_steps(twins, [0, 1], 2)
    evicted = slice(1, twins.sequences[0].released // PAGE)
    twins.offloading.pool.page_table[0, evicted] = twins.sequences[0].pages[
        0
    ]  # with storage: what reads too much reads it
    context = twins.sequences[0].num_tokens + 1
    for change in (-PAGE, PAGE):
        wanted = f"request of slot 0, head 0.* = {context - change} tokens, wanted the context of {context}"
        ask = twins.group([0]).host_reads[0]
        answer = twins.tier.attention([ContextRead(ask.context_id, ask.end - ask.begin)])
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(twins.tier, "attention", lambda asks, answer=answer: answer)
            with pytest.raises(CoverageError, match=wanted):
                twins.offloading.decode_steps.run(batch_of(twins, [0], change))


@torch.inference_mode()
def test_rows_of_padding_write_nothing_and_change_nothing() -> None:
    twins = Twins(max_running=4)
    twins.prefill(PROMPTS[:1])
    check_steps(twins, [0], 1)
    runner, batch = twins.offloading, batch_of(twins, [0])
    steps, exchange = runner.decode_steps, host_reader_of(twins).exchanges[0]
    pages = [arena.clone() for arena in runner.pool.arenas]
    logits = []
    for size in (1, 2):
        exchange.slot.out[1:] = exchange.slot.lse[1:] = torch.nan
        exchange.slot.advance(1)
        step = steps.loop.step(steps._upload(batch, size), exchange, reuses=False)
        next(step)
        attention = twins.tier.attention([_context_read(ask) for ask in batch.host_reads])
        (own,), _ = steps._take_turns([step], [attention], [exchange])
        logits.append(own[0])
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=HOP_LOGITS_FLOAT32)
    changed = sum(
        int((~torch.isclose(before, after, rtol=0, atol=0, equal_nan=True)).any(-1).sum())
        for before, after in zip(pages, runner.pool.arenas, strict=True)
    )
    assert changed <= 2 * NUM_LAYERS * runner.architecture.num_kv_heads  # the row's own token


def test_a_refused_offload_fails_its_slot_alone_until_it_is_released() -> None:
    twins = Twins(capacity_tokens=430)  # the second slot's first offload is one too many
    twins.prefill([PROMPTS[0], PROMPTS[2]])
    result = twins.step([0, 1])
    assert list(result.failures) == [1]
    assert "host memory: asked" in result.failures[1]
    assert {token.slot: token.token_id for token in result.tokens}[1] == -1
    assert sorted(token.slot for token in result.tokens) == [0, 1]
    assert furthest(twins, [0]) < HOP_LOGITS_FLOAT32
    again = twins.offloading.launch(twins.plan([0, 1], [])).collect()
    assert list(again.failures) == [1]
    assert [token.token_id for token in again.tokens if token.slot == 1] == [-1]
    twins.offloading.launch(StepPlan(released_slots=[1], closed_contexts=[101])).collect()
    assert twins.offloading._failures == {}
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


def test_an_offload_of_several_chunks_runs_layer_by_layer() -> None:
    twins = Twins()
    twins.prefill([PROMPTS[2]])
    check_steps(twins, [0], 3)
    sizes = [piece.end for piece in twins.tier.contexts[100]]
    assert len(sizes) == 2
    assert sum(sizes) == twins.sequences[0].run_end - 16


def test_a_prompt_that_was_offloaded_as_it_was_computed_is_decoded_the_same() -> None:
    twins = Twins(offload_block_tokens=32)
    twins.prefill_down(0, PROMPTS[0])
    check_steps(twins, [0], 32)
    assert twins.sequences[0].run_end > 16 + twins.tier.contexts[100][0].end


def test_warming_up_leaves_nothing_in_the_tier() -> None:
    twins = Twins()
    assert twins.tier.contexts == {}
    assert twins.offloading.host_read_times.steps == 2  # of a context that is sampled, and one that is not
    assert twins.exact.host_read_times.steps == 0


def test_rows_that_ask_nothing_share_a_step_with_those_that_ask() -> None:
    twins = Twins(check_coverage=True)
    twins.prefill([PROMPTS[0], document_prompt(20, 3), PROMPTS[2], document_prompt(40, 4)])
    before = twins.offloading.host_read_times.steps
    check_steps(twins, [0, 1, 2, 3], 8)
    assert [bool(twins.sequences[slot].run_end) for slot in range(4)] == [True, False, True, False]
    assert twins.offloading.host_read_times.steps == before + 8  # one step for all of them


def test_a_context_whose_last_tokens_are_also_on_the_device_is_asked_for_its_first() -> None:
    """What the host has and what it is asked for are two things: the rest is read on the device."""
    twins = Twins(check_coverage=True)
    twins.prefill([PROMPTS[2], PROMPTS[2]])
    check_steps(twins, [0], 1)
    ahead = twins.tier.contexts[100]
    sequence = twins.sequences[1]
    sequence.context_id = 101
    twins.tier.fork(100, 101, twins.tier.num_tokens(100), Reading.WHOLE)
    sequence.run_end = twins.sequences[0].run_end
    twins.evict(sequence, PAGE + 128)
    assert twins.tier.num_tokens(101) > 128
    assert twins.tier.contexts[101][0].chunk is ahead[0].chunk
    check_steps(twins, [0, 1], 1)


@pytest.mark.parametrize("num_kept", [16, 96, 2048])
def test_what_the_host_has_is_read_on_the_device_until_it_is_released(num_kept: int) -> None:
    twins = Twins(check_coverage=True, kept_tokens=num_kept, offload_block_tokens=32)
    twins.prefill_down(0, PROMPTS[0])
    before = twins.offloading.host_read_times.steps
    check_steps(twins, [0], 40)
    sequence = twins.sequences[0]
    assert (twins.offloading.host_read_times.steps == before) == (num_kept == 2048), "nothing is asked for"
    assert sequence.run_end - sequence.released == min(num_kept, sequence.run_end - PAGE)
    assert twins.tier.num_tokens(100) == sequence.run_end - PAGE
    asks = twins.offloading.host_read_times.steps
    twins.evict(sequence, sequence.run_end)
    check_steps(twins, [0], 2)
    assert twins.offloading.host_read_times.steps == asks + 2


def test_a_step_after_one_that_failed_waits_for_its_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that stays released, or a stamp that is one behind, would merge an old answer or wait for ever."""
    twins = Twins()
    twins.prefill(PROMPTS[:2])
    check_steps(twins, [0, 1], 1)
    steps = twins.offloading.decode_steps
    fails = MagicMock(side_effect=ExchangeError("the device is behind"))
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceAttention, "run", fails)
        with torch.inference_mode(), pytest.raises(ExchangeError):
            steps.run(batch_of(twins, [0, 1]))
    assert any(exchange.slot.is_released for exchange in host_reader_of(twins).exchanges)
    check_steps(twins, [0, 1], 3)


@pytest.mark.gpu
@pytest.mark.parametrize("reading", [Reading.WHOLE, Reading.SAMPLE])
@pytest.mark.parametrize("sizes", [(), (1, 4, 5)])
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_on_cuda_graphs_and_eager_segments_equal_the_exact_profile(
    reading: Reading, sizes: tuple[int, ...], num_rows: int
) -> None:
    twins = Twins(device="cuda", reading=reading, graph_batch_sizes=sizes)
    twins.prefill(PROMPTS[:num_rows])
    check_steps(twins, list(range(num_rows)), NUM_STEPS)


@pytest.mark.gpu
@pytest.mark.usefixtures("products_by_library")
def test_on_cuda_graphs_give_the_bits_of_eager_segments() -> None:
    logits = []
    for sizes in ((), (2, 3)):
        twins = Twins(device="cuda", dtype="bfloat16", graph_batch_sizes=sizes)
        host_reader_of(twins).halving.always = 2  # how a batch is cut follows from times, and sums from how it is cut
        twins.prefill(PROMPTS[:3])
        for _ in range(8):
            twins.step([0, 1, 2])
            assert furthest(twins, [0, 1, 2]) < BF16_LOGPROB_ATOL
        logits.append(np.stack([twins.logits(slot)[0].numpy() for slot in range(3)]))
    np.testing.assert_array_equal(logits[0], logits[1])
