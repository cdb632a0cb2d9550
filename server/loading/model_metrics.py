"""Show models in `/metrics`: with several, every metric has a model's label, and loads are counted."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from server.loading.served_model import STATES, ServedModel


class ModelMetrics:
    """Metrics of all models, and counts of loads. For a single model that is always loaded, `text` is its service's."""

    def __init__(self, models: Sequence[ServedModel], is_managed: bool) -> None:
        self._models = models
        self._is_managed = is_managed
        self._registry = CollectorRegistry()
        self._loads = self._counter("tandem_model_loads", "times that a model was loaded")
        self._unloads = self._counter("tandem_model_unloads", "times that a model was unloaded")
        self._failures = self._counter(
            "tandem_model_load_failures", "loads that failed, or engines that ended for good"
        )
        self._load_s = self._counter("tandem_model_load_seconds", "that loads took, until requests were admitted")
        self._state = Gauge(
            "tandem_model_state", "1 at what the model is now", ["model", "state"], registry=self._registry
        )
        self._waiting = Gauge(
            "tandem_model_requests_waiting", "requests that wait for a load", ["model"], registry=self._registry
        )
        self._registry.register(ByModel(models))

    def count_load(self, model: ServedModel) -> None:
        self._loads.labels(model.name).inc()
        self._load_s.labels(model.name).inc(model.load_seconds)

    def count_unload(self, model: ServedModel) -> None:
        self._unloads.labels(model.name).inc()

    def count_failure(self, model: ServedModel) -> None:
        self._failures.labels(model.name).inc()

    def text(self) -> bytes:
        if not self._is_managed:
            return self._models[0].service.metrics.text()
        for model in self._models:
            self._waiting.labels(model.name).set(len(model.waiters))
            for state in STATES:
                self._state.labels(model.name, state).set(model.state == state)
        return generate_latest(self._registry)

    def _counter(self, name: str, what: str) -> Counter:
        counter = Counter(name, what, ["model"], registry=self._registry)
        for model in self._models:
            counter.labels(model.name)
        return counter


class ByModel(Collector):
    """Collect what each model's service counts, with the label `model`."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for model in self._models:
            for family in model.service.metrics.collect():
                one = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                one.samples += [
                    sample._replace(labels={"model": model.name} | sample.labels) for sample in family.samples
                ]
        return families.values()
