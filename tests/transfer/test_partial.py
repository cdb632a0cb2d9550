"""Merging partials is exact whatever the partition, order and grouping; the ledger of coverage loses nothing."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tolerances import KERNEL_FLOAT64, LSE_CHECKSUM, MERGE_FLOAT32
from transfer.merge import merge_outputs_reference
from transfer.partial import Coverage, CoverageError, Owner, Partial, merge, merge_all

TOKENS, HEADS, DIM = 2, 3, 8
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]
on_devices = pytest.mark.parametrize("device", DEVICES)


def softmax_partial(logits: np.ndarray, values: np.ndarray, device: str) -> Partial:
    """logits `[tokens, heads, context]`, values `[context, dim]`, in float64, rounded to a float32 partial."""
    if logits.shape[-1] == 0:
        return Partial.empty(*logits.shape[:2], values.shape[1], device, counted=True)
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - top)
    mass = weights.sum(axis=-1, keepdims=True)
    lse = (top + np.log(mass))[..., 0]
    covered = np.full(lse.shape, logits.shape[-1])
    return Partial(
        torch.from_numpy(weights / mass @ values).float().to(device),
        torch.from_numpy(lse).float().to(device),
        torch.from_numpy(covered).int().to(device),
    )


def assert_same(got: Partial, wanted: Partial) -> None:
    """Outputs may differ by the rounding of the masses they are weighted with, which grows with lse."""
    allowed = MERGE_FLOAT32 * wanted.lse.abs().clamp(min=1.0)[..., None]
    assert ((got.out - wanted.out).abs() <= allowed).all()
    torch.testing.assert_close(got.lse, wanted.lse, rtol=MERGE_FLOAT32, atol=MERGE_FLOAT32)
    assert torch.equal(got.covered, wanted.covered)


def context_of(seed: int, context: int, spread: float) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    logits = generator.standard_normal((TOKENS, HEADS, context)) * spread
    return logits, generator.standard_normal((context, DIM))


@on_devices
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), context=st.integers(1, 60), parts=st.integers(1, 7), spread=st.floats(0, 60))
def test_merge_is_invariant_to_partition_order_and_grouping(device, seed, context, parts, spread):
    logits, values = context_of(seed, context, spread)
    generator = np.random.default_rng(seed + 1)
    owners = generator.integers(parts, size=context)  # some parts may own nothing
    partials = [softmax_partial(logits[..., owners == part], values[owners == part], device) for part in range(parts)]
    whole = softmax_partial(logits, values, device)
    assert_same(merge_all(partials), whole)
    assert_same(merge_all([partials[index] for index in generator.permutation(parts)]), whole)
    while len(partials) > 1:
        index = int(generator.integers(len(partials) - 1))
        partials[index : index + 2] = [merge(partials[index], partials[index + 1])]
    assert_same(partials[0], whole)


@on_devices
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_the_comparison_of_merges_sees_one_token_weighted_wrongly(device, spread):
    logits, values = context_of(3, 60, spread)
    whole = softmax_partial(logits, values, device)
    logits[..., logits.mean(axis=(0, 1)).argmax()] += 0.01
    with pytest.raises(AssertionError):
        assert_same(softmax_partial(logits, values, device), whole)


@on_devices
def test_one_lost_token_of_flat_logits_moves_the_checksum(device):
    context = 20_000
    logits, values = np.zeros((TOKENS, HEADS, context)), np.ones((context, DIM))
    cuts = [0, 64, 5_000, 19_000, context]
    parts = [softmax_partial(logits[..., a:b], values[a:b], device) for a, b in pairwise(cuts)]
    assert (merge_all(parts).lse - np.log(context)).abs().max() < LSE_CHECKSUM
    parts[2] = softmax_partial(logits[..., 5_001:19_000], values[5_001:19_000], device)
    assert (merge_all(parts).lse - np.log(context)).abs().min() > LSE_CHECKSUM


@on_devices
def test_two_empty_partials_merge_into_an_empty_one(device):
    empty = Partial.empty(TOKENS, HEADS, DIM, device, counted=True)
    merged = merge(empty, empty)
    assert torch.isneginf(merged.lse).all()
    assert not merged.out.any()
    assert not merged.covered.any()


@on_devices
def test_what_an_empty_side_holds_is_never_read_into_the_result(device):
    part = softmax_partial(*context_of(0, 9, 1.0), device)
    poisoned = Partial(torch.full_like(part.out, float("nan")), torch.full_like(part.lse, float("-inf")), None)
    for merged in (merge(part, poisoned), merge(poisoned, part)):
        assert torch.equal(merged.out, part.out)
        assert torch.equal(merged.lse, part.lse)
        assert merged.covered is None


@on_devices
def test_a_nan_mass_is_not_hidden(device):
    part = softmax_partial(*context_of(0, 9, 1.0), device)
    broken = Partial(part.out * float("nan"), part.lse * float("nan"), None)
    assert merge(part, broken).out.isnan().all()


@on_devices
def test_lse_far_from_zero_neither_overflows_nor_vanishes(device):
    part = softmax_partial(*context_of(0, 9, 1.0), device)
    for shift in (1e4, -1e4):
        moved = Partial(part.out, part.lse + shift, None)
        merged = merge(moved, moved)
        torch.testing.assert_close(merged.out, part.out, rtol=0, atol=MERGE_FLOAT32)
        torch.testing.assert_close(merged.lse, moved.lse + np.log(2.0), rtol=MERGE_FLOAT32, atol=0)


def test_the_reference_runs_in_float64():
    logits, values = context_of(3, 10, 5.0)
    weights = np.exp(logits)
    sides = []
    for part in (slice(0, 4), slice(4, 10)):
        mass = weights[..., part].sum(-1)
        out = weights[..., part] @ values[part] / mass[..., None]
        sides += [torch.from_numpy(out), torch.from_numpy(np.log(mass))]
    out, lse = merge_outputs_reference(sides[::2], sides[1::2])
    wanted = weights @ values / weights.sum(-1, keepdims=True)
    assert np.abs(out.numpy() - wanted).max() < KERNEL_FLOAT64
    assert np.abs(lse.numpy() - np.log(weights.sum(-1))).max() < KERNEL_FLOAT64


def test_partials_that_do_not_match_are_refused():
    a, b = Partial.empty(2, 3, 8, "cpu"), Partial.empty(2, 4, 8, "cpu")
    with pytest.raises(ValueError, match=r"merge: out \[\(2, 3, 8\), \(2, 4, 8\)\]"):
        merge(a, b)
    with pytest.raises(ValueError, match="wanted one dtype"):
        merge(a, Partial(a.out.double(), a.lse.double()))
    with pytest.raises(ValueError, match="got no partials"):
        merge_all([])


def counted(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_coverage_passes_when_owners_and_dropped_make_the_context():
    coverage = Coverage(3, ["a", "b"])
    coverage.add(Owner.RESIDENT, counted([[10, 10], [0, 4]]))
    coverage.add(Owner.FETCHED, counted([[90, 80], [7, 3]]))
    coverage.add(Owner.DROPPED, counted([[0, 10], [0, 0]]))
    coverage.check(torch.tensor([100, 7]))


def test_coverage_names_the_layer_request_head_and_counts_of_a_lost_token():
    coverage = Coverage(3, ["a", "b"])
    coverage.add(Owner.RESIDENT, counted([[10, 10], [1, 4]]))
    coverage.add(Owner.HOST, counted([[90, 90], [6, 2]]))
    with pytest.raises(
        CoverageError, match="layer 3, request b, head 1: resident 4, host 2 = 6 tokens, wanted the context of 7"
    ):
        coverage.check(torch.tensor([100, 7]))


def test_coverage_sees_negative_counts_that_cancel():
    coverage = Coverage(0, ["a"])
    coverage.add(Owner.RESIDENT, counted([[12]]))
    coverage.add(Owner.DROPPED, counted([[-2]]))
    with pytest.raises(CoverageError, match="request a, head 0"):
        coverage.check(torch.tensor([10]))


def test_coverage_refuses_missing_repeated_and_misshapen_counts():
    coverage = Coverage(0, ["a"])
    with pytest.raises(CoverageError, match="no owner counted"):
        coverage.check(torch.tensor([1]))
    with pytest.raises(CoverageError, match="HOST did not count"):
        coverage.add(Owner.HOST, None)
    coverage.add(Owner.HOST, counted([[1, 1]]))
    with pytest.raises(CoverageError, match="HOST counted twice"):
        coverage.add(Owner.HOST, counted([[1, 1]]))
    with pytest.raises(CoverageError, match=r"FETCHED counts \(1, 3\), wanted \(1, 2\)"):
        coverage.add(Owner.FETCHED, counted([[1, 1, 1]]))
