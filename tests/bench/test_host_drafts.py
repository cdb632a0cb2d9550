"""`tandem bench drafts --over-host` on a tiny shape: V(n) by kernel and steps, and `verified` at stated rates."""

from io import StringIO

import pytest
from rich.console import Console

from bench.host_drafts import DRAFTED, WIDTHS, HostDraftsBenchmark, run_host_drafts_benchmark
from bench.replay import RIGHT
from tests.bench.test_draft_speed import NEVER
from tests.bench.test_long_context import measure_little


def test_widths_and_rates_are_timed_and_drafts_are_drawn_at_the_rate_that_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure_little(monkeypatch)
    benchmark = HostDraftsBenchmark(
        "tiny", None, "cpu", "float32", "bfloat16", None, 128, 1100, 24, 1, (NEVER, RIGHT), 1
    )  # fmt: skip
    rows = run_host_drafts_benchmark(benchmark, Console(file=StringIO()))
    kernel, steps, drafting = (
        [row for row in rows if row.name == name]
        for name in ("host attention, kernel", "host attention, step", "drafting and verifying")
    )
    streams = rows[-2:]
    assert [row.extras["rows"] for row in drafting] == list(DRAFTED)
    assert all(row.extras["draft_ms"] for row in drafting)
    assert [row.extras["queries"] for row in kernel] == list(WIDTHS)
    assert [row.extras["rows"] for row in steps] == [width for width in WIDTHS if width <= 16]
    assert all(row.ms > 0 and row.floor_ms for row in (*kernel, *steps))
    none, all_right = streams
    assert none.extras["accepted"] == 0
    assert all_right.extras["accepted"] == all_right.extras["proposed"]
    assert all(row.peer == "offloaded" and row.peer_ms for row in streams)
    assert all(row.extras["partings"]["draws"] >= 24 for row in (*steps, *streams))
    assert not any(row.extras["partings"]["most_steps"] for row in (*steps, *streams))
