"""A model of latents behind the engine: turns, forks, preemptions and drafts give the text of a cold server."""

from typing import Any

from msgspec.structs import replace

from gpu.config import Composition
from scheduler.engine.engine import Engine
from tests.scheduler.real_model import load_small
from tests.scheduler.test_states_of_a_model import FEW_TOKENS, ask, converse, draw, serve

FEW_PAGES_GIB = 0.0015  # 1,258 tokens, where the longest context has 1,024 and several run


def make_engine(pages_gib: float = 0.05, kv: str = "auto", **more: Any) -> Engine:
    return load_small("tiny-glm4-moe-lite", {"kv_cache_gib": pages_gib, "kv": kv}, **more)


def test_turns_forks_and_few_pages_give_the_text_of_a_cold_server() -> None:
    cold = converse(make_engine(prefix_cache=False), answers=FEW_TOKENS)
    warm = converse(make_engine(pages_gib=FEW_PAGES_GIB, max_running=3), answers=FEW_TOKENS)
    assert warm[0] == cold[0]
    assert sum(warm[1]) > 0 == sum(cold[1])


def test_many_at_once_are_each_served_as_alone() -> None:
    requests = [ask(f"r{number}", draw(20 + 97 * number, number), 60) for number in range(6)]
    cold = make_engine(prefix_cache=False, max_running=1)
    alone = [serve(cold, [request])[0][0] for request in requests]
    for pages_gib in (0.05, FEW_PAGES_GIB):
        assert [told for told, _ in serve(make_engine(pages_gib=pages_gib), requests)] == alone


def test_rows_in_codes_are_cached_shared_and_preempted_as_others() -> None:
    """Prefill reads rows as they are stored, so a prefix that is found gives the text of one that is computed."""
    cold = converse(make_engine(prefix_cache=False, kv="int8"), answers=FEW_TOKENS)
    warm = converse(make_engine(pages_gib=FEW_PAGES_GIB / 2, max_running=3, kv="int8"), answers=FEW_TOKENS)
    assert warm[0] == cold[0]
    assert sum(warm[1]) > 0 == sum(cold[1])


def test_drafts_are_verified_in_rows_of_one_step() -> None:
    requests = [ask(f"r{number}", draw(12, number) * 5, 60) for number in range(3)]
    cold = make_engine(prefix_cache=False, max_running=1)
    alone = [serve(cold, [request])[0][0] for request in requests]
    quick = [replace(request, attention_profile="quick") for request in requests]
    engine = make_engine(profiles={"quick": Composition.model_validate({"draft": "ngram"})}, max_running=12)
    assert [told for told, _ in serve(engine, quick)] == alone
