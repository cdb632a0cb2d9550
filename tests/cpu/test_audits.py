"""With epsilon, a head reads in full by what full readings say: answers stay unbiased, and where an estimate chooses,
they do not."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from cpu.audits import Audits
from cpu.cpu_tier import CpuTier
from cpu.host_attention import HostPartial
from cpu.host_context import Context as HostContext
from cpu.sample_errors import LARGEST, LOG_MASS, OUTPUT
from gpu.methods.registry import list_host_counters
from tests.cpu.rows_model import SAMPLED, Context, table_of, to_bf16
from tests.cpu.test_errors import HEADS, KV_HEADS, clustered, draw_tables, kernel
from tests.cpu.tier_model import HEADS as TIER_HEADS
from tests.cpu.tier_model import LAYERS, Device, new_tier, poisoned_pages, tier_shape
from tests.tolerances import HOST_ATTENTION_FLOAT32, UNBIASED_SIGMAS
from transfer.host_config import ErrorsConfig
from transfer.reading import Reading
from transfer.slabs import PageSource

BITS, TABLES, TOKENS, STEPS = 5, 16, 400, 4
AUDITED_EPSILON, ESTIMATED_EPSILON = 0.55, 0.7  # of which some heads are beyond, and some are not


def test_heads_take_turns_and_those_beyond_epsilon_stay_within_the_share() -> None:
    settings = ErrorsConfig(bound=0.5, epsilon=0.2, audit_steps=4, full_share=0.25)
    audits, context, layers, heads = Audits(settings, 2, 4), HostContext(1, True), 2, 4
    own = np.arange(layers * heads).reshape(layers, heads) / 10  # what a full reading says of each head
    read = np.zeros((layers, heads), int)
    for step in range(8):
        full = audits.full([context, None], 2, 0, layers)
        assert (full[:, 1] == 0).all()
        turn = (np.arange(layers * heads).reshape(layers, heads) + step) % 4 == 0
        assert (full[:, 0][turn] == 1).all()
        errors = audits.new_errors(layers, 2)
        errors[:, 0, :, LOG_MASS] = np.where(full[:, 0] > 0, own, 9.0)  # an estimate is never noted
        errors[:, 0, :, LARGEST] = 0.05
        audits.note([context, None], errors, full, 0)
        audits.end_step()
        read += full[:, 0]
        if step >= 3:
            assert context.in_full is not None
            assert np.argwhere(context.in_full).tolist() == [[1, 2], [1, 3]], "a quarter, the worst ones"
    assert read[0, 0] == 2
    assert audits.counts.in_full == read.sum()
    assert audits.counts.estimated == audits.counts.beyond == 8 * layers * heads - read.sum()
    assert audits.counts.steps_beyond == 8


def test_heads_with_a_heavy_key_are_counted_apart() -> None:
    audits = Audits(ErrorsConfig(bound=0.5), 1, 4)
    errors = audits.new_errors(1, 1)
    errors[0, 0, :, OUTPUT] = 0.6, 0.4, 0.6, 0.6
    errors[0, 0, :, LARGEST] = 0.05, 0.05, 0.2, 0.0  # the last one sampled nothing
    assert audits.full([HostContext(1, True)], 1, 0, 1) is None
    audits.note([HostContext(1, True)], errors, None, 0)
    audits.end_step()
    counts = audits.counts
    assert (counts.estimated, counts.heavy, counts.beyond, counts.heavy_beyond, counts.steps_beyond) == (3, 1, 1, 1, 1)


Rule = Callable[[Audits, HostContext, HostPartial, np.ndarray], None]


def by_full_readings(audits: Audits, context: HostContext, got: HostPartial, full: np.ndarray) -> None:
    audits.note([context], got.errors[None], full, 0)


def by_estimates(audits: Audits, context: HostContext, got: HostPartial, full: np.ndarray) -> None:
    """What is not done: a sample says that it is a bad one, and from the next step on the head reads in full."""
    beyond = got.errors[..., LOG_MASS] > ESTIMATED_EPSILON
    context.in_full = beyond if context.in_full is None else beyond | context.in_full
    context.steps += 1


def masses(rule: Rule, draws: int, num_excluded: int = 0) -> np.ndarray:
    """Of the steps behind the first, as shares of the true masses: `[draws, steps, heads]`, of heads that have a key
    with half of their mass, which is found in every other draw. num_excluded: blocks behind the first that each KV head
    leaves out of a step, those to which the step before attended most, exactly.
    """
    generator = np.random.default_rng(4)
    rows, query = clustered(generator, TOKENS, BITS, TABLES)
    group = HEADS // KV_HEADS
    for kv_head, asked in enumerate(query[::group]):
        aside = generator.standard_normal(len(asked))
        heavy = 0.4 * asked / np.linalg.norm(asked) + 0.9 * aside / np.linalg.norm(aside)
        scale = np.sqrt(len(asked))
        others = np.log(np.exp(rows.real_keys()[kv_head] @ asked / scale).sum())
        rows.keys[kv_head, 0] = to_bf16((heavy * others * scale / (heavy @ asked)).astype(np.float32))
    drift = 0.05 * generator.standard_normal((STEPS, *query.shape))
    queries, shares = query + drift.cumsum(0), np.empty((draws, STEPS, HEADS))
    keys = rows.real_keys().repeat(group, axis=0)
    each = np.exp(np.einsum("hnd,shd->shn", keys, queries) / np.sqrt(query.shape[1]))
    flags = np.zeros((STEPS, 1, KV_HEADS, 32), np.uint8)
    if num_excluded:
        of_blocks = each.reshape(STEPS, KV_HEADS, group, -1, 16).sum((2, 4))[:, :, 1:]
        best = np.argsort(-of_blocks, -1)[:-1, :, :num_excluded] + 1
        np.put_along_axis(flags[1:, 0], best, 1, -1)
    excluded = np.packbits(flags, axis=-1, bitorder="little").view(np.int32)
    covered = 1 - flags[:, 0, :, : TOKENS // 16].repeat(16, -1).repeat(group, 1)
    truth = (each * covered).sum(-1)
    settings = ErrorsConfig(bound=0.25, epsilon=AUDITED_EPSILON, audit_steps=3, full_share=1.0)
    estimating, table = kernel("bf16", True, BITS, TABLES), table_of([Context([(rows, SAMPLED, 0, TOKENS)])])
    for draw in range(draws):
        audits, context = Audits(settings, 1, HEADS), HostContext(1, True)
        codes = draw_tables(generator, rows, queries.reshape(-1, query.shape[1]), BITS, TABLES)
        for step, asked in enumerate(codes.reshape(STEPS, 1, HEADS, TABLES)):
            full = audits.full([context], 1, 0, 1)
            asking = queries[step, None].astype(np.float32)
            got = estimating.attend(table, asking, asked, 1, excluded=excluded[step], full=full[0])
            shares[draw, step] = np.exp(got.lse[0]) / truth[step]
            rule(audits, context, got, full)
    return shares[:, 1:, ::group]


@pytest.mark.parametrize(("rule", "is_biased"), [(by_full_readings, False), (by_estimates, True)])
def test_the_mass_is_unbiased_where_full_readings_choose_and_biased_where_estimates_do(
    rule: Rule, is_biased: bool
) -> None:
    draws = 400
    of_draws = masses(rule, draws).mean((1, 2))
    sigmas = abs(of_draws.mean() - 1) / (of_draws.std(ddof=1) / np.sqrt(draws))
    assert of_draws.std() > 0
    assert (sigmas > UNBIASED_SIGMAS) == is_biased, sigmas


def test_the_mass_of_the_rest_is_unbiased_where_exact_attention_excludes_blocks_and_full_readings_choose() -> None:
    """Predicted blocks with epsilon: some heads read in full what is left, others a sample of it."""
    draws, read = 300, []

    def noting(audits: Audits, context: HostContext, got: HostPartial, full: np.ndarray) -> None:
        by_full_readings(audits, context, got, full)
        read.append(full.mean())

    of_draws = masses(noting, draws, num_excluded=6).mean((1, 2))
    assert 0.1 < np.mean(read) < 0.9
    assert of_draws.std() > 0
    assert abs(of_draws.mean() - 1) < UNBIASED_SIGMAS * of_draws.std(ddof=1) / np.sqrt(draws)


@pytest.mark.parametrize("missing", ["not wanted", "excluded"])
def test_a_head_that_reads_nothing_in_a_step_keeps_its_last_reading(missing: str) -> None:
    """All heads are beyond epsilon by their first turn; then some reuse an answer, or have all of the run excluded."""
    generator = np.random.default_rng(6)
    rows, query = clustered(generator, TOKENS, BITS, TABLES)
    estimating, table = kernel("bf16", True, BITS, TABLES), table_of([Context([(rows, SAMPLED, 0, TOKENS)])])
    settings = ErrorsConfig(bound=0.25, epsilon=1e-6, audit_steps=2, full_share=1.0)
    audits, context = Audits(settings, 1, HEADS), HostContext(1, True)
    codes = draw_tables(generator, rows, query, BITS, TABLES).reshape(1, HEADS, TABLES)
    wanted, excluded = np.ones((1, HEADS), np.uint8), np.zeros((1, KV_HEADS, -(-TOKENS // 512)), np.int32)
    away = np.arange(HEADS) < HEADS // KV_HEADS  # of the first KV head
    in_full = []
    for step in range(4):
        full = audits.full([context], 1, 0, 1)
        in_full.append(full[0, 0].astype(bool))
        if step == 2 and missing == "not wanted":
            wanted[0, away] = 0
        elif step == 2:
            excluded[0, 0] = -1
        got = estimating.attend(table, query[None].astype(np.float32), codes, 1, wanted, excluded, full[0])
        assert ((got.errors[0] == 0).all(1) == (away & (step > 1))).all()
        audits.note([context], got.errors[None], full, 0)
    assert not in_full[0].all(), "each has its turn in one of two steps"
    assert np.all(in_full[1:]), "and goes on"
    assert context.in_full.all()


def test_a_tier_reads_in_full_what_its_first_turns_find_beyond_epsilon() -> None:
    """Each head has its turn in one of two steps, and goes on: from the second on all are read in full."""
    errors = ErrorsConfig(bound=1e-6, epsilon=1e-6, audit_steps=2, full_share=1.0)
    shape = tier_shape(bits=5, tables=40)
    pages = PageSource(poisoned_pages, None, None)
    with Device(CpuTier(shape, torch.float32, 2**30, 1, pages, errors), 3) as device:
        device.open(1, Reading.SAMPLE, 2100)
        device.open(2, Reading.WHOLE, 300)
        for step in range(4):
            _, lse, queries = device.attend([1, 2])
            _, exact = device.expect([1, 2], queries)
            off = np.abs(lse - exact).max((0, 1)) > HOST_ATTENTION_FLOAT32
            assert off.any() == (step == 0)
        counts = device.tier.stats().errors
        assert counts.in_full == 7 * LAYERS * TIER_HEADS // 2
        assert counts.estimated == counts.beyond + counts.heavy_beyond == LAYERS * TIER_HEADS // 2
        assert counts.steps_beyond == 1
    with Device(new_tier(shape), 3) as device:
        device.open(1, Reading.SAMPLE, 2100)
        device.attend([1])
        assert device.tier.stats().errors.estimated == 0


def test_a_tier_counts_what_methods_declare_of_it() -> None:
    errors = ErrorsConfig(bound=1e-6, epsilon=1e-6, audit_steps=2, full_share=1.0)
    pages = PageSource(poisoned_pages, None, None)
    with Device(CpuTier(tier_shape(bits=5, tables=40), torch.float32, 2**30, 1, pages, errors), 3) as device:
        device.open(1, Reading.SAMPLE, 2100)
        device.attend([1])
        stats = device.tier.stats()
    assert set(stats.method_counts) == set(list_host_counters())
    assert stats.method_counts["host_tables_built"] == stats.tables_built > 0
    assert stats.method_counts["host_answers_estimated"] == stats.errors.estimated > 0
    assert stats.method_counts["host_answers_in_full"] == stats.errors.in_full > 0


def test_a_fork_goes_on_with_the_readings_of_the_context_it_stands_on() -> None:
    """As the next turn of a chat does: all heads of the first were found beyond epsilon, each in its one turn, so the
    fork reads in full from its first step on, of what both have and of its own."""
    steps = LAYERS * TIER_HEADS
    errors = ErrorsConfig(bound=1e-6, epsilon=1e-6, audit_steps=steps, full_share=1.0)
    pages = PageSource(poisoned_pages, None, None)
    with Device(CpuTier(tier_shape(bits=5, tables=40), torch.float32, 2**30, 1, pages, errors), 3) as device:
        device.open(1, Reading.SAMPLE, 2100)
        for _ in range(steps):
            device.attend([1])
        device.fork(1, 2, 1500, Reading.SAMPLE)
        device.offload(2, 2100)
        device.fork(1, 3, 1500, Reading.WHOLE)
        for ids in ([2], [3], [1, 2]):
            _, lse, queries = device.attend(ids)
            _, exact = device.expect(ids, queries)
            assert np.abs(lse - exact).max() < HOST_ATTENTION_FLOAT32


def test_what_a_fork_reads_later_is_its_own() -> None:
    settings = ErrorsConfig(bound=0.5, epsilon=0.2, audit_steps=2, full_share=1.0)
    audits, first, fork = Audits(settings, 1, 4), HostContext(1, True), HostContext(2, True)
    errors = audits.new_errors(1, 1)
    errors[..., LARGEST] = 0.05
    errors[..., LOG_MASS] = 0.3
    everything = np.ones((1, 1, 4), np.uint8)
    audits.note([first], errors, everything, 0)
    fork.take_readings(first)
    assert fork.in_full.all()
    turns = [audits.full([context], 1, 0, 1) for context in (first, fork)]
    assert np.array_equal(*turns)
    errors[..., LOG_MASS] = 0.1
    audits.note([fork], errors, everything, 0)
    assert not fork.in_full.any()
    audits.note([first], errors, np.zeros_like(everything), 0)
    assert first.in_full.all()
    assert (first.steps, fork.steps) == (2, 2)
