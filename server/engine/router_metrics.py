"""Show an engine's load under the names that vLLM's servers use, which routers and autoscalers read."""

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpu.memory.plan import MemoryPlan
from scheduler.messages import Stats


class RouterMetrics(Collector):
    """Collects a model's gauges from its engine's last report (`latest`); 0 while there is no engine.

    adapters: names by number, from 1 on. has_prefixes: whether prefixes are cached. num_load_waits: returns how many
    requests wait for the model to be loaded.
    """

    def __init__(
        self, model: str, memory: MemoryPlan, adapters: Sequence[str], has_prefixes: bool,
        latest: Callable[[], Stats | None], num_load_waits: Callable[[], int],
    ) -> None:  # fmt: skip
        self._model = model
        self._memory = memory
        self._adapters = adapters
        self._has_prefixes = has_prefixes
        self._latest = latest
        self._num_load_waits = num_load_waits

    def collect(self) -> Iterable[Metric]:
        stats = self._latest()
        running = 0 if stats is None else stats.num_running + stats.num_prefilling
        usage = 0.0 if stats is None else stats.pages_used / max(stats.pages_total, 1)
        yield self._gauge("num_requests_running", "requests whose prompt is computed, or that decode", running)
        waiting = self._num_load_waits() + (0 if stats is None else stats.num_waiting)
        yield self._gauge("num_requests_waiting", "requests that wait for admission, or for a load", waiting)
        yield self._gauge("kv_cache_usage_perc", "KV pages held by requests, from 0 to 1", usage)
        yield self._cache_config()
        if self._adapters:
            yield self._adapters_info(stats)

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"vllm:{name}", what, labels=["model_name", "engine"])
        gauge.add_metric([self._model, "0"], value)
        return gauge

    def _cache_config(self) -> Metric:
        memory = self._memory
        labels = {
            "block_size": str(memory.page_tokens),
            "num_gpu_blocks": str(memory.num_pages),
            "cache_dtype": memory.kv,
            "enable_prefix_caching": str(self._has_prefixes),
            "engine": "0",
        }
        gauge = GaugeMetricFamily("vllm:cache_config_info", "the cache's sizes, as labels", labels=list(labels))
        gauge.add_metric(list(labels.values()), 1)
        return gauge

    def _adapters_info(self, stats: Stats | None) -> Metric:
        """Return the adapters in use as labels. The value is the time, since routers read the newest sample."""
        waiting, running = (
            ",".join(self._adapters[number - 1] for number in numbers)
            for numbers in ((stats.waiting_adapters, stats.running_adapters) if stats else ([], []))
        )
        names = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        gauge = GaugeMetricFamily("vllm:lora_requests_info", "the adapters in use, as labels", labels=names)
        gauge.add_metric([str(len(self._adapters)), waiting, running], time.time())
        return gauge
