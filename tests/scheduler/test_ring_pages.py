"""Pages that rings share: who takes them, who waits or gives way for them, and when they come back."""

from random import Random

import pytest

from scheduler.engine.engine import Engine
from tests.scheduler.engines import answer, drain, prompt_of
from tests.scheduler.host_engines import INDEXES, ask, check_idle, make_engine
from tests.scheduler.page_runner import PageRunner
from transfer.reading import Reading

PAGE_TOKENS = 1024  # of an index


def make_indexed_engine(**more) -> tuple[Engine, PageRunner]:
    return make_engine(num_pages=600, limit_blocks=2000, **{"num_indexes": 3, **more})


def check_pages(runner: PageRunner) -> int:
    """Whoever steps has pages for all its tokens, which nobody was given meanwhile; the most held at once."""
    ring_of: dict[int, int] = {}
    pages_of: dict[int, list[int]] = {}
    owner: dict[int, int] = {}
    most = 0
    for plan in runner.plans:
        for slot in plan.released_slots:
            ring_of.pop(slot, None)
        for write in plan.ring_writes:
            assert write.reading is Reading.INDEXED
            ring_of[write.slot], pages_of[write.ring] = write.ring, list(write.pages)
            owner |= dict.fromkeys(write.pages, write.ring)
        for growth in plan.ring_growth:
            assert growth.part == INDEXES
            pages_of[growth.ring] += growth.pages
            owner |= dict.fromkeys(growth.pages, growth.ring)
        most = max(most, len({page for ring in ring_of.values() for page in pages_of[ring]}))
        for group in plan.decode:
            for slot, position in zip(group.slots, group.positions, strict=True):
                if (ring := ring_of.get(slot)) is not None:
                    assert position < len(pages_of[ring]) * PAGE_TOKENS
                    assert all(owner[page] == ring for page in pages_of[ring]), "somebody else was given its page"
    return most


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_contexts_of_different_lengths_share_pages_and_take_more_as_they_grow(seed: int | None) -> None:
    engine, runner = make_indexed_engine(index_pages=6, order=None if seed is None else Random(seed))
    lengths = [2030, 1000, 300]
    answer(engine, [ask(f"r{n}", prompt_of(length, salt=n), 40, "indexed") for n, length in enumerate(lengths)])
    assert 4 <= check_pages(runner) <= 6, "3, 2 and 1, where three rings of the longest context would take 12"
    assert sum(len(plan.ring_growth) for plan in runner.plans) == 2
    assert engine.scheduler.roster.num_preemptions == 0
    check_idle(engine, runner)


def test_one_whose_prompt_finds_too_few_pages_waits_and_others_pass() -> None:
    engine, runner = make_indexed_engine()
    requests = [ask("first", prompt_of(2500), 40, "indexed"), ask("second", prompt_of(2400, salt=1), 8, "indexed"),
                ask("third", prompt_of(500, salt=2), 8, "indexed")]  # fmt: skip
    answer(engine, requests)
    slots = [write.pages for plan in runner.plans for write in plan.ring_writes]
    assert list(map(len, slots)) == [3, 1, 3]
    assert check_pages(runner) == 4
    check_idle(engine, runner)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_where_no_page_is_free_the_last_that_holds_some_gives_way_and_begins_again(seed: int | None) -> None:
    engine, runner = make_indexed_engine(order=None if seed is None else Random(seed))
    requests = [ask("a", prompt_of(2000), 100, "indexed"), ask("b", prompt_of(2000, salt=1), 100, "indexed"),
                ask("none", prompt_of(40, salt=2), 50, "indexed")]  # fmt: skip
    answer(engine, requests)
    assert engine.scheduler.roster.num_preemptions == 1
    assert check_pages(runner) == 4
    check_idle(engine, runner)


def test_one_that_leaves_or_is_preempted_gives_its_pages_back() -> None:
    engine, runner = make_indexed_engine()
    engine.submit([ask("a", prompt_of(1500), 300, "indexed"), ask("b", prompt_of(1400, salt=1), 300, "indexed")])
    for _ in range(2000):
        if len(engine.scheduler.roster.running) == 2:
            break
        engine.step()
    assert engine.scheduler.rings.num_free_pages == {INDEXES: 0}
    engine.scheduler.roster.preempt_last(engine.scheduler.roster.running)
    assert engine.scheduler.rings.num_free_pages == {INDEXES: 2}
    engine.cancel(["a"])
    assert engine.scheduler.rings.num_free_pages == {INDEXES: 4}
    drain(engine)
    check_pages(runner)
    check_idle(engine, runner)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_one_that_begins_on_the_device_takes_a_ring_when_tokens_of_it_go_to_the_host(seed: int | None) -> None:
    engine, runner = make_indexed_engine(num_indexes=1, order=None if seed is None else Random(seed))
    requests = [ask(f"r{n}", prompt_of(110, salt=n), 200 + 100 * n, "indexed") for n in range(2)]
    answer(engine, requests)
    first, second = [write for plan in runner.plans for write in plan.ring_writes]
    assert {first.ring, second.ring} == {0}, "the other one goes on without, until the ring is free"
    begun = [index for index, plan in enumerate(runner.plans) if plan.decode]
    given = [index for index, plan in enumerate(runner.plans) if plan.ring_writes]
    assert given[0] > begun[0] + 20
    assert check_pages(runner) == 1
    check_idle(engine, runner)


def test_one_that_stays_on_the_device_takes_no_ring_and_waits_for_none() -> None:
    engine, runner = make_indexed_engine(num_indexes=1)
    answer(engine, [ask(f"r{n}", prompt_of(60, salt=n), 60, "indexed") for n in range(4)])
    assert [write for plan in runner.plans for write in plan.ring_writes] == []
    check_idle(engine, runner)
