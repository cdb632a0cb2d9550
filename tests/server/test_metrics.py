"""Each figure of the engine stands under its own name, and counters go on where an engine before them ended."""

from scheduler.messages import HostStats, Stats
from server.metrics import Metrics

HOST = HostStats(
    bytes_used=21, bytes_promised=22, bytes_limit=23, contexts=24, tokens=25, tokens_released=20, tokens_restored=35,
    segments=26, tables_built=27,
    tables_failed=28, tokens_covered=29, rows_read=30, rows_left_out=34,
    ready_seconds=31.5, wait_seconds=32.5, attend_seconds=33.5,
)  # fmt: skip
STATS = Stats(
    num_running=1, num_prefilling=2, num_waiting=3, pages_used=4, pages_cached=5, pages_total=6,
    prefix_queries_tokens=7, prefix_hits_tokens=8, preemptions=9, steps=10, step_seconds=11.5, host=HOST,
)  # fmt: skip
GAUGES = {
    "requests_running": 1, "requests_prefilling": 2, "requests_waiting": 3, "pages_used": 4, "pages_cached": 5,
    "host_bytes_used": 21, "host_bytes_promised": 22, "host_contexts": 24, "host_tokens": 25, "host_segments": 26,
}  # fmt: skip
CAPACITIES = {"pages_capacity": 6, "host_bytes_capacity": 23}
COUNTERS = {
    "prefix_cache_query_tokens": 7, "prefix_cache_hit_tokens": 8, "preemptions": 9, "engine_steps": 10,
    "engine_step_seconds": 11.5, "host_tables_built": 27, "host_tables_failed": 28, "host_tokens_covered": 29,
    "host_rows_read": 30, "host_rows_left_out": 34, "host_tokens_restored": 35,
    "host_ready_seconds": 31.5, "host_wait_seconds": 32.5, "host_attend_seconds": 33.5,
}  # fmt: skip


def read(metrics: Metrics) -> dict[str, float]:
    lines = [line.split() for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    return {name.removeprefix("tandem_"): float(value) for name, value in lines}


def test_every_figure_of_the_engine_is_told_under_its_name() -> None:
    metrics = Metrics()
    metrics.take(STATS)
    told = read(metrics)
    for name, value in (GAUGES | CAPACITIES).items():
        assert told[name] == value, name
    for name, value in COUNTERS.items():
        assert told[f"{name}_total"] == value, name


def test_counters_are_the_engines_own_and_begin_anew_with_the_next_one() -> None:
    metrics = Metrics()
    metrics.take(STATS)
    metrics.take(STATS)
    assert {name: read(metrics)[f"{name}_total"] for name in COUNTERS} == COUNTERS
    metrics.engine_gone()
    metrics.take(STATS)
    assert {name: read(metrics)[f"{name}_total"] for name in COUNTERS} == {n: 2 * v for n, v in COUNTERS.items()}


def test_an_engine_that_is_gone_holds_nothing() -> None:
    metrics = Metrics()
    metrics.engine_up.set(1)
    metrics.take(STATS)
    metrics.engine_gone()
    told = read(metrics)
    assert {name: told[name] for name in (*GAUGES, "engine_up")} == dict.fromkeys((*GAUGES, "engine_up"), 0)
    assert {name: told[name] for name in CAPACITIES} == CAPACITIES
