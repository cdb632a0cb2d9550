"""Experts on the card and in host memory: bytes as they are allocated, budgets, and what cannot be had in one line."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from gpu.config import GpuConfig
from gpu.memory.plan import MemoryPlan, MemoryRequest, PlanError, PlannedSizes, plan_memory
from gpu.methods.kept import keep_as_set
from gpu.model.architecture import named_shape
from gpu.model.matrix_formats import OF_EXPERTS, rounded, weight_bytes
from gpu.model.spec import Architecture
from gpu.weights.expert_shares import KV_SHARE, PINNED_SHARE, STAGED_STACKS, ExpertShares
from gpu.weights.host_experts import ALIGN_BYTES, HostExperts, tensors_of
from gpu.weights.weight_allocation import allocate_weights
from transfer.host_config import HostConfig
from transfer.machine import GIB, MachineProfile, load_machine

RTX = load_machine(Path(__file__).parents[2] / "deploy" / "machines" / "rtx4090.json")
LAPTOP = load_machine(Path(__file__).parents[2] / "deploy" / "machines" / "laptop.json")
BIG = named_shape("qwen3-30b-a3b")
TINY = named_shape("tiny-qwen3-moe")
EXPERT_BYTES = 3 * 2048 * 768 * 2  # of the big one


def make_plan(
    shape: Architecture = BIG, machine: MachineProfile = RTX, context: int | None = None, max_running: int = 4,
    host: HostConfig | None = None, **gpu,
) -> MemoryPlan:  # fmt: skip
    config = GpuConfig(**{"memory_limit_gib": 23, "graph_batch_sizes": (1, 2, 4), **gpu})
    return plan_memory(
        MemoryRequest(
            shape,
            config,
            host=host,
            kept=None if host is None else keep_as_set(host, shape),
            states=(),
            sizes=PlannedSizes(max_running, 2048, context, None),
            machine=machine,
        )
    )


def item(plan: MemoryPlan, name: str, place: str = "gpu") -> int:
    return sum(one.bytes for one in plan.items if (one.name, one.place) == (name, place))


@pytest.mark.parametrize("weights", [None, "int4", "int8", "fp8"])
@pytest.mark.parametrize("on_card", [0, 1, 5, 16, 99])
def test_planned_bytes_are_those_of_the_tensors(weights: str | None, on_card: int) -> None:
    shape = rounded(TINY, weights, "weights")
    shares = ExpertShares(shape, 2, on_card)
    held = allocate_weights(shape, torch.bfloat16, torch.device("meta"), torch.bfloat16, on_card)
    hosts = [layer.experts.host for layer in held.layers if layer.experts is not None]
    there = [one for one in hosts if one is not None]
    assert bool(there) == (on_card < 16)
    assert shares.host_bytes == sum(_nbytes(one) for one in there)
    stacks = [layer.stacks(name)[0] for layer in held.layers if layer.experts for name in OF_EXPERTS]
    assert shares.card_bytes == sum(tensor.nbytes for stack in stacks for tensor in tensors_of(stack))
    assert shares.on_host == max((one.count for one in there), default=0)
    for one in there[:1]:
        slack = ALIGN_BYTES * len([*tensors_of(one.gate_up), *tensors_of(one.down)])
        assert 0 <= STAGED_STACKS * one.num_bytes(one.count) - shares.staged_bytes < STAGED_STACKS * slack
        for tokens in (1, 2, 64):
            slots = min(one.count, tokens * 4)
            assert 0 <= one.num_bytes(slots) - shares.slot_bytes(tokens) < slack


def _nbytes(one: HostExperts) -> int:
    return sum(tensor.nbytes for matrix in (one.gate_up, one.down) for tensor in tensors_of(matrix))


def test_a_step_fetches_what_a_pencil_says() -> None:
    shares = ExpertShares(BIG, 2, 40)
    assert shares.host_bytes == 48 * 88 * EXPERT_BYTES
    assert shares.fetched_bytes(1) == pytest.approx(48 * 8 * 88 / 128 * EXPERT_BYTES)
    assert shares.fetched_bytes(2) == pytest.approx(48 * (8 + 8 * 120 / 128) * 88 / 128 * EXPERT_BYTES)
    assert shares.fetched_bytes(10_000) == pytest.approx(shares.host_bytes)
    assert ExpertShares(BIG, 2, 128).fetched_bytes(4) == 0


@pytest.mark.parametrize("gib", [5.0, 48 * 17 * EXPERT_BYTES / GIB, 48 * 17 * EXPERT_BYTES / GIB - 1e-6, 12.9])
@pytest.mark.parametrize("context", [None, 32_768])
def test_as_many_experts_are_on_the_card_as_were_asked_for(gib: float, context: int | None) -> None:
    plan = make_plan(experts_gib=gib, context=context)
    count = plan.experts_on_card
    assert count is not None
    assert count * 48 * EXPERT_BYTES <= gib * GIB < (count + 1) * 48 * EXPERT_BYTES
    all_of = weight_bytes(BIG, 2, is_packed=True)
    assert item(plan, "weights") + item(plan, "experts", "host") == all_of
    assert plan.used_bytes("gpu") <= 23 * GIB


def held_with(gib: float, context: int | None, asked: dict) -> int:
    """Pages; 0: it is refused."""
    with contextlib.suppress(PlanError):
        return make_plan(experts_gib=gib, context=context, **asked).num_pages
    return 0


@pytest.mark.parametrize(
    ("asked", "context"), [({}, None), ({}, 40_960), ({"kv_cache_gib": 2.0}, None), ({"kv_cache_gib": 5.0}, 16_384)]
)
def test_auto_leaves_contexts_what_they_want_and_not_an_expert_more(asked: dict, context: int | None) -> None:
    plan = make_plan(experts_gib="auto", context=context, **asked)
    assert plan.experts_on_card is not None
    assert plan.num_pages * plan.page_tokens >= (context or 2048)
    one_more = (plan.experts_on_card + 1.5) * 48 * EXPERT_BYTES / GIB
    if asked:
        assert plan.kv_bytes == pytest.approx(asked["kv_cache_gib"] * GIB, rel=0.001)
        assert plan.num_pages > held_with(one_more, context, asked)
    else:
        beside = ("KV pages", "gathered KV", "hidden states", "positions")
        fetching = ("weights", "staged experts", "fetched experts")
        bare = sum(item(plan, name) for name in beside + fetching) - (
            weight_bytes(BIG, 2, True) - 48 * 128 * EXPERT_BYTES
        )
        more = make_plan(experts_gib=one_more, context=context)
        assert sum(item(plan, name) for name in beside) >= KV_SHARE * bare * 0.999
        assert sum(item(more, name) for name in beside) < KV_SHARE * bare * 1.001


@pytest.mark.parametrize(
    ("name", "limit", "states_gib"),
    [
        *(("nemotron-3-nano-30b-a3b", *case) for case in ((8, 1.0), (12, 0.5), (14, None))),
        *(("qwen3.5-35b-a3b", *case) for case in ((8, None), (12, 1.0), (14, 0.5))),
    ],
)
def test_auto_leaves_room_for_the_states_that_there_are_and_not_for_one(
    name: str, limit: int, states_gib: float | None
) -> None:
    shape = rounded(named_shape(name), "int4", "weights")
    asked = {"memory_limit_gib": limit, "kv": "int8", "states_gib": states_gib, "context": 65_536}
    plan = make_plan(shape, experts_gib="auto", **asked)
    assert plan.experts_on_card is not None
    assert plan.num_pages * plan.page_tokens >= 65_536
    assert plan.used_bytes("gpu") <= limit * GIB
    assert 0 < plan.experts_on_card < shape.layers[1].experts.num_experts


def test_where_all_fit_none_go_to_host_memory() -> None:
    shape = rounded(BIG, "int4", "weights")
    for asked in ("auto", 14.5, None):
        plan = make_plan(shape, experts_gib=asked)
        assert not item(plan, "experts", "host")
        assert not item(plan, "staged experts")
        assert plan.experts_on_card == (None if asked is None else 128)


def test_experts_and_contexts_share_host_memory() -> None:
    machine = RTX.model_copy(update={"memory_bytes": 128 * GIB})
    plan = make_plan(machine=machine, host=HostConfig(), context=40_960, experts_gib="auto")
    alone = make_plan(machine=machine, context=40_960, experts_gib="auto")
    assert plan.experts_on_card is not None
    assert alone.experts_on_card is not None
    assert plan.used_bytes("host") <= PINNED_SHARE * machine.memory_bytes, "contexts that nobody counted leave the rest"
    assert item(plan, "fetched experts") == 2 * item(alone, "fetched experts"), "steps that ask have slots of their own"
    few = make_plan(machine=machine, host=HostConfig(), context=40_960, experts_gib="auto", graph_batch_sizes=(1,))
    assert item(few, "fetched experts") == (2 * 8 + 32) * EXPERT_BYTES, "and those that have no graph have more"
    with pytest.raises(PlanError, match=r"^host.memory_limit_gib: asked 90.00 GiB, .* left; lower it"):
        make_plan(machine=machine, host=HostConfig(memory_limit_gib=90), experts_gib="auto")


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_cpu_has_all_experts_in_host_memory_and_says_so(dtype: str) -> None:
    with pytest.raises(PlanError, match=r"^gpu.experts_gib: asked auto, the CPU is the device and has all experts in"):
        make_plan(TINY, LAPTOP, experts_gib="auto", memory_limit_gib=2, dtype=dtype)
    assert make_plan(TINY, LAPTOP, memory_limit_gib=2, dtype=dtype).experts_on_card is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": named_shape("llama-3.1-8b"), "experts_gib": 2.0}, "asked 2.0, llama-3.1-8b has no experts; leave"),
        ({"experts_gib": 1.0}, "0.84 GiB of experts would lie on the card, the other 53.16 GiB in pinned host memory, "
         "where there is room for 49.70 GiB of 64.00 GiB; raise it, or use fewer bits"),
        ({"machine": RTX.model_copy(update={"memory_bytes": 32 * GIB}), "experts_gib": "auto"},
         "room for 24.10 GiB of"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_one_line(changes: dict, message: str) -> None:
    with pytest.raises(PlanError, match=f"^gpu.experts_gib: .*{message}") as error:
        make_plan(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "the weights take 56.87 GiB, the limit is 23.00 GiB; .* set gpu.experts_gib: auto"),
        ({"experts_gib": 25.0}, "the limit is 23.00 GiB; .* lower gpu.experts_gib"),
        ({"experts_gib": 19.8}, "weights and workspaces take .* raise it, or lower .*, or gpu.experts_gib"),
    ],
)
def test_a_model_that_does_not_fit_is_told_of_the_budget(asked: dict, message: str) -> None:
    with pytest.raises(PlanError, match=f"^gpu.memory_limit_gib: .*{message}"):
        make_plan(**asked)


def test_what_may_be_pinned_leaves_the_system_its_own() -> None:
    shares = ExpertShares(BIG, 2, 0)
    enough = int((shares.host_bytes + 1.5 * GIB) / PINNED_SHARE) + 16
    make_plan(machine=RTX.model_copy(update={"memory_bytes": enough}), experts_gib=0)
    with pytest.raises(PlanError, match="pinned host memory"):
        make_plan(machine=RTX.model_copy(update={"memory_bytes": enough - GIB // 64}), experts_gib=0)


@pytest.mark.parametrize("given_value", [-1, "some", "4", True, [4]])
def test_a_budget_that_is_none_is_refused(given_value: object) -> None:
    with pytest.raises(ValidationError, match="wanted GiB, 0 or more, or auto") as error:
        GpuConfig.model_validate({"experts_gib": given_value})
    assert error.value.error_count() == 1
    assert [GpuConfig(experts_gib=one).experts_gib for one in (0, 2.5, "auto", None)] == [0, 2.5, "auto", None]


def test_layers_without_experts_take_no_part() -> None:
    shape = replace(BIG, layer_pattern=(BIG.layer_pattern[0], named_shape("qwen3-8b").layer_pattern[0]))
    assert ExpertShares(shape, 2, 100).host_bytes == 24 * 28 * EXPERT_BYTES
