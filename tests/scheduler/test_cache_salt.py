"""Requests of different salts find nothing of each other, neither done nor under way."""

from msgspec.structs import replace

from scheduler.messages import Delta, EngineRequest
from tests.scheduler.engines import PAGE, check_output, drain, make_engine, make_request, prompt_of

PROMPT = prompt_of(10 * PAGE + 5)


def cached(deltas: list[Delta]) -> int:
    return deltas[0].num_cached_tokens


def salted(name: str, salt: str) -> EngineRequest:
    return replace(make_request(name, PROMPT), cache_salt=salt)


def test_a_prefix_is_found_by_requests_of_its_own_salt_alone() -> None:
    engine, _ = make_engine()
    for name, salt, expected in (
        ("a", "one", 0),
        ("b", "two", 0),
        ("c", "", 0),
        ("d", "one", 10 * PAGE),
        ("e", "two", 10 * PAGE),
        ("f", "", 10 * PAGE),
    ):
        request = salted(name, salt)
        engine.submit([request])
        deltas = drain(engine)[name]
        check_output(request, deltas)
        assert cached(deltas) == expected, name


def test_nobody_waits_for_a_prefix_that_another_salt_computes() -> None:
    engine, _ = make_engine(chunk_tokens=16)
    requests = [salted("a", "one"), salted("b", "two"), salted("c", "one")]
    engine.submit(requests)
    engine.step()
    stats = engine.stats()
    assert (stats.num_prefilling, stats.num_waiting) == (2, 1)
    found = drain(engine)
    assert [cached(found[request.request_id]) for request in requests] == [0, 0, 10 * PAGE]
