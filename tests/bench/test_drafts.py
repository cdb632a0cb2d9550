"""`tandem bench drafts` on a tiny shape: a row for each width, and one for each rate beside streams without drafts."""

from io import StringIO

from rich.console import Console

from bench.drafts import WIDTHS, DraftsBenchmark, run_drafts_benchmark


def test_widths_and_rates_are_timed_and_drafts_are_drawn_at_the_rate_that_was_asked() -> None:
    benchmark = DraftsBenchmark("tiny", None, "cpu", "float32", (1,), 16, 48, 1, (0.0, 1.0), 1)
    rows = run_drafts_benchmark(benchmark, Console(file=StringIO()))
    widths, rates = [row for row in rows if row.name == "verify step"], [row for row in rows if row.peer_ms]
    assert [row.extras["rows"] for row in widths] == list(WIDTHS)
    assert all(row.ms > 0 and row.floor_ms for row in widths)
    none, all_right, free = rates
    assert none.extras["accepted"] == 0
    assert all_right.extras["accepted"] == all_right.extras["proposed"]
    assert all(row.extras["equal_texts"] == [True] for row in (none, all_right, free))
