"""Less is earlier: in the queue, in prefill and when pages run out; but nobody is overtaken for ever."""

import itertools

from scheduler.engine.engine import Engine
from scheduler.messages import EngineRequest
from scheduler.sequences.sequence import MOST_OVERTAKEN
from tests.scheduler.engines import PAGE, check_output, drain, make_engine, make_request, prompt_of
from tests.scheduler.test_fairness import Clients, engine_of

_NUMBERS = itertools.count()


def asking(name: str, priority: int, tokens: int = 30, max_tokens: int = 3) -> EngineRequest:
    prompt = prompt_of(tokens, salt=next(_NUMBERS))
    plain = make_request(name, prompt, max_tokens=max_tokens)
    return EngineRequest(**{field: getattr(plain, field) for field in plain.__struct_fields__} | {"priority": priority})


def order_of(engine: Engine, requests: list[EngineRequest]) -> list[str]:
    """In which they end, where one runs at a time."""
    engine.submit(requests)
    ended = []
    while engine.has_work:
        ended += [delta.request_id for delta in engine.step() if delta.finish_reason]
    return ended


def test_who_waits_goes_by_priority_and_then_by_arrival() -> None:
    engine, _ = make_engine(max_running=1)
    named = [("a", 0), ("b", 5), ("c", -3), ("d", 0), ("e", 5), ("f", -3)]
    assert order_of(engine, [asking(name, priority) for name, priority in named]) == ["c", "f", "a", "d", "b", "e"]


def test_a_request_is_overtaken_a_bounded_number_of_times() -> None:
    engine, _ = make_engine(max_running=1, max_queue=1000)
    engine.submit([asking("last", 9)])
    engine.submit([asking("other", 8)])
    ended = order_of(engine, [asking(f"early{i}", 0) for i in range(2 * MOST_OVERTAKEN)])
    assert ended.index("last") == MOST_OVERTAKEN, "by `other`, and by all but one of as many early ones"
    assert ended.index("other") == MOST_OVERTAKEN - 1


def test_the_prefill_of_less_priority_goes_on_first_however_long_and_the_oldest_keeps_its_share() -> None:
    engine, _ = engine_of(0.0, max_running=12, max_jobs=12)
    engine.submit([asking("short", 0, tokens=1000, max_tokens=1)])
    engine.step()
    engine.submit([asking("long", -1, tokens=4000, max_tokens=1)])
    ended = [name for name in drain(engine) if name in ("short", "long")]
    assert ended == ["long", "short"]

    engine, _ = engine_of(1 / 3, max_running=12, max_jobs=12)
    clients = Clients(engine, 4, num_tokens=200, max_tokens=1)
    engine.submit([asking("patient", 7, tokens=2000, max_tokens=1)])
    assert any("patient" in clients.step() for _ in range(3000))


def test_who_asks_for_less_is_preempted_when_pages_run_out_and_loses_no_token() -> None:
    """The first one came first, so that without priorities the second one would be preempted."""
    for priorities, victim in (((0, 0), "second"), ((1, 0), "first")):
        engine, _ = make_engine(num_pages=2 * (60 // PAGE) + 1, prefix_cache=False)
        requests = [
            asking(name, priority, tokens=PAGE, max_tokens=50)
            for name, priority in zip(("first", "second"), priorities, strict=True)
        ]
        ended = []
        preempted: set[str] = set()
        for request in requests:
            engine.submit([request])
        deltas: dict[str, list] = {request.request_id: [] for request in requests}
        while engine.has_work:
            before = engine.scheduler.roster.num_preemptions
            for delta in engine.step():
                deltas[delta.request_id].append(delta)
                ended += [delta.request_id] if delta.finish_reason else []
            if engine.scheduler.roster.num_preemptions > before:
                preempted |= {sequence.request_id for sequence in engine.scheduler._admission.waiting}
        assert preempted == {victim}
        for request in requests:
            check_output(request, deltas[request.request_id])
