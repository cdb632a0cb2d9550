"""Publish the metrics of /metrics: the engine's numbers (`stat_metrics`), and the counts of this process. One registry
per application.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from server.engine.request_figures import find_figures
from server.engine.stat_metrics import StatMetrics
from server.engine.token_rates import TokenRates

_LONG_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_SHORT_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)

disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.stats = StatMetrics(self._registry)
        self.pages_capacity = self.stats.limits["pages_total"]
        self.engine_up = self._gauge("tandem_engine_up", "1 while the engine serves")
        self.prompt_tokens = self._counter("tandem_prompt_tokens", "tokens of accepted prompts")
        self.generated_tokens = self._counter("tandem_generated_tokens", "tokens generated")
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
        self.engine_restarts = self._counter("tandem_engine_restarts", "engine processes started after the first")
        self.cache_events = self._counter("tandem_cache_events", "changes of the cache told to `server.events`")
        self.cache_events_dropped = self._counter(
            "tandem_cache_events_dropped", "messages of cache events that were not published, but only kept for replays"
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
        self.num_load_waits: Callable[[], int] = int  # requests that wait for the model's load; 0: there are no loads

    def engine_gone(self) -> None:
        """Clear the engine's gauges; the next engine counts from zero."""
        self.stats.clear()
        self.engine_up.set(0)

    def take_figures(self, figures: Mapping[str, int]) -> None:
        """Add a request's figures."""
        for name, counter in self.figures.items():
            counter.inc(figures.get(name, 0))

    def count_left_out(self, pattern: str, num_found: int) -> None:
        """Count the matches of a pattern of `server.left_out`."""
        self._left_out.labels(pattern).inc(num_found)

    def count_turn(self, parted: str, num_lost: int) -> None:
        """Count a turn, and the tokens of the turn before it that cannot be reused."""
        self._turns.labels(parted).inc()
        self._turn_tokens.labels(parted).inc(num_lost)

    def show_more(self, collector: Collector) -> None:
        """Show the metrics of another collector as well."""
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
