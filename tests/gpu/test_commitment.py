"""KV memory of the CPU device: nothing is there before it is committed, and a refusal is an answer and no fault."""

import ctypes
import errno
import mmap

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu.kv import commitment
from gpu.kv.commitment import SPARE_BYTES, Commitment, allocate_arena
from gpu.kv.pool import KvPool, PoolShape
from gpu.kv.windows import WindowShape
from gpu.model.architecture import named_shape
from transfer.host_pages import populate, reserve_pages
from transfer.machine import available_memory

CPU = torch.device("cpu")
TINY = named_shape("tiny")
PLENTY = 2**50
MIB = 2**20


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def make_pool(num_pages: int, num_windows: int = 0) -> KvPool:
    windows = WindowShape((1, 3), num_windows, 4) if num_windows else WindowShape((), 0, 1)
    return KvPool(TINY, PoolShape(num_pages, (), 16, 4, 100, torch.float32, windows), CPU)


def test_a_pool_takes_memory_as_its_pages_are_committed_and_no_sooner() -> None:
    before = resident_bytes()
    pool = make_pool(40_000, num_windows=500)
    size = sum(arena.nbytes for arena in (*pool.arenas, *pool.windows.arenas))
    assert size > 1000 * MIB
    assert resident_bytes() - before < 32 * MIB
    for memory, rows in ((pool.commitment, 4000), (pool.windows.commitment, 200)):
        asked = rows * sum(layer[0].nbytes for layer in memory._layers)
        before = resident_bytes()
        assert memory.commit(0, rows)
        taken = resident_bytes() - before
        assert asked - MIB < taken < asked + 64 * MIB, "huge pages round up"


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 700),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
)  # fmt: skip
def test_rows_that_are_committed_are_zeros_and_change_no_other(
    counts: list[int], width: int, dtype: torch.dtype
) -> None:
    arena = allocate_arena((3, 60, width), dtype, CPU)
    memory = Commitment([arena], lambda: PLENTY)
    begin = 0
    for count in counts:
        assert memory.commit(begin, begin + count)
        assert not arena[:, begin : begin + count].any()
        arena[:, begin : begin + count] = 7
        begin += count
    assert (arena[:, :begin] == 7).all()
    assert not arena[:, begin:].any()


def test_rows_are_committed_as_long_as_something_is_left_beside_them() -> None:
    arena = allocate_arena((2, 100, MIB), torch.uint8, CPU)
    before = resident_bytes()
    assert not Commitment([arena], lambda: SPARE_BYTES + 200 * MIB - 1).commit(0, 100)
    assert resident_bytes() - before < 8 * MIB, "what is refused takes nothing"
    assert Commitment([arena], lambda: SPARE_BYTES + 20 * MIB).commit(0, 10)


def test_memory_that_the_system_refuses_is_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commitment, "populate", lambda *_: False)
    assert not Commitment([allocate_arena((2, 10, 64), torch.uint8, CPU)], lambda: PLENTY).commit(0, 5)


def test_addresses_without_a_mapping_cannot_be_populated() -> None:
    pages = reserve_pages(4 * mmap.PAGESIZE)
    assert populate(pages.ctypes.data, pages.nbytes)
    assert not populate(1 << 60, mmap.PAGESIZE), f"the system says {errno.errorcode[errno.ENOMEM]}"


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EFAULT, errno.ENOMEM, errno.EPERM])
def test_whatever_the_system_refuses_memory_with_is_an_answer(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine goes on without the pages that it asked for."""

    class System:
        def madvise(self, *_: object) -> int:
            ctypes.set_errno(code)
            return -1

    arena = allocate_arena((2, 10, 64), torch.uint8, CPU)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: System())
    assert not Commitment([arena], lambda: PLENTY).commit(0, 5)


def test_the_fewest_rows_committed_at_once_are_worth_a_check() -> None:
    assert Commitment([allocate_arena((2, 9, 1000), torch.uint8, CPU)], lambda: PLENTY).least_rows == 16 * MIB // 2000
    assert Commitment([allocate_arena((2, 9, 16 * MIB), torch.uint8, CPU)], lambda: PLENTY).least_rows == 1
    assert Commitment([allocate_arena((0, 9, 10), torch.uint8, CPU)], lambda: PLENTY).least_rows == 1


def test_what_may_still_be_taken_is_no_more_than_the_machine_has() -> None:
    assert 0 < available_memory() <= psutil.virtual_memory().total
