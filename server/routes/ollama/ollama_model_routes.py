"""Answer what Ollama's clients ask of models: which there are and how they are; refuse work on models."""

import hashlib
import math
import time
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from gpu.config import ModelConfig
from gpu.model.architecture import Architecture
from gpu.model.gguf.file import is_gguf, read_gguf
from gpu.model.safetensors_index import find_files
from server.api_error import ApiError
from server.bodies.schema_limits import Tree
from server.loading.served_model import ServedModel
from server.planning.deployment_plan import find_architecture
from server.release import release
from server.routes.ollama.ollama_answers import (
    OllamaError,
    OllamaLoadedModels,
    OllamaModels,
    OllamaShown,
    OllamaVersion,
)
from server.routes.ollama.ollama_bodies import OLLAMA_SHOW, OllamaShowBody
from server.routes.ollama.ollama_shape import spell_time
from server.routes.route import BODY_ERRORS, Call, Route
from server.service.adapter_names import LATEST
from server.service.service import Service

OLLAMA_VERSION = "0.13.0"  # whose routes these are: clients refuse servers that are older than what they need
FOREVER_TIME = "9999-12-31T23:59:59Z"
_FETCH = "start the server with the model's name: `tandem serve hf:OWNER/NAME`"
_FILES = "models are folders and files of the machine, which the deployment names"
REFUSED: dict[tuple[Literal["post", "delete"], str], str] = {
    ("post", "/api/pull"): f"pull: models are not fetched over HTTP; {_FETCH}",
    ("post", "/api/push"): "push: models are not published by this server; upload the folder with `hf upload`",
    (
        "post",
        "/api/create",
    ): f"create: {_FILES}; set `model` in its YAML, and send `system` and `options` with requests",
    ("post", "/api/copy"): f"copy: {_FILES}; for a second name set `model.aliases`",
    ("delete", "/api/delete"): f"delete: {_FILES}; remove it there, or with `hf cache rm`",
    ("post", "/api/blobs/{digest}"): f"blobs: {_FILES}; put the files there",
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from the model's files. modified_s: when the newest was written; 0.0: there are none."""

    architecture: Architecture
    format: Literal["gguf", "safetensors", "random"]
    size_bytes: int
    modified_s: float
    digest: str

    def details(self) -> Tree:
        shape = self.architecture
        return {
            "parent_model": "",
            "format": self.format,
            "family": shape.family,
            "families": [shape.family],
            "parameter_size": _spell_count(shape.num_weights),
            "quantization_level": "none" if shape.quantisation is None else shape.quantisation.layers.kind,
        }


@lru_cache(maxsize=8)
def _read_facts(model_json: str) -> ModelFacts:
    """Read the files' headers once."""
    model = ModelConfig.model_validate_json(model_json)
    paths = _files_of(model.path)
    told = [(path.name, path.stat().st_size, path.stat().st_mtime) for path in paths]
    kind: Literal["gguf", "safetensors", "random"] = "random"
    if model.path is not None:
        kind = "gguf" if is_gguf(model.path) else "safetensors"
    return ModelFacts(
        architecture=find_architecture(model)[0],
        format=kind,
        size_bytes=sum(size for _, size, _ in told),
        modified_s=max((modified for _, _, modified in told), default=0.0),
        digest=hashlib.sha256(repr(sorted(told)).encode()).hexdigest(),
    )


def _files_of(path: Path | None) -> list[Path]:
    if path is None:
        return []
    return list(read_gguf(path).paths) if is_gguf(path) else list(find_files(path))


async def facts_of(service: Service) -> ModelFacts:
    return await service.texts.run(service.max_tokenize_items, _read_facts, service.deployment.model.model_dump_json())


async def list_tags(call: Call[Any]) -> Tree:
    found: list[Tree] = []
    for model in call.models.models:
        facts = await facts_of(model.service)
        modified = {"modified_at": spell_time(facts.modified_s)}
        found += [_named(name, facts) | modified for name in model.service.model_ids]
    return {"models": found}


async def list_loaded(call: Call[Any]) -> Tree:
    """Return the models that engines have."""
    return {"models": [await _describe_loaded(model) for model in call.models.models if model.is_ready]}


async def _describe_loaded(model: ServedModel) -> Tree:
    service, facts = model.service, await facts_of(model.service)
    limits = service.supervisor.limits
    on_card = service.memory.used_bytes("gpu") if service.memory.device == "cuda" else 0
    expires_s = model.expires_s if not model.num_open else model.idle_until(None)
    loaded = {
        "size": on_card or service.memory.used_bytes("host"),
        "expires_at": FOREVER_TIME if math.isinf(expires_s) else spell_time(time.time() + expires_s - time.monotonic()),
        "size_vram": on_card,
        "context_length": service.memory.max_context_tokens if limits is None else limits.max_context_tokens,
    }
    return _named(service.model_name, facts) | loaded


async def show(call: Call[OllamaShowBody]) -> Tree:
    """Return the served model's template, parameters, sizes and abilities."""
    service = call.service
    facts = await facts_of(service)
    shape, template = facts.architecture, service.template
    defaults = service.sampling_defaults
    told = {"temperature": defaults.temperature, "top_k": defaults.top_k, "top_p": defaults.top_p}
    sizes = {
        "context_length": service.memory.max_context_tokens,
        "embedding_length": shape.hidden,
        "block_count": shape.num_layers,
        "feed_forward_length": shape.intermediate,
        "attention.head_count": shape.num_heads,
        "attention.head_count_kv": shape.num_kv_heads,
    }
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value:g}" for name, value in told.items()),
        "template": "" if template is None else template.source,
        "details": facts.details(),
        "model_info": {"general.architecture": shape.family, "general.parameter_count": shape.num_weights}
        | {f"{shape.family}.{name}": value for name, value in sizes.items()},
        "capabilities": _capabilities(service),
        "modified_at": spell_time(facts.modified_s),
    }


async def show_version(_: Call[Any]) -> Tree:
    return {"version": OLLAMA_VERSION, "tandem": release()}


async def _refuse(what: str, _: Call[Any]) -> NoReturn:
    raise ApiError(400, what, code="unsupported_operation")


def _capabilities(service: Service) -> list[str]:
    found = ["completion"]
    if service.template is not None:
        found.append("tools")
    if service.answer_format is not None and service.answer_format.reasoning is not None:
        found.append("thinking")
    return found + (["embedding"] if service.vectors.embedding is not None else [])


def _named(name: str, facts: ModelFacts) -> Tree:
    full = name if ":" in name else name + LATEST
    return {
        "name": full,
        "model": full,
        "size": facts.size_bytes,
        "digest": facts.digest,
        "details": facts.details(),
    }


def _spell_count(number: int) -> str:
    """Return 1.2B, 135M or 12K."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number / 1e3:.0f}K"


ROUTES = (
    Route("get", "/api/tags", list_tags, "The models, for Ollama's clients", OllamaModels, error=OllamaError),
    Route("get", "/api/ps", list_loaded, "The models that are loaded", OllamaLoadedModels, error=OllamaError),
    Route(
        "get",
        "/api/version",
        show_version,
        "The version of Ollama whose routes these are",
        OllamaVersion,
        error=OllamaError,
    ),
    Route(
        "post",
        "/api/show",
        show,
        "A model's sizes and what it can do",
        OllamaShown,
        OLLAMA_SHOW,
        {},
        errors=BODY_ERRORS,
        error=OllamaError,
        needs_engine=lambda _: False,
    ),
    *(Route(method, path, partial(_refuse, what)) for (method, path), what in REFUSED.items()),
)
