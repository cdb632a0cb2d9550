"""Stored rows, their way back and runs scattered to the host, against float64 oracles, over poisoned memory."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu.operations.arguments import INTERPRETED
from gpu.operations.host_rows.int4_rows import restore_int4, store_int4
from gpu.operations.host_rows.offload_rows import centre_of, key_scale_of, offload_rows, value_scale_of
from gpu.operations.host_rows.restore_rows import restore_rows
from gpu.operations.host_rows.scatter_runs import scatter_runs
from tests.gpu.kernel_oracles import DEVICES, DTYPES, KERNEL_TOLERANCE, distance, random, wide
from tests.int4_reference import pack, unpack, width_of
from tests.tolerances import INT8_HALF_STEP, KERNEL_BFLOAT16, KERNEL_FLOAT32

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("dtype", DTYPES)]
SHAPES = [(1, 1, 64), (2, 33, 128), (8, 70, 96), (2, 8193, 64)]
SMALL = SHAPES[1]


def shifted(generator: np.random.Generator, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> Tensor:
    """Rows `[heads, tokens, dim]` around means of a few units, in the middle of a poisoned buffer."""
    heads, tokens, dim = shape
    room = torch.full((heads, tokens + 5, dim + 8), float("nan"), dtype=dtype, device=device)
    room[:, 2 : tokens + 2, :dim] = random(generator, shape, dtype, device) + random(
        generator, (heads, 1, dim), dtype, device
    ).mul_(3)
    return room[:, 2 : tokens + 2, :dim]


@dataclass
class Rows:
    keys: Tensor
    values: Tensor
    centre: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None
    room: Tensor

    @property
    def middles(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.centre, self.key_scale, self.value_scale

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        tokens = self.keys.shape[1]
        return self.room[0, :, 3 : tokens + 3], self.room[1, :, 3 : tokens + 3]


def make_rows(shape: tuple[int, int, int], is_int8: bool, dtype: torch.dtype, device: str) -> Rows:
    generator = np.random.default_rng(shape[1])
    keys, values = (shifted(generator, shape, dtype, device) for _ in range(2))
    centre = centre_of(keys)
    scales = (key_scale_of(keys, centre), value_scale_of(values)) if is_int8 else (None, None)
    kind = torch.int8 if is_int8 else torch.bfloat16
    room = torch.full((2, shape[0], shape[1] + 4, shape[2]), -128 if is_int8 else float("nan"), dtype=kind)
    return Rows(keys, values, centre, *scales, room.to(device))


@pytest.mark.parametrize("shape", [*SHAPES, (1, 70_000, 64)])
def test_the_centre_is_the_mean_of_the_keys(shape, dtype, device):
    keys = shifted(np.random.default_rng(0), shape, dtype, device)
    assert distance(centre_of(keys), wide(keys).mean(1)) < KERNEL_FLOAT32
    one_twice = (wide(keys).sum(1) + wide(keys)[:, 0]) / shape[1]
    assert distance(centre_of(keys), one_twice) > KERNEL_FLOAT32


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_rows_are_centred_keys_and_values_as_they_are(shape, dtype, device):
    rows = make_rows(shape, False, dtype, device)
    stored_keys, stored_values = rows.stored
    offload_rows(rows.keys, rows.values, *rows.middles, stored_keys, stored_values)
    centred = wide(rows.keys) - wide(rows.centre)[:, None]
    bound = np.linalg.norm(wide(rows.centre)) * KERNEL_FLOAT32  # one token is its own centre: nothing is left
    assert np.linalg.norm(wide(stored_keys) - centred) <= np.linalg.norm(centred) * KERNEL_BFLOAT16 + bound
    assert distance(stored_values, wide(rows.values)) < KERNEL_BFLOAT16
    assert distance(stored_values, np.roll(wide(rows.values), 1, axis=2)) > KERNEL_BFLOAT16
    outside = torch.ones(rows.room.shape, dtype=torch.bool)
    outside[:, :, 3 : shape[1] + 3] = False
    assert rows.room.cpu()[outside].isnan().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_rows_are_the_nearest_steps_of_scales_that_reach_the_largest(shape, dtype, device):
    rows = make_rows(shape, True, dtype, device)
    stored_keys, stored_values = rows.stored
    offload_rows(rows.keys, rows.values, *rows.middles, stored_keys, stored_values)
    centred = wide(rows.keys) - wide(rows.centre)[:, None]
    if shape[1] > 1:
        assert distance(rows.key_scale, np.abs(centred).max((1, 2)) / 127) < KERNEL_FLOAT32
        steps = centred / wide(rows.key_scale)[:, None, None]
        assert np.abs(wide(stored_keys) - steps).max() < INT8_HALF_STEP
        assert np.abs(wide(stored_keys) - steps[:, ::-1]).max() > INT8_HALF_STEP
    else:
        assert np.abs(wide(stored_keys) * wide(rows.key_scale)[:, None, None]).max() < KERNEL_FLOAT32
    assert distance(rows.value_scale, np.abs(wide(rows.values)).max(1) / 127) < KERNEL_FLOAT32
    steps = wide(rows.values) / wide(rows.value_scale)[:, None]
    assert np.abs(wide(stored_values) - steps).max() < INT8_HALF_STEP
    assert (rows.room[:, :, :3] == -128).all()
    assert (rows.room[:, :, shape[1] + 3 :] == -128).all()


def test_rows_outside_a_given_scale_are_clamped(dtype, device):
    rows = make_rows(SMALL, True, dtype, device)
    scales = rows.key_scale / 4, rows.value_scale / 4
    stored_keys, stored_values = rows.stored
    offload_rows(rows.keys, rows.values, rows.centre, *scales, stored_keys, stored_values)
    centred = wide(rows.keys) - wide(rows.centre)[:, None]
    for stored, steps in ((stored_keys, centred / wide(scales[0])[:, None, None]),
                          (stored_values, wide(rows.values) / wide(scales[1])[:, None])):  # fmt: skip
        assert np.abs(wide(stored) - steps.clip(-127, 127)).max() < INT8_HALF_STEP
        assert (wide(stored) == 127).any()
        assert (wide(stored) == -127).any()


def test_rows_of_zeros_are_zeros(dtype, device):
    zeros = torch.zeros(SMALL, dtype=dtype, device=device)
    centre = centre_of(zeros)
    stored = torch.full((2, *SMALL), -128, dtype=torch.int8, device=device)
    offload_rows(zeros, zeros, centre, key_scale_of(zeros, centre), value_scale_of(zeros), *stored)
    assert not stored.any()


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_restored_rows_are_scale_times_stored_and_the_centre(shape, is_int8, dtype, device):
    rows = make_rows(shape, is_int8, dtype, device)
    stored_keys, stored_values = rows.stored
    offload_rows(rows.keys, rows.values, *rows.middles, stored_keys, stored_values)
    key_scale = wide(rows.key_scale)[:, None, None] if is_int8 else 1.0
    value_scale = wide(rows.value_scale)[:, None] if is_int8 else 1.0
    heads, tokens, dim = shape
    staging = torch.full((2, heads, tokens + 9, dim), float("nan"), dtype=dtype, device=device)
    keys, values = staging[:, :, 4 : tokens + 4]
    restore_rows(stored_keys, stored_values, *rows.middles, keys, values)
    wanted = key_scale * wide(stored_keys) + wide(rows.centre)[:, None]
    assert distance(keys, wanted) < KERNEL_TOLERANCE[dtype]
    assert distance(keys, wanted + wide(rows.centre)[:, None]) > KERNEL_TOLERANCE[dtype]
    assert distance(values, value_scale * wide(stored_values)) < KERNEL_TOLERANCE[dtype]
    assert staging[:, :, :4].isnan().all()
    assert staging[:, :, tokens + 4 :].isnan().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_int4_rows_are_the_nearest_steps_of_their_groups_and_come_back(shape, dtype, device):
    rows = make_rows(shape, False, dtype, device)
    heads, tokens, dim = shape
    room = torch.full((2, heads, tokens + 4, width_of(dim)), 0xFF, dtype=torch.uint8, device=device)
    stored = room[:, :, 3 : tokens + 3]
    offload_rows(rows.keys, rows.values, *rows.middles, *stored)
    sources = wide(rows.keys) - wide(rows.centre)[:, None], wide(rows.values)
    for got, source in zip(stored.cpu().numpy(), sources, strict=True):
        groups, found = (one.reshape(heads, tokens, -1, 32) for one in (source, unpack(got, dim)))
        bound = 0.52 * np.ptp(groups, -1) / 15 + 2**-8 * np.abs(groups).max(-1) + 1e-6
        assert (np.abs(found - groups) <= bound[..., None]).all()
        if tokens > 1:
            assert (np.abs(np.roll(found, 1, 1) - groups) > bound[..., None]).any()
            differs = unpack(got, dim) != unpack(pack(source), dim)
            assert INTERPRETED or differs.mean() < 0.01  # float32 rounds another way; interpreted, bf16 cuts off
    assert (room[:, :, :3] == 0xFF).all()
    assert (room[:, :, tokens + 3 :] == 0xFF).all()
    staging = torch.full((2, heads, tokens + 9, dim), float("nan"), dtype=dtype, device=device)
    restore_rows(*stored, *rows.middles, *staging[:, :, 4 : tokens + 4])
    keys, values = (unpack(one, dim) for one in stored.cpu().numpy())
    wanted = keys + wide(rows.centre)[:, None]
    assert distance(staging[0, :, 4 : tokens + 4], wanted) < KERNEL_TOLERANCE[dtype]
    assert distance(staging[0, :, 4 : tokens + 4], wanted + wide(rows.centre)[:, None]) > KERNEL_TOLERANCE[dtype]
    assert distance(staging[1, :, 4 : tokens + 4], values) < KERNEL_TOLERANCE[dtype]
    assert staging[:, :, :4].isnan().all()
    assert staging[:, :, tokens + 4 :].isnan().all()


def test_int4_rows_that_are_all_alike_keep_what_bfloat16_keeps(dtype, device):
    alike = torch.full((1, 3, 64), 0.3, dtype=dtype, device=device)
    alike[0, 1] = 0.0
    stored = torch.full((1, 3, width_of(64)), 0xFF, dtype=torch.uint8, device=device)
    store_int4(alike, None, stored)
    back = torch.empty_like(alike)
    restore_int4(stored, None, back)
    assert (back[0, 1] == 0).all()
    assert (back - alike).abs().max() < 0.3 * 2**-8


@pytest.mark.parametrize(("heads", "inner", "length", "offset"), [(2, 1, 4096, 0), (2, 5, 128, 16), (1, 3, 7, 1)])
def test_runs_are_scattered_to_each_layers_place(heads, inner, length, offset, dtype, device):
    layers = 3
    source = random(np.random.default_rng(0), (layers, heads, inner, length), dtype, device)
    shape = (layers, heads, inner + 1, length + 32)
    room = torch.full(shape, float("nan"), dtype=dtype, pin_memory=device == "cuda")
    scatter_runs(source, [layer[:, :inner, offset : offset + length] for layer in room])
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(room[:, :, :inner, offset : offset + length], source.cpu())
    room[:, :, :inner, offset : offset + length] = float("nan")
    assert room.isnan().all()


def test_wrong_arguments_are_named(dtype, device):
    rows = make_rows(SMALL, True, dtype, device)
    stored_keys, stored_values = rows.stored
    with pytest.raises(ValueError, match="offload_rows: one of key_scale and value_scale is None"):
        offload_rows(rows.keys, rows.values, rows.centre, rows.key_scale, None, stored_keys, stored_values)
    with pytest.raises(ValueError, match=r"offload_rows: stored_keys is .*int8.*wanted .*bfloat16"):
        offload_rows(rows.keys, rows.values, rows.centre, None, None, stored_keys, stored_values)
    with pytest.raises(ValueError, match=r"restore_rows: keys is \(2, 32, 128\)"):
        restore_rows(stored_keys, stored_values, *rows.middles, rows.keys[:, 1:], rows.values)
