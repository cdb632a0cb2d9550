"""Experts in host memory are fetched or computed: by rates where nobody says, and never what cannot be had."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from gpu.memory.demand import PlanError
from gpu.memory.plan import MemoryPlan
from gpu.weights.expert_shares import ExpertShares
from scheduler.engine_config import EngineConfig
from scheduler.planning.engine_memory import find_expert_shares, plan_engine
from scheduler.planning.expert_choice import FURTHER_ROWS, HOP_MS, READ_SHARE, ExpertTimes
from server.deployment import Deployment
from server.planning.deployment_plan import find_architecture, resolve_plan
from transfer.expert_exchange import new_expert_slot
from transfer.machine import MachineProfile, load_machine

RTX = load_machine(Path(__file__).parents[2] / "deploy" / "machines" / "rtx4090.json")
CORES = {name: rate for name, rate in (RTX.rates or {}).items() if name.startswith("core_")}
SETTINGS: dict[str, Any] = {"device": "cuda", "memory_limit_gib": 23, "experts_gib": "auto", "kv_cache_gib": 2,
                            "graph_batch_sizes": [1, 2]}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def make(
    model: dict[str, Any] | None = None, rates: dict[str, float] | None = None, **gpu: Any
) -> tuple[Deployment, MachineProfile]:
    settings = {name: value for name, value in (SETTINGS | gpu).items() if value is not ...}
    deployment = Deployment.model_validate({
        "model": {"random_weights": "qwen3-30b-a3b"} | (model or {}), "gpu": settings,
        "scheduler": {"max_running": 2, "max_context_tokens": 4096},
    })  # fmt: skip
    return deployment, RTX.model_copy(update={"rates": {**(RTX.rates or {}), **(rates or {})}})


def plan(*arguments: Any, **settings: Any) -> MemoryPlan:
    deployment, machine = make(*arguments, **settings)
    return plan_engine(deployment, find_architecture(deployment.model)[0], machine)


def said(made: MemoryPlan) -> str:
    (note,) = [note for note in made.notes if note.startswith("experts in host memory")]
    return note


@pytest.mark.parametrize(
    ("rates", "computes"),
    [
        ({}, True),  # 60 GB/s of host memory beside 25 of link
        ({"host_stream_gb_s": 31.0}, True),
        ({"host_stream_gb_s": 25.0}, False),
        ({"host_to_device_gb_s": 50.0}, False),  # 85 % of 60 and 2.9 ms of hops
        ({"host_to_device_gb_s": 55.0, "host_stream_gb_s": 80.0}, True),
    ],
)
def test_auto_takes_what_is_faster_by_the_rates_and_says_what_both_would_take(
    rates: dict[str, float], computes: bool
) -> None:
    made, known = plan(rates=rates), {"host_to_device_gb_s": 25.0, "host_stream_gb_s": 60.0, **rates}
    assert made.computed_rows == (2 if computes else 0)
    deployment, _ = make()
    gb = find_expert_shares(find_architecture(deployment.model)[0], made).fetched_bytes(1) / 1e9
    fetch = 1e3 * gb / known["host_to_device_gb_s"]
    compute = 1e3 * gb / (READ_SHARE * known["host_stream_gb_s"]) + 48 * HOP_MS
    assert (compute < fetch) == computes
    assert f"{fetch:,.1f}" in said(made)
    assert f"{compute:,.1f}" in said(made)
    assert said(made).startswith(f"experts in host memory are {'computed by the CPU' if computes else 'fetched'}")


@pytest.mark.parametrize("weights", ["int4", "int8", "fp8"])
def test_experts_of_few_bits_cost_the_bytes_that_they_are_stored_in(weights: str) -> None:
    packed = {"model": {"weights": weights}, "experts_gib": 4}
    made, deployment = plan(**packed), make(**packed)[0]
    assert made.computed_rows
    shares = find_expert_shares(find_architecture(deployment.model)[0], made)
    numbers = 48 * 8 / 128 * shares.on_host * 3 * 2048 * 768
    a_number = {"int4": 67 / 128, "int8": 130 / 128, "fp8": 1 + 4 * (1 / 2048 * 2 + 1 / 768) / 3}[weights]
    assert shares.fetched_bytes(1) == pytest.approx(numbers * a_number, rel=1e-3)
    ms = 1e3 * numbers * a_number / (READ_SHARE * 60e9) + 48 * HOP_MS
    assert f"by rates {ms:,.1f} ms a token, fetched they would take {numbers * a_number / 25e6:,.1f} (" in said(made)
    assert shares.computed_numbers(1) == {weights: pytest.approx((numbers, numbers))}
    read, products = shares.computed_numbers(4)[weights]
    assert products == pytest.approx(4 * numbers)
    assert read == pytest.approx(numbers * 128 / 8 * (1 - (1 - 8 / 128) ** 4))


@pytest.mark.parametrize(("weights", "threads", "is_bound"), [
    ("int4", 8, True), ("int4", 16, False), ("int8", 4, True), ("int8", 8, False), (None, 4, False),
])  # fmt: skip
def test_few_cores_may_be_slower_at_few_bits_than_the_memory(weights: str | None, threads: int, is_bound: bool) -> None:
    """At 60 GB/s: what cores make of bytes counts, whatever the memory could give."""
    made = plan(model={"weights": weights}, experts_gib=4 if weights else 10, threads=threads, host_experts="compute")
    words = f"; its {threads} threads are slower than that at such numbers)"
    assert (words in said(made)) == is_bound
    if is_bound:
        assert weights is not None
        shares = find_expert_shares(find_architecture(make(model={"weights": weights})[0].model)[0], made)
        ((numbers, _),) = shares.computed_numbers(1).values()
        made_a_ms = CORES[f"core_{weights}_gflop_s"] / 2 * 1e6 * threads
        assert f"by rates {numbers / made_a_ms + 48 * HOP_MS:,.1f} ms" in said(made)


def test_of_few_bits_the_threads_own_rate_of_such_numbers_counts_where_it_was_measured() -> None:
    """Not of others, and not the stream's, which they do not reach."""
    few: dict[str, Any] = {"model": {"weights": "int4"}, "experts_gib": 4}
    slow = {"host_stream_gb_s": 200.0, "core_int4_gflop_s": 3.0}
    assert not plan(**few, rates=slow).computed_rows
    assert "its 16 threads are slower than that at such numbers)" in said(plan(**few, rates=slow))
    assert plan(**few, rates=slow | {"core_int4_gflop_s": 30.0}).computed_rows
    assert plan(**few, rates={"host_stream_gb_s": 200.0, "core_int8_gflop_s": 3.0}).computed_rows


def test_a_core_or_two_have_experts_fetched_that_memory_could_give() -> None:
    few = {"model": {"weights": "int4"}, "experts_gib": 4}
    assert not plan(**few, threads=1).computed_rows
    assert plan(**few, threads=8).computed_rows


def test_rows_that_take_the_same_experts_cost_arithmetic_and_no_bytes() -> None:
    deployment, _ = make(model={"random_weights": "mixtral-8x7b", "weights": "int4"})
    architecture = find_architecture(deployment.model)[0]
    times = ExpertTimes(ExpertShares(architecture, 2, 0), 25.0, 1e6, 8, CORES)
    read, products = times.shares.computed_numbers(32)["int4"]
    assert products > 7 * read  # 2 of 8 experts a row
    wanted = 2 * (read + (products - read) / FURTHER_ROWS) / CORES["core_int4_gflop_s"] / 8e6
    assert times.compute_ms(32) == pytest.approx(wanted + architecture.num_layers * HOP_MS)


MIXTRAL: dict[str, Any] = {
    "model": {"random_weights": "mixtral-8x7b", "weights": "int4"}, "experts_gib": 17, "threads": 8,
    "graph_batch_sizes": [1, 2, 4, 8, 12, 16, 24, 32, 48],
}  # fmt: skip
RUNNING_48 = {"scheduler": {"max_running": 48, "max_context_tokens": 1024}}


def test_rows_are_computed_up_to_where_the_link_is_faster() -> None:
    """Mixtral in int4, six of eight experts on the card, 8 threads, 60 and 25 GB/s: rows soon take all of two experts,
    which the link brings once, and of which cores compute one row's product after the other.
    """
    made, deployment = wide(RUNNING_48, **MIXTRAL), make(**MIXTRAL)[0]
    shares = find_expert_shares(find_architecture(deployment.model)[0], made)
    assert made.experts_on_card == 6
    times = ExpertTimes(shares, 25.0, 60.0, 8, CORES)
    found = {rows: (round(times.compute_ms(rows)), round(times.fetch_ms(rows))) for rows in (1, 12, 13, 16, 32)}
    assert found == {1: (37, 59), 12: (220, 229), 13: (231, 230), 16: (263, 234), 32: (425, 236)}
    assert (times.most_computed_rows(), made.computed_rows) == (12, 12)
    assert "computed by the CPU in decode steps of up to 12 rows: by rates 37.2 ms a token, fetched they" in said(made)
    assert "at 16 rows 262.6 and 233.7)" in said(made)


@pytest.mark.parametrize(("asked", "sizes", "rows"), [
    ("auto", [1, 8, 16], 8), ("auto", [16, 32], 0), ("auto", [1, 2, 4], 4), ("fetch", [1, 8, 16], 0),
    ("compute", [1, 8, 16, 32, 48], 32), ("compute", [1, 48], 1), (5, [1, 4, 8], 4), (0, [1, 8], 0), (32, [1, 48], 1),
])  # fmt: skip
def test_so_many_rows_are_computed_as_some_graph_has(asked: Any, sizes: list[int], rows: int) -> None:
    """Steps run in the graph of the next larger size; what is resolved resolves to itself, and slots are for others."""
    settings = MIXTRAL | {"graph_batch_sizes": sizes, "host_experts": asked}
    made = wide(RUNNING_48, **settings)
    assert made.computed_rows == rows
    assert bool(slots(made)) == (max(sizes) > rows)
    requests = [one.note for one in made.items if one.name == "host requests for experts"]
    assert requests == ([f"{rows} rows: pinned states and sums, products"] if rows else [])
    if (asked, rows) == ("auto", 0):
        assert said(made).endswith("steps of up to 12 rows have them computed, and gpu.graph_batch_sizes names none")
    deployment, machine = make(**settings)
    deployment = Deployment.model_validate(deployment.model_dump(exclude_unset=True) | RUNNING_48)
    once = resolve_plan(deployment, machine)
    again = resolve_plan(once.deployment, machine)
    assert again.deployment == once.deployment
    assert again.memory.computed_rows == rows
    assert not rows or again.memory.notes == once.memory.notes


def test_rows_that_no_graph_has_few_enough_of_are_refused_where_they_were_asked_for() -> None:
    with pytest.raises(PlanError, match=r"^gpu.host_experts: asked 5, but only captured steps of up to 5 rows have"):
        wide(RUNNING_48, **MIXTRAL | {"graph_batch_sizes": [8, 16], "host_experts": 5})
    for odd in (33, -1, True, "both"):
        with pytest.raises(ValidationError, match="wanted auto, fetch, compute, or the most rows of a step"):
            make(host_experts=odd)


def test_what_is_asked_for_is_done_whatever_the_rates_say() -> None:
    assert not plan(host_experts="fetch").computed_rows
    assert "are fetched: by rates 106" in said(plan(host_experts="fetch"))
    slow = {"host_stream_gb_s": 5.0}
    assert plan(rates=slow, host_experts="compute").computed_rows
    assert not plan(rates=slow).computed_rows


REASONS = {
    "gpu.check_coverage captures none": {"check_coverage": True},
}


@pytest.mark.parametrize("words", REASONS)
def test_what_the_cpu_has_no_code_for_is_fetched_and_refused_by_name_where_it_was_asked_for(words: str) -> None:
    made = plan(**REASONS[words])
    assert not made.computed_rows
    assert words in said(made)
    with pytest.raises(PlanError, match=f"^gpu.host_experts: asked compute, but .*{words}; use fetch, or auto$"):
        plan(**REASONS[words], host_experts="compute")


@pytest.mark.parametrize("asked", ["fetch", "compute"])
def test_a_model_all_of_which_lies_on_the_device_has_nothing_to_choose(asked: str) -> None:
    whole = {"model": {"weights": "int4"}, "experts_gib": ...}
    assert not [note for note in plan(**whole).notes if "experts in host memory" in note]
    with pytest.raises(PlanError, match=f"^gpu.host_experts: asked {asked}, no expert lies in host memory beside"):
        plan(**whole, host_experts=asked)


@pytest.mark.parametrize("asked", ["auto", "fetch", "compute"])
def test_a_resolved_deployment_names_the_way_and_resolves_to_itself(asked: str) -> None:
    deployment, machine = make(host_experts=asked)
    once = resolve_plan(deployment, machine)
    assert once.deployment.gpu.host_experts == ("fetch" if asked == "fetch" else "compute")
    again = resolve_plan(once.deployment, machine)
    assert again.deployment == once.deployment
    assert again.memory.computed_rows == once.memory.computed_rows
    assert said(again.memory) == said(once.memory)


def test_the_plan_is_what_the_engine_is_given() -> None:
    deployment, machine = make()
    assert isinstance(deployment, EngineConfig)
    assert resolve_plan(deployment, machine).memory.computed_rows


def test_steps_are_captured_for_no_more_rows_than_run() -> None:
    running = {"scheduler": {"max_running": 64, "max_context_tokens": 4096}}
    assert wide(running, graph_batch_sizes=[32, 64]).computed_rows == 32
    made = wide(running, graph_batch_sizes=[33, 64])
    assert not made.computed_rows
    assert "gpu.graph_batch_sizes names none" in said(made)
    with pytest.raises(PlanError, match=r"asked compute, but only captured steps .* names none; use fetch, or auto$"):
        wide(running, graph_batch_sizes=[33, 64], host_experts="compute")
    assert plan(graph_batch_sizes=[64]).computed_rows  # of 2


def test_rates_that_nobody_measured_are_said_to_be_assumed() -> None:
    assert "assumed" not in said(plan())
    deployment, machine = make()
    rates = {name: rate for name, rate in (machine.rates or {}).items() if name != "host_stream_gb_s"}
    architecture = find_architecture(deployment.model)[0]
    made = plan_engine(deployment, architecture, machine.model_copy(update={"rates": rates}))
    assert said(made).endswith("; the host's assumed, `tandem doctor --measure` measures)")
    made = plan_engine(deployment, architecture, machine.model_copy(update={"rates": None}))
    assert said(made).endswith("; the host's and the link's assumed, `tandem doctor --measure` measures)")
    rates = {name: rate for name, rate in (machine.rates or {}).items() if name != "core_int4_gflop_s"}
    deployment, machine = make(model={"weights": "int4"}, experts_gib=4, threads=4)
    architecture = find_architecture(deployment.model)[0]
    made = plan_engine(deployment, architecture, machine.model_copy(update={"rates": rates}))
    assert said(made).endswith(" at such numbers; the threads' assumed, `tandem doctor --measure` measures)")


def test_what_host_requests_for_experts_are_written_in_and_computed_in_is_planned() -> None:
    (item,) = [one for one in plan().items if one.name == "host requests for experts"]
    slot = new_expert_slot(2, 2048, 8, torch.device("cpu"))
    found = [getattr(slot, one.name) for one in fields(slot)]
    products = 2 * 8 * (768 + 2048 + 2048 // 2 + 2048 // 64 + 2048 // 16 + 32) * 4
    assert item.bytes == sum(one.nbytes for one in found if isinstance(one, torch.Tensor)) + products
    assert item.place == "host"
    running = {"scheduler": {"max_running": 64, "max_context_tokens": 4096}}
    items = wide(running, graph_batch_sizes=[1, 32]).items
    (wider,) = [one for one in items if one.name == "host requests for experts"]
    assert wider.bytes == 16 * item.bytes - 15 * slot.answered.nbytes  # of 32 rows
    assert not [one for one in plan(host_experts="fetch").items if one.name == "host requests for experts"]


def slots(made: MemoryPlan) -> int:
    return sum(one.bytes for one in made.items if one.name == "fetched experts")


def test_steps_whose_experts_are_computed_have_no_memory_to_fetch_them_to() -> None:
    """Of graphs beyond 32 rows, whose experts are fetched, there is some; what is spared is for more experts."""
    few, many = {"graph_batch_sizes": [1, 2]}, {"graph_batch_sizes": [1, 64]}
    assert slots(plan(**few, host_experts="fetch")) == 16 * 3 * 2048 * 768 * 2
    assert slots(plan(**few)) == slots(plan(**few, host_experts="compute")) == 0
    running = {"scheduler": {"max_running": 64, "max_context_tokens": 4096}}
    fetching, computing = (wide(running, host_experts=way, **many) for way in ("fetch", "compute"))
    assert slots(fetching) == slots(computing) > 0
    fetching, computing = (wide(running, host_experts=way, graph_batch_sizes=[1, 32]) for way in ("fetch", "compute"))
    assert slots(fetching) > slots(computing) == 0
    assert fetching.experts_on_card is not None
    assert computing.experts_on_card is not None
    assert computing.experts_on_card > fetching.experts_on_card


def wide(more: dict[str, Any], **gpu: Any) -> MemoryPlan:
    deployment, machine = make(**gpu)
    deployment = Deployment.model_validate(deployment.model_dump(exclude_unset=True) | more)
    return plan_engine(deployment, find_architecture(deployment.model)[0], machine)
