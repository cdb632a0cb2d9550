"""Rings of methods that reuse: who gets one, who waits for one, and when it comes back."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from pydantic import TypeAdapter

from gpu.methods.method import ProfilePart
from gpu.methods.registry import list_methods
from gpu.step import PartId, RingWrite, StepPlan
from scheduler.cache.ring_pool import Rings
from scheduler.engine.engine import Engine
from tests.scheduler.engines import PAGE, answer, check_output, drain, prompt_of
from tests.scheduler.host_engines import INDEXES, RINGS, ask, check_idle, make_engine
from tests.scheduler.page_runner import PageRunner
from transfer.reading import Reading


def ring_writes(runner: PageRunner) -> list[RingWrite]:
    return [write for plan in runner.plans for write in plan.ring_writes]


def start(engine: Engine, requests: list) -> dict[str, list]:
    """Until all of these run; what they were told so far."""
    deltas: dict[str, list] = {request.request_id: [] for request in requests}
    engine.submit(requests)
    for _ in range(2000):
        if len(engine.scheduler.roster.running) >= len(requests):
            return deltas
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    raise AssertionError("they do not run")


def finish(engine: Engine, requests: list, deltas: dict[str, list]) -> None:
    """To the end, with the texts of lone runs."""
    rest = drain(engine)
    for request in requests:
        check_output(request, deltas[request.request_id] + rest.get(request.request_id, []))


def test_a_request_of_a_profile_that_reuses_holds_a_ring_until_it_leaves() -> None:
    engine, runner = make_engine(num_rings=2)
    requests = [ask("a", prompt_of(150), 20, "reusing"), ask("b", prompt_of(200, salt=1), 20, "reusing-down")]
    deltas = start(engine, requests)
    assert sorted(runner.ring_holders) == [(RINGS, 0), (RINGS, 1)]
    assert engine.scheduler.rings.num_free == {RINGS: 0}
    finish(engine, requests, deltas)
    check_idle(engine, runner)


@pytest.mark.parametrize("seed", [None, 1])
def test_a_request_of_two_methods_with_rings_holds_one_of_each_and_begins_with_copies_of_both(seed: int | None) -> None:
    order = None if seed is None else Random(seed)
    engine, runner = make_engine(num_pages=400, num_rings=3, num_indexes=3, limit_blocks=2000, order=order)
    answer(engine, [ask(f"choice{index}", prompt_of(600), 12, "both") for index in range(3)])
    given = [(write.slot, write.part) for write in ring_writes(runner)]
    assert {part for _, part in given[::2]} == {RINGS}
    assert [(slot, INDEXES) for slot, _ in given[::2]] == given[1::2]
    assert {write.part for write in ring_writes(runner) if write.source is not None} == {RINGS, INDEXES}
    check_idle(engine, runner)


@pytest.mark.parametrize(("num_rings", "num_indexes"), [(1, 2), (2, 1)])
def test_a_request_that_lacks_one_of_its_two_rings_holds_none_meanwhile(num_rings: int, num_indexes: int) -> None:
    engine, runner = make_engine(num_pages=400, num_rings=num_rings, num_indexes=num_indexes, limit_blocks=2000)
    requests = [ask("first", prompt_of(300), 20, "both"), ask("second", prompt_of(280, salt=1), 20, "both")]
    engine.submit(requests)
    deltas: dict[str, list] = {}
    while engine.has_work:
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
        assert sorted(part.method for part, _ in runner.ring_holders) in ([], ["indexed", "mac"])
    for request in requests:
        check_output(request, deltas[request.request_id])
    check_idle(engine, runner)


def test_a_ring_that_comes_late_is_taken_beside_one_that_came_at_admission() -> None:
    """The prompt stays on the device; the index begins when tokens of the answer are offloaded."""
    engine, runner = make_engine(num_pages=400, num_rings=1, num_indexes=1, limit_blocks=2000)
    request = ask("grows", prompt_of(110), 200, "both")
    answer(engine, [request])
    given = [(step, write.part) for step, plan in enumerate(runner.plans) for write in plan.ring_writes]
    assert [part for _, part in given] == [RINGS, INDEXES]
    assert given[0][0] < given[1][0]
    check_idle(engine, runner)


def test_one_that_finds_no_ring_waits_and_is_passed_by_those_that_need_none() -> None:
    engine, runner = make_engine(num_rings=1)
    first, second = ask("first", prompt_of(150), 100, "reusing"), ask("second", prompt_of(160, salt=1), 5, "reusing")
    others = [ask(f"other{index}", prompt_of(40, salt=1), 3, "exact") for index in range(70)]
    engine.submit([first, second, *others])
    deltas: dict[str, list] = {}
    order = []
    while engine.has_work:
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
            order += [delta.request_id] if delta.finish_reason else []
    assert order[-2:] == ["first", "second"]
    for request in (first, second, *others):
        check_output(request, deltas[request.request_id])
    assert [write.ring for write in ring_writes(runner)] == [0, 0]
    check_idle(engine, runner)


def test_a_request_too_short_to_reuse_anything_takes_no_ring() -> None:
    engine, runner = make_engine(num_rings=1)
    engine.submit([ask("short", prompt_of(60), 39, "reusing"), ask("longer", prompt_of(60, salt=1), 40, "reusing")])
    drain(engine)
    assert len(ring_writes(runner)) == 1
    check_idle(engine, runner)


@pytest.mark.parametrize("profile", ["reusing", "reusing-down"])
def test_who_is_preempted_gives_its_ring_back_and_begins_again_with_an_empty_one(profile: str) -> None:
    engine, runner = make_engine(num_rings=2, num_pages=60, prefix_cache=False)
    request = ask("a", prompt_of(200), 60, profile)
    deltas = start(engine, [request])
    engine.scheduler.roster.preempt_last(engine.scheduler.roster.running)
    assert engine.scheduler.rings.num_free == {RINGS: 2}
    finish(engine, [request], deltas)
    assert [write.source for write in ring_writes(runner)] == [None, None]
    check_idle(engine, runner)


def test_a_request_that_is_cancelled_while_its_prompt_is_computed_gives_its_ring_back() -> None:
    engine, runner = make_engine(num_rings=1)
    engine.submit([ask("a", prompt_of(400), 60, "reusing")])
    engine.step()
    assert engine.scheduler.rings.num_free == {RINGS: 0}
    engine.cancel(["a"])
    drain(engine)
    check_idle(engine, runner)


def test_a_row_that_fails_gives_its_ring_back() -> None:
    engine, runner = make_engine(num_rings=1)
    start(engine, [ask("a", prompt_of(150), 60, "reusing")])
    runner.broken.add(engine.scheduler.roster.running[0].slot)
    assert drain(engine)["a"][-1].finish_reason == "error"
    check_idle(engine, runner)


def test_choices_of_one_prompt_begin_with_a_copy_of_the_first_ones_ring() -> None:
    engine, runner = make_engine(num_rings=3)
    requests = [ask(f"choice{index}", prompt_of(150), 12, "reusing") for index in range(3)]
    answer(engine, requests)
    sources = [write.source for write in ring_writes(runner)]
    assert sources[0] is None
    assert all(source is not None and source.begin == 144 for source in sources[1:])
    assert len(runner.copies) == 2
    check_idle(engine, runner)


def test_a_longer_prompt_takes_over_nothing_for_cells_of_its_own() -> None:
    engine, runner = make_engine(num_rings=2)
    first = ask("first", prompt_of(150), 60, "reusing")
    deltas = start(engine, [first])
    longer = ask("longer", prompt_of(150) + prompt_of(200, salt=1), 12, "reusing")
    engine.submit([longer])
    rest = drain(engine)
    check_output(first, deltas["first"] + rest["first"])
    check_output(longer, rest["longer"])
    (source,) = [write.source for write in ring_writes(runner) if write.source is not None]
    assert source.begin <= 150
    assert source.end >= 350
    check_idle(engine, runner)


def test_a_ring_is_not_copied_from_a_prompt_of_other_tokens_or_of_another_profile() -> None:
    engine, runner = make_engine(num_rings=3)
    start(
        engine, [ask("other", prompt_of(150, salt=1), 50, "reusing"), ask("down", prompt_of(150), 50, "reusing-down")]
    )
    engine.submit([ask("exact", prompt_of(150), 2, "exact")])
    drain(engine)
    engine.submit([ask("late", prompt_of(150), 2, "reusing")])
    drain(engine)
    assert runner.copies == []


@pytest.mark.parametrize("seed", range(4))
def test_in_two_lanes_a_ring_is_given_away_behind_who_held_it(seed: int) -> None:
    """The runner checks it, and that a copy finds all that its source has written."""
    engine, runner = make_engine(num_rings=2, order=Random(seed))
    prompts = [prompt_of(300, salt=index % 2) for index in range(8)]
    requests = [ask(f"r{index}", prompt, 20 + 5 * index, "reusing-down") for index, prompt in enumerate(prompts)]
    answer(engine, requests)
    check_idle(engine, runner)


def test_a_plan_that_copies_a_ring_is_fenced_while_the_other_lane_is_busy() -> None:
    engine, _ = make_engine(num_rings=2, order=Random(3))
    start(engine, [ask("a", prompt_of(300), 60, "reusing-down")])
    scheduler = engine.scheduler
    plan = StepPlan(ring_writes=[RingWrite(1, RINGS, 1, Reading.NONE, object())])
    scheduler._launched[next(lane for lane in scheduler.lanes if lane is not plan.lane)].append(object())
    assert scheduler._fence(plan, [])


def test_parts_that_print_alike_are_told_apart_and_survive_the_way_to_the_engine() -> None:
    one = PartId("reuse", "mac", (("tau", "0.5, band 2"),))
    other = PartId("reuse", "mac", (("tau", 0.5), ("band", 2)))
    assert str(one) == str(other)
    assert other != PartId("reuse", "mac", (("tau", "0.5"), ("band", "2")))
    rings = Rings({one: 1, other: 2}, PAGE)
    assert rings.num_free == {one: 1, other: 2}
    counts = TypeAdapter(tuple[tuple[PartId, int], ...])
    read = dict(counts.validate_json(counts.dump_json(((one, 1), (other, 2)))))
    assert read == {one: 1, other: 2}
    assert [type(value) for part in read for _, value in part.settings] == [str, float, int]


def test_settings_of_all_kinds_are_in_a_parts_identity_and_survive_the_way_to_the_engine() -> None:
    """Settings in settings, numbers by layer and paths among them."""
    given: dict[str, dict[str, Any]] = {
        "mac": {"layer_tau": {0: 0.4, 2: "off"}},
        "indexed": {"errors": {"epsilon": 0.1}, "resident": "full"},
        "momo": {},
        "predicted": {"weights": Path("some/where.safetensors")},
    }
    parts = TypeAdapter(PartId)
    found = {
        name: ProfilePart(list_methods()[name], list_methods()[name].settings(**one)).id for name, one in given.items()
    }
    for part in found.values():
        assert parts.validate_json(parts.dump_json(part)) == part
    others = ({"tau": 0.46}, {"layer_tau": {0: 0.5, 2: "off"}}, {"layer_tau": {0: 0.4}})
    mac = list_methods()["mac"]
    assert len({found["mac"], *(ProfilePart(mac, mac.settings(**given["mac"] | one)).id for one in others)}) == 4
    layers = dict(found["mac"].settings)
    assert (layers["layer_tau.0"], layers["layer_tau.2"]) == (0.4, "off")
