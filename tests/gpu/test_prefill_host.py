"""Prefill of prompts that are offloaded to the host: the same text, the same rows, whatever else happens meanwhile."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu.host.row_transfer import Sent
from gpu.layers.decoder import Carried, Target
from gpu.prefill.outputs import FinishedJob
from gpu.step import PageWrite, PrefillJob, PrefillUnit, Unit
from tests.gpu.host_prefill import (
    APART,
    DENSE_LAYERS,
    DOWN,
    PAGE,
    SHAPE,
    SINK,
    Stand,
    draw_prompt,
    host_prompt,
    units_of,
)
from tests.gpu.logged_streams import LoggedStreams
from tests.gpu.reference_model import logits_units
from tests.reference_tier import ReferenceReservation
from tests.tolerances import (
    CHUNKING_LOGPROB_ATOL,
    HOST_ROW_BFLOAT16,
    HOST_ROW_INT8,
)
from transfer.copies import Event
from transfer.host_tier import HostMemoryError

LENGTH = 345
CONTEXT = 70  # id of the first host context


Plain = tuple[Stand, Tensor, FinishedJob]


def run_plain(
    token_ids: np.ndarray, dtype: torch.dtype = torch.float32, device: str = "cpu", chunk_tokens: int = 64
) -> Plain:
    """The same prompt wholly on the device: the stand, its last token's logits, and the finished job."""
    stand = Stand(dtype=dtype, device=torch.device(device), has_tier=False)
    job = stand.job(1, 0, token_ids)
    stand.give_pages(0, len(token_ids), None)
    stand.prefill.add(job)
    finished = stand.run(units_of(job, chunk_tokens))[1]
    return stand, stand.sampler.logits, finished


def run_down(stand: Stand, token_ids: np.ndarray, slot: int, context_id: int, chunk_tokens: int) -> FinishedJob:
    """A whole prompt, wholly new, down to a context."""
    host = host_prompt(len(token_ids), context_id)
    stand.give_pages(slot, len(token_ids), host)
    job = stand.job(context_id, slot, token_ids, host)
    stand.prefill.add(job)
    return stand.run(units_of(job, chunk_tokens))[context_id]


def run_after(stand: Stand, token_ids: np.ndarray, begin: int, slot: int, context_id: int,
              source_id: int | None) -> None:  # fmt: skip
    """A prompt whose first `begin` tokens are offloaded already: sink and dense pages are those of slot 0."""
    host = host_prompt(len(token_ids), context_id, source_id)
    own = stand.give_pages(slot, len(token_ids), host)
    own[: begin // PAGE] = stand.pool.page_table[0, : begin // PAGE].tolist()
    stand.pool.write_pages([PageWrite(slot, 0, own)])
    job = stand.job(context_id, slot, token_ids, host, begin)
    stand.prefill.add(job)
    assert context_id in stand.run(units_of(job, 48))


def relative(got: Tensor, wanted: Tensor, centre: Tensor) -> float:
    """Largest error of rows, as a share of the largest centred element of the same layer."""
    return float((got - wanted).abs().max() / (wanted - centre).abs().max())


def assert_rows_are_offloaded(
    stand: Stand, context_id: int, plain: Stand, slot: int, end: int, tolerance: float
) -> None:
    """Tokens `[SINK, end)` of the plain stand's slot, in every layer that is offloaded."""
    assert stand.tier.num_tokens(context_id) == end - SINK
    for place, layer in enumerate(stand.down):
        for got, wanted in zip(
            stand.tier.stored(context_id, place), plain.slot_rows(slot, layer, SINK, end), strict=True
        ):
            assert got.shape == wanted.shape
            wanted = wanted.double().cpu()
            assert relative(got, wanted, wanted.mean(1, keepdim=True)) < tolerance


def logprobs(finished: FinishedJob) -> np.ndarray:
    (entries,) = (own.to_list() for own in finished.prompt_logprobs.values())
    return np.array([entry.logprob for entry in entries])


@pytest.fixture(scope="module")
def prompt() -> np.ndarray:
    return draw_prompt(LENGTH, 1)


@pytest.fixture(scope="module")
def plain(prompt: np.ndarray) -> Plain:
    return run_plain(prompt)


@pytest.mark.parametrize("chunk_tokens", [7, 16, 100, 1000])
def test_a_prompt_that_is_offloaded_has_the_logits_of_one_that_stays(
    chunk_tokens: int, prompt: np.ndarray, plain: Plain
) -> None:
    stand = Stand()
    finished = run_down(stand, prompt, 2, CONTEXT, chunk_tokens)
    torch.testing.assert_close(stand.sampler.logits, plain[1], rtol=0, atol=CHUNKING_LOGPROB_ATOL)
    np.testing.assert_allclose(logprobs(finished), logprobs(plain[2]), rtol=0, atol=CHUNKING_LOGPROB_ATOL)
    assert finished.drawing.to_host()[0].token_id == plain[2].drawing.to_host()[0].token_id


def test_rows_that_are_offloaded_are_the_exact_ones_rounded_and_the_rest_is_in_pages(
    prompt: np.ndarray, plain: Plain
) -> None:
    stand = Stand()
    run_down(stand, prompt, 2, CONTEXT, 100)
    end = host_prompt(LENGTH, CONTEXT).end
    assert stand.tier.num_tokens(CONTEXT) == end - SINK
    assert_rows_are_offloaded(stand, CONTEXT, plain[0], 0, end, HOST_ROW_BFLOAT16)
    for layer in range(SHAPE.num_layers):
        stays = [(0, LENGTH)] if layer in DENSE_LAYERS else [(0, SINK), (end, LENGTH)]
        for begin, stop in stays:
            got, wanted = stand.slot_rows(2, layer, begin, stop), plain[0].slot_rows(0, layer, begin, stop)
            for one, other in zip(got, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=CHUNKING_LOGPROB_ATOL)


def test_the_comparison_of_rows_sees_a_shift_by_one_token(plain: Plain) -> None:
    for layer in DOWN:
        for rows in plain[0].slot_rows(0, layer, SINK, 289):
            shift = relative(rows[:, 1:], rows[:, :-1], rows.mean(1, keepdim=True))
            assert shift > 10 * max(HOST_ROW_BFLOAT16, HOST_ROW_INT8)


def test_rows_kept_in_int8_are_the_exact_ones_to_eight_bits(prompt: np.ndarray, plain: Plain) -> None:
    stand = Stand(rows="int8")
    run_down(stand, prompt, 0, CONTEXT, 64)
    assert_rows_are_offloaded(stand, CONTEXT, plain[0], 0, host_prompt(LENGTH, CONTEXT).end, HOST_ROW_INT8)


def test_codes_of_every_row_are_offloaded(prompt: np.ndarray) -> None:
    stand = Stand()
    run_down(stand, prompt, 0, CONTEXT, 64)
    for place in range(len(DOWN)):
        for rows in stand.tier.rows(CONTEXT, place, stand.tier.num_tokens(CONTEXT)):
            assert int(rows.codes.int().max()) < 2**4


def rounded_plain(stand: Stand, context_id: int, token_ids: np.ndarray, longer: np.ndarray, begin: int) -> Stand:
    """What a prompt after a prefix must give: on the device alone, over pages that hold the prefix as the tier has it.

    The prefix is tokens `[0, begin)` of slot 0, the longer prompt is slot 1.
    """
    plain, _, _ = run_plain(token_ids)
    ids = plain.pool.page_table[0, SINK // PAGE : begin // PAGE].long()
    for place, layer in enumerate(stand.down):
        for pages, rows in zip(
            (plain.pool.key_pages, plain.pool.value_pages), stand.tier.stored(context_id, place), strict=True
        ):
            whole = rows[:, : begin - SINK].float().unflatten(1, (-1, PAGE)).transpose(0, 1)
            pages[layer][ids] = whole.to(plain.device)
    own = plain.give_pages(1, len(longer), None)
    own[: begin // PAGE] = plain.pool.page_table[0, : begin // PAGE].tolist()
    plain.pool.write_pages([PageWrite(1, 0, own)])
    job = plain.job(2, 1, longer, begin=begin)
    plain.prefill.add(job)
    plain.run(units_of(job, 64))
    return plain


@pytest.mark.parametrize("begin", [SINK + PAGE, 160, 272])
@pytest.mark.parametrize("num_more", [20, 73])
@pytest.mark.parametrize(("bulk_tokens", "dense_layers"), [(48, DENSE_LAYERS), (10_000, DENSE_LAYERS), (48, APART)])
def test_a_prompt_after_an_offloaded_prefix_is_as_over_pages_that_hold_the_same_rows(
    begin: int, num_more: int, bulk_tokens: int, dense_layers: tuple[int, ...], prompt: np.ndarray
) -> None:
    longer = np.concatenate([prompt, draw_prompt(num_more, 2)])
    stand = Stand(bulk_tokens=bulk_tokens, dense_layers=dense_layers)
    assert stand.prefill.staging.num_buffers == (1 if dense_layers == APART else 2)
    run_down(stand, prompt, 0, CONTEXT, 100)
    wanted = rounded_plain(stand, CONTEXT, prompt, longer, begin)
    run_after(stand, longer, begin, 3, CONTEXT + 1, CONTEXT)
    torch.testing.assert_close(stand.sampler.logits, wanted.sampler.logits, rtol=0, atol=CHUNKING_LOGPROB_ATOL)
    assert_rows_are_offloaded(stand, CONTEXT + 1, wanted, 1, host_prompt(len(longer), 0).end, HOST_ROW_BFLOAT16)


def test_a_context_goes_on_where_it_is_itself_the_prefix(prompt: np.ndarray) -> None:
    longer, begin = np.concatenate([prompt, draw_prompt(90, 2)]), host_prompt(LENGTH, CONTEXT).end
    stand = Stand()
    run_down(stand, prompt, 0, CONTEXT, 100)
    wanted = rounded_plain(stand, CONTEXT, prompt, longer, begin)
    run_after(stand, longer, begin, 3, CONTEXT, None)
    torch.testing.assert_close(stand.sampler.logits, wanted.sampler.logits, rtol=0, atol=CHUNKING_LOGPROB_ATOL)
    assert_rows_are_offloaded(stand, CONTEXT, wanted, 1, host_prompt(len(longer), 0).end, HOST_ROW_BFLOAT16)


@pytest.mark.parametrize("spoil", ["one value", "two rows change places"])
def test_the_comparison_of_logits_sees_a_wrong_row_of_the_prefix(spoil: str, prompt: np.ndarray) -> None:
    longer = np.concatenate([prompt, draw_prompt(73, 2)])
    stand = Stand()
    run_down(stand, prompt, 0, CONTEXT, 100)
    wanted = rounded_plain(stand, CONTEXT, prompt, longer, 256).sampler.logits
    rows = stand.tier.rows(CONTEXT, 1, 120)[0]
    if spoil == "one value":
        rows.values[:, 40].neg_()
    else:
        rows.keys[:, [10, 100]] = rows.keys[:, [100, 10]]
    run_after(stand, longer, 256, 3, CONTEXT + 1, CONTEXT)
    assert float((stand.sampler.logits - wanted).abs().max()) > 10 * CHUNKING_LOGPROB_ATOL


def test_chunks_may_differ_from_layer_to_layer_and_other_jobs_run_between(prompt: np.ndarray, plain: Plain) -> None:
    stand, draw = Stand(), np.random.default_rng(6)
    others = [draw_prompt(90, 7), draw_prompt(33, 8)]
    wanted = [run_plain(ids)[2] for ids in others]
    host = host_prompt(LENGTH, CONTEXT)
    stand.give_pages(0, LENGTH, host)
    jobs = [stand.job(9, 0, prompt, host)]
    for slot, ids in enumerate(others, 1):
        stand.give_pages(slot, len(ids), None)
        jobs.append(stand.job(9 + slot, slot, ids))
    queues = [random_units(job, draw) for job in jobs]
    for job in jobs:
        stand.prefill.add(job)
    order = []
    while any(queues):
        order.append(queues[draw.choice([index for index, queue in enumerate(queues) if queue])].pop(0))
    finished = stand.run(order)
    np.testing.assert_allclose(logprobs(finished[9]), logprobs(plain[2]), rtol=0, atol=CHUNKING_LOGPROB_ATOL)
    for slot, one in enumerate(wanted, 1):
        np.testing.assert_allclose(logprobs(finished[9 + slot]), logprobs(one), rtol=0, atol=CHUNKING_LOGPROB_ATOL)
    assert_rows_are_offloaded(stand, CONTEXT, plain[0], 0, host.end, HOST_ROW_BFLOAT16)


def random_units(job: PrefillJob, draw: np.random.Generator) -> list[Unit]:
    units: list[Unit] = []
    for layer in range(SHAPE.num_layers):
        cuts = sorted({0, job.num_tokens, *draw.integers(1, job.num_tokens, 3).tolist()})
        units += [PrefillUnit(job.job_id, layer, begin, end) for begin, end in itertools.pairwise(cuts)]
    return [*units, *logits_units(job, 100)]


@pytest.mark.parametrize("num_units", [0, 5, 14, 22])
def test_a_job_dropped_anywhere_leaves_the_next_one_as_if_it_had_never_been(
    num_units: int, prompt: np.ndarray, plain: Plain
) -> None:
    stand = Stand()
    other = draw_prompt(400, 9)
    host = host_prompt(len(other), CONTEXT)
    stand.give_pages(4, len(other), host)
    job = stand.job(3, 4, other, host)
    stand.prefill.add(job)
    assert not stand.run(units_of(job, 100)[:num_units])
    stand.prefill.drop(3)
    stand.tier.close(CONTEXT)
    assert stand.prefill.num_jobs == stand.tier.used_tokens == 0
    finished = run_down(stand, prompt, 2, CONTEXT + 1, 100)
    np.testing.assert_allclose(logprobs(finished), logprobs(plain[2]), rtol=0, atol=CHUNKING_LOGPROB_ATOL)
    assert_rows_are_offloaded(stand, CONTEXT + 1, plain[0], 0, host_prompt(LENGTH, 0).end, HOST_ROW_BFLOAT16)


def test_a_prompt_that_the_host_has_no_room_for_fails_alone(prompt: np.ndarray) -> None:
    stand = Stand(capacity_tokens=100)
    other = draw_prompt(60, 7)
    host = host_prompt(LENGTH, CONTEXT)
    stand.give_pages(0, LENGTH, host)
    stand.give_pages(1, len(other), None)
    jobs = [stand.job(1, 0, prompt, host), stand.job(2, 1, other)]
    for job in jobs:
        stand.prefill.add(job)
    failures = stand.prefill.take_failures()
    assert list(failures) == [0]
    assert failures[0] == f"host memory: asked {host.end - SINK} tokens, have 100"
    finished = stand.run([*units_of(jobs[0], 100), *units_of(jobs[1], 100)])
    assert list(finished) == [2]
    np.testing.assert_allclose(logprobs(finished[2]), logprobs(run_plain(other)[2]), rtol=0, atol=CHUNKING_LOGPROB_ATOL)
    assert stand.prefill.num_jobs == 0
    assert stand.prefill.take_failures() == {}
    assert run_down(stand, draw_prompt(100, 3), 2, CONTEXT + 1, 64) is not None


def test_a_host_that_refuses_in_the_middle_fails_the_slot_then(
    prompt: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand()
    layer_rows = ReferenceReservation.layer

    def refuse_the_third(self: ReferenceReservation, layer: int) -> object:
        if layer == 2:
            raise HostMemoryError("host memory: cannot pin")
        return layer_rows(self, layer)

    monkeypatch.setattr(ReferenceReservation, "layer", refuse_the_third)
    host = host_prompt(LENGTH, CONTEXT)
    stand.give_pages(0, LENGTH, host)
    job = stand.job(1, 0, prompt, host)
    stand.prefill.add(job)
    assert stand.prefill.take_failures() == {}
    assert not stand.run(units_of(job, 100))
    assert stand.prefill.take_failures() == {0: "host memory: cannot pin"}
    assert stand.prefill.num_jobs == 0


@pytest.mark.parametrize("dense_layers", [DENSE_LAYERS, APART])
@pytest.mark.parametrize("has_prefix", [False, True])
def test_a_buffer_is_written_again_only_after_waiting_for_what_left_it_and_what_came_into_it(
    has_prefix: bool, dense_layers: tuple[int, ...], prompt: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = np.concatenate([prompt, draw_prompt(40, 2)])
    stand = Stand(dense_layers=dense_layers)
    run_down(stand, prompt, 0, CONTEXT, 100)
    row_transfer, log = stand.prefill.staging.row_transfer, []
    row_transfer.streams = LoggedStreams()
    send, load, layer = row_transfer.send, row_transfer.load, stand.decoder.layer

    def logged_send(keys: Tensor, *others: object) -> Sent:
        log.append(("sent", keys.data_ptr(), send(keys, *others)))
        return log[-1][2]

    def logged_load(rows: object, keys: Tensor, values: Tensor) -> Event:
        assert left_before(keys) <= set(row_transfer.streams.waited), "a load overtakes the send of the same buffer"
        log.append(("brought", keys.data_ptr(), load(rows, keys, values)))
        return log[-1][2]

    def left_before(keys: Tensor) -> set[Event]:
        """The last event of each kind in the same buffer."""
        last = {kind: event for kind, address, event in log if is_in_buffer(address, keys)}
        return {last["sent"].read} if "sent" in last else set()

    def is_in_buffer(address: int, keys: Tensor) -> bool:
        buffers = stand.prefill.staging.keys
        size = buffers[0].nbytes
        return (address - buffers.data_ptr()) // size == (keys.data_ptr() - buffers.data_ptr()) // size

    def logged_layer(index: int, hidden: Tensor, positions: Tensor, slots: Tensor, attend: object,
                     target: Target, carried: Carried, rows: Tensor | None = None) -> Tensor:  # fmt: skip
        pages = target.pages
        if pages is not None:
            brought = [event for kind, address, event in log if kind == "brought" and is_in_buffer(address, pages[0])]
            wanted = left_before(pages[0]) | set(brought[-1:])
            assert wanted <= set(row_transfer.streams.waited), f"layer {index} does not wait for its buffer"
            num_waits.append(len(wanted))
        return layer(index, hidden, positions, slots, attend, target, carried, rows)

    num_waits: list[int] = []
    monkeypatch.setattr(row_transfer, "send", logged_send)
    monkeypatch.setattr(row_transfer, "load", logged_load)
    monkeypatch.setattr(stand.decoder, "layer", logged_layer)
    if has_prefix:
        run_after(stand, longer, 256, 3, CONTEXT + 1, CONTEXT)
        two = ["brought"] * 2 + ["sent", "brought"] * 2 + ["sent"] * 2
        assert [kind for kind, _, _ in log] == (["brought", "sent"] * 3 if dense_layers == APART else two)
    else:
        run_down(stand, longer, 3, CONTEXT + 1, 1000)
        assert {kind for kind, _, _ in log} == {"sent"}
    assert max(num_waits) == 1 + has_prefix, "some layer waits for all there is"
