"""What /metrics shows. One registry per application.

Counters in the engine's `Stats` start at zero with each engine process; here they only ever grow.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from scheduler.messages import Stats

_LONG_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_SHORT_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)


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
        self.engine_up = self._gauge("tandem_engine_up", "1 while the engine serves")
        self.prompt_tokens = self._counter("tandem_prompt_tokens", "tokens of accepted prompts")
        self.generated_tokens = self._counter("tandem_generated_tokens", "tokens generated")
        self.prefix_queries = self._counter("tandem_prefix_cache_query_tokens", "prompt tokens looked up")
        self.prefix_hits = self._counter("tandem_prefix_cache_hit_tokens", "prompt tokens found")
        self.preemptions = self._counter("tandem_preemptions", "sequences that lost their pages and began again")
        self.engine_steps = self._counter("tandem_engine_steps", "engine steps")
        self.engine_step_s = self._counter("tandem_engine_step_seconds", "time spent in engine steps")
        self.engine_restarts = self._counter("tandem_engine_restarts", "engine processes started after the first")
        self.finished = Counter(
            "tandem_requests_finished", "sequences ended", ["reason"], registry=self._registry
        )  # stop, length, error, cancelled, lost (with the engine, or to a drain), refused
        self.first_token_s = self._histogram(
            "tandem_time_to_first_token_seconds", "from arrival to the first token", _LONG_S
        )
        self.inter_token_s = self._histogram("tandem_inter_token_seconds", "between tokens of a sequence", _SHORT_S)
        self.request_s = self._histogram("tandem_request_seconds", "from arrival to the last token", _LONG_S)
        self.queue_s = self._histogram("tandem_queue_seconds", "from arrival to the start of prefill", _LONG_S)
        self._last: Stats | None = None

    def take(self, stats: Stats) -> None:
        """The engine's latest gauges and counters."""
        self.running.set(stats.num_running)
        self.prefilling.set(stats.num_prefilling)
        self.waiting.set(stats.num_waiting)
        self.pages_used.set(stats.pages_used)
        self.pages_cached.set(stats.pages_cached)
        self.pages_capacity.set(stats.pages_total)
        last = self._last
        self.prefix_queries.inc(stats.prefix_queries_tokens - (last.prefix_queries_tokens if last else 0))
        self.prefix_hits.inc(stats.prefix_hits_tokens - (last.prefix_hits_tokens if last else 0))
        self.preemptions.inc(stats.preemptions - (last.preemptions if last else 0))
        self.engine_steps.inc(stats.steps - (last.steps if last else 0))
        self.engine_step_s.inc(stats.step_seconds - (last.step_seconds if last else 0.0))
        self._last = stats

    def engine_gone(self) -> None:
        """Its gauges are void, and the next engine counts from zero."""
        self._last = None
        for gauge in (self.running, self.prefilling, self.waiting, self.pages_used, self.pages_cached, self.engine_up):
            gauge.set(0)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(name, what, registry=self._registry)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(name, what, registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, what, buckets=buckets, registry=self._registry)
