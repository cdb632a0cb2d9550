"""What was released comes back: the same rows, in other pages, read on the device as they were before."""

import time
from dataclasses import replace

import pytest
import torch

from gpu.step import StepPlan
from tests.gpu.reference_model import document_prompt
from tests.gpu.test_host_read_steps import check_steps
from tests.gpu.twin_runners import Twins, furthest
from tests.tolerances import HOP_LOGITS_FLOAT32
from transfer.host_tier import HostMemoryError
from transfer.reading import Reading

PAGE = 16
PROMPT = document_prompt(700, 3)


@pytest.mark.parametrize("dense_layers", [(0, 2), (), (1,)])
@pytest.mark.parametrize("reading", [Reading.WHOLE, Reading.SAMPLE])
def test_rows_come_back_in_pieces_and_are_read_on_the_device(dense_layers: tuple[int, ...], reading: Reading) -> None:
    """Pages are NaN until they are written and once they are evicted: what is read is there."""
    twins = Twins(check_coverage=True, kept_tokens=2048, dense_layers=dense_layers, reading=reading)
    twins.prefill_down(0, PROMPT)
    sequence = twins.sequences[0]
    twins.evict(sequence, 560)
    check_steps(twins, [0], 2)
    asked = twins.offloading.host_read_times.steps
    for begin in (320, 304, PAGE):
        restore = twins.fetch(sequence, begin)
        check_steps(twins, [0], 2)
        assert not twins.restore(restore).failures
        check_steps(twins, [0], 2)
    assert sequence.released == PAGE
    assert twins.offloading.host_read_times.steps == asked + 2 + 2 * 2 + 2 * 2, "once all is back it asks nothing"
    twins.evict(sequence, 400)
    check_steps(twins, [0], 2)


def test_a_page_that_is_not_where_it_was_brought_back_to_shows() -> None:
    twins = Twins(kept_tokens=2048)
    twins.prefill_down(0, PROMPT)
    sequence = twins.sequences[0]
    twins.evict(sequence, 560)
    restore = twins.fetch(sequence, 304)
    pages = restore.page_ids
    twins.restore(replace(restore, page_ids=(*pages[:2], pages[5], *pages[3:])))
    twins.step([0])
    assert not furthest(twins, [0]) < HOP_LOGITS_FLOAT32


def test_rows_that_cannot_come_fail_those_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(kept_tokens=2048)
    twins.prefill_down(0, PROMPT)
    sequence = twins.sequences[0]
    twins.evict(sequence, 560)

    def refuse(*_: int) -> None:
        raise HostMemoryError("host memory: gone")

    with monkeypatch.context() as patch:
        patch.setattr(twins.tier, "rows", refuse)
        restore = twins.fetch(sequence, 304)
    result = twins.restore(restore)
    assert result.failures == {0: "host memory: gone"}
    assert [token.token_id for token in result.tokens] == [-1]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(), (1, 4)])
def test_on_cuda_rows_come_back_beside_steps(sizes: tuple[int, ...]) -> None:
    twins = Twins(device="cuda", graph_batch_sizes=sizes, kept_tokens=2048)
    twins.prefill_down(0, PROMPT)
    sequence = twins.sequences[0]
    for _ in range(3):
        twins.evict(sequence, 560)
        check_steps(twins, [0], 2)
        for begin in (320, PAGE):
            restore = twins.fetch(sequence, begin)
            twins.restore(restore)
            check_steps(twins, [0], 2)


@pytest.mark.gpu
def test_on_cuda_the_host_waits_for_no_rows_that_come_back() -> None:
    """The link is held up for a while: fetch and restore are launched meanwhile, and the step behind them is right."""
    twins = Twins(device="cuda", graph_batch_sizes=(1,), kept_tokens=2048)
    twins.prefill_down(0, PROMPT)
    sequence = twins.sequences[0]
    twins.evict(sequence, 560)
    check_steps(twins, [0], 2)
    torch.cuda.synchronize()
    with torch.cuda.stream(twins.offloading._offloader._row_transfer.streams.up):
        torch.cuda._sleep(2_000_000_000)  # about a second
    began = time.perf_counter()
    launch = twins.offloading.launch
    restore = None
    try:
        twins.offloading.launch = lambda plan: (launch(plan), _Launched())[1]
        restore = twins.fetch(sequence, PAGE)
        twins.offloading.launch(StepPlan(finished_reloads=[restore]))
    finally:
        twins.offloading.launch = launch
    assert time.perf_counter() - began < 0.3
    last = sequence.released // PAGE
    sequence.pages[1:last] = restore.page_ids
    sequence.released = PAGE
    check_steps(twins, [0], 2)


class _Launched:
    def collect(self) -> None:
        """Nobody waits for it."""
