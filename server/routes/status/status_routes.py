"""What a server says about itself: its model, its health, its version, its metrics."""

from typing import Any

from starlette.responses import Response

from server.bodies.schema_limits import Tree
from server.release import release
from server.routes.route import Call, Route, json_response, path_parameter
from server.routes.status.status_answers import Health, Live, Model, Models, Version
from server.service.service import Service


async def list_models(call: Call[Any]) -> Tree:
    return {"object": "list", "data": [_model(call.service, name) for name in call.service.model_ids]}


async def show_model(call: Call[Any]) -> Tree:
    model_id = call.path_value("model_id")
    call.service.check_model(model_id)
    return _model(call.service, model_id)


async def health(call: Call[Any]) -> Response:
    """Answer 200 while the engine serves, and 503 while it is loading, draining, hung or dead."""
    supervisor = call.service.supervisor
    state = "hung" if supervisor.is_hung else supervisor.state
    status: Tree = {"status": "draining" if call.service.draining else state}
    if status["status"] == "loading":
        status |= {"stage": supervisor.loading.stage, "fraction": supervisor.loading.fraction}
    return json_response(status, 200 if status["status"] == "ready" else 503)


async def live(call: Call[Any]) -> Response:
    """Answer 200 while the engine serves or restarts, and 503 when only a new process helps."""
    can_recover = call.service.supervisor.can_recover
    return json_response({"status": "alive" if can_recover else "dead"}, 200 if can_recover else 503)


async def show_version(_: Call[Any]) -> Tree:
    return {"version": release()}


async def metrics(call: Call[Any]) -> Response:
    headers = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}
    return Response(call.service.metrics.text(), headers=headers)


def _model(service: Service, name: str) -> Tree:
    limits = service.supervisor.limits
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "tandem",
        "root": service.model_name,
        "max_model_len": limits.max_context_tokens if limits is not None else None,
        "attention_profiles": list(limits.profiles) if limits is not None else [],
    }


ROUTES = (
    Route("get", "/v1/models", list_models, "The model that is served", Models),
    Route(
        "get",
        "/v1/models/{model_id:path}",
        show_model,
        "The model, by its id",
        Model,
        parameters=(path_parameter("model_id", {}),),
    ),
    Route("get", "/health", health, "Whether the engine serves", Health, unavailable=Health, is_open=True),
    Route("get", "/live", live, "Whether this process can still do so", Live, unavailable=Live, is_open=True),
    Route("get", "/version", show_version, "Tandem's version", Version, is_open=True),
    Route("get", "/metrics", metrics, "Prometheus metrics", is_open=True),
)
