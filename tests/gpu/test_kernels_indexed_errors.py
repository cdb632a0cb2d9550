"""The kernel that reports errors of indexed attention, against float64 numpy."""

import numpy as np
import pytest
import torch

from gpu.methods.indexed import MASS_UNIT
from gpu.methods.indexed.codes import NUMBER_SQUARE, VALUE_LOSS
from gpu.methods.indexed.layer_step import spare_heads
from gpu.methods.indexed.page_rows import Pages
from gpu.methods.indexed.reporting import (
    BOUND,
    ESTIMATED,
    HEADS,
    NO_LIMIT,
    OVER,
    READ,
    READ_MASS,
    ROUNDING,
    STEPS_OVER,
    UNREPORTED,
    Report,
    new_report,
    report_errors,
)
from gpu.methods.indexed.rereading import read_again
from gpu.methods.indexed.scoring import RingStep
from tests.gpu.indexed_stand import (
    KV_HEADS,
    NUM_LAYERS,
    NUM_RINGS,
    NUM_SLOTS,
    PAGE_SLOT,
    PAGE_TOKENS,
    SINK,
    Stand,
    make_stand,
)
from tests.gpu.kernel_oracles import DEVICES, distance, wide
from tests.gpu.test_kernels_indexed import LENGTHS, draw_query, estimated_keys, partial_of, softmax_logits
from tests.tolerances import INDEXED_PARTIAL, INDEXED_SCORES
from transfer.partial import Partial, merge
from transfer.tier_shape import Rows

TOKENS = sum(LENGTHS) - 16


def near_of(query: torch.Tensor, resident: torch.Tensor) -> Partial:
    """Return a partial of two rows with this lse."""
    out = torch.tensor(np.random.default_rng(5).normal(size=tuple(query.shape)), dtype=torch.float32)
    return Partial(out.to(query.device), resident)


def step_of(query: torch.Tensor, num_tokens: int, page_slot: int = -1) -> RingStep:
    """Return the step of a row that has ring 1, whose tokens are in this slot's pages (-1: in host memory)."""
    numbers = [1], [1], [0, 0, num_tokens, num_tokens], [0] * 4, [-1, page_slot]
    return RingStep(*(torch.tensor(own, dtype=torch.int32, device=query.device) for own in numbers))


def report_step(stand: Stand, query: torch.Tensor, near: Partial, report: Report, epsilon: float | None = None,
                budget: int = 100, rest_times: float = 1.0, wanted: torch.Tensor | None = None) -> Partial:  # fmt: skip
    """Attend in layer 1 and report; return the answer of both rows. wanted: None: every head reads by index."""
    found = stand.step(query, near.lse, TOKENS, budget, wanted)
    found = Partial(found.out, found.lse + np.log(rest_times))
    if wanted is None:
        wanted = torch.ones(query.shape[:2], dtype=torch.uint8, device=query.device)
    report.limits[1] = NO_LIMIT if epsilon is None else epsilon
    report.is_over.zero_()
    step = spare_heads(step_of(query, TOKENS), wanted, stand.layout)
    report_errors(query, near, found, wanted, stand.work, report.layer(1), step, stand.layout)
    return merge(near, found)


@pytest.mark.parametrize(
    ("dim", "group", "key_bits", "value_bits"), [(64, 3, 4, 2), (128, 4, 2, 4), (96, 1, 8, 2), (256, 2, 3, 2)]
)
@pytest.mark.parametrize("device", DEVICES)
def test_a_report_has_the_expected_error_and_the_masses(
    device: str, dim: int, group: int, key_bits: int, value_bits: int
) -> None:
    stand = make_stand(dim, group, LENGTHS, device, key_bits=key_bits, value_bits=value_bits, builds=False)
    query, resident = draw_query(stand, device)
    near, report = near_of(query, resident), new_report(stand.shape, NUM_LAYERS, NUM_RINGS, torch.device(device))
    report.factor.fill_(2.0)
    answer = report_step(stand, query, near, report)
    errors, reads, rests = [], [], []
    for kv_head, chosen in enumerate(stand.chosen()):
        own = query[1, kv_head * group : (kv_head + 1) * group]
        logits = softmax_logits(own, estimated_keys(stand, kv_head, TOKENS))
        exact = softmax_logits(own, stand.runs[1].keys[kv_head][:TOKENS])
        logits[:, chosen] = exact[:, chosen]
        lse = np.logaddexp(np.logaddexp.reduce(logits, -1), wide(resident[1, kv_head * group : (kv_head + 1) * group]))
        shares = np.exp(logits - lse[:, None])
        place = KV_HEADS + kv_head
        steps = wide(stand.rows("scales", 1, place, TOKENS))
        variance = (wide(own) ** 2).sum(1)[:, None] * steps**2 / (12 * dim)
        lengths = dim * NUMBER_SQUARE[value_bits] * wide(stand.rows("value_scales", 1, place, TOKENS)) ** 2
        squares = shares**2 * lengths * (VALUE_LOSS[value_bits] + np.expm1(np.minimum(variance, 4.0)))
        is_rest = np.ones(TOKENS, bool)
        is_rest[chosen] = False
        out = wide(answer.out[1, kv_head * group : (kv_head + 1) * group])
        errors.append(np.sqrt(squares[:, is_rest].sum(1) / (out**2).sum(1) + ROUNDING**2))
        reads.append(shares[:, chosen].sum(1))
        rests.append(shares[:, is_rest].sum(1))
    assert distance(report.error[1, KV_HEADS:], np.stack(errors)) < 2 * INDEXED_SCORES
    limit = 3 * INDEXED_SCORES * KV_HEADS * group * MASS_UNIT
    assert abs(int(report.of_layers[1, READ_MASS]) - np.sum(reads) * MASS_UNIT) < limit * np.mean(reads) + 100
    assert abs(int(report.of_layers[1, BOUND]) - 2 * np.sum(errors) * MASS_UNIT) < limit * np.mean(errors) + 100
    sums = report.of_rings[1].tolist()
    assert sums[HEADS] == KV_HEADS * group
    assert abs(sums[ESTIMATED] - np.sum(rests) * MASS_UNIT) < limit * np.mean(rests) + 100
    assert abs(sums[READ] - np.sum(reads) * MASS_UNIT) < limit * np.mean(reads) + 100
    assert distance(report.out[1, KV_HEADS:].flatten(0, 1), wide(answer.out[1])) < INDEXED_PARTIAL
    assert torch.equal(report.queries[1, KV_HEADS:].flatten(0, 1), query[1].float())
    assert (report.of_rings[0] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_budgets_halve_again_once_bounds_are_far_below_epsilon(device: str) -> None:
    stand = make_stand(64, 3, LENGTHS, device, builds=False)
    query, resident = draw_query(stand, device)
    near, report = near_of(query, resident), new_report(stand.shape, NUM_LAYERS, NUM_RINGS, torch.device(device))
    report.factor.fill_(1.0)
    worst, num_over = None, 0
    for epsilon, doublings in ((1e-4, 1), (1e-4, 2), ("near", 2), (100.0, 1), (100.0, 0), (100.0, 0)):
        report_step(stand, query, near, report, 1.2 * worst if epsilon == "near" else epsilon)
        num_over += int(report.is_over[1])
        worst = float(report.error[1, KV_HEADS:].amax(1).min())
        own = report.doublings[1, KV_HEADS:].tolist()
        assert own == [doublings] * KV_HEADS or epsilon == "near"
        assert report.doublings[1, :KV_HEADS].tolist() == [0, 0]
        if epsilon == "near":
            assert doublings in own
            report.doublings[1, KV_HEADS:] = doublings
    assert int(report.of_layers[1, OVER]) >= 2 * KV_HEADS * 3
    assert report.is_over.tolist() == [0, 0, 0], "of the last step"
    assert report.of_rings[:, STEPS_OVER].tolist() == [0, num_over], "steps, not heads"
    assert 2 <= num_over < 6


@pytest.mark.parametrize("device", DEVICES)
def test_heads_that_read_nothing_by_index_are_in_no_sum_of_a_report(device: str) -> None:
    stand = make_stand(64, 3, LENGTHS, device, builds=False)
    query, resident = draw_query(stand, device)
    near, report = near_of(query, resident), new_report(stand.shape, NUM_LAYERS, NUM_RINGS, torch.device(device))
    report.factor.fill_(1.0)
    wanted = torch.ones(2, 6, dtype=torch.uint8, device=device)
    wanted[1, [0, 1, 3, 4, 5]] = 0
    report_step(stand, query, near, report, epsilon=1e-4, wanted=wanted)
    errors = report.error[1, KV_HEADS:]
    assert (errors.flatten()[[0, 1, 3, 4, 5]] == UNREPORTED).all()
    error = float(errors[0, 2])
    assert ROUNDING <= error < 1
    assert abs(int(report.of_layers[1, BOUND]) - error * MASS_UNIT) <= 2
    assert int(report.of_layers[1, OVER]) == int(report.of_rings[1, HEADS]) == 1
    assert 0 < int(report.of_rings[1, ESTIMATED]) + int(report.of_rings[1, READ]) < MASS_UNIT
    assert report.doublings[1, KV_HEADS:].tolist() == [1, 0]


@pytest.mark.parametrize("stored", [torch.float32, torch.int8, torch.uint8], ids=["plain", "int8", "fp8"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_place_that_exceeds_is_read_in_full_in_resident_pages(device: str, stored: torch.dtype) -> None:
    stand = make_stand(96, 3, [240], device, stored=stored)
    check_read_again(stand, 240, PAGE_SLOT, device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_place_of_a_ring_in_host_memory_is_read_there_though_others_are_in_pages(device: str) -> None:
    stand = make_stand(96, 3, [240], device, builds=False)
    nothing = torch.zeros(4, KV_HEADS, PAGE_TOKENS, 96, device=device)
    table = torch.zeros(NUM_SLOTS, 16, dtype=torch.int32, device=device)
    pages = Pages(nothing, nothing, table, SINK)
    check_read_again(stand, 240, -1, device, pages)
    with pytest.raises(AssertionError):
        check_read_again(stand, 240, PAGE_SLOT, device, pages)


@pytest.mark.parametrize("rows", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_place_that_exceeds_is_read_in_full_and_no_other(device: str, rows: Rows) -> None:
    stand = make_stand(96, 3, [1100, 64, 76], device, rows=rows, builds=False)
    check_read_again(stand, 1200, -1, device)


def check_read_again(stand: Stand, num_tokens: int, page_slot: int, device: str, pages: Pages | None = None) -> None:
    """Check the answers of a step in which the second KV head of ring 1 is above epsilon, and the first is not."""
    query, resident = draw_query(stand, device)
    report = new_report(stand.shape, NUM_LAYERS, NUM_RINGS, torch.device(device))
    found = stand.step(query, resident, num_tokens, 64)
    before = found.out.clone()
    report.exceeds[:] = torch.tensor([1, 1, 0, 1])
    own = stand.pages[1] if stand.pages else pages
    step = step_of(query, num_tokens, page_slot)
    read_again(query, found, stand.index.layer(1), stand.work, report, step, stand.layout, own)
    logits = softmax_logits(query[1, 3:], stand.runs[1].keys[1][:num_tokens])
    out, lse = partial_of(logits, stand.runs[1].values[1][:num_tokens])
    assert distance(found.out[1, 3:], out) < INDEXED_PARTIAL
    assert distance(found.lse[1, 3:], lse) < INDEXED_PARTIAL
    assert torch.equal(found.out[:1], before[:1])
    assert torch.equal(found.out[1, :3], before[1, :3])
