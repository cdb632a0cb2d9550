"""Page tables: a write lands in its slot's row and nowhere else, and of what goes down the dense layers' rows stay."""

import pytest
import torch

from gpu.kv.pool import KvPool
from gpu.model.architecture import named_shape
from gpu.step import PageWrite

TINY = named_shape("tiny")
CPU = torch.device("cpu")
PAGE = 16
NUM_PAGES, NUM_DENSE = 40, 30
DENSE_LAYERS = (0, 2)


def make_pool() -> KvPool:
    return KvPool(TINY, NUM_PAGES, 0, (), PAGE, 4, 100, torch.float32, CPU)


def make_tiered_pool(dtype: torch.dtype = torch.float32) -> KvPool:
    pool = KvPool(TINY, NUM_PAGES, NUM_DENSE, DENSE_LAYERS, PAGE, 4, 20 * PAGE, dtype, CPU)
    for pages in (*pool.key_pages, *pool.value_pages):
        pages.normal_()
    return pool


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


def test_only_dense_layers_have_storage_for_dense_pages() -> None:
    pool = make_tiered_pool()
    counts = [len(pages) for pages in pool.key_pages]
    assert counts == [len(pages) for pages in pool.value_pages]
    assert counts == [NUM_PAGES + NUM_DENSE, NUM_PAGES, NUM_PAGES + NUM_DENSE, NUM_PAGES]
    assert pool.deposited_layers == (1, 3)


def test_a_deposit_copies_the_dense_layers_rows_and_leaves_all_others_as_they_are() -> None:
    pool = make_tiered_pool(torch.bfloat16)
    pool.write_pages([PageWrite(3, 0, [4, 11, 7, 2, 9])])
    before = [pages.clone() for pages in pool.key_pages], [pages.clone() for pages in pool.value_pages]
    pool.deposit(3, PAGE, 3 * PAGE, [11, 7], [50, 44])
    assert pool.page_table[3, :5].tolist() == [4, 50, 44, 2, 9]
    for was, pages in zip(before[0] + before[1], pool.key_pages + pool.value_pages, strict=True):
        if len(pages) > NUM_PAGES:
            was[[50, 44]] = was[[11, 7]]
        assert torch.equal(was, pages)


def test_gathered_rows_are_the_pages_of_the_layers_that_go_down() -> None:
    pool = make_tiered_pool()
    room = torch.full((2, 2, TINY.num_kv_heads, 4 * PAGE, TINY.dim), torch.nan)
    keys, values = room[:, :, :, : 3 * PAGE]
    pool.gather_rows([11, 7, 30], keys, values)
    assert room[:, :, :, 3 * PAGE :].isnan().all()
    for rows, pages in ((keys, pool.key_pages), (values, pool.value_pages)):
        for place, layer in enumerate((1, 3)):
            wanted = torch.cat([pages[layer][page] for page in (11, 7, 30)], dim=1)
            assert torch.equal(rows[place], wanted)


@pytest.mark.parametrize(
    ("slot", "begin", "end", "page_ids", "dense_ids", "words"),
    [
        (4, 16, 32, [1], [40], "slot 4"),
        (0, 16, 336, [1] * 20, [40] * 20, "have 4 slots of 320 tokens"),
        (0, 17, 33, [1], [40], "whole pages of 16"),
        (0, 16, 48, [1], [40], "in 1 pages"),
        (0, 16, 32, [40], [41], "have 40 pages from 0 on"),
        (0, 16, 32, [1], [39], "have 30 pages from 40 on"),
    ],
)
def test_a_deposit_that_is_not_whole_pages_is_refused(
    slot: int, begin: int, end: int, page_ids: list[int], dense_ids: list[int], words: str
) -> None:
    pool = make_tiered_pool()
    pool.write_pages([PageWrite(1, 0, [0, 40, 1, 2, 3])])
    with pytest.raises(ValueError, match=words):
        pool.deposit(slot, begin, end, page_ids, dense_ids)
