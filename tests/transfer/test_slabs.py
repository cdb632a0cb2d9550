"""Slabs of host memory: a claim holds at once or not at all, freed ones are used again, refusals say what to change."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from transfer.host_memory import HUGE_PAGE_BYTES, SMALL_PAGE_BYTES, slab_bytes
from transfer.host_pages import allowed_nodes, interleave_thread, map_pages
from transfer.host_tier import HostMemoryError
from transfer.slabs import PageSource, SlabPool

SIZE = SMALL_PAGE_BYTES
LIMIT = 8 * SIZE
KEY = "host.memory_limit_gib"


class Host:
    """Pages that count how they come and go, and refuse when they are told to."""

    def __init__(self):
        self.mapped, self.pinned, self.refusal = [], [], None
        self.may_map, self.may_unpin = threading.Event(), threading.Event()
        self.may_map.set()
        self.may_unpin.set()
        self.source = PageSource(self.map, self.pin, self.unpin)

    def map(self, num_bytes):
        assert self.may_map.wait(20)
        self.mapped.append(num_bytes)
        return np.full(num_bytes, 0xFF, np.uint8)

    def pin(self, pages):
        if self.refusal is not None:
            raise self.refusal
        self.pinned.append(pages.ctypes.data)

    def unpin(self, pages):
        assert self.may_unpin.wait(20)
        self.pinned.remove(pages.ctypes.data)


def wait_until(is_so):
    ends = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.001)


@pytest.fixture
def host():
    return Host()


@pytest.fixture
def pool(host):
    pool = SlabPool(LIMIT, KEY, host.source, 2)
    yield pool
    host.may_map.set()
    host.may_unpin.set()
    pool.shutdown()
    assert pool.bytes_in_use == pool.bytes_pinned == pool.bytes_held == len(host.pinned) == 0


def test_a_claim_counts_at_once_and_its_memory_comes_in_order(pool, host):
    host.may_map.clear()
    slabs = pool.claim([SIZE, 2 * SIZE, SIZE - 100])
    assert pool.bytes_in_use == 4 * SIZE
    assert pool.bytes_pinned == 0
    host.may_map.set()
    assert [len(slab.wait()) for slab in slabs] == [SIZE, 2 * SIZE, SIZE]
    assert pool.bytes_pinned == 4 * SIZE
    pool.release(slabs)
    assert pool.bytes_in_use == 0
    assert pool.bytes_held == 4 * SIZE


def test_slabs_in_use_do_not_overlap(pool):
    slabs = pool.claim([SIZE] * 4)
    for number, slab in enumerate(slabs):
        slab.wait()[:] = number
    assert [set(slab.wait()) for slab in slabs] == [{0}, {1}, {2}, {3}]
    pool.release(slabs)


def test_a_claim_beyond_the_limit_takes_nothing_and_says_what_to_change(pool, host):
    slabs = pool.claim([4 * SIZE])
    with pytest.raises(HostMemoryError, match=r"asked 0\.4 MiB, 0\.2 MiB of 0\.5 MiB in use.*host.memory_limit_gib"):
        pool.claim([SIZE] * 6)
    assert pool.bytes_in_use == 4 * SIZE
    slabs += pool.claim([SIZE] * 4)
    pool.release(slabs)
    assert sum(host.mapped) <= 8 * SIZE


def test_a_freed_slab_is_used_again_without_pinning(pool, host):
    first = pool.claim([SIZE, 3 * SIZE])
    places = {slab.wait().ctypes.data for slab in first}
    pool.release(first)
    again = pool.claim([3 * SIZE, SIZE])
    assert {slab.wait().ctypes.data for slab in again} == places
    assert len(host.mapped) == 2
    pool.release(again)


def test_idle_slabs_make_room_for_other_sizes(pool, host):
    slabs = pool.claim([SIZE] * 8)
    for slab in slabs:
        slab.wait()
    pool.release(slabs)
    (large,) = pool.claim([6 * SIZE])
    large.wait()
    assert pool.bytes_held <= LIMIT
    pool.release([large])


def test_a_slab_that_nobody_began_is_never_mapped(pool, host):
    host.may_map.clear()
    slabs = pool.claim([SIZE] * 8)
    pool.release(slabs)
    assert pool.bytes_in_use == 0
    host.may_map.set()
    pool.release(pool.claim([SIZE]))
    assert len(host.mapped) <= 3


def test_prepared_memory_is_there_for_the_next_claim_and_takes_no_room_from_others(pool, host):
    pool.prepare([2 * SIZE] * 2)
    pool.prepare([2 * SIZE] * 2)
    assert (pool.bytes_in_use, pool.bytes_held) == (0, 4 * SIZE)
    slabs = pool.claim([2 * SIZE] * 2)
    for slab in slabs:
        slab.wait()
    assert host.mapped == [2 * SIZE] * 2
    slabs += pool.claim([3 * SIZE])
    pool.prepare([2 * SIZE])
    assert pool.bytes_held == 7 * SIZE, "what does not fit is not prepared"
    pool.release(slabs)


@pytest.mark.parametrize(
    "refusal", [OSError(12, "cudaHostRegister failed with CUDA error 2"), MemoryError("no pages")], ids=["pin", "map"]
)
def test_a_refusal_of_the_host_is_told_where_the_slab_is_waited_for(pool, host, refusal):
    host.refusal = refusal
    (slab,) = pool.claim([2 * SIZE])
    with pytest.raises(HostMemoryError, match=rf"asked the system for 0\.1 MiB.*{refusal.args[-1]}.*ulimit -l"):
        slab.wait()
    pool.release([slab])
    assert pool.bytes_held == 0
    host.refusal = None
    slabs = pool.claim([2 * SIZE])
    slabs[0].wait()
    pool.release(slabs)


def test_prepared_slabs_that_the_host_refused_are_not_held_and_are_asked_for_again(pool, host):
    host.refusal = OSError(12, "cudaHostRegister failed")
    pool.prepare([2 * SIZE])
    wait_until(lambda: len(host.mapped) == 1 and pool.bytes_held == 0)
    host.refusal = None
    pool.prepare([2 * SIZE])
    assert pool.bytes_held == 2 * SIZE
    (slab,) = pool.claim([2 * SIZE])
    assert len(slab.wait()) == 2 * SIZE
    assert host.mapped == [2 * SIZE] * 2
    pool.release([slab])


def test_a_slab_given_back_on_its_way_is_not_held_once_the_host_has_refused_it(pool, host):
    host.refusal = OSError(12, "cudaHostRegister failed")
    host.may_map.clear()
    slabs = pool.claim([SIZE])
    wait_until(slabs[0]._pages.running)
    pool.release(slabs)
    assert pool.bytes_held == SIZE
    host.may_map.set()
    wait_until(lambda: pool.bytes_held == 0)


def test_slabs_that_wait_to_be_unpinned_are_at_shutdown_and_orders_never_begin(host):
    pool = SlabPool(LIMIT, KEY, host.source, 1)
    slabs = pool.claim([SIZE] * 8)
    for slab in slabs:
        slab.wait()
    pool.release(slabs)
    host.may_unpin.clear()
    orders = pool.claim([3 * SIZE, 5 * SIZE])
    stopping = threading.Thread(target=pool.shutdown)
    stopping.start()
    wait_until(lambda: all(order.is_refused for order in orders))
    host.may_unpin.set()
    stopping.join()
    assert host.pinned == []
    assert pool.bytes_pinned == 0
    assert host.mapped == [SIZE] * 8


def test_pages_are_zero_aligned_to_huge_pages_and_outlive_their_slab():
    pool = SlabPool(2**26, KEY, PageSource(map_pages, None, None), 1)
    slabs = pool.claim([3 * HUGE_PAGE_BYTES, SIZE])
    large, small = (slab.wait() for slab in slabs)
    assert large.ctypes.data % HUGE_PAGE_BYTES == 0
    assert not large.any()
    assert not small.any()
    large[:] = 7
    pool.release(slabs)
    pool.shutdown()
    del slabs
    assert pool.bytes_held == 0
    assert (large == 7).all()


def test_pages_that_no_host_has_are_refused():
    pool = SlabPool(2**62, KEY, PageSource(map_pages, None, None), 1)
    (slab,) = pool.claim([2**55])
    with pytest.raises(HostMemoryError, match="it refused"):
        slab.wait()
    pool.release([slab])
    pool.shutdown()


@pytest.mark.parametrize(("listed", "nodes"), [("0", [0]), ("0-3", [0, 1, 2, 3]), ("0,2-3", [0, 2, 3])])
def test_numa_nodes_are_read_from_the_process_status(tmp_path, listed, nodes):
    status = tmp_path / "status"
    status.write_text(f"Name:\ttandem\nMems_allowed:\t00000001\nMems_allowed_list:\t{listed}\n")
    assert allowed_nodes(status) == nodes


def test_interleaving_leaves_a_thread_that_can_still_map_pages(caplog):
    thread = threading.Thread(target=lambda: (interleave_thread(), map_pages(SIZE)))
    thread.start()
    thread.join()
    assert not caplog.records
    assert allowed_nodes(Path("/nonexistent")) == []


def test_size_classes_waste_little_and_are_their_own_class():
    for size in [1, SIZE, SIZE + 1, 2**21, 2**21 + 1, 340 * 10**6, 2**33 + 5]:
        rounded = slab_bytes(size)
        assert size <= rounded <= max(size * 17 / 16, size + HUGE_PAGE_BYTES)
        assert slab_bytes(rounded) == rounded
