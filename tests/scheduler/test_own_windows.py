"""What a context keeps on the device is its own profile's matter: another that needs more changes nothing for it."""

from pathlib import Path

import pytest

from scheduler.engine.engine import Engine
from scheduler.planning.engine_memory import find_host_demand, find_tier_shape
from scheduler.sequences.capacity import plan_capacity
from scheduler.steps.scheduler import Scheduler
from server.deployment import Deployment
from server.planning.deployment_plan import resolve_plan
from server.planning.resolved_plan import ResolvedPlan
from tests.scheduler.engines import check_output, drain, make_request, prompt_of
from tests.scheduler.page_runner import PageRunner
from transfer.machine import load_machine

LAPTOP = Path(__file__).parents[2] / "deploy" / "machines" / "laptop.json"
MAC = {"mine": {"reuse": "mac", "host": "offloaded"}}
WINDOW, OWN_WINDOW = 64, 1280  # of the `host` section, and of mac: capacity and band


def plan_of(profiles: dict[str, object], residency: str = "fixed") -> ResolvedPlan:
    tree = {
        "model": {"random_weights": "tiny"},
        "host": {"memory_limit_gib": 0.25, "resident_tokens": 256, "residency": residency, "threads": 1},
        "profiles": profiles,
        "scheduler": {"max_running": 2, "max_context_tokens": 8192},
    }
    return resolve_plan(Deployment.model_validate(tree), load_machine(LAPTOP))


def engine_of(profiles: dict[str, object], residency: str) -> tuple[Engine, PageRunner]:
    plan = plan_of(profiles, residency)
    capacity = plan_capacity(plan.memory, find_tier_shape(plan.deployment, plan.architecture, plan.memory))
    scheduler = Scheduler(plan.deployment.scheduler, plan.architecture, capacity, b"model", plan.profiles)
    runner = PageRunner(plan.architecture.num_layers, capacity.page_tokens, layout=capacity.host.layout)
    return Engine(scheduler, runner, None, True), runner


def serve(engine: Engine, name: str, prompt: list[int], profile: str) -> int:
    """Where the prompt begins; its answer is right."""
    request = make_request(name, prompt, max_tokens=3, profile=profile)
    engine.submit([request])
    deltas = drain(engine)[name]
    check_output(request, deltas)
    return deltas[0].num_cached_tokens


@pytest.mark.parametrize("residency", ["fixed", "adaptive"])
@pytest.mark.parametrize("num_tokens", [1000, 5888])
def test_a_repeat_reuses_as_much_as_where_no_profile_keeps_more(num_tokens: int, residency: str) -> None:
    """The first length is offloaded under the plain profiles alone: mac's contexts of 1,424 tokens stay."""
    reused = []
    for profiles in ({}, MAC):
        engine, _ = engine_of(profiles, residency)
        reused.append(
            {
                profile: [serve(engine, f"{profile}{turn}", prompt_of(num_tokens), profile) for turn in range(3)]
                for profile in ("offloaded", "sampled", "exact")
            }
        )
    assert reused[0] == reused[1]
    assert reused[0]["sampled"] == [0, *[(num_tokens - WINDOW) // 16 * 16] * 2]


@pytest.mark.parametrize("residency", ["fixed", "adaptive"])
def test_a_profile_that_needs_more_keeps_it_and_its_repeats_answer_right(residency: str) -> None:
    engine, runner = engine_of(MAC, residency)
    prompt = prompt_of(5888)
    others = serve(engine, "other", prompt, "offloaded")
    begins = [serve(engine, f"mine{turn}", prompt, "mine") for turn in range(3)]
    assert (others, begins) == (0, [0, *[(5888 - OWN_WINDOW) // 16 * 16] * 2])
    assert serve(engine, "again", prompt, "offloaded") == 5888 - WINDOW
    hosts = [prompt.host for plan in runner.plans for job in plan.new_jobs for prompt in job.prompts]
    assert [5888 - host.end for host in hosts] == [WINDOW, *[OWN_WINDOW] * 3, WINDOW]


def test_the_longest_request_of_each_profile_fits_and_what_is_offloaded_of_it_is_planned_for() -> None:
    """A shorter window sends more down: the plan counts that one's bytes."""
    without, beside = plan_of({}), plan_of(MAC)
    demands = [find_host_demand(plan.deployment, plan.architecture, plan.memory) for plan in (without, beside)]
    assert demands[0].offloaded_tokens(8192) == demands[1].offloaded_tokens(8192) == 8192 - 16 - WINDOW
    assert demands[1].running_tokens(8192) - demands[0].running_tokens(8192) == OWN_WINDOW - WINDOW
    capacity = plan_capacity(beside.memory, demands[1].tier_shape)
    assert {capacity.longest_tokens(profile) for profile in beside.profiles.values()} == {8192}
    assert beside.deployment.host == without.deployment.host, "no key of another profile is another one"
    for name in ("offloaded", "sampled"):
        assert beside.profiles[name].kv_key == without.profiles[name].kv_key
