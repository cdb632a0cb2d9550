"""The memory plan: items fit their limits, what was asked for holds, and what does not fit says so in one line."""

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gpu.batching.captured_steps import StepKind, steps_to_capture
from gpu.batching.halving import most_rows_of_parts
from gpu.config import Composition, GpuConfig
from gpu.cpu_step.cpu_step import CpuStep
from gpu.host.footprint import slot_shape
from gpu.host.row_transfer import RowTransfer
from gpu.host.staging import Staging
from gpu.kv.pool import KvPool, PoolShape
from gpu.kv.windows import WindowShape
from gpu.memory.demand import CUDA_GRAPH_BYTES, Demand
from gpu.memory.host_demand import HostDemand
from gpu.memory.host_shares import DENSE_SHARE, resolve_host
from gpu.memory.machine_limits import least_gib
from gpu.memory.plan import MemoryPlan, MemoryRequest, PlanError, PlannedSizes, plan_memory
from gpu.methods.kept import keep_as_set
from gpu.methods.method import MethodState, ProfilePart
from gpu.methods.predicted import Predicted
from gpu.methods.sampled.encode import arrange
from gpu.methods.sampled.hyperplanes import draw_projections
from gpu.model.architecture import NAMED_SHAPES, Architecture, LayerSpec, named_shape, read_architecture
from gpu.model.split import split_over
from gpu.operations.decode_attention.split_rows import most_rows, num_rows
from gpu.operations.recurrent.state_arrays import state_arrays
from gpu.page_layout import PageLayout
from gpu.profiles import find_kept, resolve_profiles
from tests.gpu.cpu_decoder import cpu_decoder
from tests.reference_tier import ReferenceTier
from transfer.arrays import sum_bytes
from transfer.copies import Streams
from transfer.exchange import new_slot
from transfer.host_config import DocumentsConfig, HostConfig, SampledConfig
from transfer.machine import GIB, MachineProfile, load_machine

MACHINES = {
    path.stem: load_machine(path) for path in (Path(__file__).parents[2] / "deploy" / "machines").glob("*.json")
}
SHAPE_8B = named_shape("llama-3.1-8b")
SHAPE_TINY = named_shape("tiny")
SHAPE_WINDOWS = named_shape("tiny-gemma3")


def make_plan(
    shape: Architecture,
    machine: str | MachineProfile,
    gpu: GpuConfig,
    max_context_tokens: int | None = None,
    max_hidden_tokens: int | None = None,
    max_running: int = 64,
    chunk_tokens: int = 2048,
    host: HostConfig | None = None,
    documents: DocumentsConfig | None = None,
) -> MemoryPlan:
    return plan_memory(
        MemoryRequest(
            shape,
            gpu,
            host=host,
            kept=None if host is None else keep_as_set(host, shape),
            states=(),
            sizes=PlannedSizes(max_running, chunk_tokens, max_context_tokens, max_hidden_tokens),
            machine=MACHINES[machine] if isinstance(machine, str) else machine,
            documents=documents,
        )
    )


def find_bytes(plan: MemoryPlan, name: str) -> int:
    return next(item.bytes for item in plan.items if item.name == name)


NAMES, PLACES = st.sampled_from(sorted(NAMED_SHAPES)), st.sampled_from(sorted(MACHINES))
GPUS = st.builds(
    GpuConfig, memory_limit_gib=st.none() | st.floats(0.5, 90), kv_cache_gib=st.none() | st.floats(0.01, 40),
    page_tokens=st.sampled_from([16, 32, 64]),
)  # fmt: skip
# The longest context, the most hidden states, and the most that run.
SIZES = st.tuples(st.none() | st.integers(1, 140_000), st.none() | st.integers(1, 200_000), st.integers(1, 256))
Sizes = tuple[int | None, int | None, int]


@settings(max_examples=300, deadline=None)
@given(NAMES, PLACES, GPUS, SIZES, st.sampled_from([16, 512, 2048, 8192]))
def test_a_plan_fits_its_limits_and_holds_its_longest_context_or_is_refused_in_one_line(
    shape: str, machine: str, gpu: GpuConfig, sizes: Sizes, chunk: int
) -> None:
    (context, hidden, _), page_tokens = sizes, gpu.page_tokens
    try:
        plan = make_plan(named_shape(shape), machine, gpu, *sizes, chunk)
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
    num_layers = named_shape(shape).num_layers
    own, whole = named_shape(shape).window_heads, named_shape(shape)
    element_bytes = {"bfloat16": 2, "float32": 4}[plan.kv]
    token_bytes = (2 if whole.latent is None else 1) * whole.num_kv_heads * whole.dim * element_bytes
    own_bytes = 2 * own.count * own.dim * element_bytes
    page_bytes = token_bytes * (num_layers - len(plan.window_layers)) * page_tokens
    assert find_bytes(plan, "KV pages") == plan.num_pages * page_bytes
    longest = max((spec.window_tokens or 0 for spec in named_shape(shape).layers), default=0)
    own_state = named_shape(shape).recurrent
    if own_state is not None:
        state = sum_bytes(state_arrays(own_state, 1, plan.dtype_bytes, 4).values())
        assert plan.window_bytes == len(whole.recurrent_layers) * state
        assert plan.window_layers == whole.layers_without_kv
        assert find_bytes(plan, "recurrent states") == plan.num_windows * plan.window_bytes > 0
    elif plan.num_windows:
        assert plan.window_pages * page_tokens >= longest + plan.spare_window_tokens
        assert plan.window_bytes == len(plan.window_layers) * plan.window_pages * page_tokens * own_bytes
        assert find_bytes(plan, "KV windows") == plan.num_windows * plan.window_bytes


@pytest.mark.parametrize(("num_bytes", "words"), [(0, "0 GiB"), (2**20, "0.000977 GiB"), (3 * 2**30 + 1, "3.01 GiB")])
def test_what_a_setting_must_be_is_rounded_up(num_bytes: int, words: str) -> None:
    assert least_gib(num_bytes) == words


def test_a_long_context_of_a_model_with_windows_takes_a_sixth_of_its_layers_and_what_they_see() -> None:
    shape = named_shape("gemma-3-12b")
    plan = make_plan(shape, "a100-80g", GpuConfig(), 131_072)
    pages = find_bytes(plan, "KV pages") // plan.num_pages // plan.page_tokens
    assert (shape.kv_bytes_per_token(2), pages) == (384 * 1024, 64 * 1024)
    taken = 131_072 * pages + plan.window_bytes
    assert taken / (131_072 * shape.kv_bytes_per_token(2)) == pytest.approx(0.173, abs=0.001)
    pool = KvPool(
        SHAPE_WINDOWS, PoolShape(3, (), 16, 2, 160, torch.float32, WindowShape((0,), 5, 4)), torch.device("cpu")
    )
    taken = [sum(arena.nbytes for arena in arenas) for arenas in (pool.arenas, pool.windows.arenas)]
    layer = SHAPE_WINDOWS.kv_bytes_per_token(4) // SHAPE_WINDOWS.num_layers
    assert taken == [3 * 16 * layer * (SHAPE_WINDOWS.num_layers - 1), 5 * 4 * 16 * layer]


def test_windows_that_would_save_little_are_left_in_pages() -> None:
    shape = named_shape("mistral-7b-v0.1")  # all layers see 4,096 tokens
    assert make_plan(shape, "a100-80g", GpuConfig(), 8000).num_windows == 0
    plan = make_plan(shape, "a100-80g", GpuConfig(), max_running=8)
    assert (plan.num_windows, plan.window_pages, find_bytes(plan, "KV pages")) == (16, 258, 0)
    assert plan.num_pages * 16 >= plan.max_context_tokens == 32_768


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_codes_of_8_bits_leave_room_for_almost_twice_the_tokens(kv: str) -> None:
    gpu = GpuConfig.model_validate({"memory_limit_gib": 23.0, "kv_cache_gib": 4.0, "kv": kv})
    plain, coded = (make_plan(SHAPE_8B, "rtx4090", one, 8192) for one in (gpu.model_copy(update={"kv": "auto"}), gpu))
    assert (plain.kv, coded.kv) == ("bfloat16", kv)
    assert find_bytes(coded, "KV pages") // coded.num_pages == 16 * 32 * 8 * 2 * (128 + 4)
    assert coded.num_pages / plain.num_pages == pytest.approx(256 / 132, rel=1e-3)
    assert find_bytes(coded, "gathered KV") == find_bytes(plain, "gathered KV")


def test_a_cpu_that_computes_in_float32_has_rows_in_bf16_where_the_compiled_step_reads_them() -> None:
    def kv_of(shape: Architecture, **gpu: object) -> tuple[str, int]:
        plan = make_plan(shape, "laptop", GpuConfig.model_validate({"device": "cpu"} | gpu))
        return plan.kv, find_bytes(plan, "KV pages") // plan.num_pages // plan.page_tokens // shape.num_layers

    elements = 2 * SHAPE_TINY.num_kv_heads * SHAPE_TINY.dim
    assert kv_of(SHAPE_TINY) == ("bfloat16", 2 * elements)
    assert kv_of(SHAPE_TINY, kv="float32") == ("float32", 4 * elements)
    assert kv_of(SHAPE_TINY, dtype="float32") == ("float32", 4 * elements), "asked for by name"
    assert kv_of(SHAPE_TINY, dtype="float32", kv="bfloat16") == ("bfloat16", 2 * elements)
    normed = replace(SHAPE_TINY, layer_pattern=(LayerSpec(qk_norm=True),))  # goes layer by layer
    assert kv_of(normed) == ("float32", 4 * elements)
    assert kv_of(normed, kv="bfloat16") == ("bfloat16", 2 * elements)
    narrow = replace(SHAPE_TINY, dim=32, num_heads=2 * SHAPE_TINY.num_heads)
    assert kv_of(narrow)[0] == "float32"
    host = make_plan(SHAPE_TINY, "laptop", GpuConfig(device="cpu"), host=HostConfig())
    assert host.kv == "float32"


def test_windows_in_codes_take_as_much_less() -> None:
    shape, asked = named_shape("mistral-7b-v0.1"), [{"kv_windows": 3, "kv": kv} for kv in ("bfloat16", "int8")]
    plain, coded = (make_plan(shape, "a100-80g", GpuConfig.model_validate(one), 8000) for one in asked)
    assert find_bytes(coded, "KV windows") * 256 == find_bytes(plain, "KV windows") * 132


def test_formats_that_cannot_be_are_told() -> None:
    with pytest.raises(PlanError, match=r"gpu\.kv: asked bfloat16, .*and rows on a GPU .*auto, float32"):
        make_plan(SHAPE_TINY, "rtx4090", GpuConfig(dtype="float32", kv="bfloat16"))
    with pytest.raises(PlanError, match=r"gpu\.kv: asked bfloat16, .*and rows beside `host` or `documents` have"):
        make_plan(SHAPE_TINY, "laptop", GpuConfig(device="cpu", kv="bfloat16"), documents=DocumentsConfig())
    with pytest.raises(PlanError, match=r"gpu\.kv: asked float32, gpu\.dtype is bfloat16 here; wanted auto, fp8 or"):
        make_plan(SHAPE_TINY, "rtx4090", GpuConfig(kv="float32"))
    narrow = replace(SHAPE_TINY, name="odd", dim=72, num_heads=4)
    with pytest.raises(PlanError, match=r"gpu\.kv: fp8 rows need a multiple of 16 elements, heads of odd have 72"):
        make_plan(narrow, "laptop", GpuConfig(device="cpu", kv="fp8"))
    with pytest.raises(ValidationError, match=r"kv\n.*'auto', 'bfloat16', 'float32', 'fp8' or 'int8'"):
        GpuConfig.model_validate({"kv": "int4"})


def test_small_windows_are_kept_of_more_prefixes_for_a_fiftieth_of_what_there_is() -> None:
    """One conversation has more ends of prefixes than one, and 2 MB each: without its window a prefix is computed."""
    shape = named_shape("gpt-oss-20b")
    alone = make_plan(shape, "rtx4090", GpuConfig.model_validate({"kv": "int8"}), 65_536, max_running=1)
    assert alone.num_windows == 64
    assert find_bytes(alone, "KV windows") < find_bytes(alone, "KV pages") / 20
    tight = GpuConfig.model_validate({"kv": "int8", "kv_cache_gib": 0.5})
    plan = make_plan(shape, "rtx4090", tight, 16_384, max_running=1)
    unasked = GIB // 2 - 16_384 * find_bytes(plan, "KV pages") // (plan.num_pages * plan.page_tokens)
    assert plan.num_windows == unasked // 50 // plan.window_bytes == 3
    assert make_plan(named_shape("mistral-7b-v0.1"), "a100-80g", GpuConfig(), max_running=8).num_windows == 16


def test_windows_are_charged_and_may_be_counted_by_hand() -> None:
    shape = named_shape("mistral-7b-v0.1")
    plan = make_plan(shape, "a100-80g", GpuConfig(kv_windows=3), 8000)
    assert (plan.num_windows, plan.window_pages) == (3, 258)
    assert find_bytes(plan, "KV windows") == 3 * 258 * 16 * shape.kv_bytes_per_token(2)
    with pytest.raises(PlanError, match="kv_windows: asked 3, but no layer of the model has a window; leave it out"):
        make_plan(SHAPE_8B, "a100-80g", GpuConfig(kv_windows=3))


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


def test_a_note_says_where_steps_have_more_sequences_than_a_graph() -> None:
    def says(machine: str, sizes: tuple[int, ...], max_running: int) -> bool:
        plan = make_plan(SHAPE_TINY, machine, GpuConfig(graph_batch_sizes=sizes), max_running=max_running)
        return any("graph_batch_sizes: [1, 4]" in note for note in plan.notes)

    assert says("rtx4090", (1, 4), 5)
    assert not says("rtx4090", (1, 4), 4)
    assert not says("laptop", (1, 4), 5)


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


def test_every_step_that_is_captured_is_planned() -> None:
    """Those without host reads, and those with host reads whole or in two halves, of which a single row has none."""
    alone = make_plan(SHAPE_8B, "a100-80g", GpuConfig(), max_running=8)
    with_host = make_plan(SHAPE_8B, "a100-80g", GpuConfig(), max_running=8, host=HostConfig())
    parts_and_rows = [(0, 8), (1, 8), (2, 8), (0, 2), (1, 2), (2, 2), (1, 1)]
    assert steps_to_capture((2, 8, 64), 8, True, False) == [
        (StepKind(parts, False), rows) for parts, rows in parts_and_rows
    ]
    assert steps_to_capture((), 8, True, True) == []
    whole = steps_to_capture((2, 8, 64), 8, True, False, with_halves=False)
    assert whole == [(StepKind(parts, False), rows) for parts, rows in parts_and_rows if parts < 2]
    lent = [rows for kind, rows in steps_to_capture((2, 8, 64), 8, True, True, with_lending=True) if kind.lends]
    assert lent == [8, 2, 1]
    adapted = steps_to_capture((2, 8), 8, True, False, with_adapters=True)
    assert [(kind.num_parts, kind.adapts, rows) for kind, rows in adapted if rows == 8] == [
        (0, False, 8), (0, True, 8), (1, True, 8), (2, True, 8)
    ]  # fmt: skip
    reading = steps_to_capture((2,), 8, True, True, True, with_adapters=True)
    assert [kind.adapts for kind, _ in reading if kind.lends] == [True, True]
    turning = steps_to_capture((1, 8), 8, True, True, with_lending=True, with_turns=True)
    assert sorted(kind[:3] for kind, rows in turning if kind.turns and rows == 8) == [
        (0, True, False), (0, True, True), (1, True, False), (2, True, False)
    ], "each kind with rings, of more than one row"  # fmt: skip
    assert not any(kind.turns for kind, rows in turning if rows == 1)
    assert find_bytes(alone, "CUDA graphs") == 4 * CUDA_GRAPH_BYTES
    assert find_bytes(with_host, "CUDA graphs") == (4 + 4 + 3) * CUDA_GRAPH_BYTES
    split = make_plan(split_over(SHAPE_8B, 2), "a100-80g", GpuConfig(), max_running=8, host=HostConfig())
    assert find_bytes(split, "CUDA graphs") == (4 + 4) * CUDA_GRAPH_BYTES, "all ranks cut alike, so none does"


@pytest.mark.parametrize(
    ("machine", "gpu", "asked", "parts"),
    [
        ("rtx4090", GpuConfig(memory_limit_gib=14), {}, ("gpu.memory_limit_gib", "14.96 GiB", "14.00 GiB")),
        ("rtx4090", GpuConfig(memory_limit_gib=16), {}, ("gpu.memory_limit_gib", "chunk_tokens", "16.00 GiB")),
        ("rtx4090", GpuConfig(memory_limit_gib=17.2), {}, ("gpu.memory_limit_gib", "2,048 tokens")),
        ("rtx4090", GpuConfig(memory_limit_gib=25), {}, ("gpu.memory_limit_gib", "23.99 GiB")),
        ("rtx4090", GpuConfig(), {"max_context_tokens": 100_000},
         ("gpu.memory_limit_gib", "scheduler.max_context_tokens", "12.21 GiB")),
        ("rtx4090", GpuConfig(kv_cache_gib=8), {}, ("gpu.kv_cache_gib", "8 GiB", "22.07 GiB")),
        ("rtx4090", GpuConfig(kv_cache_gib=0.1), {}, ("gpu.kv_cache_gib", "0.1 GiB", "0.25 GiB")),
        ("rtx4090", GpuConfig(), {"max_context_tokens": 200_000}, ("scheduler.max_context_tokens", "131,072")),
        ("rtx4090", GpuConfig(), {"max_context_tokens": 8192, "max_hidden_tokens": 100},
         ("scheduler.prefill.max_hidden_tokens", "8,192")),
        ("laptop", GpuConfig(device="cuda"), {}, ("gpu.device", "laptop", "auto or cpu")),
        ("rtx4090", GpuConfig(), {"host": HostConfig(dense_layers=(0, 32))}, ("host.dense_layers", "32", "0 to 31")),
        ("rtx4090", GpuConfig(), {"host": HostConfig(dense_layers=(-1,))}, ("host.dense_layers", "-1")),
        ("rtx4090", GpuConfig(), {"host": HostConfig(dense_layers=tuple(range(32)))}, ("host.dense_layers", "all 32")),
        ("rtx4090", GpuConfig(), {"host": HostConfig(memory_limit_gib=100)},
         ("host.memory_limit_gib", "100.00 GiB", "62.50 GiB")),
        ("rtx4090", GpuConfig(), {"max_context_tokens": 98_304, "host": HostConfig(memory_limit_gib=4)},
         ("host.memory_limit_gib", "98,304", "4.00 GiB")),
        ("rtx4090", GpuConfig(kv_cache_gib=1), {"max_context_tokens": 65_536, "host": HostConfig()},
         ("gpu.kv_cache_gib", "1.00 GiB", "host.resident_tokens")),
        ("rtx4090", GpuConfig(memory_limit_gib=18.5), {"max_context_tokens": 65_536, "host": HostConfig()},
         ("gpu.memory_limit_gib", "host.resident_tokens")),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_numbers_and_the_key_to_change(
    machine: str, gpu: GpuConfig, asked: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises(PlanError) as error:
        make_plan(SHAPE_8B, machine, gpu, **asked)
    for part in parts:
        assert part in str(error.value)


def test_pages_of_the_size_that_a_refusal_asks_for_are_enough() -> None:
    with pytest.raises(PlanError, match=r"asked 0\.001 GiB, one sequence of 1,024 tokens needs 0\.0\d+ GiB") as error:
        make_plan(SHAPE_TINY, "laptop", GpuConfig(device="cpu", kv_cache_gib=0.001), 1024)
    needed = re.search(r"needs (0\.\d+) GiB", str(error.value))[1]
    assert make_plan(SHAPE_TINY, "laptop", GpuConfig(device="cpu", kv_cache_gib=float(needed)), 1024).num_pages == 64


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "llama-2-13b", "codellama-34b"])
@pytest.mark.parametrize("running", [1, 3, 16, 64])
def test_the_split_workspace_of_decode_is_no_larger_than_planned(name: str, running: int) -> None:
    shape = named_shape(name)
    for num_sms in (40, 108, 132):
        rows = max(
            num_rows(count, shape.num_kv_heads, shape.max_context_tokens, 2, num_sms) for count in range(1, running + 1)
        )
        assert rows <= most_rows(running, shape.num_kv_heads, shape.max_context_tokens)


def test_the_compiled_step_on_the_cpu_is_planned_with_its_own_rows_and_parts() -> None:
    asked = Demand(SHAPE_TINY, "cpu", 4, 4, 2048, 16, (1,), None, ())
    step = CpuStep(cpu_decoder(SHAPE_TINY, torch.float32, num_pages=4, max_slots=4, max_pages=4))
    parts = step._parts_for(SHAPE_TINY.max_context_tokens)
    logits = step._buffers_for(1).logits
    assert parts.out.nbytes + parts.top.nbytes + parts.mass.nbytes + logits.nbytes == asked._decode_partials()


def test_a_card_too_old_for_bfloat16_is_refused_by_name() -> None:
    profile = MACHINES["rtx4090"]
    old = profile.model_copy(update={"gpu": profile.gpu.model_copy(update={"compute_capability": (7, 5)})})
    with pytest.raises(PlanError, match=r"7\.5, wanted 8\.0"):
        make_plan(SHAPE_8B, old, GpuConfig())


# --- with KV in host memory ---------------------------------------------------------------------------------------


def with_memory(machine: str, host_gib: float, gpu_gib: float | None = None) -> MachineProfile:
    """A recorded machine with other memories."""
    profile = MACHINES[machine].model_copy(update={"memory_bytes": int(host_gib * GIB)})
    if gpu_gib is None or profile.gpu is None:
        return profile
    return profile.model_copy(update={"gpu": profile.gpu.model_copy(update={"memory_bytes": int(gpu_gib * GIB)})})


def assert_holds_its_longest_context(plan: MemoryPlan, num_layers: int) -> None:
    """Everything fits its place, one context of the longest kind fits every kind of page, and one that stays too."""
    for place, bound in plan.limit_bytes.items():
        assert plan.used_bytes(place) <= bound
    assert all(item.bytes >= 0 for item in plan.items)
    page = plan.page_tokens
    down = max(0, plan.max_context_tokens - plan.sink_tokens - plan.window_tokens)
    if plan.max_context_tokens > plan.resident_tokens:
        assert plan.host_tokens >= down
        dense = [layer for layer in plan.dense_layers if layer not in plan.window_layers]
        layout = PageLayout(num_layers - len(plan.window_layers), len(dense), plan.num_pages)
        dense_blocks = layout.blocks_for(-(-down // page))
        windows = plan.sink_tokens + plan.window_tokens + 2 * plan.offload_block_tokens
        assert (plan.num_pages - dense_blocks) * page >= min(windows, plan.max_context_tokens)
    assert plan.num_pages * page >= min(plan.resident_tokens + plan.offload_block_tokens, plan.max_context_tokens)
    running = plan.sink_tokens + plan.window_tokens + 2 * plan.offload_block_tokens
    assert plan.num_pages * page >= min(running, plan.max_context_tokens)
    assert plan.max_hidden_tokens >= plan.max_context_tokens
    for tokens in (plan.sink_tokens, plan.window_tokens, plan.resident_tokens, plan.offload_block_tokens):
        assert tokens % page == 0
    assert plan.resident_tokens >= plan.sink_tokens + plan.window_tokens + plan.offload_block_tokens


HOSTS = st.builds(
    HostConfig, memory_limit_gib=st.none() | st.floats(0.1, 400), resident_tokens=st.integers(0, 20_000),
    dense_layers=st.none() | st.lists(st.integers(-1, 6), max_size=3), rows=st.sampled_from(["bfloat16", "int8"]),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(NAMES, PLACES, st.sampled_from([16, 128, 512]), GPUS, HOSTS, SIZES)
def test_a_plan_with_host_memory_holds_its_longest_context_or_is_refused_in_one_line(
    shape: str, machine: str, host_gib: int, gpu: GpuConfig, host: HostConfig, sizes: Sizes
) -> None:
    context, hidden, running = sizes
    try:
        plan = make_plan(named_shape(shape), with_memory(machine, host_gib), gpu, *sizes, host=host)
    except PlanError as error:
        message = str(error)
        assert "\n" not in message
        assert message.startswith(("gpu.", "scheduler.", "host.", "host:"))
        return
    assert_holds_its_longest_context(plan, named_shape(shape).num_layers)
    assert context is None or plan.max_context_tokens == context
    assert hidden is None or plan.max_hidden_tokens == hidden
    again = make_plan(
        named_shape(shape),
        with_memory(machine, host_gib),
        gpu.model_copy(
            update={
                "kv_cache_gib": plan.kv_bytes / GIB,
                "kv_windows": plan.num_windows if plan.window_pages else None,
                "states_gib": None
                if plan.snapshot_tokens is None
                else (plan.num_windows + 0.5) * plan.window_bytes / GIB,
            }
        ),
        plan.max_context_tokens,
        plan.max_hidden_tokens,
        running,
        host=host.model_copy(
            update={"memory_limit_gib": plan.host_limit_bytes / GIB, "dense_layers": plan.dense_layers}
        ),
    )
    assert (again.items, again.num_pages) == (plan.items, plan.num_pages)


def test_an_8b_model_with_96k_context_fits_24_gb_beside_128_gib() -> None:
    plan = make_plan(SHAPE_8B, with_memory("rtx4090", 128), GpuConfig(memory_limit_gib=23), 98_304, host=HostConfig())
    assert_holds_its_longest_context(plan, SHAPE_8B.num_layers)
    assert plan.dense_layers == (0, 16)
    assert (plan.sink_tokens, plan.window_tokens, plan.resident_tokens, plan.offload_block_tokens) == (
        16,
        64,
        8192,
        128,
    )
    assert plan.host_limit_bytes == 64 * GIB
    assert plan.num_pages * plan.page_tokens < 98_304, "without host memory it would not fit"
    with pytest.raises(PlanError):
        make_plan(SHAPE_8B, with_memory("rtx4090", 128), GpuConfig(memory_limit_gib=23), 98_304)


@pytest.mark.parametrize(
    ("shape", "machine"),
    [("codellama-34b", "a100-80g"), ("llama-2-13b", with_memory("a100-80g", 256, 48))],
)
def test_larger_models_with_16k_context_fit_the_cards_they_are_known_for(
    shape: str, machine: str | MachineProfile
) -> None:
    plan = make_plan(named_shape(shape), machine, GpuConfig(), 16_384, host=HostConfig())
    assert_holds_its_longest_context(plan, named_shape(shape).num_layers)


def test_on_the_cpu_a_context_goes_far_beyond_the_pages_that_were_asked_for() -> None:
    gpu, host = GpuConfig(kv_cache_gib=0.5), HostConfig(dense_layers=(0,))
    plan = make_plan(SHAPE_TINY, "laptop", gpu, 200_000, max_running=4, host=host)
    assert_holds_its_longest_context(plan, SHAPE_TINY.num_layers)
    assert set(plan.limit_bytes) == {item.place for item in plan.items} == {"host"}
    assert find_bytes(plan, "KV pages") <= GIB // 2
    assert plan.num_pages * plan.page_tokens < 200_000


def test_the_longest_context_that_nobody_asked_for_leaves_a_share_of_the_pages_to_others() -> None:
    host = HostConfig(dense_layers=tuple(range(16)))
    plan = make_plan(SHAPE_8B, with_memory("a100-80g", 2048), GpuConfig(memory_limit_gib=24), None, host=host)
    demand = host_demand(SHAPE_8B, plan.page_tokens, 16, host)
    blocks = demand.dense_blocks(demand.offloaded_tokens(plan.max_context_tokens))
    assert 0 < blocks <= DENSE_SHARE * plan.num_pages
    longer = plan.max_context_tokens + 8192
    asked = make_plan(SHAPE_8B, with_memory("a100-80g", 2048), GpuConfig(memory_limit_gib=24), longer, host=host)
    assert demand.dense_blocks(demand.offloaded_tokens(longer)) > DENSE_SHARE * asked.num_pages


def test_how_many_tokens_stay_on_the_card_follows_from_its_pages() -> None:
    for config, kept in ((HostConfig(), 30_992), (HostConfig(residency="fixed"), 80)):
        demand = host_demand(SHAPE_8B, 16, 4, config)
        assert demand.resident_tokens_of(8192, 2200) == 8192
        assert demand.resident_tokens_of(98_304, 2200) == kept
    released = (98_304 - 30_992) // 16
    assert 30_992 // 16 + -(-released // 16) == 2200, "what stays, and the dense layers of the rest"
    assert host_demand(SHAPE_8B, 16, 4, HostConfig()).resident_tokens_of(98_304, 6144) == 98_304


def test_resident_pages_hold_the_windows_of_all_that_may_run_or_a_note_says_of_how_many() -> None:
    machine = with_memory("rtx4090", 128)
    few = make_plan(SHAPE_8B, machine, GpuConfig(memory_limit_gib=23), 98_304, max_running=16, host=HostConfig())
    many = make_plan(SHAPE_8B, machine, GpuConfig(memory_limit_gib=23), 98_304, max_running=200, host=HostConfig())
    assert few.num_pages * 16 >= 16 * (16 + 64 + 2 * 128)
    assert not any("max_running" in note for note in few.notes)
    assert any("scheduler.max_running is 200" in note for note in many.notes)


def test_on_the_cpu_pages_and_host_memory_that_were_asked_for_fit_together_beside_documents_or_are_refused() -> None:
    reference = read_architecture(Path(__file__).parents[2] / "deploy" / "models" / "reference")
    documents = DocumentsConfig(memory_limit_gib=2)  # and as much for what is under way

    def planned(kv_gib: float, host_gib: float, documents: DocumentsConfig | None) -> MemoryPlan:
        gpu, host = GpuConfig(device="cpu", kv_cache_gib=kv_gib), HostConfig(memory_limit_gib=host_gib)
        return make_plan(reference, "laptop", gpu, host=host, documents=documents)

    plan = planned(1, 1, documents)
    assert plan.documents_bytes == 2 * GIB
    for config, kept in ((DocumentsConfig(), MACHINES["laptop"].memory_bytes // 16), (documents, 2 * GIB),
                         (DocumentsConfig(memory_limit_gib=0.5), GIB // 2)):  # fmt: skip
        held = {item.name: item.bytes for item in planned(1, 1, config).items}
        assert (held["documents"], held["documents under way"]) == (kept, max(kept, GIB))
    assert plan.kv_bytes > 0.99 * GIB, "what was asked for, not what is left"
    with pytest.raises(PlanError, match=r"^gpu\.kv_cache_gib: asked 2 GiB, .* host\.memory_limit_gib, which is 1\.00"):
        planned(2, 1, documents)
    with pytest.raises(PlanError, match=r"^host\.memory_limit_gib: asked 4\.00 .* or documents\.memory_limit_gib"):
        planned(1, 4, documents)
    assert planned(2, 1, None).kv_bytes > 1.99 * GIB


def test_without_host_memory_there_is_none_of_it_in_the_plan() -> None:
    plan = make_plan(SHAPE_8B, "rtx4090", GpuConfig())
    tokens = (plan.sink_tokens, plan.window_tokens, plan.resident_tokens, plan.offload_block_tokens, plan.host_tokens)
    assert (*tokens, plan.host_limit_bytes) == (0,) * 6
    assert plan.dense_layers == ()
    assert not {"KV staging", "deposits", "exchange"} & {item.name for item in plan.items}


def host_demand(
    shape: Architecture, page_tokens: int, max_running: int, config: HostConfig, excludes: bool = False
) -> HostDemand:
    kept, dtype_bytes = keep_as_set(config, shape), 2 if shape is SHAPE_8B else 4
    return resolve_host(config, kept, shape, page_tokens, dtype_bytes, max_running, excludes=excludes)


def test_staging_takes_what_is_planned() -> None:
    demand = host_demand(SHAPE_TINY, 16, 2, HostConfig())
    shape, cpu = demand.tier_shape, torch.device("cpu")
    pool = KvPool(SHAPE_TINY, PoolShape(4, demand.dense_layers, 16, 2, 160, torch.float32), cpu)
    row_transfer = RowTransfer(replace(shape, num_tables=0), None, cpu, Streams(cpu))
    staging = Staging(pool, ReferenceTier(shape, 0, 1, 1), row_transfer)
    assert staging.keys.nbytes + staging.values.nbytes == 160 * demand.staging_token_bytes
    assert pool.layout.dense_per_block == demand.dense_per_block


@pytest.mark.parametrize("excludes", [False, True])
@pytest.mark.parametrize("running", [1, 5, 64])
def test_exchange_slots_and_hyperplanes_take_what_is_planned(running: int, excludes: bool) -> None:
    sampled = SampledConfig(bits_per_table=10, num_tables=75)
    demand, cpu = host_demand(SHAPE_TINY, 16, running, HostConfig(sampled=sampled), excludes), torch.device("cpu")
    planes = arrange(draw_projections(SHAPE_TINY.dim, 10, 75, 0, torch.float32, cpu))
    assert planes.planes.nbytes == demand.hyperplane_bytes
    taken = 0
    for rows in most_rows_of_parts(running):
        slot = new_slot(rows, slot_shape(SHAPE_TINY, 75, "float32", excludes), cpu)
        assert (slot.excluded is not None) == excludes
        taken += sum(value.nbytes for value in asdict(slot).values() if isinstance(value, torch.Tensor))
        taken -= slot.answered.nbytes
    assert taken == demand.exchange_bytes


def test_a_profile_that_takes_blocks_off_the_host_has_the_words_for_them_in_the_plan() -> None:
    """8 KB a row of 8 KV heads at 128K tokens, in slots of both places; pages have what is left, and all adds up."""
    shape, running, host = SHAPE_8B, 8, HostConfig()
    composition = Composition.model_validate({"host": {"method": "predicted", "weights": "none"}})
    profiles = resolve_profiles({"blocks": composition}, host)
    part = profiles["blocks"].host_part
    assert part.method.excludes_blocks

    def planned(excludes: bool) -> MemoryPlan:
        method = Predicted()
        method.excludes_blocks = excludes
        return plan_memory(
            MemoryRequest(
                shape,
                GpuConfig(),
                host=host,
                kept=find_kept(profiles.values(), host, shape),
                states=(MethodState(ProfilePart(method, part.settings)),),
                sizes=PlannedSizes(running, 2048, 131_072, None),
                machine=MACHINES["a100-80g"],
            )
        )

    with_words, without = planned(True), planned(False)
    words = sum(most_rows_of_parts(running)) * shape.num_kv_heads * 131_072 // 16 // 8
    for name in ("exchange", "exchange slots"):
        assert find_bytes(with_words, name) - find_bytes(without, name) == words
    page_bytes = without.kv_bytes // without.num_pages
    assert 0 <= without.kv_bytes - with_words.kv_bytes < words + page_bytes
    for plan in (with_words, without):
        unused = plan.limit_bytes["gpu"] - plan.used_bytes("gpu")
        assert 0 <= unused < page_bytes
