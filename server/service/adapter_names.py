"""Name the adapters of a deployment as requests do, `MODEL:ADAPTER`; in the engine they have numbers from 1 on."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpu.model.spec import ModelError
from scheduler.engine_config import read_adapters
from server.deployment import ConfigError, Deployment
from server.planning.deployment_plan import find_architecture

NO_ADAPTER = 0
LATEST = ":latest"  # a tag that Ollama's clients may put behind any name


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """The adapters' names and the digests of their content, in the order of their numbers."""

    names: tuple[str, ...]
    digests: tuple[str, ...]

    def join(self, models: Sequence[str]) -> list[str]:
        """Return the ids of these models with each adapter."""
        return [f"{model}:{name}" for model in models for name in self.names]

    def number_of(self, model_id: str | None) -> int:
        """Return the number of the adapter in a known id, NO_ADAPTER if it names none."""
        for known in (model_id or "", (model_id or "").removesuffix(LATEST)):
            model, _, name = known.rpartition(":")
            if model and name in self.names:
                return self.names.index(name) + 1
        return NO_ADAPTER

    def digest_of(self, number: int) -> str:
        """Return a digest that keeps the prefixes of adapters apart, even if a deployment's order or files change."""
        return "" if number == NO_ADAPTER else self.digests[number - 1]


def load_adapter_names(deployment: Deployment) -> AdapterNames:
    """Read the adapters' headers. Raises ConfigError for one that is not served."""
    if not deployment.adapters:
        return AdapterNames((), ())
    try:
        files = read_adapters(deployment, find_architecture(deployment.model)[0])
    except ModelError as error:
        raise ConfigError(str(error)) from None
    return AdapterNames(tuple(deployment.adapters), tuple(file.digest for file in files))
