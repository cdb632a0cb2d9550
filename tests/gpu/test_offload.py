"""Running sequences and the host tier: offload blocks share one buffer, and nothing is closed while it is on its way
up.
"""

import pytest
from torch import Tensor

from gpu.host.offloader import Offloader
from gpu.host.row_transfer import Sent
from gpu.memory.host_demand import HostDemand
from gpu.methods.kept import Kept
from gpu.step import StepPlan
from tests.gpu.logged_streams import LoggedStreams, Point
from tests.gpu.reference_model import document_prompt
from tests.gpu.twin_runners import DEFAULT_DENSE, Twins
from transfer.host_config import HostConfig

PAGE = 16


def offload_of(twins: Twins) -> Offloader:
    assert twins.offloading._offloader is not None
    return twins.offloading._offloader


def test_an_offload_block_is_gathered_only_after_waiting_for_the_last_one_to_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twins = Twins(offload_block_tokens=16)
    row_transfer, pool = offload_of(twins)._row_transfer, twins.offloading.pool
    streams = row_transfer.streams = LoggedStreams()
    send, gather_rows, sent = row_transfer.send, pool.gather_rows, []

    def logged_send(keys: Tensor, *others: object) -> Sent:
        result = send(keys, *others)
        if len(keys) > 1:  # all layers at once
            sent.append((keys.untyped_storage().data_ptr(), result.read))
        return result

    def logged_gather(page_ids: list[int], keys: Tensor, values: Tensor) -> None:
        assert [read for _, read in sent[-1:]] == [read for _, read in sent[-1:] if read in streams.waited]
        gather_rows(page_ids, keys, values)

    monkeypatch.setattr(row_transfer, "send", logged_send)
    monkeypatch.setattr(pool, "gather_rows", logged_gather)
    twins.prefill([document_prompt(length, length) for length in (300, 301)])
    for _ in range(20):
        twins.step([0, 1])
    assert len(sent) >= 2
    assert len({buffer for buffer, _ in sent}) == 1


def test_a_context_is_closed_when_nothing_is_on_its_way_up() -> None:
    twins = Twins()
    twins.prefill([document_prompt(300, 1)])
    twins.step([0])
    contexts = []

    class Late(Point):
        def synchronize(self) -> None:
            contexts.append(100 in twins.tier.contexts)

    offload_of(twins)._row_transfer._last_load = Late()
    twins.offloading.launch(StepPlan(released_slots=[0]))
    assert contexts == []
    twins.offloading.launch(StepPlan(closed_contexts=[100]))
    assert contexts == [True]
    assert twins.tier.contexts == {}


def test_the_buffer_of_offload_blocks_is_what_the_memory_plan_counts() -> None:
    twins = Twins()
    kept = Kept(4, 64, DEFAULT_DENSE)
    demand = HostDemand(twins.offloading.architecture, HostConfig(), kept, PAGE, dtype_bytes=4, max_running=5)
    assert offload_of(twins)._block_buffer.nbytes == demand.transfer_buffer_bytes(is_cuda=False)
