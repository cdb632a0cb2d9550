"""What indexed attention reports of its errors: bounds against float64 numpy, audits, and budgets that double."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu.methods.indexed import FIGURES
from gpu.methods.indexed.auditing import FEWEST_RATIOS, Audits, AuditSums, Calibration, Reading
from gpu.methods.indexed.device import Indexed
from gpu.methods.indexed.exact import attend_exactly
from gpu.methods.indexed.reporting import (
    STEPS_OVER,
    Report,
    new_report,
)
from gpu.methods.indexed.settings import IndexedSettings
from tests.gpu.indexed_stand import KV_HEADS, NUM_LAYERS, NUM_RINGS, Stand, make_stand
from tests.gpu.kernel_oracles import distance, wide
from tests.gpu.method_counts import counts_of
from tests.gpu.reference_model import document_prompt
from tests.gpu.test_host_read_graphs import Recorded, fake_graphs
from tests.gpu.test_indexed_serving import FEW, NEVER, ON_CARD, IndexedTwins
from tests.gpu.test_kernels_indexed import draw_query, partial_of, softmax_logits
from tests.gpu.test_kernels_indexed_errors import TOKENS, near_of, report_step
from tests.gpu.twin_runners import check_steps
from transfer.partial import Partial
from transfer.tier_shape import Rows


def true_errors(stand: Stand, query: torch.Tensor, near: Partial, answer: Partial) -> np.ndarray:
    """Return |out - exact| / |exact| of the second row's heads, float64 `[heads]`."""
    errors, group = [], stand.shape.group
    for head in range(KV_HEADS * group):
        run, kv_head = stand.runs[1], head // group
        logits = softmax_logits(query[1, head : head + 1], run.keys[kv_head][:TOKENS])
        out, lse = partial_of(logits, run.values[kv_head][:TOKENS])
        total = np.logaddexp(lse[0], float(near.lse[1, head]))
        of_near = np.exp(float(near.lse[1, head]) - total)
        exact = np.exp(lse[0] - total) * out[0] + of_near * wide(near.out[1, head])
        errors.append(np.linalg.norm(wide(answer.out[1, head]) - exact) / np.linalg.norm(exact))
    return np.array(errors)


@pytest.mark.parametrize(("key_bits", "value_bits"), [(4, 2), (4, 4), (8, 2), (3, 2)])
def test_the_expected_error_is_the_root_mean_square_of_true_ones(key_bits: int, value_bits: int) -> None:
    stand = make_stand(64, 3, [2100, 76], "cpu", key_bits=key_bits, value_bits=value_bits)
    report = new_report(stand.shape, NUM_LAYERS, NUM_RINGS, torch.device("cpu"))
    ratios = []
    for seed in range(16):
        query, _ = draw_query(stand, "cpu", seed)
        near = near_of(query, torch.full(query.shape[:2], -torch.inf).nan_to_num(neginf=-50.0))
        answer = report_step(stand, query, near, report)
        ratios.append(true_errors(stand, query, near, answer) / wide(report.error[1, KV_HEADS:]).flatten())
    assert 0.7 < np.sqrt(np.mean(np.square(ratios))) < 1.3
    assert np.mean(np.array(ratios) < 2.0) > 0.95


@pytest.mark.parametrize("rows", ["bfloat16", "int8", "int4"])
def test_exact_attention_reads_every_piece_up_to_the_last_token(rows: Rows) -> None:
    stand = make_stand(96, 3, [2100, 64, 76], "cpu", rows=rows)
    queries = np.random.default_rng(2).normal(size=(3, 96)).astype(np.float32)
    for num_tokens in (1, 2150, 2240):
        out, lse = attend_exactly(stand.runs[0].table, 1, num_tokens, queries, rows)
        logits = softmax_logits(torch.tensor(queries), stand.runs[0].keys[1][:num_tokens])
        exact, exact_lse = partial_of(logits, stand.runs[0].values[1][:num_tokens])
        assert distance(torch.tensor(out), exact) < 1e-5
        assert np.abs(lse - exact_lse).max() < 1e-5


@dataclass
class Lent:
    """Lends, and keeps what loans ended behind."""

    ended: list = field(default_factory=list)

    def places(self, row):
        raise AssertionError("audits know where rows lie")

    def lend(self):
        return self

    def end(self, done):
        self.ended.append(done)


def audit_step(stand: Stand, report: Report, rest_times: float = 1.0) -> tuple[np.ndarray, AuditSums, Audits]:
    """Return the true errors of a step, and what an audit of its second layer and first KV head says."""
    query, resident = draw_query(stand, "cpu")
    near = near_of(query, resident)
    audits, lent, sums = Audits(report, 1, KV_HEADS, rows="bfloat16"), Lent(), AuditSums()
    audits._turn = 1  # layer 1
    audits.pick([Reading(1, TOKENS, np.stack([run.table for run in stand.runs]), sums)], lent)
    answer = report_step(stand, query, near, report, rest_times=rest_times)
    audits.follow()
    audits.wait()
    assert audits.failure is None
    assert all(done.query() for done in lent.ended)
    assert len(lent.ended) == 1
    return true_errors(stand, query, near, answer)[: stand.shape.group], sums, audits


def test_an_audit_finds_the_true_error_and_what_is_wrong_with_an_estimate() -> None:
    stand = make_stand(64, 3, [2100, 76], "cpu")
    report = new_report(stand.shape, NUM_LAYERS, NUM_RINGS, torch.device("cpu"))
    errors, sums, audits = audit_step(stand, report)
    assert sums.heads == 3
    assert sums.beyond == 0
    assert abs(sums.error - errors.sum()) < 1e-4
    assert abs(audits.worst - errors.max()) < 1e-4
    assert audits.of_layers[1] == sums
    assert audits.of_layers[0].heads == 0
    twice = audit_step(stand, report, rest_times=2.0)[1]
    assert twice.beyond > 0, "what is not resident counts twice"
    codes, own = stand.index.value_codes[1], stand.index.layer(1)
    likeliest = np.argsort(-wide(stand.work.logits[KV_HEADS, :TOKENS, 0]))
    stale = [token for token in likeliest[:600] if token not in stand.chosen()[0]]
    to, where_from = (own.cells_of(KV_HEADS, torch.tensor(one), KV_HEADS) for one in (stale, stale[::-1]))
    codes[to] = codes[where_from]
    assert audit_step(stand, report)[1].error > 2 * sums.error, "values are those of other tokens"


def test_a_step_that_came_to_nothing_is_not_audited_and_ends_its_loan() -> None:
    stand = make_stand(64, 3, [256], "cpu")
    report = new_report(stand.shape, NUM_LAYERS, NUM_RINGS, torch.device("cpu"))
    audits, lent = Audits(report, 2, KV_HEADS, rows="bfloat16"), Lent()
    reading = Reading(1, 256, np.stack([run.table for run in stand.runs]), AuditSums())
    audits.pick([reading], lent)
    audits.follow()
    assert lent.ended == [], "one step of two"
    audits.pick([reading], lent)
    audits.give_up()
    audits.follow()
    assert [done.query() for done in lent.ended] == [True]
    assert reading.sums.heads == 0


def test_the_factor_of_bounds_covers_95_of_100_true_errors() -> None:
    draw, calibration, covered = np.random.default_rng(3), Calibration(4), 0
    assert calibration.factors.tolist() == [6.0] * 4
    for number in range(2_000):
        layer = number % 4
        ratios = draw.lognormal(0.7 * layer, 0.6, 3)
        covered += (ratios <= calibration.factors[layer]).sum() if number * 3 >= FEWEST_RATIOS else 0
        calibration.add(layer, ratios)
    assert calibration.factors[3] > 5 * calibration.factors[0], "each layer has its own"
    assert 0.94 < covered / (3 * (2_000 - FEWEST_RATIOS // 3)) < 0.96


def test_true_errors_lie_below_their_bounds_and_are_told_of_the_request() -> None:
    twins = IndexedTwins({**FEW, "errors": {"audit_steps": 1}})
    twins.prefill_down(0, document_prompt(900, 1))
    assert twins.side.figures_of(0) == {}
    early = 0
    for step in range(60):
        assert not twins.step([0]).failures
        twins.side.audits.wait()
        early = sum(counts_of(twins.side).audit_beyond) if 4 * step < FEWEST_RATIOS else early
    counts, figures = counts_of(twins.side), twins.side.figures_of(0)
    audited = sum(counts.audited_heads)
    assert audited == figures["index_audited_heads"] == 60 * sum(counts.heads) // (60 * 2 * 2), "one KV head of a layer"
    assert all(counts.audited_heads[layer] > 0 for layer in (1, 3))
    assert (sum(counts.audit_beyond) - early) / (audited - FEWEST_RATIOS) <= 0.05
    assert 0 < sum(counts.audit_error) < sum(counts.bound) * audited / sum(counts.heads)
    assert figures["index_heads"] == sum(counts.heads)
    assert abs(figures["index_estimated_mass"] / sum(counts.estimated_mass) - 1) < 0.02, "of answers, and of estimates"
    assert figures["index_read_mass"] == sum(counts.read_mass) > 0
    assert figures["index_steps_over"] == 0
    assert counts.audit_worst * audited >= sum(counts.audit_error)
    twins.assign(0, 0)
    assert twins.side.figures_of(0) == {}


def test_without_audit_steps_nothing_is_audited() -> None:
    twins = IndexedTwins({**FEW, "errors": {"audit_steps": 0}})
    twins.prefill_down(0, document_prompt(300, 1))
    twins.step([0])
    assert sum(counts_of(twins.side).audited_heads) == 0


@pytest.mark.parametrize(("epsilon", "over"), [(1e-4, 6), (100.0, 0)])
def test_a_head_above_epsilon_reads_twice_as_much_at_each_step_up_to_its_slots(epsilon: float, over: int) -> None:
    twins = IndexedTwins({**FEW, "budget_tokens": 128, "errors": {"epsilon": epsilon, "audit_steps": 0}})
    twins.prefill_down(0, document_prompt(900, 1))
    reads = []
    for _ in range(6):
        before = counts_of(twins.side)
        twins.step([0])
        after = counts_of(twins.side)
        reads.append((after.read_tokens - before.read_tokens) / 4)  # layers and KV heads
    assert 30 < reads[0] <= 46
    if over:
        assert 1.6 * reads[0] < reads[1] <= 92
        assert 100 < reads[2] <= 128
    else:
        assert max(reads) <= 46
    assert twins.side.figures_of(0)["index_steps_over"] == over
    assert (sum(counts_of(twins.side).heads_over) > 0) == bool(over)


def test_a_context_that_is_whole_on_the_card_has_a_bound_before_anything_is_audited() -> None:
    twins = IndexedTwins({**FEW, **ON_CARD, "errors": {"epsilon": 1e-4}}, offload_block_tokens=NEVER)
    twins.prefill([document_prompt(600, 1)])
    for _ in range(3):
        twins.step([0])
    assert twins.side.figures_of(0)["index_steps_over"] == 3


def test_a_captured_step_goes_by_the_epsilon_of_whoever_holds_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = IndexedTwins({**FEW, "errors": {"epsilon": 100.0}}, ringed=(), check_coverage=False)
    twins.prefill([document_prompt(300, 1), document_prompt(300, 3)])
    fake_graphs(monkeypatch)
    with torch.inference_mode():
        twins.offloading.decode_steps.capture((2,), lambda fraction: None)
    for epsilons in ((None, 1e-4), (1e-4, None), (None, None)):
        before = Recorded.running
        for slot, epsilon in enumerate(epsilons):
            twins.assign(slot, slot, epsilon=epsilon)
        for _ in range(3):
            assert not twins.step([0, 1]).failures
        over = twins.side._report.of_rings[:2, STEPS_OVER].tolist()
        assert over == [0 if epsilon is None else 3 for epsilon in epsilons]
        assert Recorded.running is not before, "a graph was replayed"


def test_heads_above_epsilon_are_read_again_before_the_token_is_drawn() -> None:
    errors = {"epsilon": 1e-4, "on_exceed": "reread", "audit_steps": 0}
    twins = IndexedTwins({**FEW, "errors": errors})
    twins.prefill_down(0, document_prompt(300, 1))
    check_steps(twins, [0], 4)
    assert sum(counts_of(twins.side).estimated_mass) > 0, "of what would have been"


def test_heads_above_epsilon_are_read_again_in_pages_and_beside_them_in_host_memory() -> None:
    errors = {"epsilon": 1e-4, "on_exceed": "reread", "audit_steps": 0}
    twins = IndexedTwins({**FEW, **ON_CARD, "errors": errors}, ringed=(0, 1), offload_block_tokens=NEVER)
    twins.prefill([document_prompt(300, 1), document_prompt(280, 3)])
    check_steps(twins, [0], 2)
    assert counts_of(twins.side).fetched_rows == 0
    twins.prefill_down(1, document_prompt(280, 3))
    check_steps(twins, [0, 1], 3)
    counts = counts_of(twins.side)
    assert counts.fetched_rows > 0
    assert 0 < counts.read_tokens < counts.offloaded_tokens


def test_reading_again_needs_an_epsilon() -> None:
    with pytest.raises(ValueError, match="`reread` without `epsilon`"):
        IndexedSettings.model_validate({"errors": {"on_exceed": "reread"}})


@pytest.mark.parametrize("heads", [0, 4])
def test_an_answer_for_which_no_index_was_read_has_no_figures(heads: int) -> None:
    numbers = torch.tensor([[heads, 0, 0, 0, 7]])
    known = SimpleNamespace(generation=7, audited=AuditSums())
    side: Any = SimpleNamespace(held={3: 0}, upkeep=SimpleNamespace(known=[known]), _on_host=[None, None, numbers])
    assert len(Indexed.figures_of(side, 3)) == (len(FIGURES) if heads else 0)
