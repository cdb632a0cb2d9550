"""The memory plan: items fit their limits, what was asked for holds, and what does not fit says so in one line."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu import logprobs, memory_demand
from gpu.architecture import NAMED_SHAPES, Architecture, named_shape
from gpu.config import GpuConfig
from gpu.cpu_step import MAX_ROWS, CpuStep
from gpu.kernels.cpu_paged_attention import PART_TOKENS
from gpu.kernels.paged_decode_attention import num_splits
from gpu.memory_demand import Demand
from gpu.memory_plan import MemoryPlan, PlanError, plan_memory
from gpu.prefill import LOGITS_BLOCK_ROWS
from tests.gpu.cpu_decoder import cpu_decoder
from transfer.config import HostConfig
from transfer.machine import GIB, MachineProfile, load_machine

MACHINES = {
    path.stem: load_machine(path) for path in (Path(__file__).parents[2] / "deploy" / "machines").glob("*.json")
}
SHAPE_8B = named_shape("llama-3.1-8b")
SHAPE_TINY = named_shape("tiny")


def make_plan(
    shape: Architecture,
    machine: str | MachineProfile,
    gpu: GpuConfig,
    max_context_tokens: int | None = None,
    max_hidden_tokens: int | None = None,
    max_running: int = 64,
    chunk_tokens: int = 2048,
    host: HostConfig | None = None,
) -> MemoryPlan:
    return plan_memory(
        shape,
        gpu,
        host=host,
        max_running=max_running,
        chunk_tokens=chunk_tokens,
        max_context_tokens=max_context_tokens,
        max_hidden_tokens=max_hidden_tokens,
        machine=MACHINES[machine] if isinstance(machine, str) else machine,
    )


def find_bytes(plan: MemoryPlan, name: str) -> int:
    return next(item.bytes for item in plan.items if item.name == name)


@settings(max_examples=300, deadline=None)
@given(
    shape=st.sampled_from(sorted(NAMED_SHAPES)),
    machine=st.sampled_from(sorted(MACHINES)),
    limit=st.none() | st.floats(0.5, 90),
    kv_cache=st.none() | st.floats(0.01, 40),
    page_tokens=st.sampled_from([16, 32, 64]),
    context=st.none() | st.integers(1, 140_000),
    hidden=st.none() | st.integers(1, 200_000),
    running=st.integers(1, 256),
    chunk=st.sampled_from([16, 512, 2048, 8192]),
)
def test_a_plan_fits_its_limits_and_holds_its_longest_context_or_is_refused_in_one_line(
    shape: str,
    machine: str,
    limit: float | None,
    kv_cache: float | None,
    page_tokens: int,
    context: int | None,
    hidden: int | None,
    running: int,
    chunk: int,
) -> None:
    gpu = GpuConfig.model_validate(
        {"memory_limit_gib": limit, "kv_cache_gib": kv_cache, "page_tokens": page_tokens, "device": "auto"}
    )
    try:
        plan = make_plan(named_shape(shape), machine, gpu, context, hidden, running, chunk)
    except PlanError as error:
        message = str(error)
        assert "\n" not in message
        assert message.startswith(("gpu.", "scheduler."))
        return
    for place, bound in plan.limit_bytes.items():
        assert plan.used_bytes(place) <= bound
    assert all(item.bytes >= 0 for item in plan.items)
    assert plan.num_pages * plan.page_tokens >= plan.max_context_tokens
    assert plan.max_hidden_tokens >= plan.max_context_tokens
    assert context is None or plan.max_context_tokens == context
    assert hidden is None or plan.max_hidden_tokens == hidden
    page_bytes = named_shape(shape).kv_bytes_per_token(plan.dtype_bytes) * page_tokens
    assert find_bytes(plan, "KV pages") == plan.num_pages * page_bytes


def test_an_8b_model_on_a_24_gib_card_keeps_what_the_arithmetic_says() -> None:
    plan = make_plan(SHAPE_8B, "rtx4090", GpuConfig(memory_limit_gib=23.0))
    assert find_bytes(plan, "weights") == SHAPE_8B.num_weights * 2
    assert (plan.device, plan.dtype, plan.threads) == ("cuda", "bfloat16", 16)
    unused = plan.limit_bytes["gpu"] - plan.used_bytes("gpu")
    kept_for_pages = find_bytes(plan, "KV pages") + unused
    others = sum(item.bytes for item in plan.items if item.place == "gpu" and item.name != "KV pages")
    assert kept_for_pages + others == 23 * GIB
    assert unused < 2**20 * 64


def test_pages_take_all_that_is_left_to_less_than_one_page() -> None:
    plan = make_plan(SHAPE_8B, "a100-80g", GpuConfig())
    unused = plan.limit_bytes["gpu"] - plan.used_bytes("gpu")
    assert 0 <= unused < SHAPE_8B.kv_bytes_per_token(2) * plan.page_tokens


def test_a_derived_context_shrinks_to_memory_and_says_so() -> None:
    plan = make_plan(SHAPE_8B, "rtx4090", GpuConfig())
    assert plan.max_context_tokens < SHAPE_8B.max_context_tokens
    assert any("131,072" in note for note in plan.notes)


def test_without_a_gpu_every_item_is_in_host_memory_and_a_note_says_so() -> None:
    plan = make_plan(SHAPE_TINY, "laptop", GpuConfig())
    assert {item.place for item in plan.items} == {"host"}
    assert (plan.device, plan.dtype, plan.threads) == ("cpu", "float32", 4)
    assert any("host memory" in note for note in plan.notes)


def test_a_cpu_device_on_a_machine_with_a_gpu_leaves_the_gpu_alone() -> None:
    plan = make_plan(SHAPE_TINY, "rtx4090", GpuConfig(device="cpu"))
    assert "gpu" not in plan.limit_bytes
    assert plan.used_bytes("gpu") == 0


def test_asked_for_threads_and_dtype_are_kept() -> None:
    plan = make_plan(SHAPE_TINY, "laptop", GpuConfig(threads=3, dtype="bfloat16"))
    assert (plan.threads, plan.dtype, plan.dtype_bytes) == (3, "bfloat16", 2)


def test_only_batch_sizes_that_can_run_get_graphs() -> None:
    few = make_plan(SHAPE_8B, "a100-80g", GpuConfig(), max_running=2)
    many = make_plan(SHAPE_8B, "a100-80g", GpuConfig(), max_running=64)
    assert find_bytes(few, "CUDA graphs") * 9 == find_bytes(many, "CUDA graphs") * 2


@pytest.mark.parametrize(
    ("machine", "gpu", "context", "hidden", "parts"),
    [
        ("rtx4090", GpuConfig(memory_limit_gib=14), None, None, ("gpu.memory_limit_gib", "14.96 GiB", "14.00 GiB")),
        ("rtx4090", GpuConfig(memory_limit_gib=16), None, None, ("gpu.memory_limit_gib", "chunk_tokens", "16.00 GiB")),
        ("rtx4090", GpuConfig(memory_limit_gib=17.2), None, None, ("gpu.memory_limit_gib", "2,048 tokens")),
        ("rtx4090", GpuConfig(memory_limit_gib=25), None, None, ("gpu.memory_limit_gib", "23.99 GiB")),
        ("rtx4090", GpuConfig(), 100_000, None, ("gpu.memory_limit_gib", "scheduler.max_context_tokens", "12.21 GiB")),
        ("rtx4090", GpuConfig(kv_cache_gib=8), None, None, ("gpu.kv_cache_gib", "8 GiB", "22.07 GiB")),
        ("rtx4090", GpuConfig(kv_cache_gib=0.1), None, None, ("gpu.kv_cache_gib", "0.1 GiB", "0.25 GiB")),
        ("rtx4090", GpuConfig(), 200_000, None, ("scheduler.max_context_tokens", "131,072")),
        ("rtx4090", GpuConfig(), 8192, 100, ("scheduler.prefill.max_hidden_tokens", "8,192")),
        ("laptop", GpuConfig(device="cuda"), None, None, ("gpu.device", "laptop", "auto or cpu")),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers_and_the_key_to_change(
    machine: str, gpu: GpuConfig, context: int | None, hidden: int | None, parts: tuple[str, ...]
) -> None:
    with pytest.raises(PlanError) as error:
        make_plan(SHAPE_8B, machine, gpu, context, hidden)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "llama-2-13b", "codellama-34b"])
@pytest.mark.parametrize("running", [1, 3, 16, 64])
def test_the_split_workspace_of_decode_is_no_larger_than_planned(name: str, running: int) -> None:
    shape = named_shape(name)
    demand = Demand(shape, "cuda", 2, running, 2048, 16, (1,), None)
    for num_sms in (40, 108, 132):
        rows = max(
            count * num_splits(count, shape.num_kv_heads, shape.max_context_tokens, num_sms)
            for count in range(1, running + 1)
        )
        assert rows <= demand.split_rows


def test_the_compiled_step_on_the_cpu_is_planned_with_its_own_rows_and_parts() -> None:
    assert (memory_demand.CPU_STEP_ROWS, memory_demand.CPU_PART_TOKENS) == (MAX_ROWS, PART_TOKENS)
    demand = Demand(SHAPE_TINY, "cpu", 4, 4, 2048, 16, (1,), None)
    step = CpuStep(cpu_decoder(SHAPE_TINY, torch.float32, num_pages=4, max_slots=4, max_pages=4))
    parts = step._parts_for(SHAPE_TINY.max_context_tokens)
    logits = step._buffers_for(1).logits
    assert parts.out.nbytes + parts.top.nbytes + parts.mass.nbytes + logits.nbytes == demand._decode_partials()


def test_rows_of_logits_are_those_of_the_prefill_and_their_copies_those_of_logprobs() -> None:
    assert memory_demand.MAX_LOGITS_ROWS == LOGITS_BLOCK_ROWS
    assert memory_demand.LOGPROB_BYTES == 30 * logprobs._CHUNK_ELEMENTS


def test_a_card_too_old_for_bfloat16_is_refused_by_name() -> None:
    profile = MACHINES["rtx4090"]
    assert profile.gpu is not None
    old = profile.model_copy(update={"gpu": profile.gpu.model_copy(update={"compute_capability": (7, 5)})})
    with pytest.raises(PlanError, match=r"7\.5, wanted 8\.0"):
        make_plan(SHAPE_8B, old, GpuConfig())
