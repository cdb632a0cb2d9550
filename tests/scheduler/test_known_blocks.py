"""The page pool against a model that walks: which blocks are known, which are held, and whose pages they are in."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler.cache.page_pool import PagePool, count_front
from scheduler.cache.prefix_cache import extend_hashes

NUM_PAGES, FIRST_PAGE, BLOCK = 40, 7, 4
CHAINS = [[0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 2, 2], [1, 1, 1], [0, 0, 0, 0, 2, 2]]


def hashes_of(chain: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, np.repeat(np.array(chain, np.int32), BLOCK), BLOCK, b"seed")
    return hashes


class Walk:
    """Sequences that hold pages of chains. What a page's content is, and who holds it, is written down twice."""

    def __init__(self) -> None:
        self.pool = PagePool(FIRST_PAGE, NUM_PAGES, True)
        self.held: list[tuple[list[bytes], list[int], int]] = []  # hashes, pages, blocks computed
        self.content: dict[int, bytes] = {}

    def enter(self, chain: int, is_shared: bool) -> None:
        hashes = hashes_of(CHAINS[chain])
        known = self.pool.count_known(hashes, 0, len(hashes)) if is_shared else 0
        cached = list(self.pool.prefix_pages(hashes, known).page_ids)
        self.pool.hold(cached)
        if len(hashes) - known > self.pool.num_available:
            self.pool.release(cached)
            return
        pages = cached + self.pool.allocate(len(hashes) - known)
        for block, page in enumerate(pages):
            assert block >= known or self.content[page] == hashes[block], "a shared page has what its hash says"
            self.content[page] = hashes[block]
        self.held.append((hashes, pages, known))

    def publish(self, place: int) -> None:
        hashes, pages, begin = self.held[place % len(self.held)]
        self.pool.publish(hashes, pages, begin, len(pages))

    def leave(self, place: int) -> None:
        self.pool.release(self.held.pop(place % len(self.held))[1])

    def check(self) -> None:
        pool = self.pool
        holders = {
            page: sum(page in pages for _, pages, _ in self.held) for page in range(FIRST_PAGE, FIRST_PAGE + NUM_PAGES)
        }
        assert {page: pool.num_holders(page) for page in holders} == holders
        assert pool.num_held == sum(count > 0 for count in holders.values())
        assert pool.num_available == NUM_PAGES - pool.num_held
        for chain in CHAINS:
            hashes = hashes_of(chain)
            known = [digest in pool._page_of for digest in hashes]
            front = [*known, False].index(False)
            assert known == [True] * front + [False] * (len(known) - front), "nothing is known behind a gap"
            pages = [pool._page_of[digest] for digest in hashes[:front]]
            assert pool.prefix_pages(hashes, front).page_ids == tuple(pages)
            assert pool.prefix_pages(hashes, front).array.tolist() == pages
            assert [self.content[page] for page in pages] == hashes[:front]
            for near in range(len(hashes) + 1):
                assert pool.count_known(hashes, near, len(hashes)) == front
                assert pool.count_known(hashes, min(near, 2), 2) == min(front, 2)


@example([("alone", 0), ("publish", 0), ("enter", 1), ("retract", 0), ("publish", 1)])
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "enter", "alone", "publish", "publish", "leave", "retract"]), st.integers(0, 30)
        ),
        max_size=60,
    )
)
def test_blocks_are_known_from_the_front_whatever_is_held_published_evicted_or_retracted(
    steps: list[tuple[str, int]],
) -> None:
    walk = Walk()
    for what, number in steps:
        if what in ("enter", "alone"):
            walk.enter(number % len(CHAINS), what == "enter")
        elif what == "retract":
            hashes = hashes_of(CHAINS[number % len(CHAINS)])
            walk.pool.retract(hashes[number % len(hashes)])
            assert walk.pool.count_known(hashes, 0, len(hashes)) <= number % len(hashes)
        elif walk.held:
            getattr(walk, what)(number)
        walk.check()


def test_what_two_computed_stays_known_when_the_first_lets_go() -> None:
    """The second one's page takes over: evicting the first one's would take all that is behind it along."""
    walk = Walk()
    walk.enter(3, False)
    walk.enter(0, False)
    walk.held[0] = (hashes_of(CHAINS[0])[:3], walk.held[0][1], 0)
    for page, digest in zip(walk.held[0][1], walk.held[0][0], strict=True):
        walk.content[page] = digest
    walk.publish(0)
    walk.publish(1)
    hashes, pages, _ = walk.held[1]
    assert walk.pool.prefix_pages(hashes, 8).page_ids == (*walk.held[0][1], *pages[3:])
    assert walk.pool.count_held(hashes, 0, 8) == 8
    walk.leave(0)
    assert walk.pool.prefix_pages(hashes, 8).page_ids == tuple(pages)
    assert walk.pool.count_held(hashes, 0, 8) == 8
    walk.check()
    walk.pool.release(walk.pool.allocate(walk.pool.num_available))
    assert walk.pool.count_known(hashes, 8, 8) == 8


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_a_front_is_found_from_wherever_the_look_begins(front: int, near: int, end: int) -> None:
    hashes = [bytes([i]) for i in range(20)]
    looks: list[bytes] = []

    def has(digest: bytes) -> bool:
        looks.append(digest)
        return digest[0] < front

    assert count_front(hashes, has, min(near, end), end) == min(front, end)
    assert len(looks) <= (2 if min(front, end) == min(near, end) else 7)
