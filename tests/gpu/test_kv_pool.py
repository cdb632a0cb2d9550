"""Page tables: a write lands in its slot's row alone, and of what is released the dense layers' rows stay."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu.kv.pool import KvPool, PoolShape
from gpu.model.architecture import named_shape
from gpu.page_layout import PageLayout
from gpu.step import PageEviction, PageWrite, TablePlace

TINY = named_shape("tiny")
CPU = torch.device("cpu")
PAGE = 16
NUM_PAGES = 40
DENSE_LAYERS = (0, 2)


def make_pool() -> KvPool:
    return KvPool(TINY, PoolShape(NUM_PAGES, (), PAGE, 4, 100, torch.float32), CPU)


def make_tiered_pool(dtype: torch.dtype = torch.float32) -> KvPool:
    pool = KvPool(TINY, PoolShape(NUM_PAGES, DENSE_LAYERS, PAGE, 4, 20 * PAGE, dtype), CPU)
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


def test_only_dense_layers_have_ids_of_dense_pages() -> None:
    pool = make_tiered_pool()
    counts = [len(pages) for pages in pool.key_pages]
    assert counts == [len(pages) for pages in pool.value_pages]
    assert counts == [3 * NUM_PAGES, NUM_PAGES, 3 * NUM_PAGES, NUM_PAGES]
    assert pool.offloaded_layers == (1, 3)


@given(num_layers=st.integers(1, 9), num_dense=st.integers(1, 9), num_pages=st.integers(1, 6))
def test_dense_pages_of_a_block_lie_in_it_and_overlap_nowhere(num_layers: int, num_dense: int, num_pages: int) -> None:
    num_dense = min(num_dense, num_layers)
    layout = PageLayout(num_layers, num_dense, num_pages)
    arena = torch.full((num_layers * num_pages,), -1)
    views = [arena[place * num_pages :][: layout.num_ids] for place in range(num_dense)]
    for block in range(num_pages):
        for page in layout.dense_pages([block], 0, layout.dense_per_block):
            for view in views:
                assert view[page] == -1
                view[page] = block
    assert layout.blocks_for(0) == 0
    assert layout.blocks_for(layout.dense_per_block * 2 + 1) == 3
    of_block = arena.view(num_layers, num_pages)
    used = layout.dense_per_block * num_dense
    assert torch.equal(of_block[:used], torch.arange(num_pages).expand(used, -1))
    assert (of_block[used:] == -1).all()


def test_dense_pages_of_several_blocks_come_one_block_after_another() -> None:
    layout = PageLayout(6, 2, 10)
    assert layout.dense_pages([7, 3, 4], 2, 8) == [47, 3, 23, 43, 4, 24]
    assert PageLayout(6, 0, 10).dense_pages([], 0, 3) == [0, 0, 0]
    assert PageLayout(6, 0, 10).blocks_for(5) == 0


@pytest.mark.parametrize("dense_pages", [[30, 110], [11, 91], [7, 87]])
def test_a_release_copies_the_dense_layers_rows_even_into_pages_that_it_evicts(dense_pages: list[int]) -> None:
    pool = make_tiered_pool(torch.bfloat16)
    pool.write_pages([PageWrite(3, 0, [4, 11, 7, 2, 9]), PageWrite(1, 0, [11, 7, 5])])
    before = [pages.clone() for pages in (*pool.key_pages, *pool.value_pages)]
    pool.evict(PageEviction([11, 7], dense_pages, [TablePlace(3, 1), TablePlace(1, 0)]))
    assert pool.page_table[3, :5].tolist() == [4, *dense_pages, 2, 9]
    assert pool.page_table[1, :3].tolist() == [*dense_pages, 5]
    for layer, was in enumerate(before):
        pages = (*pool.key_pages, *pool.value_pages)[layer]
        if layer % len(pool.key_pages) in DENSE_LAYERS:
            assert torch.equal(pages[dense_pages], was[[11, 7]])
        others = [page for page in range(NUM_PAGES) if page not in {11, 7, 30}]
        assert torch.equal(pages[others], was[others])


def test_gathered_rows_are_the_pages_of_the_layers_that_are_offloaded() -> None:
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
    ("release", "words"),
    [
        (PageEviction([1], [40], [TablePlace(4, 1)]), "slot 4"),
        (PageEviction([1] * 20, [40] * 20, [TablePlace(0, 1)]), "pages 1 to 21; have 4 slots of 20 pages"),
        (PageEviction([1, 2], [40], [TablePlace(0, 1)]), "2 pages and 1 dense"),
        (PageEviction([40], [41], [TablePlace(0, 1)]), "have 40 pages"),
        (PageEviction([1], [120], [TablePlace(0, 1)]), "have 120 pages"),
    ],
)
def test_a_release_outside_the_pool_is_refused(release: PageEviction, words: str) -> None:
    pool = make_tiered_pool()
    with pytest.raises(ValueError, match=words):
        pool.evict(release)
