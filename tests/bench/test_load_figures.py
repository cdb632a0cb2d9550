"""Numbers from hand-written traces equal what a hand computes."""

import math
from array import array

import numpy as np
import pytest

from bench.load.load_figures import count_peak, meets, spread_ms, summarise
from bench.load.records import RequestRecord
from tests.tolerances import LOAD_MS

TRACE_WALL_S = 10.0


def write_record(
    due: float, sent: float, chunks: list[float], end: float, tokens: int | None = None, outcome: str = "completed"
) -> RequestRecord:
    record = RequestRecord(0, 0, due, 100, sent_s=sent, end_s=end, outcome=outcome)
    record.chunk_times_s = array("d", chunks)
    record.output_tokens = len(chunks) if tokens is None else tokens
    record.prompt_tokens, record.cached_tokens, record.output_source = 100, 25, "usage"
    record.accepted_tokens, record.rejected_tokens = 2, 5
    record.reason = "" if outcome == "completed" else "scripted"
    return record


@pytest.fixture
def trace() -> list[RequestRecord]:
    """Three that completed and one that failed after two chunks."""
    return [
        write_record(0.0, 0.0, [1.0, 1.5, 2.0], 2.0),
        write_record(1.0, 1.25, [2.0, 2.25], 2.5),
        write_record(2.0, 2.0, [5.0, 5.1, 5.3, 5.6], 6.0, tokens=7),
        write_record(4.0, 4.0, [5.0, 5.5], 9.0, outcome="failed"),
    ]


def test_latencies_of_a_trace_equal_those_computed_by_hand(trace: list[RequestRecord]) -> None:
    summary = summarise(trace, TRACE_WALL_S, 0.5, {})
    assert summary.ttft.p50 == pytest.approx(1000, abs=LOAD_MS)
    assert summary.ttft.mean == pytest.approx((1000 + 1000 + 3000) / 3, abs=LOAD_MS)
    assert summary.e2el.p50 == pytest.approx(2000, abs=LOAD_MS)
    assert summary.e2el.max == pytest.approx(4000, abs=LOAD_MS)
    assert summary.tpot.mean == pytest.approx((500 + 250 + 100) / 3, abs=LOAD_MS)
    assert summary.itl.num == 6
    assert summary.itl.mean == pytest.approx((500 + 500 + 250 + 100 + 200 + 300) / 6, abs=LOAD_MS)


def test_rates_and_counts_of_a_trace_equal_those_computed_by_hand(trace: list[RequestRecord]) -> None:
    summary = summarise(trace, TRACE_WALL_S, 0.5, {})
    assert (summary.due, summary.completed, summary.failed, summary.unfinished, summary.skipped) == (4, 3, 1, 0, 0)
    assert summary.reasons == {"scripted": 1}
    assert summary.request_rate == pytest.approx(0.3)
    assert summary.output_token_rate == pytest.approx((3 + 2 + 7) / 10)
    assert summary.total_token_rate == pytest.approx((3 + 2 + 7 + 300) / 10)
    assert summary.cached_share == pytest.approx(0.25)
    assert (summary.accepted_tokens, summary.rejected_tokens) == (3 * 2, 3 * 5)
    assert summary.offered_rate == pytest.approx(4 / 4.0)
    assert summary.lost_output_tokens == 2
    assert summary.num_chunk_mismatches == 1
    assert summary.tokens_per_chunk == pytest.approx(12 / 9)
    assert summary.peak_concurrency == 2


def test_latency_starts_when_a_request_was_due_not_when_it_was_sent() -> None:
    record = write_record(due=1.0, sent=3.0, chunks=[4.0], end=5.0)
    assert record.ttft_s == 3.0
    assert record.e2el_s == 4.0
    assert summarise([record], 5.0, None, {}).send_lag.p50 == pytest.approx(2000)


def test_goodput_counts_requests_within_every_limit_over_all_that_were_due(trace: list[RequestRecord]) -> None:
    summary = summarise(trace, TRACE_WALL_S, None, {"ttft": 2000, "tpot": 300})
    assert summary.goodput_share == pytest.approx(1 / 4)
    assert summary.goodput_rate == pytest.approx(1 / 10)
    assert [meets(record, {"gap": 299}) for record in trace] == [False, True, False, False]
    assert [meets(record, {"e2el": 2000}) for record in trace] == [True, True, False, False]
    assert summarise(trace, TRACE_WALL_S, None, {}).goodput_rate is None


def test_percentiles_interpolate_between_ranks() -> None:
    spread = spread_ms(value / 1e3 for value in range(1, 102))
    assert (spread.p10, spread.p50, spread.p90, spread.p99) == pytest.approx((11, 51, 91, 100), abs=LOAD_MS)
    two = spread_ms([0.0, 0.1])
    assert (two.p50, two.p90) == pytest.approx((50, 90), abs=LOAD_MS)


def test_one_wrong_rank_would_be_seen() -> None:
    values = [value / 1e3 for value in range(1, 102)]
    assert abs(spread_ms(values).p99 - spread_ms(values[:-1]).p99) > LOAD_MS


def test_nothing_measured_is_not_a_number_and_null_in_json() -> None:
    summary = summarise([], 1.0, None, {})
    assert math.isnan(summary.ttft.p50)
    assert summary.to_json()["ttft"]["p50"] is None


def test_a_single_token_has_no_time_per_further_token() -> None:
    assert write_record(0, 0, [1.0], 1.0).tpot_s is None


def test_peak_does_not_count_a_request_that_ends_as_another_is_sent() -> None:
    assert count_peak([write_record(0, 0, [1.0], 1.0), write_record(1, 1, [2.0], 2.0)]) == 1
    assert count_peak([write_record(0, 0, [1.0], 1.0 + 1e-9), write_record(1, 1, [2.0], 2.0)]) == 2


def test_peak_equals_a_brute_force_count() -> None:
    rng = np.random.default_rng(3)
    begins = rng.uniform(0, 10, 60)
    records = [
        write_record(begin, begin, [], begin + length)
        for begin, length in zip(begins, rng.uniform(0.1, 3, 60), strict=True)
    ]
    at_each_send = [sum(other.sent_s <= one.sent_s < other.end_s for other in records) for one in records]
    assert count_peak(records) == max(at_each_send)
