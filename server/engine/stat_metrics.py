"""Publish the numbers of the engine's `Stats` as metrics. One table has the name and description of each.

Counters of `Stats` start at zero with each engine process; the metrics only grow.
"""

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from gpu.methods.registry import list_counters, list_host_counters
from scheduler.messages import Stats
from server.engine.turn_histogram import TurnHistogram

# By the place of a number in `Stats`: its metric's name behind `tandem_`, and what it is.
Table = Mapping[str, tuple[str, str]]

GAUGES: Table = {
    "num_running": ("requests_running", "sequences that decode"),
    "num_prefilling": ("requests_prefilling", "sequences whose prompt is being computed"),
    "num_waiting": ("requests_waiting", "sequences that wait for admission"),
    "pages_used": ("pages_used", "KV pages held by requests"),
    "pages_cached": ("pages_cached", "KV pages held by the prefix cache alone"),
    "pages_committed": ("pages_committed", "KV pages whose memory the host has given"),
    "rings_free": ("reuse_rings_free", "rings that no sequence holds"),
    "drafts.saved_seconds": ("draft_saved_seconds", "expected seconds saved by drafts"),
    "host.bytes_used": ("host_bytes_used", "host memory of offloaded contexts"),
    "host.bytes_promised": (
        "host_bytes_promised", "host memory that contexts have and may still take, as admission counts it"
    ),
    "host.contexts": ("host_contexts", "contexts in host memory, idle ones among them"),
    "host.tokens": ("host_tokens", "tokens in host memory, shared ones once"),
    "host.tokens_evicted": (
        "host_tokens_evicted", "tokens in host memory that have no KV pages on the device any more"
    ),
    "host.tokens_resident": (
        "host_tokens_resident", "resident tokens of contexts that are partly in host memory, windows included"
    ),
    "host.segments": ("host_segments", "segments of tokens with tables of their own"),
    "host.leases": ("host_leases", "reads of segments under way; 0 at rest"),
    "chunks.memory_bytes": ("chunks_memory_bytes", "host memory of recently used document chunks"),
    "disk.bytes_held": ("disk_bytes_held", "bytes of contexts on disk, of all models in the folder"),
    "disk.records": ("disk_records", "files of contexts on disk"),
    "disk.read_rate": (
        "disk_read_rate", "disk read rate in bytes per second, as used to choose between reading and computing"
    ),
    "disk.bytes_today": ("disk_bytes_written_today", "bytes of contexts that were written today"),
}  # fmt: skip
# Gauges that stay as they are when the engine is gone.
LIMITS: Table = {
    "pages_total": ("pages_capacity", "KV pages in all"),
    "host.bytes_limit": ("host_bytes_capacity", "host memory that contexts may take"),
    "disk.bytes_a_day": ("disk_bytes_a_day_limit", "bytes that may be written on a day; 0: any"),
}
COUNTERS: Table = {
    "prefix_queries_tokens": ("prefix_cache_query_tokens", "prompt tokens looked up, once each"),
    "prefix_hits_tokens": ("prefix_cache_hit_tokens", "prompt tokens found"),
    "preemptions": (
        "preemptions",
        "times a running or prefilling request was preempted, for lack of memory or since blocks of its prompt on disk "
        "were lost: its pages are freed, its tokens stay",
    ),
    "recomputed_tokens": (
        "preempted_tokens_recomputed", "tokens of preempted requests computed again when they resumed"
    ),
    "steps": ("engine_steps", "engine steps"),
    "step_seconds": ("engine_step_seconds", "time spent in engine steps"),
    "masks.held_requests": ("held_requests", "requests with a grammar, allowed tokens or min_tokens"),
    "masks.masks": ("masks", "token draws restricted by a mask"),
    "masks.mask_seconds": ("mask_seconds", "seconds spent making token masks"),
    "masks.jumps": ("jumps", "runs of tokens forced by a grammar, computed in one step each"),
    "masks.jumped_tokens": ("jumped_tokens", "tokens in runs forced by a grammar"),
    "drafts.steps": ("draft_steps", "decode steps with drafted tokens"),
    "drafts.proposed": ("draft_proposed", "drafted tokens computed"),
    "drafts.accepted": ("draft_accepted", "drafted tokens accepted"),
    "drafts.declined": ("draft_declined", "decode steps that did not draft because it would be slower"),
    "drafts.model_seconds": ("draft_model_seconds", "seconds spent in the draft model"),
    "experts.fetched": (
        "experts_fetched", "experts copied from host memory one by one, for decode steps and short prompts"
    ),
    "experts.copied": ("experts_copied", "experts copied from host memory a whole layer at a time, for prompts"),
    "experts.computed": (
        "experts_computed",
        "experts in host memory computed by the CPU, each counted once per layer of a decode step",
    ),
    "chunks.written": ("chunks_written", "document chunks written to disk"),
    "chunks.refused": (
        "chunks_refused", "document chunks not written (disk full, I/O error, non-finite values); see the log"
    ),
    "chunks.evicted": ("chunks_evicted", "files of document chunks evicted for others"),
    "chunks.set_aside": ("chunks_set_aside", "corrupt files of document chunks, which are not read again"),
    "chunks.lost": (
        "chunks_lost",
        "corrupt files of document chunks found while a prompt read them, which computed the layer again",
    ),
    "disk.bytes_written": ("disk_bytes_written", "bytes of contexts written to disk"),
    "disk.bytes_read": ("disk_bytes_read", "bytes of contexts read from disk"),
    "disk.written": ("disk_written", "context blocks written to disk"),
    "disk.refused": ("disk_refused", "context blocks not written because the disk was full or failed; see the log"),
    "disk.capped": ("disk_capped", "context blocks not written because the daily limit was reached"),
    "disk.declined": (
        "disk_declined", "context blocks not written because computing them again is faster than reading them"
    ),
    "disk.evicted": ("disk_evicted", "context blocks on disk evicted for others"),
    "disk.damaged": ("disk_damaged", "corrupt context blocks on disk, which are computed again"),
    "disk.failed": (
        "disk_failed", "disk reads that failed for lack of open files or memory; the blocks stay on disk"
    ),
    "host.tokens_reloaded": ("host_tokens_reloaded", "tokens reloaded from host memory to free KV pages"),
    "host.tokens_covered": (
        "host_tokens_covered", "offloaded tokens that decode attended to, in each layer and head"
    ),
    "host.rows_read": ("host_rows_read", "keys of offloaded tokens that the CPU read"),
    "host.rows_left_out": (
        "host_rows_left_out", "rows left out of a decode step because rows or tables had not arrived"
    ),
    "host.ready_seconds": ("host_ready_seconds", "seconds that decode waited for offloads and hash tables"),
    "host.wait_seconds": ("host_wait_seconds", "seconds that the CPU waited for a layer's queries"),
    "host.attend_seconds": ("host_attend_seconds", "seconds of attention on the CPU"),
}  # fmt: skip


class StatMetrics:
    """The metrics of `Stats`, of methods' counters, and of bytes written by turns. latest: the engine's last report;
    None: there is none yet, or the engine is gone.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.latest: Stats | None = None
        self._registry = registry
        self._gauges, self.limits = (
            {place: Gauge(f"tandem_{name}", what, registry=registry) for place, (name, what) in table.items()}
            for table in (GAUGES, LIMITS)
        )
        self._counters = {
            place: Counter(f"tandem_{name}", what, registry=registry) for place, (name, what) in COUNTERS.items()
        }
        self._host_counters = {
            name: Counter(f"tandem_{name}", one.description, registry=registry)
            for name, one in list_host_counters().items()
        }
        self._turns = TurnHistogram("tandem_disk_turn_written_bytes", "bytes that a turn wrote to the disk")
        registry.register(self._turns)
        self._method_counters = list_counters()
        self._methods: dict[str, Gauge | Counter] = {}  # of those that the engine has

    def take(self, stats: Stats) -> None:
        """Take the engine's latest gauges and counters."""
        last, self.latest = self.latest, stats
        for place, gauge in (self._gauges | self.limits).items():
            if (value := _find(stats, place)) is not None:
                gauge.set(value)
        for place, counter in self._counters.items():
            if (value := _find(stats, place)) is not None:
                counter.inc(value - (_find(last, place) or 0))
        self._take_host_counters(stats, last)
        if stats.disk is not None:
            before = None if last is None else last.disk
            then = [0] * len(stats.disk.turns_written) if before is None else before.turns_written
            counts = [now - was for now, was in zip(stats.disk.turns_written, then, strict=True)]
            self._turns.add(counts, stats.disk.turn_bytes - (0 if before is None else before.turn_bytes))
        self._take_methods(stats.methods, {} if last is None else last.methods)

    def clear(self) -> None:
        """Set gauges to 0, since the engine is gone; the next one counts from zero."""
        self.latest = None
        for gauge in self._gauges.values():
            gauge.set(0)

    def _take_host_counters(self, stats: Stats, last: Stats | None) -> None:
        counts, before = ({} if one is None or one.host is None else one.host.method_counts for one in (stats, last))
        for name, now in counts.items():
            self._host_counters[name].inc(now - before.get(name, 0))

    def _take_methods(self, counts: dict[str, list[int]], last: dict[str, list[int]]) -> None:
        for name, numbers in counts.items():
            metric, before = self._method_metric(name), last.get(name, [0] * len(numbers))
            for layer, (now, then) in enumerate(zip(numbers, before, strict=True)):
                child = metric.labels(str(layer)) if self._method_counters[name].by_layer else metric
                if isinstance(child, Gauge):
                    child.set(now)
                else:
                    child.inc(now - then)

    def _method_metric(self, name: str) -> Gauge | Counter:
        """Return the metric of a method's counter; the first report makes it."""
        if name not in self._methods:
            one = self._method_counters[name]
            self._methods[name] = (Gauge if one.is_gauge else Counter)(
                f"tandem_{name}", one.description, ["layer"] if one.by_layer else [], registry=self._registry
            )
        return self._methods[name]


def _find(stats: Stats | None, place: str) -> Any:
    """Return the number at a place, or None where there is none."""
    found: Any = stats
    for name in place.split("."):
        found = None if found is None else getattr(found, name)
    return found
