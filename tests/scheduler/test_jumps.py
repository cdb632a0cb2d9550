"""Text that must come takes no step for each token, and is the text that it would be; and where it takes one all the
same: who holds a ring, and what a step has no room for.
"""

from random import Random

import msgspec
import pytest
from llguidance import LLMatcher

from gpu.step import DecodeGroup
from scheduler.engine.engine import Engine
from scheduler.messages import Delta, EngineRequest
from tests.scheduler import engines, host_engines
from tests.scheduler.engines import PAGE, drain, make_engine, make_request, prompt_of, text
from tests.scheduler.page_runner import PageRunner
from tests.scheduler.test_constraints import (
    LETTERS,
    WORDS,
    check,
    expected,
    held,
    with_letters,
)


def runs_of(runner: PageRunner) -> list[list[int]]:
    return [list(run) for plan in runner.plans for group in plan.decode for run in group.runs or [] if run]


def decode_steps(runner: PageRunner) -> int:
    return sum(bool(plan.decode) for plan in runner.plans)


def serve(engine: Engine, requests: list[EngineRequest]) -> dict[str, list[Delta]]:
    with_letters(engine).submit(requests)
    return drain(engine)


def texts(number: int, max_tokens: int = 60) -> list[EngineRequest]:
    return [held(f"{i}", "text", prompt_of(20 + i, i), max_tokens) for i in range(number)]


@pytest.mark.parametrize("is_pipelined", [True, False])
def test_a_run_takes_one_step_and_not_one_each(is_pipelined: bool) -> None:
    """A word is chosen in one step, and another writes the rest; with a device ahead of the host, one begins to."""
    steps = {}
    for jumps in (True, False):
        engine, runner = make_engine(is_pipelined=is_pipelined, jump_forward=jumps, max_running=32)
        requests = texts(1)
        check(requests[0], "text", serve(engine, requests)["0"])
        steps[jumps] = decode_steps(runner)
        output = expected(requests[0], "text")[0]
        stats = engine.stats().masks
        assert stats.jumped_tokens == sum(map(len, runs_of(runner)))
        assert stats.jumps == len(runs_of(runner))
        assert (stats.jumps > 0) == jumps
    num_words = sum(output.count(LETTERS.index(letter)) for letter in "ab") + 1
    assert len(output) > 20
    assert steps[False] >= len(output) - 1
    assert steps[True] <= (3 if is_pipelined else 2) * num_words + 2


def test_what_must_come_is_told_in_one_message_and_in_order() -> None:
    engine, runner = make_engine(max_running=32)
    requests = texts(1)
    deltas = serve(engine, requests)["0"]
    longest = max(runs_of(runner), key=len)
    (message,) = [delta for delta in deltas if len(delta.token_ids) > len(longest)]
    assert message.token_ids[:-1] == longest
    check(requests[0], "text", deltas)


@pytest.mark.parametrize("max_tokens", range(1, 27))
def test_the_most_tokens_of_an_answer_end_it_wherever_a_run_is(max_tokens: int) -> None:
    engine, _ = make_engine(max_running=32)
    requests = texts(2, max_tokens)
    deltas = serve(engine, requests)
    for request in requests:
        check(request, "text", deltas[request.request_id])
        assert len(text(deltas[request.request_id])) <= max_tokens


@pytest.mark.parametrize("letter", ["c", "k", "w", "z"])
def test_a_token_that_ends_a_text_ends_it_in_the_middle_of_a_run(letter: str) -> None:
    stop = LETTERS.index(letter)
    engine, _ = make_engine(max_running=32)
    requests = [msgspec.structs.replace(request, stop_token_ids=(stop,)) for request in texts(3)]
    deltas = serve(engine, requests)
    for request in requests:
        whole = expected(msgspec.structs.replace(request, stop_token_ids=(49,)), "text")[0]
        wanted = whole[: whole.index(stop) + 1] if stop in whole else whole
        assert text(deltas[request.request_id]) == wanted
        assert deltas[request.request_id][-1].finish_reason == "stop"


def test_what_must_come_and_may_not_leaves_nothing_to_draw() -> None:
    """As it would token by token: what is in front of it comes, and no more."""
    banned = [LETTERS.index("k"), LETTERS.index("A")]
    told = {}
    for jumps in (True, False):
        engine, _ = make_engine(jump_forward=jumps, max_running=32)
        requests = [msgspec.structs.replace(one, bad_token_ids=tuple((token,) for token in banned)) for one in texts(3)]
        deltas = serve(engine, requests)
        assert {one[-1].finish_reason for one in deltas.values()} == {"error"}
        assert all("no token has a finite score" in (one[-1].error or "") for one in deltas.values())
        told[jumps] = {name: text(one) for name, one in deltas.items()}
    assert told[True] == told[False]
    assert any(len(one) > 8 for one in told[True].values())


def test_a_step_has_no_more_rows_than_it_may() -> None:
    for most_rows in (3, 5, 9):
        engine, runner = make_engine(max_running=3)
        engine.scheduler.jumps.most_rows = most_rows
        requests = texts(3)
        deltas = serve(engine, requests)
        for request in requests:
            check(request, "text", deltas[request.request_id])
        rows = [sum(group.lengths) for plan in runner.plans for group in plan.decode]
        assert max(rows) <= most_rows
        assert runs_of(runner)


def test_streams_beside_wait_for_a_share_of_their_step_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run reads beside a step is bounded by what the step reads; one that runs alone keeps to the token gap."""
    engine, runner = make_engine(max_running=32, num_pages=200)
    costs = engine.scheduler._costs
    monkeypatch.setattr(costs, "_weight_cells", lambda num_rows: 0.0)
    serve(engine, [make_request("free", prompt_of(400, 1), 60), *texts(5)])
    runner_cells = [
        (len(group.slots), sum(group.positions) + len(group.slots), sum(
            (place + 1) * len(run) for place, run in zip(group.positions, group.runs or [], strict=False)))
        for plan in runner.plans for group in plan.decode
    ]  # fmt: skip
    assert any(more for num_rows, _, more in runner_cells if num_rows > 1)
    assert all(more <= 0.25 * whole for num_rows, whole, more in runner_cells if num_rows > 1)


def test_who_holds_a_ring_goes_token_by_token() -> None:
    engine, runner = host_engines.make_engine()
    engine.scheduler.jumps.most_rows = 40
    requests = [held("ring", "text", prompt_of(150), 40, "reusing"), held("other", "text", prompt_of(60, 2), 40)]
    with_letters(engine)
    engine.submit(requests)
    deltas = drain(engine)
    for request in requests:
        check(request, "text", deltas[request.request_id])
    slots = {slot for plan in runner.plans for write in plan.ring_writes for slot in [write.slot]}
    with_runs = {
        slot for plan in runner.plans for group in plan.decode
        for slot, run in zip(group.slots, group.runs or [], strict=False) if run
    }  # fmt: skip
    assert slots
    assert with_runs
    assert not slots & with_runs


@pytest.mark.parametrize("num_windows", [4, 6])
def test_a_run_writes_over_nothing_that_its_first_tokens_see(num_windows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "SPARE", 8)  # less than a word is long
    engine, runner = make_engine(max_running=4, num_windows=num_windows, num_pages=200)
    engine.scheduler.jumps.most_rows = 40
    requests = [held(f"{i}", "text", prompt_of(60 + 30 * i, i), 60) for i in range(3)]
    deltas = serve(engine, requests)
    for request in requests:
        check(request, "text", deltas[request.request_id])
    assert runs_of(runner)
    again = [msgspec.structs.replace(one, request_id=f"again {one.request_id}") for one in requests]
    deltas = serve(engine, again)
    for request in again:
        check(request, "text", deltas[request.request_id])


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_contexts_are_offloaded_with_runs_as_well(is_adaptive: bool, seed: int) -> None:
    engine, runner = host_engines.make_engine(is_adaptive=is_adaptive, order=Random(seed), num_pages=120)
    engine.scheduler.jumps.most_rows = 40
    with_letters(engine)
    names = ("offloaded", "offloaded", "exact", "offloaded")
    requests = [held(f"{i}", "text", prompt_of(60 + 25 * i, i), 60, name) for i, name in enumerate(names)]
    engine.submit(requests)
    deltas = drain(engine)
    for request in requests:
        check(request, "text", deltas[request.request_id])
    assert runs_of(runner)


def test_contexts_are_offloaded_at_the_places_that_single_tokens_would_send_them() -> None:
    """With fixed residence, what each token's row reads where is what it would be, token by token."""
    released = 0
    for length in range(90, 200, 5):
        asked: dict[bool, dict[int, int | None]] = {True: {}, False: {}}
        for jumps in (True, False):
            engine, runner = host_engines.make_engine()
            engine.scheduler.jumps.most_rows = 40
            engine.scheduler.jumps.is_on = jumps
            request = held("a", "text", prompt_of(length, length), 100, "offloaded")
            with_letters(engine)
            engine.submit([request])
            check(request, "text", drain(engine)["a"])
            for plan in runner.plans:
                for group in plan.decode:
                    note_asks(asked[jumps], group)
        both = asked[True].keys() & asked[False].keys()
        assert {place: asked[True][place] for place in both} == {place: asked[False][place] for place in both}
        released += len({end for end in asked[True].values() if end is not None})
    assert released > 5


def note_asks(asked: dict[int, int | None], group: DecodeGroup) -> None:
    """By position, where what the host reads ends: of the one slot."""
    asks = group.host_reads or [None]
    for position in range(group.positions[0], group.positions[0] + group.lengths[0]):
        asked[position] = None if asks[0] is None else asks[0].end


@pytest.mark.parametrize("step", range(1, 12))
def test_a_request_that_is_cancelled_in_a_run_leaves_nothing_behind(step: int) -> None:
    """Nor is another disturbed, that goes on from the same tokens."""
    engine, _ = make_engine(max_running=32, num_pages=40)
    prompt = prompt_of(5 * PAGE, 3)
    gone, stays = held("gone", "text", prompt, 60), held("stays", "text", prompt, 60)
    with_letters(engine).submit([gone, stays])
    deltas: dict[str, list[Delta]] = {"gone": [], "stays": [], "next": []}
    for _ in range(step):
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    engine.cancel(["gone"])
    output = expected(gone, "text")[0]
    following = held("next", "free", [*prompt, *output], 10)
    engine.submit([following])
    for name, more in drain(engine).items():
        deltas[name] += more
    check(stays, "text", deltas["stays"])
    check(following, "free", deltas["next"])
    assert output[: len(text(deltas["gone"]))] == text(deltas["gone"])
    assert not engine.scheduler.pages.num_held


def test_words_are_long_enough_to_need_a_page_of_their_own() -> None:
    assert max(map(len, WORDS)) > PAGE


def test_no_row_stands_behind_a_token_that_ends_the_text() -> None:
    engine, runner = make_engine(max_running=32)
    stop = LETTERS.index("k")
    requests = [msgspec.structs.replace(request, stop_token_ids=(stop,)) for request in texts(3)]
    serve(engine, requests)
    assert any(len(run) > 5 for run in runs_of(runner))
    assert not any(stop in run for run in runs_of(runner))


def test_no_row_stands_behind_the_last_token_that_may_be() -> None:
    engine, runner = make_engine(max_running=32)
    requests = texts(3, 11)
    serve(engine, requests)
    lengths = [sample + 1 for plan in runner.plans for group in plan.decode for sample in group.samples]
    assert max(lengths) == 11
    assert any(len(run) > 5 for run in runs_of(runner))


def test_a_run_of_bad_tokens_is_seen_in_what_is_on_its_way() -> None:
    """`defg` may not come: none of `efg` does, whatever of it is in flight."""
    told = {}
    run = [LETTERS.index(letter) for letter in "defg"]
    for jumps in (True, False):
        engine, _ = make_engine(jump_forward=jumps, max_running=32)
        requests = [msgspec.structs.replace(request, bad_token_ids=(tuple(run),)) for request in texts(3)]
        told[jumps] = {name: text(one) for name, one in serve(engine, requests).items()}
    assert told[True] == told[False]
    assert any(one[-3:] == run[:3] for one in told[True].values())


@pytest.mark.parametrize("num_free", [2, 3])
@pytest.mark.parametrize("most", [20, 40])
def test_nobody_is_preempted_for_a_run(num_free: int, most: int) -> None:
    """Streams that need all pages there are, one each that they are about to take, and runs beside them."""
    preemptions = {}
    for jumps in (True, False):
        engine, _ = make_engine(jump_forward=jumps, max_running=32, num_pages=10, prefix_cache=False)
        free = [make_request(f"f{i}", prompt_of(30, i), most) for i in range(num_free)]
        requests = [held("0", "text", prompt_of(15, 7), 40), held("1", "text", prompt_of(30, 9), 40), *free]
        deltas = serve(engine, requests)
        for request in requests[:2]:
            check(request, "text", deltas[request.request_id])
        preemptions[jumps] = engine.scheduler.roster.num_preemptions
    assert preemptions[True] <= preemptions[False]
    assert preemptions[True] < num_free, "one more is preempted where runs take the last page"


@pytest.mark.parametrize("is_pipelined", [True, False])
def test_a_grammar_that_ends_with_a_run_ends_its_answer_behind_all_of_it(is_pipelined: bool) -> None:
    """And no message says stop before."""
    engine, runner = make_engine(max_running=32, is_pipelined=is_pipelined)
    word = "bcdefghij"
    grammar = LLMatcher.grammar_from_regex(f"(a|b){word}")
    request = msgspec.structs.replace(texts(1)[0], grammar=grammar, stop_token_ids=())
    deltas = serve(engine, [request])["0"]
    assert [LETTERS[token] for token in text(deltas)[1:]] == list(word)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert len(runs_of(runner)[0]) == len(word) - is_pipelined
