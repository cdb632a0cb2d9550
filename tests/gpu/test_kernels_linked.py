"""Attention of the device to rows in host memory against a float64 oracle: shared chunks, int8 rows, heads left out."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu.operations.host_rows import chunk_columns as linked
from gpu.operations.host_rows.chunk_columns import CHUNKS, COLUMNS
from gpu.operations.host_rows.linked_attention import LinkedChunks, linked_attention
from tests.gpu.kernel_oracles import DEVICES, DTYPES, KERNEL_TOLERANCE, attend, distance, random, wide

DIM, KV_HEADS, GROUP = 64, 2, 4
HEADS, SCALE = KV_HEADS * GROUP, DIM**-0.5
SIZES = (1, 70, 64, 130)  # of a context's chunks
LEADERS = [0, 0, 0, -1, 4]  # rows 0 to 2 read together, row 3 nothing, row 4 another context


@dataclass
class Stored:
    """A context in host memory, `[kv_heads, tokens, dim]`: as it lies there, and in float64."""

    arrays: list[Tensor]
    keys: np.ndarray
    values: np.ndarray


def store(generator: np.random.Generator, tokens: int, is_int8: bool, device: str) -> Stored:
    """Rows whose keys have a centre, where the device can read them; a token behind the last is NaN, or 127."""
    shape = (KV_HEADS, tokens + 1, DIM)
    made = [torch.from_numpy(generator.standard_normal(shape)) for _ in range(2)]
    if is_int8:
        rows = [(40 * one).round().clamp(-127, 127).to(torch.int8) for one in made]
    else:
        rows = [one.bfloat16() for one in made]
    for one in rows:
        one[:, -1] = 127 if is_int8 else torch.nan
    centre = torch.from_numpy(generator.standard_normal((KV_HEADS, DIM))).float()
    key_scale = torch.full((KV_HEADS,), 0.03) + torch.arange(KV_HEADS) * 0.01
    value_scale = torch.from_numpy(generator.uniform(0.01, 0.04, (KV_HEADS, DIM))).float()
    arrays = [*rows, centre, key_scale, value_scale]
    if device == "cuda":
        arrays = [one.pin_memory() for one in arrays]
    keys, values = (one[:, :tokens].double() for one in rows)
    if is_int8:
        keys, values = keys * key_scale[:, None, None].double(), values * value_scale[:, None].double()
    keys = keys + centre[:, None].double()
    return Stored(arrays, keys.numpy(), values.numpy())


def describe(stored: Stored, into: Tensor) -> None:
    keys, values, centre, key_scale, value_scale = stored.arrays
    begin = 0
    for chunk, tokens in zip((0, 3, 4, CHUNKS - 1), SIZES, strict=True):
        for at, rows in ((linked.KEYS, keys), (linked.VALUES, values)):
            into[at, chunk] = rows[:, begin:].data_ptr()
            into[at + 1, chunk], into[at + 2, chunk] = (rows.element_size() * one for one in rows.stride()[:2])
        into[linked.CENTRE, chunk] = centre.data_ptr()
        into[linked.KEY_SCALE, chunk], into[linked.VALUE_SCALE, chunk] = key_scale.data_ptr(), value_scale.data_ptr()
        into[linked.TOKENS, chunk] = tokens
        begin += tokens


@pytest.mark.parametrize("has_wanted", [False, True])
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_read_together_have_each_its_own_attention(
    device: str, dtype: torch.dtype, is_int8: bool, has_wanted: bool
) -> None:
    generator = np.random.default_rng(3)
    contexts = {leader: store(generator, sum(SIZES), is_int8, device) for leader in (0, 4)}
    query = random(generator, (len(LEADERS), HEADS, DIM), dtype, device)
    chunks = torch.full((len(LEADERS), COLUMNS, CHUNKS), 1 << 40, dtype=torch.int64)
    for row in range(len(LEADERS)):
        chunks[row, linked.TOKENS] = 0 if row in contexts else 9  # of rows that do not lead nothing is read
    for leader, stored in contexts.items():
        describe(stored, chunks[leader])
    together = torch.tensor([3, 0, 0, 0, 1], dtype=torch.int32)
    leaders = torch.tensor(LEADERS, dtype=torch.int32)
    wanted = torch.ones(len(LEADERS), HEADS, dtype=torch.uint8)
    wanted[1, :5], wanted[4, GROUP:] = 0, 0
    numbers = len(LEADERS) * HEADS * CHUNKS
    work = tuple(torch.full((count,), torch.nan, device=device) for count in (numbers * DIM, numbers))
    out, lse = linked_attention(
        query, LinkedChunks(chunks.to(device), together.to(device), leaders.to(device)), SCALE, KV_HEADS, is_int8,
        wanted.to(device) if has_wanted else None, work,
    )  # fmt: skip
    for row, leader in enumerate(LEADERS):
        reads = wanted[row].bool().numpy() if has_wanted else np.ones(HEADS, bool)
        if leader < 0:
            reads[:] = False
        assert (wide(lse[row])[~reads] == -np.inf).all()
        assert (wide(out[row])[~reads] == 0).all()
        if leader >= 0:
            stored = contexts[leader]
            want = attend(wide(query[row]), stored.keys.swapaxes(0, 1), stored.values.swapaxes(0, 1), SCALE)
            assert distance(out[row][torch.from_numpy(reads)], want[0][reads]) < KERNEL_TOLERANCE[dtype]
            assert np.abs(wide(lse[row])[reads] - want[1][reads]).max() < KERNEL_TOLERANCE[dtype] * 10


def test_a_wrong_shape_is_refused_by_name() -> None:
    query = torch.zeros(1, HEADS, DIM)
    chunks, one = torch.zeros(1, COLUMNS, CHUNKS, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    work = torch.zeros(1), torch.zeros(1)
    with pytest.raises(ValueError, match="linked_attention: leaders is"):
        linked_attention(query, LinkedChunks(chunks, one, one.long()), SCALE, KV_HEADS, False, None, work)
