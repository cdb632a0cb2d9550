"""Serve `/openapi.json`, written when it changes, and `/docs`: Swagger UI over it, from the files of `fastapi-swagger`.

The page names its files relative to itself, so that it works below a proxy's prefix, and its content security policy
lets it load from this server and ask this server only.
"""

from collections.abc import Sequence
from functools import cache, partial
from importlib.resources import files
from typing import Any

import msgspec
from starlette.responses import Response

from server.bodies.body_reader import refuses_unknown
from server.bodies.schema_limits import BodyLimits
from server.routes.catalogue import find_routes, nested_tables
from server.routes.openapi import build_document
from server.routes.route import Call, Route
from server.service.service import Service

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Tandem</title>
<link rel="icon" href="docs/favicon-32x32.png"><link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<noscript>The same as a document: <a href="openapi.json">openapi.json</a>.</noscript>
<div id="page"></div>
<script src="docs/swagger-ui-bundle.js"></script><script src="docs/start.js"></script>
</body>
</html>
"""
MEDIA_TYPES = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "start.js": "text/javascript",
    "favicon-32x32.png": "image/png",
}
# The default validator is a service elsewhere.
_START = b"""SwaggerUIBundle({
  url: "openapi.json", dom_id: "#page", validatorUrl: null, tryItOutEnabled: true, deepLinking: true,
  defaultModelsExpandDepth: 0,
});
"""


async def show_document(call: Call[Any]) -> Response:
    document = _write(_limits_of(call.service, call.models.ids), bool(call.service.keys.digests))
    return Response(document, media_type="application/json")


async def show_page(_: Call[Any]) -> Response:
    return Response(PAGE, media_type="text/html", headers=HEADERS)


async def _send_file(name: str, _: Call[Any]) -> Response:
    return Response(_read_file(name), media_type=MEDIA_TYPES[name], headers=HEADERS)


@cache
def _read_file(name: str) -> bytes:
    return _START if name == "start.js" else (files("fastapi_swagger") / "resources" / name).read_bytes()


def _limits_of(service: Service, model_ids: Sequence[str]) -> BodyLimits:
    settings, ready = service.settings, service.supervisor.limits
    tables = nested_tables(find_routes())
    return BodyLimits(
        model_ids=tuple(model_ids),
        refusing=frozenset(table.struct for table in tables if refuses_unknown(settings, table)),
        min_prompt_chars=0 if service.tokenizer.encode("", add_special_tokens=True) else 1,
        max_tokenize_items=service.max_tokenize_items,
        max_sequences=service.max_sequences,
        profiles=() if ready is None else tuple(ready.profiles),
        takes_epsilon=ready is None or not ready.without_epsilon.keys() >= ready.profiles.keys(),
        vocab_size=None if ready is None else ready.vocab_size,
        max_context_tokens=None if ready is None else ready.max_context_tokens,
        has_documents=service.documents is not None,
        ranks_by=service.deployment.model.ranking,
        has_nested_embeddings=service.vectors.is_nested,
    )


@cache
def _write(limits: BodyLimits, has_keys: bool) -> bytes:
    return msgspec.json.encode(build_document(find_routes(), limits, has_keys))


ROUTES = (
    Route("get", "/openapi.json", show_document, is_open=True),
    Route("get", "/docs", show_page, is_open=True),
    *(Route("get", f"/docs/{name}", partial(_send_file, name), is_open=True) for name in MEDIA_TYPES),
)
