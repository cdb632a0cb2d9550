"""What is planned is what is allocated: an engine is handed its memory plan, and looks whether its device is there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from numba.core import event

import gpu.memory.plan
from cpu.part_attention import attend_rows
from gpu.memory.plan import MemoryPlan, PlanError
from gpu.profiles import ProfileError
from scheduler.engine import load_device
from scheduler.engine import load_engine as loading
from scheduler.engine.load_engine import load_engine
from server.deployment import Deployment
from server.planning.deployment_plan import resolve_plan
from tests.scheduler.test_aligned_prefill import make_profile
from transfer.machine import GpuProfile, load_machine

MACHINES = Path(__file__).parents[2] / "deploy" / "machines"
DEPLOYMENT = Deployment.model_validate({
    "model": {"random_weights": "tiny"},
    "gpu": {"dtype": "float32", "kv_cache_gib": 0.02, "graph_batch_sizes": [1]},
    "scheduler": {"max_running": 2, "max_context_tokens": 256},
})  # fmt: skip


def plan_on(machine: str) -> MemoryPlan:
    return resolve_plan(DEPLOYMENT, load_machine(MACHINES / f"{machine}.json")).memory


def test_an_engine_allocates_what_it_is_handed_and_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(plan_on("laptop"), num_pages=37, threads=1)

    def plan_again(*_: object, **__: object) -> None:
        raise AssertionError("it plans again")

    monkeypatch.setattr("scheduler.planning.engine_memory.plan_memory", plan_again)
    engine, ready = load_engine(DEPLOYMENT, plan, lambda *_: None)
    assert (ready.num_pages, engine.scheduler.pages.num_pages) == (37, 37)
    assert engine._runner.pool.key_pages[0].shape[0] == 37
    assert ready.max_context_tokens == plan.max_context_tokens == 256


def test_a_start_tells_of_each_stage_before_it_begins_and_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told last is what an operator reads while it takes its time."""
    tree = DEPLOYMENT.model_dump() | {
        "host": {"memory_limit_gib": 0.1, "threads": 1},
        "documents": {"folder": tmp_path, "memory_limit_gib": 0.1},
    }
    deployment = Deployment.model_validate(tree)
    plan = resolve_plan(deployment, load_machine(MACHINES / "laptop.json")).memory
    told: list[tuple[str, float]] = []
    for name, stage in (("load_tier", "host_attention"), ("open_library", "documents")):

        def make(
            *given: object,
            make: Callable[..., object] = getattr(load_device, name),
            stage: str = stage,
        ):
            assert told[-1] == (stage, 0.0)
            with event.trigger_event("numba:compile", {"dispatcher": attend_rows}):
                pass
            assert (told[-1] == (stage, 0.0)) == (stage == "documents"), "what attends is told of as it is compiled"
            return make(*given)

        monkeypatch.setattr(load_device, name, make)
    engine, _ = load_engine(deployment, plan, lambda stage, fraction: told.append((stage, fraction)))
    engine.shutdown()
    assert list(dict(told).items()) == [(stage, 1.0) for stage in ("host_attention", "documents", "weights", "kernels")]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, r"gpu\.device: asked cuda, machine '.*' has no usable NVIDIA GPU; use auto or cpu, or plan"),
        ({"compute_capability": (7, 5)}, r"gpu\.device: .* has compute capability 7\.5, wanted 8\.0; use device: cpu"),
        ({"memory_bytes": 2**33}, r"gpu\.memory_limit_gib: asked 22\.07 GiB, .* has 8\.00 GiB; lower it"),
    ],
)
def test_a_gpu_that_is_not_the_one_planned_for_is_refused_before_anything_is_loaded(
    found: dict[str, object] | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("loading began")

    card = load_machine(MACHINES / "rtx4090.json").gpu
    assert card is not None
    gpu_now: GpuProfile | None = None if found is None else card.model_copy(update=found)
    monkeypatch.setattr(loading, "probe_gpu", lambda: gpu_now)
    monkeypatch.setattr(load_device, "load_architecture", load)
    with pytest.raises(PlanError, match=words):
        load_engine(DEPLOYMENT, plan_on("rtx4090"), lambda *_: None)


def test_the_gpu_that_was_planned_for_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = load_machine(MACHINES / "rtx4090.json")
    gpu.memory.plan.require_device(plan_on("rtx4090"), machine.gpu, machine.name)
    gpu.memory.plan.require_device(plan_on("laptop"), None, "a machine without one")


def test_a_method_whose_blocks_are_longer_than_a_unit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = {"blocky": make_profile("blocky", 4096)}
    monkeypatch.setattr("scheduler.planning.engine_memory.resolve_profiles", lambda named, host: profiles)
    words = r"profiles\.blocky: units of 'prefill: blocky' end at multiples of 4096 tokens, and one has 2048 at most"
    with pytest.raises(ProfileError, match=words):
        plan_on("laptop")


def test_a_plan_says_how_many_tokens_a_step_has_room_to_draft() -> None:
    def notes(max_running: int, graphs: tuple[int, ...] = (1,), machine: str = "laptop") -> list[str]:
        tree = DEPLOYMENT.model_dump() | {
            "profiles": {"drafting": {"draft": {"most_tokens": 5}}},
            "scheduler": {"max_running": max_running, "max_context_tokens": 256},
        }
        tree["gpu"] |= {"graph_batch_sizes": graphs}
        plan = resolve_plan(Deployment.model_validate(tree), load_machine(MACHINES / f"{machine}.json")).memory
        return [note for note in plan.notes if note.startswith("drafts: ")]

    assert notes(6) == []
    (note,) = notes(2)
    assert note.endswith("scheduler.max_running, so it drafts up to 1 tokens and not 5; raise it to 6")
    assert notes(6, (1, 6), "rtx4090") == notes(6, (), "rtx4090") == []
    (note,) = notes(6, (1, 4), "rtx4090")
    assert note.endswith("the most of gpu.graph_batch_sizes, so it drafts up to 3 tokens and not 5; raise it to 6")
    (note,) = notes(6, (1,), "rtx4090")
    assert note.endswith("the most of gpu.graph_batch_sizes, so it has no drafts; raise it to 6")
