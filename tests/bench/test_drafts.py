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


def test_a_heads_steps_are_timed_with_tokens_in_place_of_what_it_guesses() -> None:
    benchmark = DraftsBenchmark("tiny-qwen3.5", None, "cpu", "float32", (1,), 16, 16, 1, (1.0,), 1, mtp=True)
    rows = run_drafts_benchmark(benchmark, Console(file=StringIO()))
    assert [row.extras["rows"] for row in rows if row.name == "verify step"] == [1, 2, 4], "of at most 5 rows"
    all_right, free = (row for row in rows if row.peer_ms)
    assert all_right.extras["accepted"] == all_right.extras["proposed"]
    assert free.extras["equal_texts"] == all_right.extras["equal_texts"] == [True]
