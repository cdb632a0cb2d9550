"""What a server says about itself: its model, its health, its version, its metrics."""

from importlib.metadata import version

import msgspec
from fastapi import APIRouter, Request, Response

from server.service.service import Service, service_of

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> Response:
    service = service_of(request)
    return _json({"object": "list", "data": [_model(service, name) for name in service.model_ids]})


@router.get("/v1/models/{model_id:path}")
async def model(request: Request, model_id: str) -> Response:
    service = service_of(request)
    service.check_model(model_id)
    return _json(_model(service, model_id))


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine serves; 503 while loading, draining, hung or dead. The body says which."""
    service = service_of(request)
    supervisor = service.supervisor
    state = "hung" if supervisor.is_hung else supervisor.state
    status: dict[str, object] = {"status": "draining" if service.draining else state}
    if status["status"] == "loading":
        status |= {"stage": supervisor.loading.stage, "fraction": supervisor.loading.fraction}
    return _json(status, 200 if status["status"] == "ready" else 503)


@router.get("/live")
async def live(request: Request) -> Response:
    """200 while the engine serves or is being seen to; 503 when only a new process helps."""
    can_recover = service_of(request).supervisor.can_recover
    return _json({"status": "alive" if can_recover else "dead"}, 200 if can_recover else 503)


@router.get("/version")
async def show_version() -> Response:
    return _json({"version": version("tandem")})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    text = service_of(request).metrics.text()
    return Response(text, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})


def _model(service: Service, name: str) -> dict[str, object]:
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


def _json(tree: dict[str, object], status: int = 200) -> Response:
    return Response(msgspec.json.encode(tree), status, media_type="application/json")
