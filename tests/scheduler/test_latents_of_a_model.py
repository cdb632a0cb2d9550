"""A model of latents behind the engine: turns, forks, preemptions and drafts give the text of a cold server."""

from msgspec.structs import replace

from gpu.config import Composition, GpuConfig, ModelConfig
from gpu.model.architecture import load_architecture
from scheduler.engine.engine import Engine
from scheduler.engine.load_engine import load_engine
from scheduler.engine_config import EngineConfig, PrefillConfig, SchedulerConfig
from scheduler.planning.engine_memory import plan_engine
from tests.scheduler.test_states_of_a_model import FEW_TOKENS, ask, converse, draw, serve
from transfer.machine import probe_machine

FEW_PAGES_GIB = 0.0015  # 1,258 tokens, where the longest context has 1,024 and several run


def make_engine(
    prefix_cache: bool = True, pages_gib: float = 0.05, max_running: int = 4, drafts: bool = False,
    kv: str = "auto",
) -> Engine:  # fmt: skip
    model = ModelConfig(random_weights="tiny-glm4-moe-lite")
    profiles = {"quick": Composition.model_validate({"draft": "ngram"})} if drafts else {}
    config = EngineConfig(
        model=model, profiles=profiles,
        gpu=GpuConfig(device="cpu", dtype="float32", kv_cache_gib=pages_gib, threads=1, kv=kv),
        scheduler=SchedulerConfig(
            max_running=max_running, max_context_tokens=1024, prefix_cache=prefix_cache,
            default_profile="quick" if drafts else "exact",
            prefill=PrefillConfig(chunk_tokens=96, max_hidden_tokens=4096),
        ),
    )  # fmt: skip
    plan = plan_engine(config, load_architecture(model), probe_machine())
    return load_engine(config, plan, lambda stage, fraction: None)[0]


def test_turns_forks_and_few_pages_give_the_text_of_a_cold_server() -> None:
    cold = converse(make_engine(prefix_cache=False), answers=FEW_TOKENS)
    for engine in (make_engine(), make_engine(pages_gib=FEW_PAGES_GIB, max_running=3)):
        warm = converse(engine, answers=FEW_TOKENS)
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
    engine = make_engine(drafts=True, max_running=12)
    assert [told for told, _ in serve(engine, quick)] == alone
