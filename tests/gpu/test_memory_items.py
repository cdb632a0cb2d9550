"""What a plan counts for one more token is what is allocated for it, and limits are in the units that they name."""

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from gpu import ranks
from gpu.config import Composition, GpuConfig
from gpu.disk.block_writer import BlockWriter
from gpu.disk.disk_copies import DiskCopies
from gpu.disk.prefix_load import _buffer_of
from gpu.disk.record_shapes import disk_format, end_record, kv_record, piece_blocks
from gpu.host.gathered import GatheredKv
from gpu.kv.pool import KvPool, PoolShape
from gpu.kv.windows import NO_WINDOWS, WindowShape
from gpu.layers.layer_arrays import logits_arrays, rope_bytes
from gpu.layers.rope import rope_tables
from gpu.memory.demand import Demand
from gpu.memory.plan import MemoryPlan, MemoryRequest, PlannedSizes, plan_memory
from gpu.methods.device_side import Site, make_device_sides
from gpu.model.architecture import named_shape
from gpu.model.matrix_format import MOST_PACKED_TOKENS
from gpu.model.matrix_formats import matrix_parts, matrix_shapes, rounded
from gpu.model.named_shapes import NAMED_SHAPES
from gpu.model.split import split_over
from gpu.operations.linear.plain_linear import logits_linear
from gpu.page_layout import page_table
from gpu.prefill.scored_rows import LOGITS_BLOCK_ROWS
from gpu.profiles import resolve_profiles
from gpu.ranks import ProcessRanks
from gpu.sampling.penalties import PenaltyTable
from gpu.weights.rounding import BYTES_A_NUMBER, NUMBERS_AT_ONCE
from gpu.weights.weight_allocation import allocate_weights
from tests.gpu.live_bytes import LiveBytes
from tests.gpu.test_predicted_serving import WEIGHTS
from transfer.arrays import sum_bytes
from transfer.copies import Streams
from transfer.disk.context_store import ContextStore
from transfer.disk.disk_config import DiskConfig
from transfer.host_config import HostConfig
from transfer.machine import load_machine
from transfer.tier_shape import TierShape

TINY = named_shape("tiny")
CPU = torch.device("cpu")
CARD = load_machine(Path(__file__).parents[2] / "deploy" / "machines" / "rtx4090.json")
PAGE, PAGES, SLOTS, CONTEXT = 16, 10, 5, 128
BLOCK_PAGES = 16  # of a block on disk
LEAST_SHARE = 0.5  # of what is planned, that is taken
IDS_BYTES = 1024  # page ids of a block, which no plan counts
DEMAND = Demand(TINY, "cpu", 4, SLOTS, 256, PAGE, (1,), None, ())


@pytest.fixture
def pool() -> KvPool:
    return KvPool(TINY, PoolShape(PAGES, (), PAGE, SLOTS, CONTEXT, torch.float32), CPU)


def test_pages_take_what_is_planned(pool: KvPool) -> None:
    taken = sum(pages.nbytes for pages in (*pool.key_pages, *pool.value_pages))
    assert taken == PAGES * DEMAND.page_bytes == PAGES * PAGE * DEMAND.kv_token_bytes


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_pages_of_codes_take_what_is_planned_and_little_more_than_a_byte_an_element(kv: Literal["fp8", "int8"]) -> None:
    demand = replace(DEMAND, dtype_bytes=2, kv=kv)
    pool = KvPool(TINY, PoolShape(PAGES, (), PAGE, SLOTS, CONTEXT, torch.bfloat16, kv=kv), CPU)
    assert sum(arena.nbytes for arena in pool.arenas) == PAGES * demand.page_bytes
    assert demand.kv_token_bytes == 2 * TINY.num_layers * TINY.num_kv_heads * (TINY.dim + 4)
    one_head = replace(demand, shape=replace(TINY, num_kv_heads=1))
    gathered = GatheredKv(
        KvPool(one_head.shape, PoolShape(PAGES, (), PAGE, 2, CONTEXT, torch.bfloat16, kv=kv), CPU), 1, TINY.dim
    )
    assert 2 * gathered.keys.nbytes + gathered.values.nbytes == CONTEXT * one_head.gathered_token_bytes


@pytest.mark.parametrize("name", [name for name, shape in NAMED_SHAPES.items() if shape.quantisation is None])
def test_rounding_at_load_fits_into_what_steps_take_later(name: str) -> None:
    """Of the smallest deployment. While weights are loaded there are no logits and no widened matrices yet."""
    shape = rounded(NAMED_SHAPES[name], "int8", "weights")
    read = [shape.vocab_size * shape.hidden]
    for spec in set(shape.layer_pattern):
        for matrix, (_, inner) in matrix_shapes(shape, spec).items():
            read += [rows * inner for _, rows in matrix_parts(shape, spec, matrix)]
    later = Demand(shape, "cuda", 2, 1, 16, PAGE, (1,), None, ()).fixed_items()
    spare = sum(item.bytes for item in later if item.name in ("logits", "widened matrices"))
    assert BYTES_A_NUMBER * min(NUMBERS_AT_ONCE, max(read)) <= spare


def test_page_tables_take_what_is_planned(pool: KvPool) -> None:
    assert pool.page_table.nbytes == page_table(SLOTS, CONTEXT // PAGE).num_bytes


def test_rope_tables_take_what_is_planned() -> None:
    assert sum(table.nbytes for table in rope_tables(TINY, CONTEXT, CPU)) == rope_bytes(TINY, CONTEXT)


def test_gathered_keys_and_values_take_what_is_planned(pool: KvPool) -> None:
    """Both, and a copy of one of the two while it is gathered."""
    gathered = GatheredKv(pool, TINY.num_kv_heads, TINY.dim)
    assert 2 * gathered.keys.nbytes + gathered.values.nbytes == CONTEXT * DEMAND.gathered_token_bytes


def test_a_token_under_prefill_takes_its_hidden_state_and_its_ids() -> None:
    ids = 3 * 8 + 4  # id, position and slot as they are uploaded; the slot as kernels read it
    assert 0 <= DEMAND.hidden_token_bytes - TINY.hidden * 4 - ids <= 8


def test_the_penalty_table_takes_what_is_planned() -> None:
    table = PenaltyTable(SLOTS, TINY.vocab_size, CPU)
    planned = next(item.bytes for item in DEMAND.fixed_items() if item.name == "penalties")
    assert table.counts.nbytes + table.in_prompt.nbytes == planned


METHOD_SETTINGS: list[dict[str, Any]] = [
    {"reuse": {"method": "mac", "capacity": 16}},
    {"reuse": {"method": "mac", "capacity": 64, "summaries": "float32", "layer_tau": {1: "off"}}},
    {"host": {"method": "predicted", "weights": WEIGHTS, "budget_tokens": 32}},
    {"host": {"method": "predicted+sampled", "weights": WEIGHTS, "history": 7, "exempt_layers": 1}},
    {"host": {"method": "indexed", "budget_tokens": 64}},
    {"host": {"method": "indexed", "key_bits": 2, "value_bits": 4, "resident": "indexed"}},
]
BOOKKEEPING_BYTES = 64
"""Of a ring, which no plan counts: who holds it, and its last cell."""


@pytest.mark.parametrize("tree", METHOD_SETTINGS)
def test_one_ring_more_takes_what_its_method_states(tree: dict[str, Any]) -> None:
    shape, host = replace(TINY, max_context_tokens=4096), HostConfig(dense_layers=())
    profile = resolve_profiles({"own": Composition.model_validate(tree)}, host)["own"]
    part = profile.ring_parts[0]
    layers = tuple(part.settings.layers(shape)) if hasattr(part.settings, "layers") else tuple(range(shape.num_layers))
    tier = TierShape(layers, shape.num_heads, shape.num_kv_heads, shape.dim, "bfloat16", 8, 75)
    site = Site(shape, tier, 16, SLOTS, torch.float32, torch.float32, CPU)
    planned = part.method.footprint(part.settings, shape, SLOTS)
    counts = [(2, 5), (3, 5), (3, 6)] if planned.page_bytes else [(2, None), (3, None)]
    taken = []
    for num_rings, num_pages in counts:
        shared = {} if num_pages is None else {part.id: num_pages}
        sides = make_device_sides([part], site, {part.id: num_rings}, shared)
        taken.append(bytes_of(next(iter(sides.values()))))
    stated = planned.sequence_bytes + (planned.sequence_rows * shape.dim + planned.sequence_numbers) * 4
    assert 0 <= taken[1] - taken[0] - stated <= BOOKKEEPING_BYTES
    assert not planned.page_bytes or taken[2] - taken[1] == planned.page_bytes, "one page more"


def bytes_of(holder: object) -> int:
    """Return the bytes of all tensors that an object holds, itself or in what it holds, each storage once."""
    storages: dict[int, int] = {}

    def add(value: object) -> None:
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            for one in value.values():
                add(one)
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        elif is_dataclass(value) and not isinstance(value, type):
            for each in fields(value):
                add(getattr(value, each.name))
        elif type(value).__module__.startswith("gpu.methods"):
            add(vars(value))

    add(holder)
    return sum(storages.values())


def bytes_by_name(demand: Demand) -> dict[str, int]:
    return {item.name: item.bytes for item in demand.fixed_items()}


def demand_of(name: str, disk: DiskConfig | None = None, kv: Literal["int8"] | None = None) -> tuple[Demand, KvPool]:
    """A model's demand, with windows where it has layers with windows, and its pool."""
    shape = named_shape(name)
    windows = WindowShape(shape.window_layers, 2, 12) if shape.window_layers else NO_WINDOWS
    pages = windows.num_pages if windows.layers else 0
    demand = replace(DEMAND, shape=shape, kv=kv, disk=disk, window_pages=pages, num_windows=windows.count)
    return demand, KvPool(shape, PoolShape(BLOCK_PAGES, (), PAGE, SLOTS, 1024, torch.float32, windows, kv), CPU)


@pytest.mark.parametrize("kv", [None, "int8"])
@pytest.mark.parametrize("name", ["tiny-gemma3", "tiny-gemma4"])
def test_windows_take_what_is_planned(name: str, kv: Literal["int8"] | None) -> None:
    """The layers with windows of the second have other heads than its other layers."""
    demand, pool = demand_of(name, kv=kv)
    taken = sum(arena.nbytes for arena in pool.windows.arenas)
    assert taken == demand.num_windows * demand.window_bytes == bytes_by_name(demand)["KV windows"]


@pytest.mark.parametrize("rows", ["same", "int8"])
@pytest.mark.parametrize("name", ["tiny", "tiny-gemma3"])
def test_blocks_on_their_way_to_the_disk_and_back_take_what_is_planned(
    tmp_path: Path, name: str, rows: Literal["same", "int8"]
) -> None:
    disk = DiskConfig(folder=tmp_path, rows=rows, threads=3, memory_mib=1.0)
    demand, pool = demand_of(name, disk)
    planned = bytes_by_name(demand)
    stored = kv_record(demand.shape, demand.window_layers, disk_format(rows, "float32"), disk.block_tokens)
    store = ContextStore(disk, "0" * 32, stored, end_record(demand.shape, demand.window_bytes, stored))
    copies = DiskCopies(pool, store, Streams(CPU))
    writer = BlockWriter(copies, None)
    try:
        free = [writer._free.get_nowait() for _ in range(writer._free.qsize())]
        assert sum(buffer.nbytes for buffer in free) == planned["contexts to the disk"]
        piece = _buffer_of(copies)
        assert disk.threads * piece.nbytes == planned["contexts from the disk"]
        with LiveBytes([*pool.arenas, *pool.windows.arenas]) as live:
            copies.gather(range(BLOCK_PAGES))
        decoded = 0
        if rows == "int8":
            names = piece_blocks(copies.part_bytes)
            sides = piece[: names * copies.part_bytes].view(names, 2, BLOCK_PAGES, -1).unbind(1)
            with LiveBytes([piece, *pool.arenas]) as decoding:
                whole = [copies.decode(side.flatten(0, 1)) for side in sides]
            assert sum(side.nbytes for side in whole) <= decoding.peak
            decoded = decoding.peak
    finally:
        writer.shutdown()
    taken = writer._staged.nbytes + live.peak + disk.threads * piece.nbytes + decoded  # one piece at a time
    planned_bytes = planned["blocks of contexts"]
    assert LEAST_SHARE * planned_bytes <= taken <= planned_bytes + IDS_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_take_what_is_planned(dtype: torch.dtype) -> None:
    rows, hidden = 48, torch.randn(48, TINY.hidden).to(dtype)
    weight = torch.randn(TINY.vocab_size, TINY.hidden).to(dtype)
    with LiveBytes([hidden, weight]) as live:
        logits_linear(hidden, weight)
    assert live.peak == sum_bytes(logits_arrays(TINY, rows, dtype.itemsize, on_cuda=False).values())


def test_logits_of_several_devices_take_what_is_planned_where_they_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    share = split_over(TINY, 2)
    rows = max(LOGITS_BLOCK_ROWS, SLOTS)
    monkeypatch.setattr(ranks, "_gather", lambda parts, own: parts.view(2, *own.shape).copy_(own))
    joining = ProcessRanks.__new__(ProcessRanks)
    joining.rank, joining.count = 0, 2
    own = torch.randn(rows, share.logit_rows)
    with LiveBytes([own]) as live:
        joined = joining.join(own)
    assert torch.equal(joined, torch.cat([own, own], 1))
    planned = bytes_by_name(replace(DEMAND, shape=share))
    assert live.peak == planned["gathered logits"]
    assert "gathered logits" not in bytes_by_name(DEMAND)


def test_a_device_of_several_has_its_share_of_the_rows_in_pages() -> None:
    share = split_over(TINY, 2)
    pool = KvPool(share, PoolShape(PAGES, (), PAGE, SLOTS, CONTEXT, torch.float32), CPU)
    taken = sum(arena.nbytes for arena in pool.arenas)
    assert taken == PAGES * replace(DEMAND, shape=share).page_bytes == PAGES * DEMAND.page_bytes // 2


def plan_8b(**gpu: float) -> MemoryPlan:
    return plan_memory(
        MemoryRequest(
            named_shape("llama-3.1-8b"),
            GpuConfig.model_validate(gpu),
            host=None,
            kept=None,
            states=(),
            sizes=PlannedSizes(8, 2048, 4096, None),
            machine=CARD,
        )
    )


def test_matrices_of_few_bits_are_counted_as_they_are_held_and_one_of_them_widened() -> None:
    shape = rounded(replace(TINY, tied_embeddings=False), "int4", "weights")
    on_cpu = replace(DEMAND, shape=shape)
    unpacked = {item.name: item for item in replace(on_cpu, unpacked="reason").fixed_items()}
    assert unpacked["weights"].bytes == 4 * shape.num_weights
    assert unpacked["weights"].note.endswith("unpacked: reason")
    assert "widened matrices" not in unpacked
    on_gpu = {item.name: item.bytes for item in replace(on_cpu, device="cuda").fixed_items()}
    for name in ("weights", "widened matrices"):  # of which the CPU has no second for large batches
        assert {item.name: item.bytes for item in replace(on_cpu, max_running=300).fixed_items()}[name] == on_gpu[name]
    packed = allocate_weights(shape, torch.float32, torch.device("meta"))
    layers = [getattr(layer, name) for layer in packed.layers for name in layer.__dataclass_fields__]
    tensors = (*layers, packed.final_norm, packed.logits, packed.embedding)
    assert on_gpu["weights"] == sum(tensor.nbytes for tensor in tensors if tensor is not None)
    widest = 4 * shape.hidden * (3 * shape.intermediate + (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.dim)
    assert on_gpu["widened matrices"] == widest
    for running, count in ((MOST_PACKED_TOKENS, 1), (MOST_PACKED_TOKENS + 1, 2), (300, 2)):
        items = replace(on_cpu, device="cuda", max_running=running).fixed_items()
        assert sum(item.bytes for item in items if item.name == "widened matrices") == count * widest


def test_a_limit_of_gib_is_in_gib() -> None:
    assert plan_8b(memory_limit_gib=20.0).limit_bytes["gpu"] == 20 * 2**30
    plan = plan_8b(kv_cache_gib=1.5)
    pages = next(item.bytes for item in plan.items if item.name == "KV pages")
    page_bytes = pages // plan.num_pages
    assert 0 <= 1.5 * 2**30 - pages < page_bytes


def test_without_a_limit_a_card_keeps_something_for_others() -> None:
    assert 0.9 <= plan_8b().limit_bytes["gpu"] / CARD.gpu.memory_bytes <= 0.95
    assert plan_8b().limit_bytes["host"] == CARD.memory_bytes
