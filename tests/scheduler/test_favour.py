"""What `scheduler.favour` stands for, and what larger units of prefill may cost."""

from pathlib import Path
from typing import Any

import pytest

from gpu.config import GpuConfig
from gpu.model.named_shapes import named_shape
from scheduler.engine.load_engine import describe_steps
from scheduler.engine_config import EngineConfig, PrefillConfig, SchedulerConfig
from scheduler.planning.engine_memory import plan_engine
from transfer.machine import MachineProfile, load_machine

MACHINES = Path(__file__).resolve().parents[2] / "deploy" / "machines"


def read_machine(name: str) -> MachineProfile:
    return load_machine(MACHINES / f"{name}.json")


def plan_chunks(machine: str, shape: str = "llama-3.1-8b", gpu: dict[str, Any] | None = None, **scheduler: Any) -> int:
    """Return the tokens of a prefill unit that the plan chooses."""
    tree = {"model": {"random_weights": shape}, "gpu": gpu or {}, "scheduler": scheduler}
    config = EngineConfig.model_validate(tree)
    return plan_engine(config, named_shape(shape), read_machine(machine)).chunk_tokens


def test_throughput_stands_for_a_long_gap_and_a_large_share_and_others_for_the_plain_defaults() -> None:
    plain, fast = SchedulerConfig(), SchedulerConfig.model_validate({"favour": "throughput"})
    assert (plain.token_gap_target_ms, plain.prefill.share) == (100, None)
    assert (fast.token_gap_target_ms, fast.prefill.share) == (4000, 0.95)
    latency = SchedulerConfig.model_validate({"favour": "latency"})
    assert latency.model_dump(exclude={"favour"}) == plain.model_dump(exclude={"favour"})


def test_auto_gives_prefill_what_the_target_leaves_where_many_prompts_wait() -> None:
    auto, latency = SchedulerConfig(), SchedulerConfig(favour="latency")
    assert [auto.prefill_share(prompts, 9.0, 32) for prompts in (7, 8)] == [0.8, 1.0]
    assert [auto.prefill_share(prompts, None, 1) for prompts in (3, 4)] == [0.8, 1.0]
    assert latency.prefill_share(64, 9.0, 1) == 0.8
    assert SchedulerConfig(prefill=PrefillConfig(share=0.8)).prefill_share(64, 9.0, 1) == 0.8


def test_auto_gives_a_prompt_that_takes_no_longer_than_the_target_all_that_this_leaves() -> None:
    auto, latency = (SchedulerConfig(favour=favour, token_gap_target_ms=50) for favour in ("auto", "latency"))
    assert [auto.prefill_share(1, seconds, 32) for seconds in (0.049, 0.051, None)] == [1.0, 0.8, 0.8]
    assert latency.prefill_share(1, 0.01, 32) == 0.8
    assert SchedulerConfig(prefill=PrefillConfig(share=0.8)).prefill_share(1, 0.01, 32) == 0.8


@pytest.mark.parametrize("prefill", [{"share": 0.5}, PrefillConfig(share=0.5)], ids=["mapping", "model"])
def test_what_is_set_by_itself_wins(prefill: Any) -> None:
    given = {"favour": "throughput", "token_gap_target_ms": 50, "prefill": prefill}
    config = SchedulerConfig.model_validate(given)
    assert (config.token_gap_target_ms, config.prefill.share) == (50, 0.5)
    again = SchedulerConfig.model_validate_json(config.model_dump_json())
    assert again == config
    unset = SchedulerConfig(favour="throughput", prefill=PrefillConfig(max_jobs=2))
    assert (unset.prefill.share, unset.prefill.max_jobs) == (0.95, 2)


def test_units_are_large_where_memory_is_plenty_and_small_for_latency_on_request_and_on_the_cpu() -> None:
    assert plan_chunks("a100-80g") == 16_384
    assert plan_chunks("a100-80g", favour="throughput") == 16_384
    assert plan_chunks("a100-80g", favour="latency") == 2048
    assert plan_chunks("a100-80g", prefill={"chunk_tokens": 1024}) == 1024
    assert plan_chunks("laptop", "tiny", gpu={"device": "cpu", "kv_cache_gib": 0.5}) == 2048


def test_larger_units_cost_no_context_and_next_to_no_pages() -> None:
    small = {"memory_limit_gib": 20, "kv": "int8"}
    tree = {"model": {"random_weights": "llama-3.1-8b"}, "gpu": small, "scheduler": {"favour": "latency"}}
    shape, machine = named_shape("llama-3.1-8b"), read_machine("a100-80g")
    latency = plan_engine(EngineConfig.model_validate(tree), shape, machine)
    auto = plan_engine(EngineConfig.model_validate(tree | {"scheduler": {}}), shape, machine)
    large = plan_engine(
        EngineConfig.model_validate(tree | {"scheduler": {"prefill": {"chunk_tokens": 8192}}}), shape, machine
    )
    assert auto.chunk_tokens < large.chunk_tokens == 8192
    assert auto.max_context_tokens == latency.max_context_tokens
    assert auto.num_pages >= 0.97 * latency.num_pages > large.num_pages


def test_a_mixture_of_experts_gives_more_pages_for_larger_units() -> None:
    """Of a dense model's pages, 92 % would be too few for units of 8,192 tokens."""
    shape, sizes = named_shape("qwen3-30b-a3b"), {"max_running": 64, "max_context_tokens": 17_408}
    tree = {"model": {"random_weights": "qwen3-30b-a3b"}, "gpu": {"memory_limit_gib": 72}, "scheduler": sizes}
    auto = plan_engine(EngineConfig.model_validate(tree), shape, read_machine("a100-80g"))
    tree["scheduler"] = {**sizes, "favour": "latency"}
    latency = plan_engine(EngineConfig.model_validate(tree), shape, read_machine("a100-80g"))
    assert (auto.chunk_tokens, latency.chunk_tokens) == (8192, 2048)
    assert 0.9 * latency.num_pages <= auto.num_pages < 0.97 * latency.num_pages


def test_the_log_says_how_a_load_will_be_stepped_through() -> None:
    config = EngineConfig.model_validate(
        {"model": {"random_weights": "llama-3.1-8b"}, "scheduler": {"max_running": 20}}
    )
    plan = plan_engine(config, named_shape("llama-3.1-8b"), read_machine("a100-80g"))
    scheduler = config.scheduler.model_copy(update={"prefill": PrefillConfig(chunk_tokens=plan.chunk_tokens)})
    told = describe_steps(scheduler, GpuConfig(graph_batch_sizes=(1, 16, 24, 64)), plan)
    assert told == "favour=auto chunk_tokens=16384 token_gap_target_ms=100 max_running=20 graphs=1,16,20"
    assert describe_steps(scheduler, GpuConfig(graph_batch_sizes=()), plan).endswith("graphs=none")


@pytest.mark.parametrize(
    ("machine", "asked", "wanted"),
    [
        ("a100-80g", {}, (128, 256, 512, 1024)),
        ("a100-80g", {"prefill_graph_sizes": [64, 4096, 100_000]}, (64, 4096)),
        ("a100-80g", {"prefill_graph_sizes": []}, ()),
        ("a100-80g", {"check_coverage": True}, ()),
        ("a100-80g", {"memory_limit_gib": 20}, (128, 256)),
        ("laptop", {"device": "cpu", "kv_cache_gib": 0.5}, ()),
    ],
)
def test_layers_of_short_units_are_captured_where_that_costs_next_to_no_pages(
    machine: str, asked: dict[str, Any], wanted: tuple[int, ...]
) -> None:
    name = "tiny" if machine == "laptop" else "llama-3.1-8b"
    tree = {"model": {"random_weights": name}, "gpu": asked}
    plan = plan_engine(EngineConfig.model_validate(tree), named_shape(name), read_machine(machine))
    assert plan.prefill_graph_sizes == wanted
    assert any(item.name == "prefill graphs" for item in plan.items) is bool(wanted)


def test_spare_windows_are_fewer_beside_captured_layers_and_a_context_that_is_asked_for() -> None:
    """They are counted by what is left, so anything else takes some of them."""
    tree = {"model": {"random_weights": "gpt-oss-20b"}, "scheduler": {"max_running": 4}}
    config, shape, machine = EngineConfig.model_validate(tree), named_shape("gpt-oss-20b"), read_machine("rtx4090")
    plan = plan_engine(config, shape, machine)
    assert plan.prefill_graph_sizes
    assert plan.num_windows > 8
    tight = {"scheduler": {"max_running": 1, "max_context_tokens": 27_520}, "gpu": {"memory_limit_gib": 15.5}}
    plan = plan_engine(EngineConfig.model_validate(tree | tight), shape, machine)
    assert plan.max_context_tokens == 27_520


def test_layers_with_a_state_are_captured_likewise() -> None:
    machine, shape = read_machine("a100-80g"), named_shape("qwen3.5-9b")
    for asked, wanted in (({}, (128, 256, 512, 1024)), ({"prefill_graph_sizes": [128]}, (128,))):
        tree = {"model": {"random_weights": "qwen3.5-9b"}, "gpu": asked}
        assert plan_engine(EngineConfig.model_validate(tree), shape, machine).prefill_graph_sizes == wanted


def test_whole_units_of_a_model_with_states_are_captured_and_what_has_no_room_is_said() -> None:
    machine, shape = read_machine("a100-80g"), named_shape("qwen3.5-9b")
    tree: dict[str, Any] = {"model": {"random_weights": "qwen3.5-9b"}}
    scheduler = {"prefill": {"chunk_tokens": 2048}, "max_running": 2}
    plan = plan_engine(EngineConfig.model_validate(tree | {"scheduler": scheduler}), shape, machine)
    assert plan.prefill_graph_sizes == (128, 256, 512, 1024, 2048)
    assert not any("prefill_graph_sizes" in note for note in plan.notes)
    tree["gpu"] = {"memory_limit_gib": 21.5}
    plan = plan_engine(EngineConfig.model_validate(tree | {"scheduler": scheduler}), shape, machine)
    left = [note for note in plan.notes if "prefill_graph_sizes" in note]
    assert len(left) == 1
    assert "2,048 would take more than 20% of the KV pages" in left[0]
    assert 2048 not in plan.prefill_graph_sizes
