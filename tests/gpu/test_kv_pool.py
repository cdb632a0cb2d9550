"""Page writes land in their slot's row, and nowhere else."""

import pytest
import torch

from gpu.architecture import named_shape
from gpu.kv_pool import KvPool
from gpu.step import PageWrite


def make_pool() -> KvPool:
    return KvPool(named_shape("tiny"), 40, 16, 4, 100, torch.float32, torch.device("cpu"))


def test_page_writes_append_where_they_say() -> None:
    pool = make_pool()
    pool.page_table.fill_(-7)
    pool.write_pages([PageWrite(1, 0, [5, 3]), PageWrite(3, 4, [9])])
    pool.write_pages([PageWrite(1, 2, [39])])
    wanted = torch.full((4, 7), -7, dtype=torch.int32)
    wanted[1, :3] = torch.tensor([5, 3, 39])
    wanted[3, 4] = 9
    assert torch.equal(pool.page_table, wanted)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (PageWrite(4, 0, [1]), "slot 4"),
        (PageWrite(0, 6, [1, 2]), "pages 6 to 8"),
        (PageWrite(0, 0, [40]), "have 40 pages"),
        (PageWrite(0, 0, [-1]), "have 40 pages"),
    ],
)
def test_a_write_outside_the_pool_is_refused(write: PageWrite, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_pool().write_pages([write])
