"""What other programs ask a server about itself before they use it: the router `smg` (as of SGLang's servers) and
lm_eval's remote tokenizer (as of vLLM's)."""

from importlib.metadata import version

import msgspec
from fastapi import APIRouter, Request, Response

from server.service.service import service_of

router = APIRouter()


@router.get("/server_info")
async def server_info(request: Request) -> Response:
    """The model and the limits of the engine. Raises ApiError 503 unless it serves."""
    service = service_of(request)
    limits, deployment = service.supervisor.ready(), service.deployment
    path = deployment.model.path
    return _json(
        {
            "model_id": service.model_name,
            "served_model_name": service.model_name,
            "model_path": str(path) if path is not None else service.model_name,
            "version": version("tandem"),
            "tp_size": 1,
            "dp_size": 1,
            "max_total_tokens": limits.num_pages * limits.page_tokens,
            "max_running_requests": deployment.scheduler.max_running,
            "max_prefill_tokens": deployment.scheduler.prefill.chunk_tokens,
        }
    )


@router.get("/v1/loads")
async def loads(request: Request) -> Response:
    """How busy the engine is, as one rank of one. Raises ApiError 503 unless it serves."""
    service = service_of(request)
    limits, stats = service.supervisor.ready(), service.metrics.latest
    load: dict[str, object] = {
        "dp_rank": 0,
        "max_total_num_tokens": limits.num_pages * limits.page_tokens,
        "max_running_requests": service.deployment.scheduler.max_running,
    }
    if stats is not None:
        load |= {
            "num_running_reqs": stats.num_running,
            "num_waiting_reqs": stats.num_waiting,
            "num_total_reqs": stats.num_running + stats.num_waiting,
            "num_used_tokens": stats.pages_used * limits.page_tokens,
            "token_usage": stats.pages_used / max(stats.pages_total, 1),
            "cache_hit_rate": stats.prefix_hits_tokens / max(stats.prefix_queries_tokens, 1),
            "utilization": stats.num_running / service.deployment.scheduler.max_running,
        }
    return _json({"dp_rank_count": 1, "loads": [load]})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """The tokenizer's own settings, with the chat template that is in use."""
    service = service_of(request)
    tokenizer, template = service.tokenizer, service.template
    # Whoever renders it elsewhere may not have the special tokens that it names.
    named = "".join(
        f"{{% set {name} = {msgspec.json.encode(text).decode()} %}}" for name, text in tokenizer.special_tokens.items()
    )
    source = None if template is None else named + template.source
    return _json(tokenizer.settings | tokenizer.special_tokens | {"chat_template": source})


def _json(tree: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(tree), media_type="application/json")
