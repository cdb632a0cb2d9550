"""Pages that rings share: who takes them, who waits or is preempted for them, and when they come back."""

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.cache.ring_pool import Rings
from scheduler.engine.engine import Engine
from scheduler.sequences.sequence import State
from tests.scheduler.engines import PAGE, answer, drain, prompt_of
from tests.scheduler.host_engines import INDEXES, PROFILES, RINGS, SINK, ask, check_idle, make_engine
from tests.scheduler.page_runner import PageRunner
from transfer.reading import Reading

PAGE_TOKENS = 1024  # of an index


def make_indexed_engine(**more) -> tuple[Engine, PageRunner]:
    return make_engine(num_pages=600, limit_blocks=2000, **{"num_indexes": 3, **more})


def check_pages(runner: PageRunner) -> int:
    """Whoever steps has pages for all its tokens, which nobody was given meanwhile but who began with all tokens of
    theirs (the runner compares the tokens); the most held at once.
    """
    ring_of: dict[int, int] = {}
    pages_of: dict[int, list[int]] = {}
    owners: dict[int, set[int]] = {}
    most = 0

    for plan in runner.plans:
        for slot in plan.released_slots:
            ring_of.pop(slot, None)
        for write in [write for write in plan.ring_writes if write.part == INDEXES]:
            assert write.reading is Reading.INDEXED
            common = write.pages[: write.num_shared]
            if common:
                assert list(common) == pages_of[write.source.ring][: len(common)]
                assert SINK + len(common) * PAGE_TOKENS <= write.source.begin, "a page has tokens of one of them alone"
            ring_of[write.slot], pages_of[write.ring] = write.ring, list(write.pages)
            owners |= {page: {write.ring} for page in write.pages[write.num_shared :]}
            for page in common:
                owners[page].add(write.ring)
        for growth in plan.ring_growth:
            assert growth.part == INDEXES
            pages_of[growth.ring] += growth.pages
            owners |= {page: {growth.ring} for page in growth.pages}
        most = max(most, len({page for ring in ring_of.values() for page in pages_of[ring]}))
        for group in plan.decode:
            for slot, position in zip(group.slots, group.positions, strict=True):
                if (ring := ring_of.get(slot)) is not None:
                    assert position < len(pages_of[ring]) * PAGE_TOKENS
                    assert all(ring in owners[page] for page in pages_of[ring]), "somebody else was given its page"
    return most


def num_shared(runner: PageRunner) -> list[int]:
    return [write.num_shared for plan in runner.plans for write in plan.ring_writes if write.part == INDEXES]


def pages_of(sequence: Any) -> list[int]:
    held = sequence.rings.get(INDEXES)
    return [] if held is None else held.pages


def check_counts(engine: Engine) -> None:
    """Every page is free, or held, and by as many sequences as is counted."""
    rings, held = engine.scheduler.rings, {}
    for sequence in engine.scheduler.roster.holding():
        for page in pages_of(sequence):
            held[page] = held.get(page, 0) + 1
    pages = range(len(rings._holders[INDEXES]))
    assert rings._holders[INDEXES] == [held.get(page, 0) for page in pages]
    assert sorted([*held, *rings._free_pages[INDEXES]]) == [*pages]


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
def test_where_no_page_is_free_the_last_that_holds_some_is_preempted_and_begins_again(seed: int | None) -> None:
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


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("profile", ["indexed", "both"])
def test_answers_to_one_prompt_hold_the_pages_of_its_index_together(profile: str, seed: int | None) -> None:
    """Three of 3 pages each, of which 2 are common, where 5 pages are all there are."""
    engine, runner = make_indexed_engine(num_rings=3, index_pages=5, order=None if seed is None else Random(seed))
    answer(engine, [ask(f"r{n}", prompt_of(2500), 12 + n, profile) for n in range(3)])
    assert sorted(num_shared(runner)) == [0, 2, 2]
    assert check_pages(runner) == 5
    assert engine.scheduler.roster.num_preemptions == 0
    check_idle(engine, runner)


def test_pages_stay_while_one_of_those_that_hold_them_does() -> None:
    engine, runner = make_indexed_engine(index_pages=5)
    engine.submit([ask(name, prompt_of(2500), 300, "indexed") for name in "ab"])
    for _ in range(2000):
        if len(engine.scheduler.roster.running) == 2:
            break
        engine.step()
    rings = engine.scheduler.rings
    assert rings.num_free_pages == {INDEXES: 1}
    engine.cancel(["a"])
    assert rings.num_free_pages == {INDEXES: 2}
    check_counts(engine)
    engine.submit([ask("c", prompt_of(2500), 300, "indexed")])
    for _ in range(40):
        engine.step()
    assert rings.num_free_pages == {INDEXES: 1}
    engine.cancel(["b", "c"])
    assert rings.num_free_pages == {INDEXES: 5}
    check_pages(runner)


def play(seed: int, num_steps: int = 160, profiles: tuple[str, ...] = ("indexed",)) -> PageRunner:
    """Prompts with common fronts come, grow, are preempted and cancelled, in two lanes; counts hold at each step."""
    draw = Random(seed)
    engine, runner = make_indexed_engine(num_rings=3, num_indexes=4, index_pages=8, order=Random(seed))
    fronts = [prompt_of(2400, salt=salt) for salt in range(2)]
    alive: list[str] = []
    for number in range(num_steps):
        roster = engine.scheduler.roster
        change = draw.choice(["come", "come", "cancel", "preempt", "step", "step", "step"])
        if change == "come" and roster.num_unfinished < 5:
            front = draw.choice(fronts)[: draw.choice([900, 1100, 2100, 2400])]
            alive.append(f"r{number}")
            prompt = front + prompt_of(draw.choice([1, 40]), salt=number)
            engine.submit([ask(alive[-1], prompt, draw.choice([8, 60]), profiles[number % len(profiles)])])
        elif change == "cancel" and alive:
            engine.cancel([alive.pop(draw.randrange(len(alive)))])
        elif change == "preempt" and roster.running:
            roster.preempt_last(roster.running)
        for _ in range(6):
            engine.step()
            check_counts(engine)
    drain(engine)
    check_pages(runner)
    check_idle(engine, runner)
    return runner


@pytest.mark.parametrize("seed", [3, 4])
def test_pages_are_whoevers_tokens_they_have_whatever_becomes_of_those_that_hold_them(seed: int) -> None:
    assert max(num_shared(play(seed))) == 2


@pytest.mark.parametrize("seed", [5, 6])
def test_sequences_that_hold_a_ring_of_each_of_two_methods_share_pages_with_those_that_hold_one(seed: int) -> None:
    runner = play(seed, profiles=("both", "both", "indexed"))
    assert {write.part for plan in runner.plans for write in plan.ring_writes} == {RINGS, INDEXES}


def test_a_page_too_many_in_common_or_given_back_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    source_of, give_back = Rings._source_of, Rings.give_back

    def with_one_more(self: Rings, part: Any, sequence: Any, other: Any, begin: int) -> Any:
        found = source_of(self, part, sequence, other, begin)
        return replace(found, pages=tuple(pages_of(other)[: len(found.pages) + 1]))

    def of_all(self: Rings, sequence: Any) -> None:
        for page in pages_of(sequence):
            self._holders[INDEXES][page] = 1
        give_back(self, sequence)

    for name, broken in (("_source_of", with_one_more), ("give_back", of_all)):
        with monkeypatch.context() as patch:
            patch.setattr(Rings, name, broken)
            with pytest.raises(AssertionError):
                play(3, num_steps=60)


def test_one_that_takes_its_ring_late_has_the_pages_of_whoever_began_alike() -> None:
    """No tokens of it were in host memory at admission; blocks of hashes say what is in common."""
    rings = Rings({INDEXES: 3}, PAGE, {INDEXES: 5}, SINK)

    def running(hashes: list[bytes]) -> Any:
        return SimpleNamespace(
            rings={}, open_context=object(), profile=PROFILES["indexed"], hashes=hashes, slot=0,
            state=State.RUNNING, num_prompt_tokens=2500, num_tokens=2500, next_position=2499,
            request=SimpleNamespace(max_tokens=8, epsilon=None),
        )  # fmt: skip

    blocks = [str(number).encode() for number in range(2500 // PAGE)]
    differs_at = (SINK + PAGE_TOKENS) // PAGE
    alike, other = running(blocks), running([*blocks[:differs_at], *(b"other" + one for one in blocks[differs_at:])])
    first = running(blocks)
    for sequence in (first, alike, other):
        rings.take_late(sequence, [first, alike, other])
    own, second = rings.take_writes()
    assert (own.source, own.num_shared) == (None, 0)
    assert (second.num_shared, second.pages[:2]) == (2, own.pages[:2])
    assert other.rings == {}, "it lacks a page: one is common, and of two others one is free"
    rings.give_back(alike)
    rings.take_late(other, [first, alike, other])
    (third,) = rings.take_writes()
    assert (third.num_shared, third.pages[0], third.source.begin) == (1, own.pages[0], SINK + PAGE_TOKENS)
