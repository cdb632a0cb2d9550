"""Serve the routes about the server itself: its model, health, version and metrics."""

import time
from typing import Any

from starlette.responses import Response

from server.bodies.schema_limits import Tree
from server.engine.token_rates import STEP_SECONDS
from server.loading.model_registry import ModelRegistry
from server.loading.served_model import ServedModel
from server.release import release
from server.routes.route import OF_MODEL, Call, Route, json_response, path_parameter
from server.routes.status.status_answers import Activity, Health, Live, Model, Models, Version
from transfer.machine import GIB


async def list_models(call: Call[Any]) -> Tree:
    data = [_model(model, name) for model in call.models.models for name in model.service.model_ids]
    return {"object": "list", "data": data}


async def show_model(call: Call[Any]) -> Tree:
    model_id = call.path_value("model_id")
    return _model(call.models.find(model_id), model_id)


async def health(call: Call[Any]) -> Response:
    """Answer 200 while requests are served, and 503 while the one model, or the first one of several, is loading, while
    the server drains, and while the one model's engine is hung or dead.
    """
    models = call.models
    status = _status(_shown(models), models.first.service.draining)
    return json_response(status, 200 if status["status"] == "ready" else 503)


def _shown(models: ModelRegistry) -> ServedModel | None:
    """Return the model whose engine says how the server is; None: it can serve, whatever is loaded."""
    if not models.is_managed or (models.first.state == "loading" and not models.has_served):
        return models.first
    return None


def _status(model: ServedModel | None, is_draining: bool) -> Tree:
    if is_draining:
        return {"status": "draining"}
    if model is None:
        return {"status": "ready"}
    supervisor = model.supervisor
    status: Tree = {"status": "hung" if supervisor.is_hung else supervisor.state}
    if status["status"] == "loading":
        status |= {"stage": supervisor.loading.stage, "fraction": supervisor.loading.fraction}
    return status


async def activity(call: Call[Any]) -> Tree:
    """Return what is served within which limits, memory by the plan's items, and the tokens of the last ten minutes."""
    service = call.service
    limits, deployment, memory = service.supervisor.limits, service.deployment, service.memory
    return {
        **_status(call.model, call.models.first.service.draining),
        "model": service.model_name,
        "version": release(),
        "uptime_seconds": time.time() - service.created,
        "device": None if limits is None else limits.device,
        "profiles": {} if limits is None else limits.profiles,
        "default_profile": None if limits is None else limits.default_profile,
        "max_running": deployment.scheduler.max_running,
        "max_queue": deployment.scheduler.max_queue,
        "page_tokens": memory.page_tokens,
        "has_chat": service.template is not None,
        "has_documents": service.documents is not None,
        "disk_limit_bytes": None if deployment.disk is None else int(deployment.disk.limit_gib * GIB),
        "memory": [
            {
                "place": place,
                "limit_bytes": limit,
                "items": [
                    {"name": item.name, "bytes": item.bytes, "note": item.note}
                    for item in memory.items
                    if item.place == place
                ],
            }
            for place, limit in memory.limit_bytes.items()
        ],
        "generated": {"step_seconds": STEP_SECONDS, "tokens": service.metrics.rates.last()},
    }


async def live(call: Call[Any]) -> Response:
    """Answer 200 while the engine serves or restarts, and 503 when only a new process helps."""
    can_recover = call.models.can_recover
    return json_response({"status": "alive" if can_recover else "dead"}, 200 if can_recover else 503)


async def show_version(_: Call[Any]) -> Tree:
    return {"version": release()}


async def metrics(call: Call[Any]) -> Response:
    headers = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}
    return Response(call.models.metrics.text(), headers=headers)


def _model(model: ServedModel, name: str) -> Tree:
    service, limits = model.service, model.supervisor.limits
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "tandem",
        "root": service.model_name,
        "max_model_len": limits.max_context_tokens if limits is not None else None,
        "attention_profiles": list(limits.profiles) if limits is not None else [],
        "state": model.state,
        "load_error": model.failure,
    }


ROUTES = (
    Route("get", "/v1/models", list_models, "The models that are served, and which are loaded", Models),
    Route(
        "get",
        "/v1/models/{model_id:path}",
        show_model,
        "A model, by its id",
        Model,
        parameters=(path_parameter("model_id", {}),),
    ),
    Route(
        "get",
        "/v1/activity",
        activity,
        "What a model's engine is doing, and in what memory",
        Activity,
        parameters=OF_MODEL,
    ),
    Route("get", "/health", health, "Whether the engine serves", Health, unavailable=Health, is_open=True),
    Route("get", "/live", live, "Whether this process can still do so", Live, unavailable=Live, is_open=True),
    Route("get", "/version", show_version, "Tandem's version", Version, is_open=True),
    Route("get", "/metrics", metrics, "Prometheus metrics", is_open=True),
)
