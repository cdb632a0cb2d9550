"""Rows that are offloaded through `RowTransfer`, layer by layer or in offload blocks, and come back.

On a machine without a GPU the device's way through buffers is taken as well, by CPU tensors.
"""

import numpy as np
import pytest
import torch

from gpu.host.footprint import PIECE_ROWS
from gpu.host.row_transfer import RowTransfer, _Buffers
from gpu.methods.sampled.codes import Codes
from gpu.methods.sampled.encode import arrange
from gpu.methods.sampled.hyperplanes import draw_projections, encode_reference
from tests.gpu.kernel_oracles import DEVICES, distance, wide
from tests.int4_reference import unpack
from tests.tolerances import INT8_HALF_STEP, KERNEL_BFLOAT16, KERNEL_FLOAT32, SAME_CODES
from transfer.copies import Streams
from transfer.host_tier import LayerRows
from transfer.tier_shape import TierShape

BITS, TABLES, MARK = 10, 30, 40_404
WAYS = [pytest.param(("cpu", False), id="cpu"), pytest.param(("cpu", True), id="cpu-through-buffers")]
WAYS += [pytest.param((device.values[0], True), id="cuda", marks=device.marks) for device in DEVICES[1:]]


def make_row_transfer(way: tuple[str, bool], kv_heads: int, dim: int, rows: str, tables: int = TABLES) -> RowTransfer:
    name, is_buffered = way
    device = torch.device(name)
    shape = TierShape(tuple(range(8)), 4 * kv_heads, kv_heads, dim, rows, BITS, tables)
    dtype = torch.bfloat16 if name == "cuda" else torch.float32
    encode = Codes(arrange(draw_projections(dim, BITS, tables, 0, dtype, device))).encode_keys if tables else None
    row_transfer = RowTransfer(shape, encode, device, Streams(device))
    if is_buffered and name == "cpu":
        row_transfer._down, row_transfer._up = _Buffers(shape, tables, device), _Buffers(shape, 0, device)
    return row_transfer


class Store:
    """Host memory of some layers, `capacity` tokens each, poisoned; `rows` are views of tokens `[begin, end)`."""

    def __init__(self, row_transfer: RowTransfer, layers: int, capacity: int) -> None:
        shape = row_transfer.shape
        is_int8, is_pinned = shape.rows == "int8", row_transfer.device.type == "cuda"

        def full(size: tuple[int, ...], value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((layers, shape.num_kv_heads, *size), value, dtype=dtype, pin_memory=is_pinned)

        row = {"int8": (torch.int8, -128), "int4": (torch.uint8, 0xFF), "bfloat16": (torch.bfloat16, float("nan"))}
        dtype, poison = row[shape.rows]
        self.keys, self.values = (full((capacity, shape.row_width), poison, dtype) for _ in range(2))
        self.codes = full((shape.num_tables, capacity), MARK, torch.uint16) if shape.num_tables else None
        self.centre = full((shape.dim,), float("nan"), torch.float32)
        self.key_scale = full((), float("nan"), torch.float32) if is_int8 else None
        self.value_scale = full((shape.dim,), float("nan"), torch.float32) if is_int8 else None

    def rows(self, layer: int, begin: int, end: int) -> LayerRows:
        return LayerRows(
            self.keys[layer, :, begin:end],
            self.values[layer, :, begin:end],
            None if self.codes is None else self.codes[layer, :, :, begin:end],
            self.centre[layer],
            None if self.key_scale is None else self.key_scale[layer],
            None if self.value_scale is None else self.value_scale[layer],
        )

    def restored(self) -> tuple[np.ndarray, np.ndarray]:
        """What the arrays mean, float64 `[layers, kv_heads, capacity, dim]`."""
        key_step, value_step = 1.0, 1.0
        if self.key_scale is not None and self.value_scale is not None:
            key_step, value_step = wide(self.key_scale)[:, :, None, None], wide(self.value_scale)[:, :, None]
        if self.keys.dtype == torch.uint8:
            keys, values = (unpack(one.numpy(), self.centre.shape[-1]) for one in (self.keys, self.values))
            return keys + wide(self.centre)[:, :, None], values
        return key_step * wide(self.keys) + wide(self.centre)[:, :, None], value_step * wide(self.values)


def make_source(row_transfer: RowTransfer, layers: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys around means of a few units, and values: `[layers, kv_heads, tokens, dim]`, strided, in a poisoned room."""
    shape, generator = row_transfer.shape, torch.Generator().manual_seed(tokens)
    size = (layers, shape.num_kv_heads, tokens, shape.dim)
    dtype = torch.bfloat16 if row_transfer.device.type == "cuda" else torch.float32
    room = torch.full((2, *size[:2], tokens + 7, shape.dim), float("nan"), dtype=dtype, device=row_transfer.device)
    means = 3 * torch.randn(layers, shape.num_kv_heads, 1, shape.dim, generator=generator)
    room[0, :, :, 5 : tokens + 5] = (torch.randn(size, generator=generator) + means).to(room)
    room[1, :, :, 5 : tokens + 5] = torch.randn(size, generator=generator).to(room)
    return room[0, :, :, 5 : tokens + 5], room[1, :, :, 5 : tokens + 5]


def assert_sent(store: Store, row_transfer: RowTransfer, keys, values, begin: int, end: int) -> None:
    """Rows `[begin, end)` of the store are the source within what is lost by storing, codes are of the stored keys."""
    got_keys, got_values = (rows[:, :, begin:end] for rows in store.restored())
    if store.keys.dtype == torch.uint8:
        for got, source, less in ((got_keys, keys, wide(store.centre)[:, :, None]), (got_values, values, 0.0)):
            assert_within_steps(got - less, wide(source) - less)
    elif store.key_scale is None or store.value_scale is None:
        centred = wide(keys) - wide(store.centre)[:, :, None]
        error = np.linalg.norm(got_keys - wide(keys))
        assert error <= KERNEL_BFLOAT16 * np.linalg.norm(centred) + KERNEL_FLOAT32 * np.linalg.norm(wide(keys))
        assert np.linalg.norm(got_values - wide(values)) < KERNEL_BFLOAT16 * np.linalg.norm(wide(values))
    else:
        for got, source, step in ((got_keys, keys, wide(store.key_scale)[:, :, None, None]),
                                  (got_values, values, wide(store.value_scale)[:, :, None])):  # fmt: skip
            rounding = KERNEL_FLOAT32 * np.abs(wide(source)).max()
            assert (np.abs(got - wide(source)) <= INT8_HALF_STEP * step + rounding).all()
    assert distance(keys.roll(1, 2) if end - begin > 1 else keys + 1, got_keys) > KERNEL_BFLOAT16
    if store.codes is None:
        return
    projections = draw_projections(row_transfer.shape.dim, BITS, TABLES, 0, torch.float32, torch.device("cpu"))
    if row_transfer.device.type == "cuda":
        projections = projections.to(torch.device("cpu"), torch.bfloat16)
    stored = store.keys[:, :, begin:end].float()
    if store.keys.dtype == torch.uint8:
        stored = torch.from_numpy(got_keys - wide(store.centre)[:, :, None]).float()
        if row_transfer._down is not None:
            stored = stored.bfloat16().float()  # as they pass through the buffer
    wanted = encode_reference(stored, projections).transpose(2, 3).to(torch.int32)
    got = store.codes[..., begin:end].to(torch.int32)
    assert (got == wanted).float().mean() > SAME_CODES
    if end - begin > 1:  # a lone token is its own centre: nothing is left to encode
        assert (got.roll(1, 2) == wanted).float().mean() < SAME_CODES


def assert_within_steps(got: np.ndarray, rows: np.ndarray) -> None:
    """Each number is off by half a fifteenth of what its 32 dimensions span, and by what bf16 loses of these steps."""
    groups = rows.reshape(*rows.shape[:-1], -1, 32)
    span, largest = np.ptp(groups, -1), np.abs(groups).max(-1)
    bound = (INT8_HALF_STEP + 0.1) * span / 15 + 2**-8 * largest + 1e-5
    assert (np.abs(got.reshape(groups.shape) - groups) <= bound[..., None]).all()
    if span.max() > 0.1:
        assert not (np.abs(np.roll(got, 1, -1).reshape(groups.shape) - groups) <= bound[..., None]).all()


def assert_untouched(store: Store, begin: int, end: int) -> None:
    for array, axis in ((store.keys, 2), (store.values, 2), (store.codes, 3)):
        if array is None:
            continue
        for part in (array.narrow(axis, 0, begin), array.narrow(axis, end, array.shape[axis] - end)):
            if part.dtype == torch.bfloat16:
                assert part.isnan().all()
            else:
                assert (part.to(torch.int32) == {torch.int8: -128, torch.uint8: 0xFF}.get(part.dtype, MARK)).all()


@pytest.mark.parametrize("rows", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize(("kv_heads", "tokens", "dim"), [(1, 1, 64), (2, 130, 128), (8, 300, 64), (2, 8193, 64)])
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_is_offloaded_and_reloaded(kv_heads, tokens, dim, rows, way):
    row_transfer = make_row_transfer(way, kv_heads, dim, rows)
    store = Store(row_transfer, 1, tokens)
    keys, values = make_source(row_transfer, 1, tokens)
    row_transfer.send(keys, values, [store.rows(0, 0, tokens)], False).done.synchronize()
    assert distance(store.centre, wide(keys).mean(2)) < KERNEL_FLOAT32
    assert_sent(store, row_transfer, keys, values, 0, tokens)
    staging = torch.full((2, kv_heads, tokens + 9, dim), float("nan"), dtype=keys.dtype, device=keys.device)
    into = staging[:, :, 4 : tokens + 4]
    halves = [store.rows(0, begin, end) for begin, end in ((0, tokens // 3), (tokens // 3, tokens)) if begin < end]
    row_transfer.streams.wait_for(row_transfer.load(halves, *into))
    for got, wanted in zip(into, store.restored(), strict=True):
        assert distance(got, wanted[0]) < (KERNEL_BFLOAT16 if keys.dtype == torch.bfloat16 else KERNEL_FLOAT32)
    assert staging[:, :, :4].isnan().all()
    assert staging[:, :, tokens + 4 :].isnan().all()


@pytest.mark.parametrize("rows", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("way", WAYS)
def test_a_second_offload_block_joins_the_first_under_its_centre_and_scales(rows, way):
    row_transfer = make_row_transfer(way, 2, 64, rows)
    store = Store(row_transfer, 3, 512)
    keys, values = make_source(row_transfer, 3, 256)
    send_offload_blocks(row_transfer, store, keys[:, :, :128], values[:, :, :128], 128, False)
    assert distance(store.centre, wide(keys[:, :, :128]).mean(2)) < KERNEL_FLOAT32
    middles = [None if part is None else part.clone() for part in (store.centre, store.key_scale, store.value_scale)]
    low = keys[:, :, 128:] * 0.25 + store.centre[:, :, None].to(keys) * 0.75  # no further from the centre
    send_offload_blocks(row_transfer, store, low, values[:, :, 128:] * 0.25, 256, True)
    for part, before in zip((store.centre, store.key_scale, store.value_scale), middles, strict=True):
        assert part is before is None or torch.equal(part, before)
    assert_sent(store, row_transfer, keys[:, :, :128], values[:, :, :128], 128, 256)
    assert_sent(store, row_transfer, low, values[:, :, 128:] * 0.25, 256, 384)
    assert_untouched(store, 128, 384)


def send_offload_blocks(row_transfer: RowTransfer, store: Store, keys, values, begin: int, has_centre: bool) -> None:
    layers, _, tokens, _ = keys.shape
    views = [store.rows(layer, begin, begin + tokens) for layer in range(layers)]
    sent = row_transfer.send(keys, values, views, has_centre)
    row_transfer.streams.wait_for(sent.read)
    sent.done.synchronize()


@pytest.mark.parametrize("piece_rows", [100, 250, 450])  # a head; two heads; two layers of two heads
@pytest.mark.parametrize("run_bytes", [1, 10**9])
@pytest.mark.parametrize("way", WAYS)
def test_pieces_and_the_way_runs_are_copied_change_nothing(piece_rows, run_bytes, way, monkeypatch):
    row_transfer = make_row_transfer(way, 2, 64, "int8")
    keys, values = make_source(row_transfer, 3, 100)
    wanted, got = Store(row_transfer, 3, 160), Store(row_transfer, 3, 160)
    send_offload_blocks(row_transfer, wanted, keys, values, 10, False)
    monkeypatch.setattr("gpu.host.row_transfer.PIECE_ROWS", piece_rows)
    monkeypatch.setattr("gpu.host.row_transfer.COPIED_RUN_BYTES", run_bytes)
    send_offload_blocks(row_transfer, got, keys, values, 10, False)
    for name in ("keys", "values", "codes", "centre", "key_scale", "value_scale"):
        assert torch.equal(getattr(got, name).nan_to_num(), getattr(wanted, name).nan_to_num()), name
    staging = torch.empty(2, 2, 100, 64, dtype=keys.dtype, device=keys.device)
    row_transfer.load([got.rows(1, 10, 110)], *staging).synchronize()
    assert distance(staging[0], wanted.restored()[0][1, :, 10:110]) < KERNEL_BFLOAT16


@pytest.mark.parametrize("way", WAYS)
def test_a_context_that_is_not_sampled_gets_no_codes(way):
    for tables in (0, TABLES):
        row_transfer = make_row_transfer(way, 2, 64, "bfloat16", tables)
        store = Store(row_transfer, 1, 50)
        store.codes = None
        keys, values = make_source(row_transfer, 1, 50)
        send_offload_blocks(row_transfer, store, keys, values, 0, False)
        assert_sent(store, row_transfer, keys, values, 0, 50)


@pytest.mark.parametrize("way", WAYS)
def test_the_source_may_be_overwritten_once_it_is_read(way):
    row_transfer = make_row_transfer(way, 8, 128, "bfloat16")
    store = Store(row_transfer, 1, 8192)
    keys, values = make_source(row_transfer, 1, 8192)
    kept = keys.clone(), values.clone()
    sent = row_transfer.send(keys, values, [store.rows(0, 0, 8192)], False)
    row_transfer.streams.wait_for(sent.read)
    keys.fill_(float("nan"))
    values.fill_(float("nan"))
    sent.done.synchronize()
    assert_sent(store, row_transfer, *kept, 0, 8192)


@pytest.mark.parametrize("way", WAYS)
def test_a_row_transfer_is_given_rooms_that_fit(way):
    row_transfer = make_row_transfer(way, 2, 64, "bfloat16")
    store = Store(row_transfer, 1, 50)
    keys, values = make_source(row_transfer, 1, 50)
    with pytest.raises(AssertionError, match="50 rows for a room of 49"):
        row_transfer.load([store.rows(0, 0, 50)], keys[0, :, :49], values[0, :, :49])
    with pytest.raises(AssertionError, match=f"0 tokens of a segment, wanted 1 to {PIECE_ROWS}"):
        row_transfer.send(keys[:, :, :0], values[:, :, :0], [store.rows(0, 0, 0)], False)


@pytest.mark.parametrize(("rows", "element_bytes"), [("bfloat16", 2), ("int8", 1), ("int4", 0.75)])
def test_buffers_take_what_the_memory_plan_counts(rows, element_bytes):
    down, up = (
        _Buffers(make_row_transfer(("cpu", False), 2, 64, rows).shape, tables, torch.device("cpu"))
        for tables in (TABLES, 0)
    )
    taken = sum(buffer.nbytes for buffers in (down, up) for buffer in (buffers._rows, buffers._codes))
    assert taken == PIECE_ROWS * (4 * 64 * element_bytes + 2 * TABLES)
    assert down._widened.nbytes == (PIECE_ROWS * 64 * 2 if rows == "int4" else 0)
    assert up._widened.nbytes == 0
