"""A past in pieces is the past: sizes, padding, what is left over; the choice of kernels follows what is measured."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gpu.prefill.past_attention
from gpu.attention.flash3 import has_flash3
from gpu.attention.prefill_attention import Whole, past_attention, prefill_attention_reference
from gpu.attention.prefill_query import Attended, PrefillQuery
from gpu.operations.prefill_attention.merge_attended import merge_attended
from gpu.prefill.choice import KernelChoice, decide, find_fault
from gpu.prefill.dense import Dense
from gpu.prefill.past_attention import (
    LEAST_QUERIES,
    Kernel,
    attend_in_pieces,
    attend_in_square,
    compile_merges,
    cut_past,
    key_seconds,
    longest_piece,
    padded_queries,
    square_size,
)
from gpu.prefill.prefill_arrays import MERGED_PIECES, PIECE_TOKENS
from tests.gpu.test_prefill_attention import inputs
from tests.tolerances import ATTENTION_BF16_ATOL, ATTENTION_F32_ATOL
from transfer.measured import measured_path, read_measured

SCALE = 0.125


MOST_TOKENS = st.none() | st.integers(11, 20).map(lambda place: 1 << place)


@given(st.integers(0, 2**21), MOST_TOKENS)
def test_pieces_are_powers_of_two_and_leave_less_than_the_shortest(past: int, most: int | None) -> None:
    pieces = cut_past(past, most)
    ends = [0, *(piece.stop for piece in pieces)]
    assert [piece.start for piece in pieces] == ends[:-1]
    assert 0 <= past - ends[-1] < PIECE_TOKENS
    lengths = [len(piece) for piece in pieces]
    assert lengths == sorted(lengths, reverse=True)
    assert all(length.bit_count() == 1 and length >= PIECE_TOKENS for length in lengths)
    shorter = [length for length in lengths if length != most]
    assert len(set(shorter)) == len(shorter), "only the longest comes more than once"
    assert most is None or max(lengths, default=0) <= most
    assert not lengths or lengths[0] in (most, 1 << (past.bit_length() - 1)), "a past is cut no further than asked"


def test_a_piece_is_as_long_as_a_block_may_take() -> None:
    """650 TFLOP/s on 132 SMs: a tile of 128 queries takes 13.3 ns a key of 128 dimensions."""
    of_key = key_seconds(650e12, 128, 132)
    assert of_key == pytest.approx(13.3e-9, rel=2e-3)
    for tokens in (2048, 4096, 8192, 65536):
        assert longest_piece(tokens * of_key * 1.001, of_key) == tokens
        assert longest_piece(tokens * of_key * 1.999, of_key) == tokens
    for seconds in (1e-12, 1e-6, 2047 * of_key):
        assert longest_piece(seconds, of_key) == PIECE_TOKENS, "kernels' launches would be more than what they do"


@given(st.integers(1, 2**14))
def test_queries_are_padded_to_a_power_of_two_at_most_twice_as_many(count: int) -> None:
    padded = padded_queries(count)
    assert padded.bit_count() == 1
    assert count <= padded < max(2 * count, LEAST_QUERIES + 1)


def stub_cudnn(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[int, int]]) -> None:
    """All queries to all keys by definition, in float64; padding must not matter, so its outputs are NaN."""

    def attend(query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scale: float) -> Attended:
        calls.append((query.shape[0], keys.shape[1]))
        if is_causal:
            partial = prefill_attention_reference(query.double(), keys.double(), values.double(), scale)
            return Attended(partial.out.to(query.dtype), partial.lse.float())
        group = query.shape[1] // keys.shape[0]
        keys, values = (one.double().repeat_interleave(group, 0) for one in (keys, values))
        scores = torch.einsum("thd,hcd->thc", query.double(), keys) * scale
        out = torch.einsum("thc,hcd->thd", scores.softmax(-1), values).to(query.dtype)
        padding = (query == 0).all(-1).all(-1)
        out[padding] = torch.nan
        return Attended(out, scores.logsumexp(-1).float())

    monkeypatch.setattr(gpu.prefill.past_attention, "cudnn_attention", attend)


@pytest.mark.parametrize("most", [None, 2048, 4096])
@pytest.mark.parametrize(("tokens", "past"), [(3, 2048), (300, 2047 + 4096), (256, 6144), (256, 2049), (40, 2048 + 9)])
def test_attention_in_pieces_equals_the_definition(
    tokens: int, past: int, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []
    stub_cudnn(monkeypatch, calls)
    query, keys, values = (one.float() for one in inputs(tokens, past + tokens, 4, 2, 16))
    got = attend_in_pieces(query, keys, values, SCALE, "flash", "cudnn", most)
    wanted = prefill_attention_reference(query.double(), keys.double(), values.double(), SCALE)
    np.testing.assert_allclose(got.out, wanted.out, atol=ATTENTION_F32_ATOL, rtol=0)
    np.testing.assert_allclose(got.partial_lse, wanted.lse, atol=ATTENTION_F32_ATOL, rtol=0)
    assert {queries for queries, _ in calls} == {padded_queries(tokens)}
    own = [tokens] if tokens == padded_queries(tokens) and past % PIECE_TOKENS == 0 else []
    assert sorted(length for _, length in calls) == sorted([len(piece) for piece in cut_past(past, most)] + own)


@pytest.mark.parametrize(("tokens", "past"), [(5, 2 * 2048 + 7), (70, 17 * 2048 + 100)])
def test_a_kernel_that_takes_any_past_takes_it_in_pieces_as_well(
    tokens: int, past: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than are merged at once; no query is padded, and no piece is longer than asked."""
    lengths: list[int] = []

    def watched(query: Tensor, key: Tensor, *more: object) -> Attended:
        lengths.append(key.shape[1])
        assert len(query) == tokens
        return past_attention(query, key, *more)

    def merge(outs: list[Tensor], lses: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        merged.append((len(outs), dtype))
        return merge_attended(outs, lses, dtype)

    merged: list[tuple[int, torch.dtype]] = []
    monkeypatch.setattr(gpu.prefill.past_attention, "past_attention", watched)
    monkeypatch.setattr(gpu.prefill.past_attention, "merge_attended", merge)
    query, keys, values = (one.float() for one in inputs(tokens, past + tokens, 4, 2, 16))
    got = attend_in_pieces(query, keys, values, SCALE, "efficient", "efficient", 2048)
    wanted = prefill_attention_reference(query.double(), keys.double(), values.double(), SCALE)
    np.testing.assert_allclose(got.out, wanted.out, atol=ATTENTION_F32_ATOL, rtol=0)
    np.testing.assert_allclose(got.partial_lse, wanted.lse, atol=ATTENTION_F32_ATOL, rtol=0)
    assert lengths == [2048] * (past // 2048)
    sides = [len(lengths[begin : begin + MERGED_PIECES]) + 1 for begin in range(0, len(lengths), MERGED_PIECES)]
    assert merged == [(count, torch.float32) for count in sides], "not rounded between, and as the query in the end"


@pytest.mark.parametrize(("tokens", "past"), [(1024, 0), (1000, 0), (1025, 0), (966, 58), (900, 200)])
def test_attention_in_a_square_equals_the_definition(tokens: int, past: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is behind the last key is NaN, and of no size but whole steps is there a plan."""
    calls: list[tuple[int, int]] = []
    stub_cudnn(monkeypatch, calls)
    query, keys, values = (one.float() for one in inputs(tokens, past + tokens, 4, 2, 16))
    rooms = [torch.full((2, 4096, 16), torch.nan) for _ in range(2)]
    for room, rows in zip(rooms, (keys, values), strict=True):
        room[:, : past + tokens] = rows
    got = attend_in_square(query, *(room[:, : past + tokens] for room in rooms), SCALE)
    wanted = prefill_attention_reference(query.double(), keys.double(), values.double(), SCALE)
    np.testing.assert_allclose(got.out, wanted.out, atol=ATTENTION_F32_ATOL, rtol=0)
    np.testing.assert_allclose(got.partial_lse, wanted.lse, atol=ATTENTION_F32_ATOL, rtol=0)
    size = square_size(past + tokens)
    assert calls == [(size, size)]
    assert size % 1024 == 0
    assert 0 <= size - past - tokens < 1024


def test_a_square_is_taken_where_it_computes_less_than_it_gains() -> None:
    choice = KernelChoice("flash", {}, {}, {}, most_square=8192, square_gain=1.8)
    assert all(choice.is_square(*part) for part in ((8192, 0), (8000, 0), (7808, 192), (6100, 2000)))
    assert not choice.is_square(1024, 0), "a launch, not work"
    assert not choice.is_square(8192, 1), "no plan"
    assert not choice.is_square(2000, 6000), "it would compute the past's queries too"
    assert not replace(choice, square_gain=1.0).is_square(8000, 0)
    assert not replace(choice, most_square=0).is_square(8192, 0)


def test_a_past_in_pieces_sees_a_key_left_out() -> None:
    """What the comparison above would not see, it would not test."""
    query, keys, values = (one.float() for one in inputs(5, 2 * 2048 + 12, 4, 2, 16))
    got = attend_in_pieces(query, keys, values, SCALE, "efficient", "efficient", 2048)
    without = prefill_attention_reference(query.double(), keys[:, 1:].double(), values[:, 1:].double(), SCALE)
    assert float((got.out - without.out).abs().max()) > ATTENTION_F32_ATOL


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient"])
def test_every_merge_of_pieces_is_compiled_before_a_prompt_needs_it(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is left of a past, and however long it is: numbers of sides, dtypes of the last and of the result."""
    seen: set[tuple[int, torch.dtype, torch.dtype]] = set()

    def merge(outs: list[Tensor], lses: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        seen.add((len(outs), outs[-1].dtype, dtype))
        assert {out.dtype for out in outs[:-1]} == {torch.bfloat16}
        return merge_attended(outs, lses, dtype)

    stub_cudnn(monkeypatch, [])
    monkeypatch.setattr(gpu.prefill.past_attention, "merge_attended", merge)
    compile_merges(2, 8, torch.bfloat16, torch.device("cpu"))
    compiled, whole = seen.copy(), "flash" if kernel == "cudnn" else kernel
    for past in (1, 2, 6, 7, 8, 15):
        for left in (0, 5):
            given = [one.bfloat16() for one in inputs(9, past * 2048 + left + 9, 2, 1, 8)]
            attend_in_pieces(*given, SCALE, whole, kernel, 2048)
    assert seen == compiled


ON_CUDA = [
    *(("cudnn", None, *sizes, *heads) for heads in ((32, 8, 128), (4, 4, 64), (8, 1, 128))
      for sizes in ((2048, 6144), (300, 2047 + 4096), (1500, 14336))),
    *((kernel, most, *sizes, 32, 8, 128) for kernel, most in (("cudnn", 2048), ("flash", 2048), ("efficient", 4096))
      for sizes in ((300, 2047 + 4096), (64, 9 * 2048 + 5))),  # of the last, more pieces than are merged at once
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "most", "tokens", "past", "heads", "kv_heads", "dim"), ON_CUDA)
def test_on_cuda_pieces_equal_the_definition(
    kernel: Kernel, most: int | None, tokens: int, past: int, heads: int, kv_heads: int, dim: int
) -> None:
    query, keys, values = (
        one.to("cuda", torch.bfloat16) for one in inputs(tokens, past + tokens, heads, kv_heads, dim)
    )
    padded = [
        torch.full((kv_heads, past + 4096, dim), torch.nan, dtype=one.dtype, device="cuda") for one in (keys, values)
    ]
    for room, one in zip(padded, (keys, values), strict=True):
        room[:, : past + tokens] = one
    whole = "flash" if kernel == "cudnn" else kernel
    got = attend_in_pieces(query, *(one[:, : past + tokens] for one in padded), SCALE, whole, kernel, most)
    assert got.out.dtype == torch.bfloat16
    for row in (0, 1, tokens // 2, tokens - 1):
        seen = (one[:, : past + row + 1].double() for one in (keys, values))
        wanted = prefill_attention_reference(query[row : row + 1].double(), *seen, SCALE)
        for one, other in ((got.out, wanted.out), (got.partial_lse, wanted.lse)):
            np.testing.assert_allclose(one[row].double().cpu(), other[0].cpu(), atol=ATTENTION_BF16_ATOL, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "past"), [(2048, 0), (8000, 0), (7800, 200)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (4, 4, 64)])
def test_on_cuda_a_square_equals_the_definition(tokens: int, past: int, heads: int, kv_heads: int, dim: int) -> None:
    query, keys, values = (
        one.to("cuda", torch.bfloat16) for one in inputs(tokens, past + tokens, heads, kv_heads, dim)
    )
    got = attend_in_square(query, keys, values, SCALE)
    for row in (0, 1, tokens // 2, tokens - 1):
        seen = (one[:, : past + row + 1].double() for one in (keys, values))
        wanted = prefill_attention_reference(query[row : row + 1].double(), *seen, SCALE)
        for one, other in ((got.out, wanted.out), (got.partial_lse, wanted.lse)):
            np.testing.assert_allclose(one[row].double().cpu(), other[0].cpu(), atol=ATTENTION_BF16_ATOL, rtol=0)


# --- the choice -------------------------------------------------------------------------------------------------------


def decided(
    cudnn: float, flash: float, efficient: float, launch: float = 0.0, **given: int
) -> tuple[str, dict[int, int]]:
    """Of kernels at these rates, where cuDNN takes `launch` seconds beside, in multiples of what a piece takes it."""
    rates = {"cudnn": cudnn, "flash": flash, "efficient": efficient}

    def seconds(name: str, tokens: int, past: int) -> float:
        beside = launch * PIECE_TOKENS * LEAST_QUERIES / cudnn if name == "cudnn" else 0.0
        computed = padded_queries(tokens) if name == "cudnn" else tokens
        return computed * past / rates[name] + beside

    candidates = [name for name, rate in rates.items() if rate]
    return decide(candidates, seconds, given.get("most", 2048), given.get("context", 100_000))


def test_what_is_faster_is_chosen_for_each_number_of_queries() -> None:
    sizes = [256, 512, 1024, 2048]
    assert decided(600, 350, 300) == ("flash", dict.fromkeys(sizes, PIECE_TOKENS))
    assert decided(600, 300, 350) == ("efficient", dict.fromkeys(sizes, PIECE_TOKENS))
    assert decided(400, 350, 300) == ("flash", {2048: PIECE_TOKENS}), "padding costs more than cuDNN gives"
    assert decided(300, 350, 200) == ("flash", {})
    waits = {256: 16 * PIECE_TOKENS, 512: 4 * PIECE_TOKENS, 1024: 4 * PIECE_TOKENS, 2048: PIECE_TOKENS}
    assert decided(600, 350, 300, launch=2.0) == ("flash", waits), "the fewer the queries, the longer the past it takes"
    assert decided(600, 350, 300, launch=1e9) == ("flash", {})


def by_reference(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
    partial = prefill_attention_reference(query.float(), keys.float(), values.float(), scale)
    return Attended(partial.out.bfloat16(), partial.lse)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
def test_a_kernel_that_rounds_is_in_and_one_that_is_wrong_or_raises_is_out(heads: int, kv_heads: int) -> None:
    given = [one.bfloat16() for one in inputs(40, 130, heads, kv_heads, 16)]

    def raises(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
        raise RuntimeError("No available kernel.\nMore words")

    def forgets(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
        return by_reference(query, keys[:, 8:], values[:, 8:], scale)

    def counts_wrongly(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
        return replace(
            by_reference(query, keys, values, scale), lse=by_reference(query, keys, values, scale).lse + 0.05
        )

    def leaves_out(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
        attended = by_reference(query, keys, values, scale)
        attended.out[-1] = torch.nan
        return attended

    assert find_fault(by_reference, *given, SCALE) is None
    assert find_fault(raises, *given, SCALE) == "No available kernel."
    for wrong in (forgets, counts_wrongly, leaves_out):
        assert "is off by" in (find_fault(wrong, *given, SCALE) or "")


def ask(tokens: int, past: int) -> PrefillQuery:
    query, keys, values = (one.float() for one in inputs(tokens, past + tokens, 2, 1, 8))
    return PrefillQuery(
        0, query, query, keys, values, torch.arange(past, past + tokens), past, past + tokens, SCALE, None
    )


def test_dense_goes_by_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    stub_cudnn(monkeypatch, calls)
    dense = Dense()
    dense.choice = KernelChoice("efficient", {256: 4096}, {}, {})
    told = []
    for tokens, past in ((9, 2048), (9, 4095), (300, 4096), (9, 0)):
        told.append(dense.attend(ask(tokens, past)))
        assert calls == []
    told.append(dense.attend(ask(9, 4097)))
    assert calls == [(256, 4096)]
    dense.choice = None
    for attended, (tokens, past) in zip(told, ((9, 2048), (9, 4095), (300, 4096), (9, 0), (9, 4097)), strict=True):
        wanted = dense.attend(ask(tokens, past))
        np.testing.assert_allclose(attended.out, wanted.out, atol=ATTENTION_F32_ATOL, rtol=0)


def test_prompts_that_are_packed_go_by_flash_attention_3_where_it_was_faster() -> None:
    dense = Dense()
    chosen = [dense.packed_kernel]
    for whole in get_args(Whole):
        dense.choice = KernelChoice(whole, {}, {}, {})
        chosen.append(dense.packed_kernel)
    assert chosen == ["flash", "flash", "flash3", "flash"]


@pytest.mark.parametrize("least_past", [{}, {256: 2048}])
def test_a_past_is_cut_further_while_dense_yields_and_never_before(
    least_past: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever kernel it is that takes pieces: cuDNN, or the one that takes any past."""
    lengths: list[int] = []
    for name in ("cudnn_attention", "past_attention"):
        attend = getattr(gpu.prefill.past_attention, name)
        if name == "cudnn_attention":
            stub_cudnn(monkeypatch, [])
            attend = gpu.prefill.past_attention.cudnn_attention
        monkeypatch.setattr(
            gpu.prefill.past_attention,
            name,
            lambda *given, attend=attend: (lengths.append(given[1].shape[1]), attend(*given))[1],
        )
    dense, asked = Dense(), ask(9, 4096 + 3)
    dense.choice = KernelChoice("efficient", least_past, {}, {})
    dense._key_seconds = 1e-8
    wanted = [4096] if least_past else []
    whole = dense.attend(asked)
    assert lengths == wanted
    for seconds, limits_prefill_blocks, cut in ((0.0, True, False), (2100e-8, False, False), (2100e-8, True, True)):
        lengths.clear()
        dense.bound_blocks(seconds)
        dense.limits_prefill_blocks = limits_prefill_blocks
        got = dense.attend(asked)
        assert lengths == ([2048, 2048] if cut else wanted)
        np.testing.assert_allclose(got.out, whole.out, atol=ATTENTION_F32_ATOL, rtol=0)
    lengths.clear()
    dense.attend(ask(9, 2047))
    assert lengths == [], "a past no longer than a piece is not cut"


@pytest.mark.gpu
def test_a_machine_chooses_and_what_it_chose_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    dense = Dense()
    keys, values = torch.empty(2, 8, 20_000, 128, dtype=torch.bfloat16, device="cuda")
    dense.choose(keys, values, 32, 2048)
    assert dense.choice.tflop_s.keys() | dense.choice.out.keys() == {"flash", "efficient", "cudnn"} | (
        {"flash3"} if has_flash3(keys) else set()
    )
    (entry,) = read_measured(measured_path())
    assert entry["of"]["gpu"] == torch.cuda.get_device_name()
    assert entry["result"]["whole"] == dense.choice.whole
    of_key = dense._key_seconds
    assert of_key is not None
    assert 1e-9 < of_key < 1e-6, "between ten times what any card is told to do and a hundredth of one"
    dense.bound_blocks(8200 * of_key)
    assert dense.longest_piece == 8192
    assert (dense.choice.most_square > 0) == (dense.choice.square_gain > 0)
    packed = dense.choice.most_square
    assert not packed or dense.is_faster_alone(packed, 0) == (dense.choice.square_gain > 1)
