"""The assembly that makes bf16 of codes, run an instruction after another in numpy: exact for every code there is."""

import re

import numpy as np
import pytest

from gpu.operations.decode_attention import balanced_decode_attention, paged_decode_attention
from gpu.operations.decode_attention.attended_codes import INTEGER_CONFIGS, RUN_CELLS
from gpu.operations.decode_attention.split_rows import MOST_PROGRAMS_PER_SM
from gpu.operations.kv import kv_rows
from tests.gpu.packed_oracle import e4m3

CODES = np.arange(256, dtype=np.uint8)


def bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def run(assembly: str, word: np.ndarray) -> np.ndarray:
    """Numbers `[words, 4]` that PTX of `prmt`, `lop3` of (a & b) | c, `and`, `shr`, `mov` and `fma.rn.bf16x2` makes."""
    held = {"$2": word}
    for line in assembly.strip(" {}\n").splitlines():
        if ".reg" in line or not line.strip(" }"):
            continue
        name, to, *rest = re.findall(r"[\w.$]+", line)
        args = [held[arg] if arg in held else np.uint32(int(arg, 0)) for arg in rest]
        if name == "mov.b32":
            held[to] = args[0] + 0 * word
        elif name == "prmt.b32":
            eight = [args[part] >> np.uint32(8 * byte) & 0xFF for part in (0, 1) for byte in range(4)]
            selected = [eight[int(args[2]) >> 4 * byte & 7] << np.uint32(8 * byte) for byte in range(4)]
            held[to] = sum(selected).astype(np.uint32)
        elif name == "shr.u32":
            held[to] = args[0] >> args[1]
        elif name == "and.b32":
            held[to] = args[0] & args[1]
        elif name == "lop3.b32" and args[3] == 0xEA:
            held[to] = (args[0] & args[1]) | args[2]
        elif name == "fma.rn.bf16x2":
            halves = []
            for shift in (0, 16):
                a, b, c = (bf16(arg >> np.uint32(shift) & 0xFFFF) for arg in args)
                halves.append((a * b + c).astype(np.float32).view(np.uint32) >> np.uint32(16))
                assert np.array_equal(bf16(halves[-1]), a * b + c)  # nothing is rounded
            held[to] = halves[0] | halves[1] << np.uint32(16)
        else:
            raise AssertionError(f"{line.strip()}: unknown to this test")
    return np.stack([bf16(held[f"${at}"] >> np.uint32(shift) & 0xFFFF) for at in (0, 1) for shift in (0, 16)], -1)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_four_codes_in_a_register_are_four_numbers_in_bf16(kind):
    assembly = {"int8": kv_rows._INT8_TO_BF16, "fp8": kv_rows._FP8_TO_BF16}[kind].value
    four = np.stack([CODES, CODES[::-1], np.roll(CODES, 77), np.random.default_rng(3).permutation(CODES)], -1)
    got = run(assembly, np.ascontiguousarray(four).view(np.uint32)[:, 0])
    wanted = four.view(np.int8).astype(np.float64) if kind == "int8" else e4m3(four)
    known = np.isfinite(wanted)
    assert known.sum() >= 4 * 254
    assert np.array_equal(got[known], wanted[known])
    assert np.array_equal(np.signbit(got[known]), np.signbit(wanted[known]))
    assert np.isfinite(got).all()  # also of codes that stand for NaN: a row's scale says so


def test_every_warp_takes_whole_runs_of_codes():
    for configs in (paged_decode_attention.CONFIGS, balanced_decode_attention.CONFIGS):
        coded = {dim: config for (itemsize, dim), config in configs.items() if itemsize == 1}
        assert set(coded) == set(paged_decode_attention.DECODED_DIMS)
        for block_tokens, num_warps, *_ in coded.values():
            runs = block_tokens // (num_warps * RUN_CELLS)
            assert runs in (1, 2)
            assert block_tokens == runs * num_warps * RUN_CELLS
    for block_tokens, num_warps, *_ in INTEGER_CONFIGS.values():
        assert block_tokens == 2 * num_warps * RUN_CELLS  # tensor cores multiply 32 integers at once


def test_a_workspace_has_room_for_the_programs_of_every_kernel():
    for configs in (INTEGER_CONFIGS, paged_decode_attention.CONFIGS):
        assert max(programs for *_, programs in configs.values()) <= MOST_PROGRAMS_PER_SM
