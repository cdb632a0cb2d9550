"""Each figure of the engine stands under its own name, and counters go on where an engine before them ended."""

from msgspec.structs import replace

from scheduler.messages import ChunkStats, DraftStats, ExpertStats, HostStats, Stats
from server.engine.prometheus import Metrics
from transfer.disk.disk_counts import DiskCounts

HOST = HostStats(
    bytes_used=21, bytes_promised=22, bytes_limit=23, contexts=24, tokens=25, tokens_evicted=20, tokens_resident=19,
    tokens_reloaded=35, segments=26, leases=37,
    tokens_covered=29, rows_read=30, rows_left_out=34,
    ready_seconds=31.5, wait_seconds=32.5, attend_seconds=33.5,
    method_counts={
        "host_tables_built": 27, "host_tables_failed": 28, "host_answers_estimated": 60, "host_answers_heavy": 61,
        "host_answers_beyond_bound": 62, "host_answers_heavy_beyond_bound": 63, "host_steps_beyond_bound": 64,
        "host_answers_in_full": 65,
    },
)  # fmt: skip
REUSE_NAMES = ("tries", "hits", "context_cells", "skipped_cells", "gaps", "ages", "kv_cells", "whole_groups", "refused",
               "stops")  # fmt: skip
METHODS = {f"reuse_{name}": [2 * number + 1, 2 * number + 2] for number, name in enumerate(REUSE_NAMES)} | {
    "reuse_matching": [1, 0], "fetch_hole_tokens": [37], "fetch_read_tokens": [38], "fetch_dropped_tokens": [39],
    "fetch_fetched_blocks": [40], "fetch_looked_blocks": [41], "fetch_late_blocks": [42],
}  # fmt: skip
STATS = Stats(
    num_running=1, num_prefilling=2, num_waiting=3, pages_used=4, pages_cached=5, pages_total=6, pages_committed=16,
    prefix_queries_tokens=7, prefix_hits_tokens=8, preemptions=9, recomputed_tokens=39, steps=10, step_seconds=11.5,
    rings_free=36, host=HOST, methods=METHODS,
    experts=ExpertStats(fetched=70, copied=71, computed=72),
    chunks=ChunkStats(memory_bytes=80, written=81, refused=82, evicted=83, set_aside=84, lost=85),
    disk=DiskCounts(
        bytes_held=100, records=101, read_rate=102, bytes_written=103, bytes_read=104, written=105, refused=106,
        capped=107, evicted=108, damaged=109, failed=110, declined=111, bytes_today=112, bytes_a_day=113,
        turns_written=(3, 0, 2, 0, 0, 0, 0, 0, 1), turn_bytes=2**33,
    ),
    drafts=DraftStats(steps=90, proposed=91, accepted=92, saved_seconds=93.5, declined=94, model_seconds=95.5),
)  # fmt: skip
GAUGES = {
    "requests_running": 1, "requests_prefilling": 2, "requests_waiting": 3, "pages_used": 4, "pages_cached": 5,
    "pages_committed": 16, "host_bytes_used": 21, "host_bytes_promised": 22, "host_contexts": 24, "host_tokens": 25,
    "host_segments": 26, "host_leases": 37,
    "host_tokens_evicted": 20, "host_tokens_resident": 19,
    "reuse_rings_free": 36, "chunks_memory_bytes": 80, "draft_saved_seconds": 93.5,
    "disk_bytes_held": 100, "disk_records": 101, "disk_read_rate": 102, "disk_bytes_written_today": 112,
}  # fmt: skip
CAPACITIES = {"pages_capacity": 6, "host_bytes_capacity": 23, "disk_bytes_a_day_limit": 113}
COUNTERS = {
    "prefix_cache_query_tokens": 7, "prefix_cache_hit_tokens": 8, "preemptions": 9, "preempted_tokens_recomputed": 39,
    "engine_steps": 10, "engine_step_seconds": 11.5, "host_tables_built": 27, "host_tables_failed": 28,
    "host_tokens_covered": 29, "host_rows_read": 30, "host_rows_left_out": 34, "host_tokens_reloaded": 35,
    "host_ready_seconds": 31.5, "host_wait_seconds": 32.5, "host_attend_seconds": 33.5, "fetch_hole_tokens": 37,
    "fetch_read_tokens": 38, "fetch_dropped_tokens": 39, "fetch_fetched_blocks": 40, "fetch_looked_blocks": 41,
    "fetch_late_blocks": 42, "experts_fetched": 70, "experts_copied": 71, "experts_computed": 72,
    "chunks_written": 81, "chunks_refused": 82, "chunks_evicted": 83, "chunks_set_aside": 84, "chunks_lost": 85,
    "host_answers_estimated": 60, "host_answers_heavy": 61, "host_answers_beyond_bound": 62,
    "host_answers_heavy_beyond_bound": 63, "host_steps_beyond_bound": 64, "host_answers_in_full": 65,
    "draft_steps": 90, "draft_proposed": 91, "draft_accepted": 92, "draft_declined": 94, "draft_model_seconds": 95.5,
    "disk_bytes_written": 103, "disk_bytes_read": 104, "disk_written": 105, "disk_refused": 106, "disk_capped": 107,
    "disk_evicted": 108, "disk_damaged": 109, "disk_failed": 110, "disk_declined": 111,
}  # fmt: skip


def read(metrics: Metrics) -> dict[str, float]:
    lines = [line.split() for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    return {name.removeprefix("tandem_"): float(value) for name, value in lines}


def test_every_figure_of_the_engine_is_told_under_its_name() -> None:
    metrics = Metrics()
    metrics.stats.take(STATS)
    told = read(metrics)
    for name, value in (GAUGES | CAPACITIES).items():
        assert told[name] == value, name
    for name, value in COUNTERS.items():
        assert told[f"{name}_total"] == value, name


def test_counters_of_the_host_tier_are_told_from_the_start() -> None:
    """As rates over them need, before any engine has reported."""
    told = read(Metrics())
    assert {name: told[f"{name}_total"] for name in HOST.method_counts} == dict.fromkeys(HOST.method_counts, 0)


def test_counters_are_the_engines_own_and_begin_anew_with_the_next_one() -> None:
    metrics = Metrics()
    metrics.stats.take(STATS)
    metrics.stats.take(STATS)
    assert {name: read(metrics)[f"{name}_total"] for name in COUNTERS} == COUNTERS
    metrics.engine_gone()
    metrics.stats.take(STATS)
    assert {name: read(metrics)[f"{name}_total"] for name in COUNTERS} == {n: 2 * v for n, v in COUNTERS.items()}


def test_an_engine_that_is_gone_holds_nothing() -> None:
    metrics = Metrics()
    metrics.engine_up.set(1)
    metrics.stats.take(STATS)
    metrics.engine_gone()
    told = read(metrics)
    assert {name: told[name] for name in (*GAUGES, "engine_up")} == dict.fromkeys((*GAUGES, "engine_up"), 0)
    assert {name: told[name] for name in CAPACITIES} == CAPACITIES


def test_what_is_reused_is_told_layer_by_layer_and_grows_over_engines() -> None:
    metrics = Metrics()
    metrics.stats.take(STATS)
    wanted = {f'reuse_{name}_total{{layer="{layer}"}}': 2 * number + 1 + layer
              for number, name in enumerate(REUSE_NAMES) for layer in range(2)}  # fmt: skip
    assert wanted.items() <= read(metrics).items()
    assert read(metrics)['reuse_matching{layer="1"}'] == 0
    metrics.stats.take(replace(STATS, methods=METHODS | {"reuse_hits": [8, 5]}))
    assert read(metrics)['reuse_hits_total{layer="0"}'] == 8
    metrics.engine_gone()
    metrics.stats.take(STATS)
    assert read(metrics)['reuse_hits_total{layer="0"}'] == 8 + 3


def test_what_turns_wrote_is_a_histogram_that_grows_over_engines() -> None:
    metrics = Metrics()
    for engines in (1, 2):
        metrics.stats.take(STATS)
        metrics.stats.take(STATS)
        told = read(metrics)
        bounds = {"0.0": 3, f"{4.0 * 2**20}": 5, f"{2.0**32}": 5, "+Inf": 6}
        for bound, number in bounds.items():
            assert told[f'disk_turn_written_bytes_bucket{{le="{bound}"}}'] == engines * number
        assert told["disk_turn_written_bytes_count"] == engines * 6
        assert told["disk_turn_written_bytes_sum"] == engines * 2**33
        metrics.engine_gone()
