"""What /metrics shows. One registry per application.

Counters in the engine's `Stats` start at zero with each engine process; here they only ever grow.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gpu.methods.registry import list_counters
from scheduler.messages import HostStats, Stats
from server.engine.request_figures import find_figures
from server.engine.token_rates import TokenRates
from server.engine.turn_histogram import TurnHistogram
from transfer.disk.disk_counts import DiskCounts

_LONG_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_SHORT_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)


MASK_COUNTERS = {
    "held_requests": "requests with a grammar, allowed tokens or min_tokens",
    "masks": "token draws restricted by a mask",
    "mask_seconds": "seconds spent making token masks",
    "jumps": "runs of tokens forced by a grammar, computed in one step each",
    "jumped_tokens": "tokens in runs forced by a grammar",
}
DRAFT_COUNTERS = {
    "steps": "decode steps with drafted tokens",
    "proposed": "drafted tokens computed",
    "accepted": "drafted tokens accepted",
    "declined": "decode steps that did not draft because it would be slower",
    "model_seconds": "seconds spent in the draft model",
}
CHUNK_COUNTERS = {
    "written": "document chunks written to disk",
    "refused": "document chunks not written (disk full, I/O error, non-finite values); see the log",
    "evicted": "files of document chunks evicted for others",
    "set_aside": "corrupt files of document chunks, which are not read again",
    "lost": "corrupt files of document chunks found while a prompt read them, which computed the layer again",
}
DISK_COUNTERS = {
    "bytes_written": "bytes of contexts written to disk",
    "bytes_read": "bytes of contexts read from disk",
    "written": "context blocks written to disk",
    "refused": "context blocks not written because the disk was full or failed; see the log",
    "capped": "context blocks not written because the daily limit was reached",
    "declined": "context blocks not written because computing them again is faster than reading them",
    "evicted": "context blocks on disk evicted for others",
    "damaged": "corrupt context blocks on disk, which are computed again",
    "failed": "disk reads that failed for lack of open files or memory; the blocks stay on disk",
}
EXPERT_COUNTERS = {
    "fetched": "experts copied from host memory one by one, for decode steps and short prompts",
    "copied": "experts copied from host memory a whole layer at a time, for prompts",
    "computed": "experts in host memory computed by the CPU, each counted once per layer of a decode step",
}

disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.running = self._gauge("tandem_requests_running", "sequences that decode")
        self.prefilling = self._gauge("tandem_requests_prefilling", "sequences whose prompt is being computed")
        self.waiting = self._gauge("tandem_requests_waiting", "sequences that wait for admission")
        self.pages_used = self._gauge("tandem_pages_used", "KV pages held by requests")
        self.pages_cached = self._gauge("tandem_pages_cached", "KV pages held by the prefix cache alone")
        self.pages_capacity = self._gauge("tandem_pages_capacity", "KV pages in all")
        self.pages_committed = self._gauge("tandem_pages_committed", "KV pages whose memory the host has given")
        self.engine_up = self._gauge("tandem_engine_up", "1 while the engine serves")
        self.prompt_tokens = self._counter("tandem_prompt_tokens", "tokens of accepted prompts")
        self.generated_tokens = self._counter("tandem_generated_tokens", "tokens generated")
        self.prefix_queries = self._counter("tandem_prefix_cache_query_tokens", "prompt tokens looked up, once each")
        self.prefix_hits = self._counter("tandem_prefix_cache_hit_tokens", "prompt tokens found")
        self._turns = self._counter(
            "tandem_turns", "prompts that continue an answer, by where they differ from what was computed", ["parted"]
        )
        self._turn_tokens = self._counter(
            "tandem_turn_tokens_parted",
            "tokens of the previous turn after that difference, which are computed again",
            ["parted"],
        )
        self._left_out = self._counter(
            "tandem_prompt_texts_left_out", "texts removed from system messages by server.left_out", ["pattern"]
        )
        self.preemptions = self._counter(
            "tandem_preemptions",
            "times a running or prefilling request was preempted: its pages are freed, its tokens stay",
        )
        self.recomputed = self._counter(
            "tandem_preempted_tokens_recomputed",
            "tokens of preempted requests computed again when they resumed",
        )
        self.engine_steps = self._counter("tandem_engine_steps", "engine steps")
        self.engine_step_s = self._counter("tandem_engine_step_seconds", "time spent in engine steps")
        self.engine_restarts = self._counter("tandem_engine_restarts", "engine processes started after the first")
        self.cache_events = self._counter("tandem_cache_events", "changes of the cache told to `server.events`")
        self.cache_events_dropped = self._counter(
            "tandem_cache_events_dropped", "messages of cache events that were not published, but only kept for replays"
        )
        self.host_bytes = self._gauge("tandem_host_bytes_used", "host memory of offloaded contexts")
        self.host_bytes_promised = self._gauge(
            "tandem_host_bytes_promised", "host memory that contexts have and may still take, as admission counts it"
        )
        self.host_bytes_capacity = self._gauge("tandem_host_bytes_capacity", "host memory that contexts may take")
        self.host_contexts = self._gauge("tandem_host_contexts", "contexts in host memory, idle ones among them")
        self.host_tokens = self._gauge("tandem_host_tokens", "tokens in host memory, shared ones once")
        self.host_tokens_evicted = self._gauge(
            "tandem_host_tokens_evicted", "tokens in host memory that have no KV pages on the device any more"
        )
        self.host_tokens_resident = self._gauge(
            "tandem_host_tokens_resident",
            "resident tokens of contexts that are partly in host memory, windows included",
        )
        self.host_tokens_reloaded = self._counter(
            "tandem_host_tokens_reloaded",
            "tokens reloaded from host memory to free KV pages",
        )
        self.host_segments = self._gauge("tandem_host_segments", "segments of tokens with tables of their own")
        self.host_leases = self._gauge("tandem_host_leases", "reads of segments under way; 0 at rest")
        self.host_tables_built = self._counter("tandem_host_tables_built", "hash tables of a layer of a segment built")
        self.host_errors = {
            "answers_estimated": self._counter(
                "tandem_host_answers_estimated",
                "sampled answers, of a head in a layer, whose standard error was estimated",
            ),
            "answers_heavy": self._counter(
                "tandem_host_answers_heavy", "sampled answers in which a key has more than a tenth of the weight"
            ),
            "answers_beyond": self._counter(
                "tandem_host_answers_beyond_bound",
                "sampled answers without a heavy key whose error exceeds host.sampled.errors.bound",
            ),
            "answers_heavy_beyond": self._counter(
                "tandem_host_answers_heavy_beyond_bound",
                "sampled answers with a heavy key whose error exceeds host.sampled.errors.bound",
            ),
            "steps_beyond": self._counter(
                "tandem_host_steps_beyond_bound", "decode steps with a sampled answer whose error exceeds the bound"
            ),
            "answers_in_full": self._counter(
                "tandem_host_answers_in_full", "answers read in full for host.sampled.errors.epsilon, audits included"
            ),
        }
        self.host_tables_failed = self._counter(
            "tandem_host_tables_failed",
            "hash tables that could not be built; that layer of the segment is read exactly",
        )
        self.host_tokens_covered = self._counter(
            "tandem_host_tokens_covered", "offloaded tokens that decode attended to, in each layer and head"
        )
        self.host_rows_read = self._counter("tandem_host_rows_read", "keys of offloaded tokens that the CPU read")
        self.host_rows_left_out = self._counter(
            "tandem_host_rows_left_out", "rows left out of a decode step because rows or tables had not arrived"
        )
        self.host_ready_s = self._counter(
            "tandem_host_ready_seconds", "seconds that decode waited for offloads and hash tables"
        )
        self.host_wait_s = self._counter(
            "tandem_host_wait_seconds", "seconds that the CPU waited for a layer's queries"
        )
        self.host_attend_s = self._counter("tandem_host_attend_seconds", "seconds of attention on the CPU")
        self.rings_free = self._gauge("tandem_reuse_rings_free", "rings that no sequence holds")
        self._method_counters = list_counters()
        self.methods: dict[str, Gauge | Counter] = {}  # of those that the engine has
        self.experts = {name: self._counter(f"tandem_experts_{name}", what) for name, what in EXPERT_COUNTERS.items()}
        self.masks = {name: self._counter(f"tandem_{name}", what) for name, what in MASK_COUNTERS.items()}
        self.drafts = {name: self._counter(f"tandem_draft_{name}", what) for name, what in DRAFT_COUNTERS.items()}
        self.draft_saved_s = self._gauge(
            "tandem_draft_saved_seconds",
            "expected seconds saved by drafts",
        )
        self.documents = self._gauge("tandem_documents", "documents stored, of all API keys")
        self.document_chats = self._counter("tandem_document_chats", "chats that came with documents")
        self.document_tokens = self._counter("tandem_document_tokens", "tokens of documents in prompts of chats")
        self.figures = {
            name: self._counter(f"tandem_{figure.metric}", figure.description)
            for name, figure in find_figures().items()
            if figure.metric
        }
        self.chunks_stored = self._counter("tandem_document_chunks_stored", "document chunks stored ahead by clients")
        self.chunks_memory = self._gauge("tandem_chunks_memory_bytes", "host memory of recently used document chunks")
        self.chunks = {name: self._counter(f"tandem_chunks_{name}", what) for name, what in CHUNK_COUNTERS.items()}
        self.disk_held = self._gauge("tandem_disk_bytes_held", "bytes of contexts on disk, of all models in the folder")
        self.disk_records = self._gauge("tandem_disk_records", "files of contexts on disk")
        self.disk_rate = self._gauge(
            "tandem_disk_read_rate",
            "disk read rate in bytes per second, as used to choose between reading and computing",
        )
        self.disk = {name: self._counter(f"tandem_disk_{name}", what) for name, what in DISK_COUNTERS.items()}
        self.disk_today = self._gauge("tandem_disk_bytes_written_today", "bytes of contexts that were written today")
        self.disk_a_day = self._gauge("tandem_disk_bytes_a_day_limit", "bytes that may be written on a day; 0: any")
        self.disk_turns = TurnHistogram("tandem_disk_turn_written_bytes", "bytes that a turn wrote to the disk")
        self._registry.register(self.disk_turns)
        self.chunks_known = self._counter(
            "tandem_document_chunks_known", "document chunks already stored when a client asked"
        )
        self.finished = Counter(
            "tandem_requests_finished", "sequences ended", ["reason"], registry=self._registry
        )  # stop, length, error, cancelled, lost (with the engine, or to a drain), refused
        self.first_token_s = self._histogram(
            "tandem_time_to_first_token_seconds", "from arrival to the first token", _LONG_S
        )
        self.inter_token_s = self._histogram("tandem_inter_token_seconds", "between tokens of a sequence", _SHORT_S)
        self.request_s = self._histogram("tandem_request_seconds", "from arrival to the last token", _LONG_S)
        self.queue_s = self._histogram("tandem_queue_seconds", "from arrival to the start of prefill", _LONG_S)
        self.prefill_s = self._histogram(
            "tandem_prefill_seconds", "from the start of prefill to the first token, as the engine measures it", _LONG_S
        )
        self.rates = TokenRates()
        self.latest: Stats | None = None  # what the engine reported last
        self.num_load_waits: Callable[[], int] = int  # requests that wait for the model's load; 0: there are no loads

    def take(self, stats: Stats) -> None:
        """Take the engine's latest gauges and counters."""
        self.running.set(stats.num_running)
        self.prefilling.set(stats.num_prefilling)
        self.waiting.set(stats.num_waiting)
        self.pages_used.set(stats.pages_used)
        self.pages_cached.set(stats.pages_cached)
        self.pages_capacity.set(stats.pages_total)
        self.pages_committed.set(stats.pages_committed)
        last = self.latest
        self.prefix_queries.inc(stats.prefix_queries_tokens - (last.prefix_queries_tokens if last else 0))
        self.prefix_hits.inc(stats.prefix_hits_tokens - (last.prefix_hits_tokens if last else 0))
        self.preemptions.inc(stats.preemptions - (last.preemptions if last else 0))
        self.recomputed.inc(stats.recomputed_tokens - (last.recomputed_tokens if last else 0))
        self.engine_steps.inc(stats.steps - (last.steps if last else 0))
        self.engine_step_s.inc(stats.step_seconds - (last.step_seconds if last else 0.0))
        self.rings_free.set(stats.rings_free)
        for name, counter in self.masks.items():
            counter.inc(getattr(stats.masks, name) - (getattr(last.masks, name) if last else 0))
        for name, counter in self.drafts.items():
            counter.inc(getattr(stats.drafts, name) - (getattr(last.drafts, name) if last else 0))
        self.draft_saved_s.set(stats.drafts.saved_seconds)
        self._take_methods(stats.methods, last.methods if last else {})
        if stats.experts is not None:
            for name, counter in self.experts.items():
                before = getattr(last.experts, name) if last and last.experts else 0
                counter.inc(getattr(stats.experts, name) - before)
        if stats.chunks is not None:
            self.chunks_memory.set(stats.chunks.memory_bytes)
            for name, counter in self.chunks.items():
                before = getattr(last.chunks, name) if last and last.chunks else 0
                counter.inc(getattr(stats.chunks, name) - before)
        if stats.disk is not None:
            self._take_disk(stats.disk, last.disk if last else None)
        if stats.host is not None:
            self._take_host(stats.host, last.host if last else None)
        self.latest = stats

    def _take_disk(self, disk: DiskCounts, last: DiskCounts | None) -> None:
        self.disk_held.set(disk.bytes_held)
        self.disk_records.set(disk.records)
        self.disk_rate.set(disk.read_rate)
        self.disk_today.set(disk.bytes_today)
        self.disk_a_day.set(disk.bytes_a_day)
        before = [0] * len(disk.turns_written) if last is None else last.turns_written
        counts = [now - then for now, then in zip(disk.turns_written, before, strict=True)]
        self.disk_turns.add(counts, disk.turn_bytes - (last.turn_bytes if last else 0))
        for name, counter in self.disk.items():
            counter.inc(getattr(disk, name) - (getattr(last, name) if last else 0))

    def _take_host(self, host: HostStats, last: HostStats | None) -> None:
        self.host_bytes.set(host.bytes_used)
        self.host_bytes_promised.set(host.bytes_promised)
        self.host_bytes_capacity.set(host.bytes_limit)
        self.host_contexts.set(host.contexts)
        self.host_tokens.set(host.tokens)
        self.host_tokens_evicted.set(host.tokens_evicted)
        self.host_tokens_resident.set(host.tokens_resident)
        self.host_tokens_reloaded.inc(host.tokens_reloaded - (last.tokens_reloaded if last else 0))
        self.host_segments.set(host.segments)
        self.host_leases.set(host.leases)
        self.host_tables_built.inc(host.tables_built - (last.tables_built if last else 0))
        self.host_tables_failed.inc(host.tables_failed - (last.tables_failed if last else 0))
        self.host_tokens_covered.inc(host.tokens_covered - (last.tokens_covered if last else 0))
        self.host_rows_read.inc(host.rows_read - (last.rows_read if last else 0))
        self.host_rows_left_out.inc(host.rows_left_out - (last.rows_left_out if last else 0))
        self.host_ready_s.inc(host.ready_seconds - (last.ready_seconds if last else 0.0))
        self.host_wait_s.inc(host.wait_seconds - (last.wait_seconds if last else 0.0))
        self.host_attend_s.inc(host.attend_seconds - (last.attend_seconds if last else 0.0))
        for name, counter in self.host_errors.items():
            counter.inc(getattr(host, name) - (getattr(last, name) if last else 0))

    def count_generated(self, num_tokens: int) -> None:
        self.generated_tokens.inc(num_tokens)
        self.rates.count(num_tokens)

    def take_figures(self, figures: Mapping[str, int]) -> None:
        """Add a request's figures."""
        for name, counter in self.figures.items():
            counter.inc(figures.get(name, 0))

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
        """Return the metric of a method's counter, which is there from its first report on."""
        if name not in self.methods:
            one = self._method_counters[name]
            self.methods[name] = (Gauge if one.is_gauge else Counter)(
                f"tandem_{name}", one.description, ["layer"] if one.by_layer else [], registry=self._registry
            )
        return self.methods[name]

    def count_left_out(self, pattern: str, num_found: int) -> None:
        """Count what a pattern of `server.left_out` found."""
        self._left_out.labels(pattern).inc(num_found)

    def count_turn(self, parted: str, num_lost: int) -> None:
        """Count a turn, and how much of the one before it cannot be used."""
        self._turns.labels(parted).inc()
        self._turn_tokens.labels(parted).inc(num_lost)

    def engine_gone(self) -> None:
        """Clear the engine's gauges; the next engine counts from zero."""
        self.latest = None
        of_device = (self.running, self.prefilling, self.waiting, self.pages_used, self.pages_cached, self.engine_up)
        of_host = (self.host_bytes, self.host_bytes_promised, self.host_contexts, self.host_segments, self.host_leases)
        of_tokens = (self.host_tokens, self.host_tokens_evicted, self.host_tokens_resident)
        for gauge in (
            *of_device, *of_host, *of_tokens, self.pages_committed, self.rings_free, self.chunks_memory, self.disk_held,
            self.disk_records, self.disk_rate, self.disk_today,
            self.draft_saved_s,
        ):  # fmt: skip
            gauge.set(0)

    def show_more(self, collector: Collector) -> None:
        """Show what another collector has, too."""
        self._registry.register(collector)

    def collect(self) -> Iterable[Metric]:
        """Return all families of samples."""
        return self._registry.collect()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(name, what, registry=self._registry)

    def _counter(self, name: str, what: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, what, buckets=buckets, registry=self._registry)
