"""`tandem bench drafts` on a tiny shape: a row for each width, and one for each rate beside streams without drafts."""

import re
from io import StringIO

import pytest
from rich.console import Console

from bench.draft_speed import WIDTHS, DraftsBenchmark, run_drafts_benchmark
from bench.replay import RIGHT, Acceptance
from tests.bench.test_long_context import measure_little

pytestmark = pytest.mark.usefixtures("_rates_of_little_memory")
NEVER, HALF = Acceptance("never", (0.0,)), Acceptance("half", (0.5,))


@pytest.fixture
def _rates_of_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_little(monkeypatch)


def test_widths_and_rates_are_timed_and_drafts_are_drawn_at_the_rate_that_was_asked() -> None:
    benchmark = DraftsBenchmark("tiny", None, "cpu", "float32", (1, 2), 16, 48, 1, (NEVER, RIGHT), 1)
    printed = StringIO()
    rows = run_drafts_benchmark(benchmark, Console(file=printed, width=300))
    widths, rates = [row for row in rows if row.name == "verify step"], [row for row in rows if row.peer_ms]
    assert [row.extras["rows"] for row in widths] == [*WIDTHS, *(2 * width for width in WIDTHS)]
    assert all(row.ms > 0 and row.floor_ms for row in widths)
    for none, all_right, free in (rates[:3], rates[3:]):
        assert none.extras["accepted"] == 0
        assert all_right.extras["accepted"] == all_right.extras["proposed"]
        for row in (none, all_right, free):
            for name in ("partings", "partings_without"):
                told = row.extras[name]
                assert told["draws"] >= 48
                assert (told["level"], told["beyond"], told["most_steps"]) == (0, 0, 0.0)
    lines = [line for line in printed.getvalue().splitlines() if re.match(r" *[\d.]+ s  ", line)]
    assert sum("draws 0 had another candidate first" in line for line in lines) == len(rows)
    assert any("loading: weights" in line for line in lines)
    assert any("recording texts of batch 2" in line for line in lines)


def test_a_heads_steps_are_timed_with_tokens_in_place_of_what_it_guesses() -> None:
    benchmark = DraftsBenchmark(
        "tiny-qwen3.5", None, "cpu", "float32", (1,), 16, 40, 1, (Acceptance("half", (0.5,)), RIGHT), 1, mtp=True
    )
    for _ in range(5):  # drafts end by themselves where other programs make rows dear
        rows = run_drafts_benchmark(benchmark, Console(file=StringIO()))
        half, all_right, free = (row for row in rows if row.peer_ms)
        if half.extras["proposed"] > 1 and all_right.extras["proposed"]:
            break
    assert [row.extras["rows"] for row in rows if row.name == "verify step"] == [1, 2, 4], "of at most 5 rows"
    assert 0 < half.extras["accepted"] < half.extras["proposed"]
    assert all_right.extras["accepted"] == all_right.extras["proposed"] > 0
    assert free.extras["partings"]["draws"] >= 40
