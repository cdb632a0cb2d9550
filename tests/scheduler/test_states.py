"""Recurrent layers: a prompt goes on from a state behind its own tokens and no others, wherever one was left."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from scheduler.cache.eviction_order import EvictionOrder
from scheduler.engine.engine import Engine
from scheduler.messages import COMPUTED_AGAIN, Delta, EngineRequest
from tests.scheduler.engines import (
    PAGE,
    answer,
    check_empty,
    check_output,
    drain,
    make_engine,
    make_request,
    prompt_of,
    text,
)
from tests.scheduler.page_runner import PageRunner


def serve(engine, request: EngineRequest) -> tuple[list[int], int]:
    """Its text, and how many of its tokens were not computed."""
    said, cached, _ = serve_counted(engine, request)
    return said, cached


def serve_counted(engine, request: EngineRequest) -> tuple[list[int], int, int]:
    """Return its text, how many of its tokens were not computed, and how many others have rows in pages."""
    engine.submit([request])
    deltas = drain(engine)[request.request_id]
    check_output(request, deltas)
    return text(deltas), deltas[0].num_cached_tokens, deltas[0].figures.get(COMPUTED_AGAIN, 0)


def test_the_next_turn_computes_the_last_answer_and_what_is_new() -> None:
    """A prompt leaves a state at its last block's end; an answer of less than `snapshot_tokens` leaves none."""
    engine, _ = make_engine(num_states=4)
    first = make_request("a", prompt_of(200), max_tokens=40)
    said, _ = serve(engine, first)
    second = make_request("b", first.prompt_token_ids + said + prompt_of(30, salt=2))
    assert serve(engine, second)[1] == 200 // PAGE * PAGE
    check_empty(engine)


def test_a_long_answer_leaves_states_on_its_way() -> None:
    engine, _ = make_engine(num_states=8, num_pages=200)
    first = make_request("a", prompt_of(203), max_tokens=300)
    said, _ = serve(engine, first)
    whole = first.prompt_token_ids + said
    assert serve(engine, make_request("b", whole + prompt_of(30, salt=2)))[1] >= 503 - 64 - PAGE
    check_empty(engine)


def test_a_prompt_whose_last_block_is_whole_leaves_a_state_in_front_of_its_last_token() -> None:
    engine, _ = make_engine(num_states=4)
    serve(engine, make_request("a", prompt_of(192)))
    assert serve(engine, make_request("b", prompt_of(192)))[1] == 176
    assert serve(engine, make_request("c", prompt_of(193)))[1] == 176
    assert serve(engine, make_request("d", prompt_of(193)))[1] == 192
    check_empty(engine)


def test_prompts_that_part_in_the_middle_begin_there_from_the_third_one_on() -> None:
    engine, _ = make_engine(num_states=8, num_pages=300)
    found = [
        serve_counted(engine, make_request(f"r{number}", prompt_of(160) + prompt_of(60, salt=10 + number)))[1:]
        for number in range(4)
    ]
    assert found == [(0, 0), (0, 160), (160, 0), (160, 0)], "what is computed again for want of a state is told"
    check_empty(engine)


def branches_of(runner: PageRunner) -> list[list[int]]:
    """Return behind which tokens prompts left states, prompt by prompt."""
    jobs = [job for plan in runner.plans for job in plan.new_jobs]
    return [[branch.end for branch in prompt.branches] for job in jobs for prompt in job.prompts]


def converse(engine, name: str, front: int, num_turns: int) -> list[int]:
    """Return how many tokens of each turn of a conversation were not computed, whose first `front` tokens others
    have.
    """
    history, cached = prompt_of(163), []
    for turn in range(num_turns):
        history = history + prompt_of(40, salt=ord(name) + turn)
        request = make_request(f"{name}{turn}", history, max_tokens=12)
        said, found = serve(engine, structs.replace(request, front_tokens=front))
        cached.append(found)
        history = history + said
    return cached


@pytest.mark.parametrize("front", [0, 163])
def test_the_first_prompt_leaves_a_state_behind_what_the_system_says(front: int) -> None:
    """One more state for all conversations that begin alike, none a turn; without it the second one begins anew."""
    engine, runner = make_engine(num_states=30, num_pages=400)
    cached = [converse(engine, name, front, 4) for name in "ab"]
    own = [192, 240, 304]  # the last whole block of the turn in front
    assert cached == [[0, *own], [160 if front else 0, *own]]
    left = branches_of(runner)
    assert left[0] == ([192, 160] if front else [192])
    assert sum(map(len, left)) == 2 * 4 + 1, "the second conversation leaves it where the first did not"
    check_empty(engine)


@pytest.mark.parametrize(("num_states", "wanted"), [(2, [[848]]), (3, [[848, 784]])])
def test_another_question_about_a_long_text_begins_near_it_where_a_state_was_free_for_that(
    num_states: int, wanted: list[list[int]]
) -> None:
    """64 tokens, `snapshot_tokens`, in front of the first prompt's last whole block. A text that is not long leaves
    none there: see the prompts of 220 tokens above.
    """
    engine, runner = make_engine(num_states=num_states, num_pages=300)
    prompts = [prompt_of(800) + prompt_of(60, salt=10 + number) for number in range(2)]
    serve(engine, make_request("a", prompts[0]))
    assert branches_of(runner) == wanted
    found = serve_counted(engine, make_request("b", prompts[1]))[1:]
    assert found == ((784, 16) if num_states > 2 else (0, 800))
    check_empty(engine)


def test_nothing_is_evicted_for_a_snapshot_that_nobody_may_ask_for() -> None:
    """Of three states one runs; the last two prompts' ends stay, and of the long one's nothing else."""
    engine, runner = make_engine(num_states=3, num_pages=400)
    for name, length in (("a", 200), ("b", 230), ("c", 900)):
        serve(engine, make_request(name, prompt_of(length, salt=ord(name))))
    assert branches_of(runner) == [[192], [224], [896]]
    check_empty(engine)


@pytest.mark.parametrize(("said", "wanted"), [(100, [352]), (300, [448, 560])])
def test_behind_a_long_answer_alone_the_next_turn_leaves_a_state_for_who_takes_it_back(
    said: int, wanted: list[int]
) -> None:
    engine, runner = make_engine(num_states=8, num_pages=200, snapshot_tokens=1024)
    first = make_request("a", prompt_of(163), max_tokens=said)
    told, _ = serve(engine, first)
    serve(engine, make_request("b", first.prompt_token_ids + told + prompt_of(100, salt=2)))
    assert branches_of(runner) == [[160], wanted]
    check_empty(engine)


@pytest.mark.parametrize(("num_states", "wanted"), [(2, [[192]]), (3, [[192, 160]])])
def test_where_one_state_is_left_it_is_the_prompts_own_end(num_states: int, wanted: list[list[int]]) -> None:
    """So a budget for one conversation serves it as it would without a front."""
    engine, runner = make_engine(num_states=num_states)
    assert converse(engine, "a", 163, 1) == [0]
    assert branches_of(runner) == wanted
    check_empty(engine)


def test_one_that_is_preempted_begins_again_behind_a_state_that_was_left() -> None:
    engine, runner = make_engine(num_states=6, num_pages=24)
    answer(engine, [make_request(f"r{i}", prompt_of(100, salt=i), max_tokens=150) for i in range(2)])
    prompts = [prompt for plan in runner.plans for job in plan.new_jobs for prompt in job.prompts]
    assert len(prompts) > 2, "one was preempted"
    assert all(prompt.begin >= 96 for prompt in prompts[2:])
    check_empty(engine)


def test_a_turn_goes_on_from_host_memory_where_the_card_has_evicted_its_snapshot() -> None:
    """Two states on the card, twelve in host memory, and four conversations in turn."""
    engine, runner = make_engine(num_states=2, num_pages=300, num_host_states=12)
    histories = {name: prompt_of(100 + 16 * name, salt=name) for name in range(4)}
    for turn in range(3):
        for name, history in histories.items():
            said, cached = serve(engine, make_request(f"{name} {turn}", history, max_tokens=8))
            assert cached == (len(history) - 20 - 8 - 1) // PAGE * PAGE or not turn
            histories[name] = history + said + prompt_of(20, salt=9 + turn)
    assert runner.windows.num_moved_up == 8
    check_empty(engine)


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_snapshot_in_host_memory_of_another_text_is_seen(is_stale: bool) -> None:
    engine, runner = make_engine(num_states=2, num_host_states=8)
    serve(engine, make_request("a", prompt_of(113)))
    for salt in (3, 4):
        serve(engine, make_request(f"b{salt}", prompt_of(50, salt)))
    if is_stale:
        for state in runner.windows.places:
            if state:
                state[3] += 1
        with pytest.raises(AssertionError, match="a state is of another text"):
            serve(engine, make_request("c", prompt_of(120)))
    else:
        assert serve(engine, make_request("c", prompt_of(120)))[1] == 112


def test_one_that_is_preempted_finds_its_state_in_host_memory() -> None:
    engine, runner = make_engine(num_states=2, num_pages=200, num_host_states=8)
    requests = [make_request(f"r{i}", prompt_of(40 + 37 * i, salt=i), max_tokens=60) for i in range(4)]
    engine.submit(requests)
    deltas = preempt_every(engine, 3)
    for request in requests:
        check_output(request, deltas[request.request_id])
    assert engine.stats().recomputed_tokens == 0
    assert runner.windows.num_moved_up > 10
    check_empty(engine)


def test_what_costs_least_to_make_again_goes_first_and_what_is_not_used_goes_in_time() -> None:
    order: EvictionOrder[str] = EvictionOrder()
    for name, cost in (("long", 1000), ("short", 10), ("next", 20)):
        order.put(name, cost)
    assert order.pop() == "short"
    for number in range(200):
        order.put(f"{number}", 20)
    assert [order.pop() for _ in range(2)] == ["next", "0"]
    popped = []
    for number in range(200, 20_000):
        order.put(f"{number}", 20)
        popped.append(order.pop())
    assert "long" in popped


def preempt_every(engine: Engine, num_steps: int) -> dict[str, list[Delta]]:
    """Drain an engine, with a preemption every so many steps."""
    deltas: dict[str, list[Delta]] = {}
    for step in range(20_000):
        if not engine.has_work:
            return deltas
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
        running = engine.scheduler.roster.running
        if step % num_steps == num_steps - 1 and running:
            engine.scheduler.roster.preempt_last([running[step % len(running)]])
    raise AssertionError("still unfinished")


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("num_steps", [2, 3, 7])
def test_one_that_is_preempted_goes_on_with_its_own_state_and_computes_nothing_again(
    num_steps: int, is_pipelined: bool
) -> None:
    engine, runner = make_engine(num_states=8, num_pages=200, is_pipelined=is_pipelined)
    requests = [make_request(f"r{i}", prompt_of(5 + 37 * i, salt=i), max_tokens=90) for i in range(3)]
    engine.submit(requests)
    deltas = preempt_every(engine, num_steps)
    for request in requests:
        check_output(request, deltas[request.request_id])
    prompts = [prompt for plan in runner.plans for job in plan.new_jobs for prompt in job.prompts]
    resumed = [prompt for prompt in prompts if prompt.samples]
    assert len(resumed) > 12
    assert any(prompt.begin % PAGE for prompt in resumed)
    assert all(prompt.num_computed_tokens == 1 for prompt in resumed)
    assert engine.stats().recomputed_tokens == 0
    check_empty(engine)


def test_a_live_state_that_is_stale_is_seen() -> None:
    """Power: the state is changed while its sequence waits."""
    engine, runner = make_engine(num_states=4, is_pipelined=False)
    engine.submit([make_request("a", prompt_of(50), max_tokens=40)])
    for _ in range(6):
        engine.step()
    (running,) = engine.scheduler.roster.running
    engine.scheduler.roster.preempt_last([running])
    for state in runner.windows.states:
        if state:
            state[7] += 1
    with pytest.raises(AssertionError, match="a state is of another text"):
        drain(engine)


def test_one_whose_last_pages_were_taken_begins_again_behind_a_snapshot() -> None:
    engine, runner = make_engine(num_states=8, num_pages=24, is_pipelined=False)
    first, other = make_request("a", prompt_of(200), max_tokens=60), make_request("b", prompt_of(330, salt=5))
    engine.submit([first])
    told = [delta for _ in range(30) for delta in engine.step()]
    engine.scheduler.roster.preempt_last([*engine.scheduler.roster.running])
    engine.submit([structs.replace(other, priority=-1)])
    deltas = drain(engine)
    check_output(first, told + deltas["a"])
    check_output(other, deltas["b"])
    begun = [prompt for plan in runner.plans for job in plan.new_jobs for prompt in job.prompts]
    assert [prompt.num_prompt_tokens for prompt in begun] == [200, 330, 200]
    assert begun[2].begin % PAGE == 0
    check_empty(engine)


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_request_that_is_cancelled_leaves_no_live_state(is_preempted: bool) -> None:
    engine, _ = make_engine(num_states=4, is_pipelined=False)
    engine.submit([make_request("a", prompt_of(50), max_tokens=40)])
    for _ in range(6):
        engine.step()
    if is_preempted:
        engine.scheduler.roster.preempt_last([*engine.scheduler.roster.running])
    engine.cancel(["a"])
    windows = engine.scheduler.residence.windows
    assert windows.num_kept == 1, "what its prompt left"
    drain(engine)
    check_empty(engine)


def test_without_a_prefix_cache_nothing_is_left() -> None:
    engine, runner = make_engine(num_states=3, prefix_cache=False)
    for name in "ab":
        assert serve(engine, make_request(name, prompt_of(100), max_tokens=90))[1] == 0
    assert not any(prompt.branches for plan in runner.plans for job in plan.new_jobs for prompt in job.prompts)
    check_empty(engine)


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_state_of_another_text_is_seen(is_stale: bool) -> None:
    """Power of every test here: the runner compares the state that a prompt begins with."""
    engine, runner = make_engine(num_states=4)
    serve(engine, make_request("a", prompt_of(100)))
    if is_stale:
        for state in runner.windows.states:
            if state:
                state[3] += 1
        with pytest.raises(AssertionError, match="a state is of another text"):
            serve(engine, make_request("b", prompt_of(120)))
    else:
        assert serve(engine, make_request("b", prompt_of(120)))[1] == 96


@pytest.mark.parametrize("length", [96, 97, 98])
def test_a_prompt_that_nothing_is_drawn_from_leaves_no_state_behind_a_token_that_it_does_not_end_with(
    length: int,
) -> None:
    """One that is scored or embedded has taken in its last token, where another's last drawn one waits for a step."""
    engine, _ = make_engine(num_states=4)
    engine.submit([make_request("a", prompt_of(length), max_tokens=0, num_prompt_logprobs=0)])
    drain(engine)
    whole = prompt_of(length) + prompt_of(30, salt=3)
    assert serve(engine, make_request("b", whole))[1] == (length - 1) // PAGE * PAGE
    check_empty(engine)


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("num_steps", range(1, 18))
def test_a_draw_from_which_nothing_is_left_leaves_the_state_of_a_step_that_ran(
    num_steps: int, is_pipelined: bool
) -> None:
    engine, runner = make_engine(num_states=4, is_pipelined=is_pipelined)
    request = make_request("a", prompt_of(100), max_tokens=60)
    engine.submit([request])
    said: list[int] = []
    while len(said) < num_steps:
        said += [token for delta in engine.step() for token in delta.token_ids]
    runner.exhausted = set(range(8))
    said += [token for deltas in drain(engine).values() for delta in deltas for token in delta.token_ids]
    runner.exhausted = set()
    serve(engine, make_request("b", prompt_of(100) + said + prompt_of(30, salt=3)))
    check_empty(engine)


TURNS = st.lists(
    st.tuples(
        st.integers(0, 2),  # the conversation
        st.integers(1, 70),  # tokens of the message
        st.integers(1, 100),  # and of the answer
        st.integers(0, 3),  # turns that are taken back first
        st.booleans(),  # whether it comes beside the next one
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60)
@given(
    turns=TURNS,
    num_states=st.integers(1, 7),
    num_pages=st.integers(40, 90),
    is_pipelined=st.booleans(),
    num_steps=st.sampled_from([3, 11, 10**6]),
    num_host_states=st.integers(0, 6),
)
def test_any_turns_forks_and_evictions_give_the_text_of_a_cold_server(
    turns: list[tuple[int, int, int, int, bool]], num_states: int, num_pages: int, is_pipelined: bool, num_steps: int,
    num_host_states: int,
) -> None:  # fmt: skip
    """And with a request that is preempted every so many steps."""
    engine, _ = make_engine(
        num_states=num_states,
        num_pages=num_pages,
        max_running=4,
        snapshot_tokens=32,
        is_pipelined=is_pipelined,
        num_host_states=num_host_states,
    )
    histories: dict[int, list[list[int]]] = {}
    waiting: list[tuple[EngineRequest, int]] = []
    for number, (name, asked, answered, back, is_beside) in enumerate(turns):
        history = histories.setdefault(name, [])
        del history[max(0, len(history) - back) :]
        prompt = [*chain.from_iterable(history), *prompt_of(asked, salt=number % 5)]
        if len(prompt) + answered > num_pages * PAGE - PAGE:
            continue
        waiting.append((make_request(f"r{number}", prompt, max_tokens=answered), name))
        if is_beside:
            continue
        engine.submit([request for request, _ in waiting])
        deltas = preempt_every(engine, num_steps)
        for request, of in waiting:
            check_output(request, deltas[request.request_id])
            histories[of] = [request.prompt_token_ids, text(deltas[request.request_id])]
        waiting = []
    answer(engine, [request for request, _ in waiting])
    check_empty(engine)
