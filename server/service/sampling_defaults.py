"""Find sampling defaults for what a request leaves open: from the model's generation_config.json, a GGUF file's
metadata, or OpenAI's.

`do_sample: false` means the most likely token. Values must be in the ranges of a request's fields.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu.model.gguf.file import is_gguf, read_gguf
from gpu.model.gguf.header import shown
from gpu.model.json_files import read_object
from gpu.model.spec import ModelError
from server.api_error import ApiError
from server.bodies.ranges import check_range
from server.deployment import ConfigError, Deployment

FILE = "generation_config.json"
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF_KEYS = dict(zip(FIELDS, ("temp", "top_p", "top_k", "min_p", "penalty_repeat"), strict=True))


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling defaults; the initial values are OpenAI's. top_k: 0: all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def load_sampling_defaults(deployment: Deployment) -> SamplingDefaults:
    """Load the model's defaults. Raises ConfigError if its file cannot be read, or has values that no request could."""
    folder = deployment.model.path
    if deployment.server.generation_defaults == "openai" or folder is None:
        return SamplingDefaults()
    return read_gguf_defaults(folder) if is_gguf(folder) else read_sampling_defaults(folder / FILE)


def read_sampling_defaults(path: Path) -> SamplingDefaults:
    try:
        return _defaults(path, read_object(path) or {})
    except ModelError as error:
        raise ConfigError(str(error)) from None


def read_gguf_defaults(path: Path) -> SamplingDefaults:
    """Return the defaults in the metadata's `general.sampling`. Raises ConfigError."""
    try:
        metadata = read_gguf(path).metadata
    except ModelError as error:
        raise ConfigError(str(error)) from None
    return _defaults(path, {name: metadata.get(f"general.sampling.{key}") for name, key in _GGUF_KEYS.items()})


def _defaults(path: Path, tree: dict[str, Any]) -> SamplingDefaults:
    given: dict[str, Any] = {name: _number(path, name, tree[name]) for name in FIELDS if tree.get(name) is not None}
    if tree.get("do_sample") is False:
        given["temperature"] = 0.0
    defaults = replace(SamplingDefaults(), **given)
    return replace(defaults, top_k=max(0, int(defaults.top_k)))


def _number(path: Path, name: str, value: object) -> float:
    what = f"model: {path}: {name} is {shown(value)}; correct it, or set server.generation_defaults: openai"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(what)
    try:
        check_range(name, value)
    except ApiError:
        raise ConfigError(what) from None
    return value
