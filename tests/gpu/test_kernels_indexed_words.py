"""Estimates by words of 16 bits: against float64 numpy, and what the card alone does, its instructions and its powers
of two, in numpy and in the interpreter.
"""

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from gpu.methods.indexed import estimating, unpacking, words
from gpu.methods.indexed.building import index_tokens, index_tokens_reference
from gpu.operations.arguments import INTERPRETED
from tests.gpu.kernel_oracles import DEVICES, distance, wide
from tests.gpu.test_kernels_indexed import LENGTHS, TOKENS, draw_query, expected, make_stand
from tests.tolerances import INDEXED_PARTIAL, INDEXED_SCORES, INDEXED_WEIGHTS


def check_estimate(device: str, dim: int, group: int, key_bits: int, value_bits: int) -> None:
    """Hold a step over a run, of whose tokens most are estimated, against float64; a stale value and a rest that counts
    twice are seen.
    """
    stand = make_stand(dim, group, LENGTHS, device, key_bits=key_bits, value_bits=value_bits, builds=False)
    query, resident = draw_query(stand, device)
    count = TOKENS - 7  # the last tile has tokens that are not there
    partial = stand.step(query, resident, count, 100)
    chosen = stand.chosen()
    out, lse = expected(stand, query, count, chosen)
    limit = INDEXED_PARTIAL + INDEXED_SCORES + INDEXED_WEIGHTS
    assert distance(partial.out[1], out) < limit
    assert np.abs(wide(partial.lse[1]) - lse).max() < INDEXED_SCORES
    twice = expected(stand, query, count, chosen, rest_times=2.0)
    assert distance(partial.out[1], twice[0]) > limit
    likeliest = np.argsort(-wide(stand.work.logits[2, : count - 1, 0]))
    stale = int(next(token for token in likeliest if token not in chosen[0]))
    assert distance(partial.out[1], expected(stand, query, count, chosen, stale=stale)[0]) > INDEXED_PARTIAL


@pytest.mark.parametrize(("key_bits", "value_bits"), [(4, 2), (2, 4), (3, 2), (8, 2)])
@pytest.mark.parametrize(("dim", "group"), [(64, 3), (96, 1), (128, 4), (128, 16)])
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_by_words_is_that_of_its_codes(
    device: str, dim: int, group: int, key_bits: int, value_bits: int
) -> None:
    check_estimate(device, dim, group, key_bits, value_bits)


@pytest.mark.parametrize("device", DEVICES)
def test_equal_values_have_centres_and_are_estimated_nearly_exactly_by_words(device: str) -> None:
    stand = make_stand(64, 3, [1100], device, builds=False)
    for run in stand.runs:
        stored = run.alive[1]
        stored.copy_(stored[:, :1].clone().expand_as(stored))
    build = index_tokens_reference if INTERPRETED else index_tokens
    build(stand.index, 1, 0, 1100, stand.layout)
    query, resident = draw_query(stand, device)
    partial = stand.step(query, resident, 1100, 20)
    value = wide(stand.runs[1].alive[1][:, 0].float()).repeat(3, 0)
    assert distance(partial.out[1], value) < INDEXED_WEIGHTS
    stand.index.value_centres.zero_()
    assert distance(stand.step(query, resident, 1100, 20).out[1], value) > 0.5


@triton.jit
def _plane_on_a_card(words, PLANE: tl.constexpr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return what the card's instructions make of a plane."""
    lowest = PLANE % (7 // BITS) * BITS
    code = (words.to(tl.int32) >> (PLANE * BITS)) & ((1 << BITS) - 1)
    return 1 + (code << lowest).to(tl.float32) / 128


@pytest.mark.skipif(not INTERPRETED, reason="stands in for the card's instructions under the interpreter")
@pytest.mark.parametrize(("key_bits", "value_bits"), [(4, 2), (2, 4)])
def test_powers_of_two_and_ones_are_taken_off_again_as_on_a_card_cpu(
    monkeypatch: pytest.MonkeyPatch, key_bits: int, value_bits: int
) -> None:
    monkeypatch.setattr(words, "_plane_of", _plane_on_a_card)
    for module in (words, estimating):
        monkeypatch.setattr(module, "ON_CARD", tl.constexpr(True))
    check_estimate("cpu", 64, 3, key_bits, value_bits)


@pytest.mark.parametrize("bits", [2, 4])
def test_a_planes_instructions_make_one_and_a_part_of_each_code_cpu(bits: int) -> None:
    """Of two words at once, for all words."""
    low = np.arange(2**16, dtype=np.uint32)
    high = np.random.default_rng(1).permutation(low)
    for plane, assembly in enumerate(words.word_assembly(bits)):
        found = re.search(r"shr\.b32 codes, \$1, (\d+); lop3\.b32 \$0, codes, 0x(\w+), 0x(\w+), 0xEA;", assembly)
        assert found is not None, assembly
        by, mask, ones = int(found[1]), int(found[2], 16), int(found[3], 16)
        made = (((low | high << 16) >> by) & mask) | ones
        for half, own in ((made & 0xFFFF, low), (made >> 16, high)):
            number = torch.from_numpy(half.astype(np.int16)).view(torch.bfloat16).double().numpy()
            lowest = plane % (words.MANTISSA // bits) * bits
            code = (own >> (plane * bits)) & (2**bits - 1)
            assert (number == 1 + code * 2.0**lowest / 2**words.MANTISSA).all()


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("w", "width", "low"), [(8, 8, 8), (12, 16, 8), (16, 16, 8), (16, 32, 32), (32, 32, 32)])
@pytest.mark.skipif(not INTERPRETED, reason="a kernel of this test alone")
def test_each_dimension_has_one_number_cpu(bits: int, w: int, width: int, low: int) -> None:
    planes = 16 // bits
    found = torch.full((2, planes * width), -1, dtype=torch.int32)
    _places_kernel[(1,)](found, W=w, WIDTH=width, LOW=low, BITS=bits, NUMBERS=planes * width)
    own = found[0][found[1] != 0]
    assert own.sort().values.tolist() == list(range(planes * w))


@triton.jit
def _places_kernel(
    found, W: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr, BITS: tl.constexpr, NUMBERS: tl.constexpr
):
    dim, is_dim, _ = words.number_places(W, WIDTH, LOW, BITS)
    number = tl.arange(0, NUMBERS)
    tl.store(found + number, dim)
    tl.store(found + NUMBERS + number, is_dim.to(tl.int32))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_planes_instructions_make_a_whole_number_of_each_code_of_a_key_cpu(bits: int) -> None:
    """Of four bytes at once, for all bytes; twice the number that a code stands for is twice that and an odd number."""
    packed = np.random.default_rng(1).permuted(np.tile(np.arange(256, dtype=np.uint8), (4, 1)), axis=1)
    words_of = np.ascontiguousarray(packed.T).view(np.uint32)[:, 0]
    for plane, assembly in enumerate(unpacking.plane_assembly(bits)):
        found = re.search(r"(?:shr\.b32 codes, \$1, (\d+); and\.b32 \$0, codes|xor\.b32 \$0, \$1), 0x(\w+);", assembly)
        assert found is not None, assembly
        mask = int(found[2], 16)
        made = (words_of >> int(found[1])) & mask if found[1] else words_of ^ mask
        numbers = made.astype(np.uint32)[:, None].view(np.int8).astype(int)
        code = (packed.T.astype(int) >> (plane * bits)) & (2**bits - 1)
        lacks = 1 if bits == 8 else 1 - 2**bits
        assert (2 * numbers + lacks == 2 * (code + 0.5 - 2.0 ** (bits - 1))).all()
