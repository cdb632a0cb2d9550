"""A model over two devices, as processes with gloo: its texts are those of one device, and what is not served so is
refused by name.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu.config import Composition, DraftConfig, GpuConfig, ModelConfig
from gpu.memory.plan import PlanError
from gpu.methods.momo import Momo
from gpu.model.architecture import load_architecture, named_shape
from scheduler.engine.engine import Engine
from scheduler.engine.rank_processes import share_cores
from scheduler.engine_config import EngineConfig, SchedulerConfig
from scheduler.messages import ACCEPTED, Delta, EngineRequest
from scheduler.planning.devices import check_split
from scheduler.planning.engine_memory import plan_engine
from server.deployment import Deployment
from server.grammar.structured import schema_grammar
from server.planning.deployment_plan import resolve_plan
from server.planning.side_by_side import taken_bytes
from tests.gpu.reference_model import FOLDER
from tests.scheduler.drafting import take_all
from tests.scheduler.engines import drain
from tests.scheduler.real_model import ask_variously, check_preemption, check_told, load, shallow_config, small_host
from transfer.machine import load_machine, probe_machine

GRAMMAR = schema_grammar("schema", {"type": "object", "properties": {"the year of it": {"type": "integer"}},
                                    "required": ["the year of it"], "additionalProperties": False})  # fmt: skip
MACHINES = Path(__file__).parents[2] / "deploy" / "machines"
MOST = 40


def config_of(devices: int, **more: Any) -> EngineConfig:
    gpu = GpuConfig(
        device="cpu", dtype="float32", kv="float32", kv_cache_gib=0.05 / devices, threads=1, devices=devices
    )
    return EngineConfig(
        model=shallow_config(),
        gpu=gpu,
        host=small_host().model_copy(update={"memory_limit_gib": 0.2}),
        profiles={"drafting": Composition(draft=DraftConfig(least_match=2))},
        scheduler=SchedulerConfig(max_running=8, max_context_tokens=1200, prefix_cache=False),
        **more,
    )


def ask(number: int) -> EngineRequest:
    profiles = ("exact", "offloaded", "sampled", "drafting")
    return ask_variously(number, (60, 380, 400, 33), profiles, MOST, GRAMMAR if number % 4 == 1 else "",
                         frequency_penalty=(0.0, 0.4)[number % 2])  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Delta]]:
    """What one device says."""
    engine = load(config_of(1))
    engine.submit([ask(number) for number in range(8)])
    told = drain(engine)
    engine.shutdown()
    return told


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    before = os.sched_getaffinity(0)
    made = load(config_of(2))
    take_all(made)
    yield made
    processes = psutil.Process().children(recursive=True)
    made.shutdown()
    assert not [one for one in processes if one.is_running() and "rank_process" in " ".join(one.cmdline())]
    assert os.sched_getaffinity(0) == before


def test_texts_and_logprobs_are_those_of_one_device(engine: Engine, alone: dict[str, list[Delta]]) -> None:
    """Of prompts in pages and in host memory, with drafts, penalties and temperatures, and by a grammar."""
    engine.submit([ask(number) for number in range(8)])
    told = drain(engine)
    assert told.keys() == alone.keys()
    check_texts(told, alone)
    assert any(deltas[-1].figures.get(ACCEPTED) for deltas in told.values())


def check_texts(told: dict[str, list[Delta]], alone: dict[str, list[Delta]]) -> None:
    free = {name for name in told if int(name) % 4 != 1}
    check_told({name: told[name] for name in free}, {name: alone[name] for name in free}, ask)
    for name in told.keys() - free:
        ends = [[token for delta in one[name] for token in delta.token_ids] for one in (told, alone)]
        assert ends[0] == ends[1]


@pytest.mark.long
def test_one_that_is_preempted_goes_on_as_if_it_had_not(engine: Engine) -> None:
    check_preemption(engine, ask, lambda is_on: None)


def test_each_device_has_half_of_what_is_split_and_its_part_of_the_host() -> None:
    machine = probe_machine()
    plans = {}
    for devices in (1, 2):
        config = config_of(devices).model_copy(update={"host": None})
        config = config.model_copy(
            update={"gpu": config.gpu.model_copy(update={"threads": None, "kv_cache_gib": 0.05})}
        )
        plans[devices] = plan_engine(config, load_architecture(config.model), machine)
    whole, share = plans[1], plans[2]
    assert share.num_pages == pytest.approx(2 * whole.num_pages, abs=1), "a token takes half as many bytes there"
    assert share.threads == max(1, whole.threads // 2)
    assert share.limit_bytes["host"] <= machine.memory_bytes // 2
    assert [item.name for item in share.items if item.name == "gathered logits"]
    assert any(note.startswith("gpu.devices: 2: bytes, tokens and threads are of each device") for note in share.notes)


def test_a_resolved_plan_of_several_devices_resolves_to_itself() -> None:
    """Also of GPUs that a machine elsewhere has, with a profile chosen that several devices serve."""
    machine = load_machine(MACHINES / "a100-80g.json").model_copy(update={"num_gpus": 4})
    asked = {"model": {"random_weights": "llama-3.3-70b"}, "gpu": {"devices": 4}, "host": {}}
    plan = resolve_plan(Deployment.model_validate(asked), machine)
    again = resolve_plan(plan.deployment, machine)
    assert (again.deployment, again.memory) == (plan.deployment, plan.memory)
    assert plan.deployment.scheduler.default_profile == "exact"
    weights = next(item for item in plan.memory.items if item.name == "weights")
    assert 0.25 < weights.bytes / (2 * named_shape("llama-3.3-70b").num_weights) < 0.27
    assert "NCCL" in [item.name for item in plan.memory.items]
    assert taken_bytes(plan.memory, "host") == 4 * plan.memory.used_bytes("host")
    wanted = (
        "gpu.devices: asked 4, machine 'a100-80g' has 2 GPUs; lower it, or name a machine with more by --machine "
        "(its file says num_gpus)"
    )
    with pytest.raises(PlanError, match=rf"^{re.escape(wanted)}$"):
        resolve_plan(Deployment.model_validate(asked), machine.model_copy(update={"num_gpus": 2}))


def test_cores_are_shared_between_devices() -> None:
    assert share_cores(range(8), 2, lambda cpu: (0, cpu)) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert share_cores(range(8), 2, lambda cpu: None) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert share_cores([3], 2) == [(3,), (3,)]


def test_hyperthreads_of_a_core_are_of_one_rank() -> None:
    assert share_cores(range(8), 2, lambda cpu: (0, cpu % 4)) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert share_cores(range(8), 2, lambda cpu: (cpu % 2, cpu % 4 // 2)) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert share_cores(range(2), 2, lambda cpu: (0, 0)) == [(0,), (1,)], "there are too few"


def test_a_method_says_itself_that_several_devices_serve_it(monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"model": {"path": str(FOLDER)}, "gpu": {"devices": 2, "device": "cpu"}}
    config = EngineConfig.model_validate(base | {"profiles": {"p": {"prefill": "momo"}}})
    with pytest.raises(PlanError, match="take one of exact, offloaded, sampled, or use 1"):
        check_split(config)
    monkeypatch.setattr(Momo, "serves_split_devices", True)
    check_split(config)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"adapters": {"one": "/a"}}, "adapters have matrices that are not split; leave them out, or use 1"),
        ({"documents": {}}, "documents have keys and values of all heads in one file"),
        ({"disk": {}}, "disk has keys and values of all heads in one file"),
        ({"gpu": {"devices": 2, "device": "cpu", "experts_gib": 1.0}}, "gpu.experts_gib leaves experts in host memory"),
        ({"profiles": {"p": {"draft": {"profile": "indexed"}, "host": "offloaded"}}}, "profiles.p.draft is by"),
        ({"profiles": {"p": {"draft": "mtp"}}}, "profiles.p.draft is by 'mtp', which is not split; draft by `ngram`"),
        ({"profiles": {"p": {"draft": {"model": "/m"}}}}, "profiles.p.draft is by 'm', which is not split"),
        ({"profiles": {"p": {"host": "indexed"}}}, "profiles.p has 'indexed', which chooses by times or by all heads"),
        ({"profiles": {"p": {"host": {"method": "predicted", "weights": "/p"}}}}, "profiles.p has 'predicted'"),
        ({"profiles": {"p": {"prefill": "momo"}}}, "profiles.p has 'momo'"),
        ({"profiles": {"p": {"reuse": "mac"}}}, "profiles.p has 'mac'"),
        ({"model": {"path": "/there/one.gguf"}}, "one.gguf is a GGUF file, whose blocks cannot be read in part"),
        ({"gpu": {"devices": 5, "device": "cpu"}}, "has 8 heads, no multiple of it; use 1"),
    ],
)
def test_what_is_not_served_on_several_devices_is_refused_by_name(given: dict[str, Any], why: str) -> None:
    base = {"model": {"path": str(FOLDER)}, "gpu": {"devices": 2, "device": "cpu"}, "host": {}}
    config = EngineConfig.model_validate(base | given)
    with pytest.raises(PlanError) as refused:
        plan_engine(config, load_architecture(ModelConfig(path=FOLDER)), probe_machine())
    assert str(refused.value).startswith(f"gpu.devices: asked {config.gpu.devices}, and ")
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
