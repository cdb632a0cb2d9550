"""Answer programs that ask which server this is before they use it, in the form that they know from other servers.

The router `smg` asks as it asks SGLang's servers, and lm_eval's remote tokenizer as it asks vLLM's.
"""

from datetime import UTC, datetime
from typing import Any

import msgspec

from server.bodies.schema_limits import Tree
from server.release import release
from server.routes.route import OF_MODEL, Call, Route
from server.routes.status.status_answers import Loads, ServerInfo, TokenizerInfo


async def server_info(call: Call[Any]) -> Tree:
    """Return the model and the limits of the engine. Raises ApiError 503 unless it serves."""
    service = call.service
    limits, deployment = service.supervisor.ready(), service.deployment
    path = deployment.model.path
    return {
        "model_id": service.model_name,
        "served_model_name": service.model_name,
        "model_path": str(path) if path is not None else service.model_name,
        "version": release(),
        "tp_size": deployment.gpu.devices,
        "dp_size": 1,
        "max_total_tokens": limits.num_pages * limits.page_tokens,
        "max_running_requests": deployment.scheduler.max_running,
        "max_prefill_tokens": deployment.scheduler.prefill.chunk_tokens,
        "page_size": limits.page_tokens,
        "context_length": limits.max_context_tokens,
    }


async def loads(call: Call[Any]) -> Tree:
    """Return how busy the engine is, as one rank of one. Raises ApiError 503 unless it serves."""
    service = call.service
    limits, stats = service.supervisor.ready(), service.metrics.stats.latest
    load: Tree = {
        "dp_rank": 0,
        "max_total_num_tokens": limits.num_pages * limits.page_tokens,
        "max_running_requests": service.deployment.scheduler.max_running,
    }
    if stats is not None:
        num_running, num_used_tokens = stats.num_running + stats.num_prefilling, stats.pages_used * limits.page_tokens
        load |= {
            "num_running_reqs": num_running,
            "num_waiting_reqs": stats.num_waiting,
            "num_total_reqs": num_running + stats.num_waiting,
            "num_waiting_uncached_tokens": stats.waiting_uncached_tokens,
            "num_used_tokens": num_used_tokens,
            "num_total_tokens": num_used_tokens + stats.waiting_tokens,
            "token_usage": stats.pages_used / max(stats.pages_total, 1),
            "gen_throughput": round(service.metrics.rates.per_second(), 2),
            "cache_hit_rate": stats.prefix_hits_tokens / max(stats.prefix_queries_tokens, 1),
            "utilization": num_running / service.deployment.scheduler.max_running,
        }
    now = datetime.now(UTC).isoformat()
    return {"timestamp": now, "version": release(), "dp_rank_count": 1, "loads": [load]}


async def tokenizer_info(call: Call[Any]) -> Tree:
    """Return the tokenizer's own settings, with the chat template that is in use."""
    service = call.service
    tokenizer, template = service.tokenizer, service.template
    # Whoever renders it elsewhere may not have the special tokens that it names.
    named = "".join(
        f"{{% set {name} = {msgspec.json.encode(text).decode()} %}}" for name, text in tokenizer.special_tokens.items()
    )
    source = None if template is None else named + template.source
    return tokenizer.settings | tokenizer.special_tokens | {"chat_template": source}


ROUTES = (
    Route(
        "get",
        "/tokenizer_info",
        tokenizer_info,
        "The tokenizer's settings",
        TokenizerInfo,
        parameters=OF_MODEL,
    ),
    Route(
        "get",
        "/server_info",
        server_info,
        "The model and the engine's limits, for routers",
        ServerInfo,
        parameters=OF_MODEL,
    ),
    Route(
        "get",
        "/get_server_info",
        server_info,
        "Likewise, for older routers",
        ServerInfo,
        parameters=OF_MODEL,
    ),
    Route("get", "/v1/loads", loads, "How busy the engine is, for routers", Loads, parameters=OF_MODEL),
)
