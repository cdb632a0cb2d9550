"""Experts of few bits computed on the CPU as they lie there: a float64 oracle of every format, and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu.experts import HostExperts
from tests.cpu.packed_experts import CPU, FORMATS, PLAIN, Format, draw_experts, draw_rows, oracle, with_biases
from tests.cpu.test_experts import TAKEN, answer, fill, off
from tests.gpu.packed_oracle import e2m1
from tests.narrow_vectors import run_with_narrow_vectors, where_vectors_are_wide
from tests.tolerances import HOST_EXPERTS_FLOAT32, HOST_EXPERTS_INTEGERS, HOST_EXPERTS_SHARE
from transfer.expert_exchange import NOT_HERE, LayerExperts, PackedRows, new_expert_slot
from transfer.matrix_rows import columns_of, is_in_integers, num_gains
from transfer.simd import packed_gains
from transfer.simd.packed_gains import fill_gains

COUNT, PER_TOKEN, MOST_ROWS = 11, 4, 9


def sizes_of(asked: Format) -> tuple[int, int]:
    """Rows that are no whole units, where the format allows them."""
    return (512, 256) if asked.run == 256 else (160, 96) if asked.group != 48 else (96, 192)


# Each takes seconds to compile, and differs from another one in the size of its groups alone.
LONG = ("int4 AWQ of 64", "int4 of 48", "int4 of 16", "int8 GPTQ of 32", "FP8 blocks of 32", "FP4 of rows")
# In floats their products are those of `gpu/test_cpu_packed`; in integers others have their numbers, and their groups.
LONG_IN_FLOATS, LONG_IN_INTEGERS = ("Q8_0", "Q5_K", "Q6_K", "NVFP4"), ("int8 rounded", "int8 of rows", "NVFP4")


KINDS = FORMATS | {"plain": PLAIN}
PATHS = pytest.mark.parametrize("in_integers", [False, True], ids=["floats", "integers"])


def most_off(layer: LayerExperts) -> float:
    """Of a path: integers are as far off as tokens of 16 bits make them."""
    is_rounded = layer.in_integers and (is_in_integers(layer.gate_up) or is_in_integers(layer.down))
    return HOST_EXPERTS_INTEGERS if is_rounded else HOST_EXPERTS_FLOAT32


@pytest.mark.parametrize(
    ("name", "in_integers"),
    [
        pytest.param(name, path, marks=[pytest.mark.long] if name in LONG + others else [])
        for name in FORMATS
        for path, others in ((False, LONG_IN_FLOATS), (True, LONG_IN_INTEGERS))
    ],
)
def test_rows_get_what_experts_of_the_numbers_they_stand_for_make_of_them(name: str, in_integers: bool) -> None:
    hidden, width = sizes_of(FORMATS[name])
    experts = draw_experts(FORMATS[name], FORMATS[name], COUNT, hidden, width, in_integers)
    worker, slot = HostExperts([experts.layer], MOST_ROWS, PER_TOKEN, 2), new_expert_slot(MOST_ROWS, hidden, 4, CPU)
    for which in ("one row", "an expert of three, five and two rows", "one expert for all", "a row takes none"):
        ids = np.array(TAKEN[which])
        states, shares = fill(slot, 1, ids)
        answer(worker, slot, 0, len(ids))
        got, wanted = slot.out[: len(ids)].numpy(), oracle(experts, states, ids, shares)
        assert off(got, wanted) < most_off(experts.layer)
        if most_off(experts.layer) == HOST_EXPERTS_INTEGERS:
            assert off(got, wanted) > HOST_EXPERTS_FLOAT32, "power: the two are different products"
        assert bool(slot.out[len(ids) :].isnan().all())
    fewer = ids.copy()
    fewer[2, 3] = NOT_HERE
    assert off(got, oracle(experts, states, fewer, shares)) > HOST_EXPERTS_SHARE, "power: an expert that is left out"
    turned = replace(experts, down=np.roll(experts.down, 1, 2))
    assert off(got, oracle(turned, states, ids, shares)) > HOST_EXPERTS_SHARE, "power: columns one further"


@PATHS
@pytest.mark.parametrize("name", ["MXFP4", "Q4_0"])
def test_experts_with_biases_and_gpt_oss_activation(name: str, in_integers: bool) -> None:
    """Of rows that several take, and of one; gates and ups are beyond their limits, too."""
    experts = with_biases(draw_experts(FORMATS[name], FORMATS[name], COUNT, 160, 96, in_integers))
    worker, slot = HostExperts([experts.layer], MOST_ROWS, PER_TOKEN, 2), new_expert_slot(MOST_ROWS, 160, 4, CPU)
    for which in ("one row", "an expert of three, five and two rows", "a row takes none"):
        ids = np.array(TAKEN[which])
        states, shares = fill(slot, 1, ids)
        answer(worker, slot, 0, len(ids))
        assert off(slot.out[: len(ids)].numpy(), oracle(experts, states, ids, shares)) < most_off(experts.layer)
    got = slot.out[: len(ids)].numpy()
    both = np.array([experts.gate_up[1] @ states[0] + experts.gate_up_bias[1]])
    assert both.min() < -7, "ups or gates below the limit"
    assert both.max() > 7, "and above it"
    for left_out in ("gate_up_bias", "down_bias"):
        without = replace(experts, **{left_out: 0 * getattr(experts, left_out)})
        assert off(got, oracle(without, states, ids, shares)) > HOST_EXPERTS_SHARE, f"power: without {left_out}"
    other = replace(experts, gate_up_bias=None)
    assert off(got, oracle(other, states, ids, shares)) > HOST_EXPERTS_SHARE, "power: SiLU"


@pytest.mark.parametrize("name", ["MXFP4", "Q4_0", "plain"])
def test_a_number_that_is_not_finite_stays_in_its_row_and_zeros_are_zero(name: str) -> None:
    experts = draw_experts(KINDS[name], KINDS[name], COUNT, 160, 96, in_integers=True)
    worker, slot = HostExperts([experts.layer], MOST_ROWS, PER_TOKEN, 2), new_expert_slot(MOST_ROWS, 160, 4, CPU)
    ids = np.array([[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3, 4]])
    states, shares = fill(slot, 1, ids)
    slot.hidden[0, 5], slot.hidden[2] = float("nan"), 0.0
    answer(worker, slot, 0, 3)
    assert bool(slot.out[0].isnan().all())
    assert bool((slot.out[2] == 0).all())
    assert off(slot.out[1:2].numpy(), oracle(experts, states[1:2], ids[1:2], shares[1:2])) < most_off(experts.layer)


def test_exponents_of_fp4_are_powers_of_two() -> None:
    """All bytes but 255, which files may not have; 0 counts as 0."""
    every = torch.arange(256, dtype=torch.uint8).clamp(max=254).view(1, 256)
    gains, _ = gains_of(
        PackedRows("fp4", 32 * 256, 32, 1, torch.zeros(1, 1024, dtype=torch.int32), every, None, None), 0, 1
    )
    wanted = 2.0 ** (every.double().numpy() - 127)
    assert gains[0, 0] == 0
    assert np.array_equal(gains[0, 1:].astype(float), wanted[0, 1:])


@PATHS
@pytest.mark.parametrize(
    ("name", "hidden", "width"),
    [
        ("int4 rounded", 2048, 768),
        ("MXFP4", 2880, 96),  # 2880 of 2880 draws for seconds
        ("MXFP4", 96, 2880),
        ("Q4_0", 32, 32),
        ("FP8 blocks", 256, 384),
        ("Q4_K", 256, 4096),
        ("plain", 2048, 768),
        ("plain", 4096, 96),  # a claim of 4 rows ends in the middle of an expert
    ],
)
def test_widths_of_real_models_and_the_narrowest(name: str, hidden: int, width: int, in_integers: bool) -> None:
    experts = draw_experts(KINDS[name], KINDS[name], 3, hidden, width, in_integers)
    worker, slot = HostExperts([experts.layer], 2, 2, 2), new_expert_slot(2, hidden, 2, CPU)
    ids = np.array([[2, 0], [1, 2]])
    states, shares = fill(slot, 3, ids)
    answer(worker, slot, 0, 2)
    assert off(slot.out.numpy(), oracle(experts, states, ids, shares)) < most_off(experts.layer)


@pytest.mark.parametrize("in_integers", [pytest.param(False, marks=pytest.mark.long), True], ids=["floats", "integers"])
def test_each_layer_and_each_matrix_may_have_a_format_of_its_own(in_integers: bool) -> None:
    """As GGUF files have them: Q4_K beside Q6_K, and plain ones; bytes are those of the layer that asks."""
    row_bytes = {"Q4_K": 128 + 16 + 4, "Q6_K": 256 + 32 + 4, "plain": 512}
    formats = [("Q4_K", "Q6_K"), ("plain", "plain"), None, ("Q4_K", "Q4_K"), ("plain", "Q6_K")]
    drawn = [
        pair and draw_experts(*(KINDS[name] for name in pair), COUNT, 256, 256, in_integers and pair[1] == "Q6_K")
        for pair in formats
    ]
    worker, slot = HostExperts([one and one.layer for one in drawn], 2, 2, 2), new_expert_slot(2, 256, 2, CPU)
    ids, read = np.array([[2, 0], [1, 2]]), 0
    for number in (0, 3, 1, 4, 0):
        experts, pair = drawn[number], formats[number]
        assert experts is not None
        assert pair is not None
        states, shares = fill(slot, 3, ids)
        answer(worker, slot, number, 2)
        assert off(slot.out.numpy(), oracle(experts, states, ids, shares)) < most_off(experts.layer)
        read += 3 * (512 * row_bytes[pair[0]] + 256 * row_bytes[pair[1]])
        assert worker.counts.bytes_read == read
    answer(worker, slot, 2, 2)
    assert bool((slot.out == 0).all()), "a layer that has none here"
    assert worker.counts.bytes_read == read


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([
        *((name, path) for name in ("int4 rounded", "Q4_0", "FP8 rows", "MXFP4", "plain") for path in (False, True)),
        ("int8 rounded", False), ("Q8_0", True),
    ]),
    st.integers(1, MOST_ROWS), st.integers(0, 2**32 - 1), st.floats(0, 1),
)  # fmt: skip
def test_a_rows_sum_is_the_same_in_every_batch_and_on_any_number_of_threads(
    kind: tuple[str, bool], rows: int, seed: int, gone: float
) -> None:
    """To the last bit: whatever others take, and whoever computes."""
    name, in_integers = kind
    experts = draw_experts(KINDS[name], KINDS[name], COUNT, 160, 96, in_integers)
    draw = np.random.default_rng(seed)
    ids = np.array([draw.permutation(COUNT)[:PER_TOKEN] for _ in range(rows)])
    ids[draw.uniform(size=ids.shape) < gone] = NOT_HERE
    slot, sums = new_expert_slot(MOST_ROWS, 160, PER_TOKEN, CPU), []
    for threads in (1, 2):
        worker = HostExperts([experts.layer], MOST_ROWS, PER_TOKEN, threads)
        states, shares = fill(slot, seed, ids)
        answer(worker, slot, 0, rows)
        sums.append(slot.out[:rows].clone())
    assert torch.equal(*sums)
    assert off(sums[0].numpy(), oracle(experts, states, ids, shares)) < most_off(experts.layer)
    last = rows - 1
    slot.hidden[0], slot.shares[0] = torch.tensor(states[last]), torch.tensor(shares[last])
    slot.experts[0] = torch.tensor(ids[last])
    answer(worker, slot, 0, 1)
    assert torch.equal(slot.out[0], sums[0][last])


def gains_of(rows: PackedRows, at: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Of so many rows from one on: `[count, gains]` each."""
    gains, offsets = np.full((2, count, num_gains(rows)), np.nan, np.float32)
    fill_gains(np.array(columns_of(rows)), at, count, gains.ctypes.data, offsets.ctypes.data)
    return gains, offsets


def test_every_scale_of_16_bits_is_widened_exactly() -> None:
    """Subnormal ones, too; of float16 and of bfloat16, and zero points of all sizes beside them."""
    words, every = torch.zeros(256, 2048, dtype=torch.int32), np.arange(65_536, dtype=np.uint16).reshape(256, 256)
    zeros = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous()
    for dtype in (torch.float16, torch.bfloat16):
        scales = torch.from_numpy(every.view(np.int16)).view(dtype)
        scales = torch.where(scales.isfinite(), scales, 1).contiguous()
        if dtype == torch.bfloat16:
            scales = scales.clamp(-1e30, 1e30)
        gains, offsets = gains_of(PackedRows("int8", 32 * 256, 32, 1, words, scales, zeros, None), 0, 256)
        assert np.array_equal(gains, scales.float().numpy())
        wanted = -scales.double().numpy() * zeros.numpy()
        assert np.array_equal(offsets.astype(float), wanted.astype(np.float32).astype(float))
        assert np.array_equal(offsets.astype(float), wanted) or dtype == torch.bfloat16  # whose least have no room


@pytest.mark.parametrize("name", FORMATS)
def test_gains_and_offsets_stand_for_each_column_of_a_group(name: str) -> None:
    """From a row within the matrix on; against the numbers, of which a group has two that differ."""
    hidden, _ = sizes_of(FORMATS[name])
    rows, wanted = draw_rows(FORMATS[name], 24, hidden)
    gains, offsets = gains_of(rows, 5, 4)
    codes = np.array([unpacked(rows, row) for row in range(5, 9)], float)
    columns = hidden if rows.scales.shape[1] == 1 else next(
        n for n in (128 if rows.number in ("int4", "fp4") else 64, 32, 16) if rows.group % n == 0
    )  # fmt: skip
    gains, offsets = (np.repeat(one.astype(float), columns, 1)[:, :hidden] for one in (gains, offsets))
    if rows.number == "fp4":
        assert np.array_equal(e2m1(codes.astype(np.uint8)) * gains, wanted[5:9])
    elif rows.number == "fp8":
        numbers = torch.tensor(codes).to(torch.uint8).view(torch.float8_e4m3fn).double().numpy()
        assert np.array_equal(numbers * gains / 256, wanted[5:9])
    else:
        assert np.allclose(codes * gains + offsets, wanted[5:9], rtol=0, atol=1e-9)


def unpacked(rows: PackedRows, row: int) -> list[int]:
    """By the definition of the words' order, column by column."""
    bits, found = 4 if rows.number in ("int4", "fp4") else 8, []
    columns = 512 // bits
    for column in range(rows.inner):
        run, inside = divmod(column % columns, 32)
        word = int(rows.words[row, column // columns * 16 + inside // 2]) & 0xFFFFFFFF
        found.append(word >> (16 * (inside % 2) + bits * run) & (2**bits - 1))
    return found


def changed(inner: int = 160, **change: Any) -> LayerExperts:
    layer = draw_experts(FORMATS["int4 rounded"], FORMATS["int4 rounded"], 2, 160, 96).layer
    assert isinstance(layer.gate_up, PackedRows)
    assert isinstance(layer.down, PackedRows)
    return replace(layer, gate_up=replace(layer.gate_up, inner=inner), down=replace(layer.down, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": 40}, "down has groups of 40 columns; wanted a multiple of 16"),
        ({"inner": 72}, "gate_up has rows of 72; wanted a multiple of 32"),
        ({"words": torch.zeros(320, 32, dtype=torch.int32)}, r"down's words is \(320, 32\).*; wanted \(320, 16\) in"),
        ({"words": torch.zeros(320, 16)}, "down's words is torch.float32; wanted torch.int32"),
        ({"scales": torch.zeros(320, 1, dtype=torch.float64)}, "down's scales is torch.float64; wanted torch.bfloat16"),
        ({"scales": torch.zeros(640, 1)[::2]},
         "down's scales is .*; wanted .* contiguous"),
        ({"zeros": torch.zeros(320, 2, dtype=torch.uint8)}, r"down's zero points is \(320, 2\).*; wanted \(320, 1\)"),
        ({"runs": torch.zeros(320, 1, dtype=torch.int32)}, "down's scales is torch.bfloat16; wanted torch.int16"),
        ({"runs": torch.zeros(320, 3, dtype=torch.int32), "scales": torch.zeros(320, 1, dtype=torch.int16)},
         "down has 3 runs of 1 groups; wanted whole ones"),
    ],
)  # fmt: skip
def test_rows_that_there_is_no_code_for_are_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^experts on the CPU: .*{message}"):
        HostExperts([changed(**change)], 1, 1, 1)


def test_a_matrix_is_as_many_columns_as_the_context_has_room_for() -> None:
    rows, _ = draw_rows(FORMATS["Q8_0"], 8, 64)
    assert len(columns_of(rows)) == packed_gains.MATRIX_COLUMNS
    assert len(columns_of(torch.zeros(4, 64))) == packed_gains.MATRIX_COLUMNS


NARROW = ["make_of_them and Q4_0 or gpt_oss and MXFP4", pytest.param("make_of_them or threads", marks=pytest.mark.long)]


@where_vectors_are_wide
@pytest.mark.parametrize("names", NARROW, ids=["4 bits", "every format"])
def test_the_narrow_vectors_compute_the_same(names: str) -> None:
    """Which convert 4 bits where wide ones look them up."""
    run_with_narrow_vectors(__file__, names)
