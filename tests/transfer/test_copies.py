"""Side streams keep the order that they promise; on the CPU nothing is ever under way."""

import pytest
import torch

from transfer.copies import PASSED, Streams

LARGE = 1 << 26  # elements: a copy of it takes far longer than a launch


def test_on_the_cpu_all_work_is_done_and_every_wait_is_over() -> None:
    streams = Streams(torch.device("cpu"))
    assert (streams.down, streams.up) == (None, None)
    with streams.aside(streams.down):
        event = streams.record()
    assert event is PASSED
    assert event.query()
    event.synchronize()
    streams.wait_for(event)
    streams.keep((torch.zeros(1),), streams.up)


@pytest.mark.gpu
def test_work_aside_sees_what_came_before_and_is_seen_by_who_waits() -> None:
    streams = Streams(torch.device("cuda"))
    source = torch.zeros(LARGE, device="cuda")
    host = torch.full((LARGE,), -1.0).pin_memory()
    for number in range(1, 6):
        source.fill_(float(number))
        with streams.aside(streams.down):
            host.copy_(source, non_blocking=True)
            landed = streams.record()
        streams.wait_for(landed)
        source.fill_(float("nan"))
        landed.synchronize()
        assert landed.query()
        assert (host == number).all()


@pytest.mark.gpu
def test_memory_that_a_side_stream_reads_is_not_given_to_others() -> None:
    streams = Streams(torch.device("cuda"))
    host = torch.empty(LARGE).pin_memory()
    kept = torch.ones(LARGE, device="cuda")
    with streams.aside(streams.down):
        for _ in range(4):
            host.copy_(kept, non_blocking=True)
        landed = streams.record()
    streams.keep((kept,), streams.down)
    del kept
    torch.full((LARGE,), float("nan"), device="cuda")
    landed.synchronize()
    assert (host == 1).all()
