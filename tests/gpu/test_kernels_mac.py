"""MAC-Attention's match, spans, completion and rings against the float64 oracle, step by step."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpu.methods.mac.match import Count
from tests.gpu.kernel_oracles import DEVICES, DTYPES, distance, wide
from tests.gpu.mac_oracles import Rule
from tests.gpu.mac_rows import MacRows, Shape, Taken
from tests.tolerances import (
    MAC_BFLOAT16,
    MAC_DISTANCE2,
    MAC_FLOAT32,
    MAC_LSE_BFLOAT16,
    MAC_LSE_FLOAT32,
    MAC_SUMMARIES_BFLOAT16,
    MAC_SUMMARY_BFLOAT16,
)

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("dtype", DTYPES)]
OUT = {torch.float32: MAC_FLOAT32, torch.bfloat16: MAC_BFLOAT16}
LSE = {torch.float32: MAC_LSE_FLOAT32, torch.bfloat16: MAC_LSE_BFLOAT16}
SMALL = Shape(4, 2, 64)
RULE = Rule(sink=4, band=8, capacity=16, tau=0.45, max_gap=16, max_age=40)


def check(taken: Taken, rows: MacRows, out: float, lse: float) -> int:
    """One step is the oracle's; returns the number of hits."""
    capacity, hits = rows.rule.capacity, 0
    entries, wholes = taken.matched.entries.tolist(), wide(taken.whole.out)
    covered = (taken.near.covered.cpu(), taken.far.covered.cpu()) if taken.near.covered is not None else None
    bounds = taken.matched.bounds.cpu()
    for row, heads in enumerate(taken.wanted):
        begin, end = rows.skips[row]
        for head, step in enumerate(heads):
            at = row, head
            is_hit = entries[row][head] >= 0
            left_out = int(bounds[1][at] - bounds[0][at])
            if covered is not None:
                assert int(covered[0][at] + covered[1][at]) + left_out == rows.paged.contexts[row]
            assert int(taken.matched.wanted[at]) == (not is_hit)
            if step is None:
                assert entries[row][head] == -1
                assert left_out == end - begin
                continue
            hits += is_hit
            assert entries[row][head] == (-1 if step.matched is None else step.matched % capacity)
            assert left_out == rows.paged.contexts[row] - len(step.read)
            got = float(taken.matched.distances2[at])
            assert got == step.distance**2 or abs(got - step.distance**2) < MAC_DISTANCE2
            assert np.linalg.norm(wholes[row, head] - step.out) < out * np.linalg.norm(step.out)
            assert abs(float(taken.whole.lse[at]) - step.lse) < lse
            check_entry(rows, row, head, step, out, lse)
    return hits


def check_entry(rows: MacRows, row: int, head: int, step, out: float, lse: float) -> None:
    """The ring holds the step's own summary."""
    ring, m = rows.ring, int(rows.paged.contexts[row]) - 1
    at = int(rows.rings[row]), head, m % rows.rule.capacity
    if m + 1 - rows.rule.band <= rows.rule.sink:
        assert torch.isposinf(ring.norms[at])
        return
    prefix = step.prefix
    np.testing.assert_array_equal(wide(ring.queries[at]), prefix.query)
    sign = -1 if prefix.share > rows.rule.max_prefix_share else 1
    assert abs(sign * float(ring.norms[at]) - prefix.query @ prefix.query) < MAC_DISTANCE2
    assert abs(float(ring.lses[at]) - np.log(prefix.mass)) < lse
    kept = prefix.weighted / prefix.mass
    rounding = MAC_SUMMARY_BFLOAT16 if ring.outs.dtype == torch.bfloat16 else 0
    assert np.linalg.norm(wide(ring.outs[at]) - kept) < (out + rounding) * np.linalg.norm(kept)
    assert int(ring.origins[at]) == prefix.origin
    assert bool(ring.is_estimate[at]) == prefix.is_estimate


def run(rows: MacRows, steps: int, repeat, out: float | None = None, lse: float | None = None) -> int:
    """`repeat(row, head, step)`: how many cells before this one its query was; counts are held at the end."""
    hits, counts = 0, np.zeros(len(Count), int)
    for number in range(steps):
        gaps = [[repeat(row, head, number) for head in range(rows.shape.heads)] for row in range(len(rows.prompts))]
        taken = rows.step(np.array(gaps))
        hits += check(taken, rows, out or OUT[rows.dtype], lse or LSE[rows.dtype])
        counts += rows.tally(taken)
    assert rows.counts.tolist() == counts.tolist()
    assert counts[Count.HITS] == hits
    return hits


def test_every_step_is_the_oracles_with_hits_misses_plain_rows_and_short_contexts(dtype, device):
    steps = 36
    rows = MacRows(SMALL, RULE, [50, 0, 30, 9], steps, dtype, device, plain=(2,))
    generator = np.random.default_rng(5)
    hits = run(rows, steps, lambda *_: int(generator.integers(1, 20)) if generator.random() < 0.7 else 0)
    assert 100 < hits < 4 * 3 * steps


@pytest.mark.parametrize("kind", ["all", "none", "one_of_a_group"])
def test_heads_of_a_group_hit_together_apart_or_not_at_all(kind, dtype, device):
    steps, first = 24, 13
    rows = MacRows(SMALL, RULE, [40], steps, dtype, device)
    repeats = {"all": lambda head: 3, "none": lambda head: 0, "one_of_a_group": lambda head: 5 * (head == 1)}[kind]
    hits = run(rows, steps, lambda row, head, step: repeats(head) if step >= first else 0)
    assert hits == {"all": 4, "none": 0, "one_of_a_group": 1}[kind] * (steps - first)


def test_a_ring_wraps_around_and_its_own_entry_is_read_before_it_is_written(dtype, device):
    steps = 40
    rows = MacRows(SMALL, RULE, [24, 31], steps, dtype, device)
    hits = run(rows, steps, lambda row, head, step: 16 if step >= 16 else 0)
    assert hits == 2 * 4 * (steps - 16)


def test_chains_of_hits_end_at_the_greatest_age(dtype, device):
    steps = 60
    rows = MacRows(SMALL, RULE, [30], steps, dtype, device)
    hits = run(rows, steps, lambda row, head, step: 1)
    assert hits == 4 * (steps - 2), "the first has nobody to match, and one is older than 40"


def test_a_gap_or_a_context_beyond_the_limits_matches_nothing(dtype, device):
    rule = Rule(sink=4, band=8, capacity=16, tau=0.45, max_gap=6, max_age=40, min_cells=60)
    rows = MacRows(SMALL, rule, [44], 28, dtype, device)
    hits = run(rows, 28, lambda row, head, step: (6, 7, 2, 16)[head])
    assert hits > 0
    assert rows.counts[Count.TRIES] == 4 * 13


def test_what_is_nearer_than_the_least_gap_matches_nothing(dtype, device):
    rule = Rule(sink=4, band=8, capacity=16, tau=0.45, max_gap=11, max_age=40, min_gap=5)
    rows = MacRows(SMALL, rule, [44], 28, dtype, device)
    hits = run(rows, 28, lambda row, head, step: (4, 5, 11, 12)[head])
    assert 0 < rows.counts[Count.HITS] == hits
    assert rows.counts[Count.GAPS] >= 5 * hits


def test_a_layer_that_does_not_match_reads_all_and_still_fills_its_rings(dtype, device):
    rows = MacRows(SMALL, RULE, [40], 12, dtype, device)
    rows.is_matching.zero_()
    assert run(rows, 8, lambda *_: 1) == 0
    assert not rows.counts.any()
    rows.is_matching.fill_(1)
    taken = rows.step(np.ones((1, 4), int))
    assert check(taken, rows, OUT[dtype], LSE[dtype]) == 4


def test_skipped_ranges_are_the_hosts_where_heads_missed_and_reused_where_they_hit(dtype, device):
    steps = 30
    rows = MacRows(SMALL, RULE, [60, 70, 50], steps, dtype, device, skips=[(4, 36), (4, 40), (4, 20)], plain=(1,),
                   is_estimate=(0, 1))  # fmt: skip
    generator = np.random.default_rng(2)
    hits = run(rows, steps, lambda *_: int(generator.integers(1, 17)) if generator.random() < 0.6 else 0)
    assert hits > 50
    sampled = rows.ring.is_estimate[rows.rings[[0, 2]].long()].cpu()
    assert sampled[0].all()
    assert not sampled[1].any()


def test_what_was_released_since_is_not_reused(dtype, device):
    rows = MacRows(SMALL, RULE, [60], 20, dtype, device, skips=[(4, 40)])
    run(rows, 16, lambda *_: 0)
    rows.skips = [(4, 65)]
    assert check(rows.step(np.full((1, 4), 5)), rows, OUT[dtype], LSE[dtype]) == 0, "the prefix of cell 71 ends at 64"
    assert check(rows.step(np.full((1, 4), 5)), rows, OUT[dtype], LSE[dtype]) == 4


def test_summaries_in_bfloat16_cost_their_rounding(dtype, device):
    steps = 40
    rows = MacRows(SMALL, RULE, [50], steps, dtype, device, outs=torch.bfloat16)
    allowed = OUT[dtype] + MAC_SUMMARIES_BFLOAT16
    assert run(rows, steps, lambda *_: 3, out=allowed) > 100


def test_heads_of_96_are_read_whole_and_nothing_behind_them(dtype, device):
    rows = MacRows(Shape(2, 1, 96), RULE, [30], 5, dtype, device)
    assert run(rows, 5, lambda row, head, step: 3 if (step + head) % 3 else 20) > 1


@pytest.mark.parametrize(
    "shape", [Shape(32, 8, 128), Shape(32, 4, 128), Shape(8, 8, 64)], ids=["32_over_8", "32_over_4", "8_over_8"]
)
def test_heads_of_models_over_contexts_longer_than_band_and_ring(shape, dtype, device):
    rule = Rule(sink=16, band=256, capacity=1024, tau=0.45, max_gap=1024, max_age=4096)
    rows = MacRows(shape, rule, [1500, 270], 4, dtype, device)
    generator = np.random.default_rng(1)
    hits = run(rows, 4, lambda row, head, step: int(generator.integers(0, 3)))
    assert hits > shape.heads


def test_equal_distances_go_to_the_youngest(dtype, device):
    rows = MacRows(SMALL, RULE, [40], 14, dtype, device)
    run(rows, 4, lambda *_: 0)
    for queries in rows.queries:
        for cell in queries:
            queries[cell] = np.round(queries[cell])  # products of small integers are exact
    zeros = np.zeros((1, 4), int)
    rows.generator = np.random.default_rng(0)
    for number in range(8):
        taken = rows.step(zeros if number < 1 else zeros + 1, noise=0.0)
        rows.queries[0][43 + number] = rows.queries[0][43 + number]
        check(taken, rows, OUT[dtype], LSE[dtype])
        if number >= 1:
            assert taken.matched.entries.tolist() == [[(int(taken.cells[0]) - 1) % 16] * 4]


def plain(rows: MacRows) -> tuple[np.ndarray, np.ndarray]:
    """Attention of the step's queries to all of each context."""
    contexts = np.array(rows.paged.contexts)
    everything = np.arange(contexts.max()) < contexts[:, None, None]
    return rows.paged.wanted_of(everything.repeat(rows.shape.heads, 1))


def test_where_nothing_matches_the_whole_is_plain_attention(dtype, device):
    rule = Rule(sink=4, band=8, capacity=16, tau=1.0, max_gap=16, max_age=40)
    rows = MacRows(SMALL, rule, [200, 3], 6, dtype, device)
    for _ in range(6):
        taken = rows.step(np.ones((2, 4), int), noise=0.0)
        out, lse = plain(rows)
        assert not (taken.matched.entries >= 0).any()
        assert distance(taken.whole.out, out) < OUT[dtype]
        assert np.abs(wide(taken.whole.lse) - lse).max() < LSE[dtype]


def test_an_identical_query_that_is_not_turned_gives_plain_attention(dtype, device):
    rows = MacRows(SMALL, RULE, [200], 8, dtype, device, is_turned=False)
    for number in range(8):
        taken = rows.step(np.ones((1, 4), int), noise=0.0)
        out, _ = plain(rows)
        assert (taken.matched.entries >= 0).all() == (number > 0)
        assert distance(taken.whole.out, out) < OUT[dtype]


def test_a_summary_of_the_query_as_it_is_turned_now_gives_plain_attention(dtype, device):
    rows = MacRows(SMALL, RULE, [200], 3, dtype, device)
    rows.step(np.zeros((1, 4), int))
    rows.is_matching.zero_()
    rows.taken, twin = 1, rows.queries[0][200]
    rows.queries[0][200] = twin
    rows.step(np.ones((1, 4), int), noise=0.0)  # leaves the summary of this query at cell 201
    rows.ring.origins.clamp_(max=201)
    rows.taken, rows.queries[0][200] = 1, twin
    norms = rows.ring.norms.clone()
    rows.ring.norms.fill_(torch.inf)
    own, entry = int(rows.rings[0]), 201 % 16
    before = {name: getattr(rows.ring, name)[own, :, entry].clone() for name in ("queries", "outs", "lses")}
    for name, kept in before.items():  # as if cell 200 had summed over `[sink, 200 + 1 - band)` with it
        getattr(rows.ring, name)[own, :, 200 % 16] = kept
    keys, values = rows.paged.keys[0], rows.paged.values[0]
    turned = wide(rows.paged.query)[0]
    for head in range(4):
        weights = np.exp(keys[4:193, head // 2] @ turned[head] * rows.paged.scale)
        rows.ring.lses[own, head, 200 % 16] = float(np.log(weights.sum()))
        summary = torch.from_numpy(weights @ values[4:193, head // 2] / weights.sum())
        rows.ring.outs[own, head, 200 % 16] = summary.to(rows.ring.outs)
    rows.ring.norms[own, :, 200 % 16] = norms[own, :, 200 % 16]
    rows.is_matching.fill_(1)
    taken = rows.step(np.ones((1, 4), int), noise=0.0)
    out, _ = plain(rows)
    assert (taken.matched.entries == 200 % 16).all()
    assert distance(taken.whole.out, out) < OUT[dtype]


def test_one_cell_of_the_band_more_or_less_is_noticed(dtype, device):
    for band in (7, 9):
        rows = MacRows(SMALL, RULE, [40], 3, dtype, device)
        run(rows, 2, lambda *_: 0)
        rows.rule = Rule(sink=4, band=band, capacity=16, tau=0.45, max_gap=16, max_age=40)
        with pytest.raises(AssertionError):
            check(rows.step(np.ones((1, 4), int)), rows, OUT[dtype], LSE[dtype])


def test_an_entry_whose_prefix_held_too_much_is_refused_and_another_near_one_is_taken(dtype, device):
    """The nearest query has often too large a share: the next one that is near enough is a hit, or none is."""
    steps = 20
    rows = MacRows(SMALL, replace(RULE, max_prefix_share=0.72), [50], steps, dtype, device)
    generator = np.random.default_rng(3)
    hits = run(rows, steps, lambda *_: int(generator.integers(1, 6)))
    assert rows.counts[Count.REFUSED] > 10
    assert hits > 10


def test_a_query_of_zeros_is_refused_like_any_other(dtype, device):
    rows = MacRows(SMALL, replace(RULE, max_prefix_share=0.5), [50], 4, dtype, device)
    rows.generator = SimpleNamespace(standard_normal=np.zeros)
    assert run(rows, 4, lambda *_: 0) == 0
    assert rows.counts[Count.REFUSED] == 3 * 4


@pytest.mark.parametrize("share", [0.69, 0.75, 1.0])
def test_another_share_than_the_settings_is_noticed(share, dtype, device):
    rows = MacRows(SMALL, replace(RULE, max_prefix_share=0.72), [50], 20, dtype, device)
    rows.rule = replace(RULE, max_prefix_share=share)
    generator = np.random.default_rng(3)
    with pytest.raises(AssertionError):
        run(rows, 20, lambda *_: int(generator.integers(1, 6)))


def test_wrong_arguments_are_named(dtype, device):
    rows = MacRows(SMALL, RULE, [40], 2, dtype, device)
    rows.rings = rows.rings.long()
    with pytest.raises(ValueError, match=r"match: rings is \(1,\) torch.int64.*int32"):
        rows.step(np.zeros((1, 4), int))
