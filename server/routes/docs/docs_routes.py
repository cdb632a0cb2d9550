"""`/openapi.json`, written when it changes, and `/docs`, the page over it."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import msgspec
from starlette.responses import Response

from server.bodies.body_reader import refuses_unknown
from server.bodies.schema_limits import BodyLimits
from server.routes.catalogue import find_routes, nested_tables
from server.routes.docs.docs_page import HEADERS, MEDIA_TYPES, PAGE, read_file
from server.routes.openapi import build_document
from server.routes.route import Call, Route
from server.service.service import Service


async def show_document(call: Call[Any]) -> Response:
    document = _write(_limits_of(call.service, call.models.ids), bool(call.service.keys.digests))
    return Response(document, media_type="application/json")


async def show_page(_: Call[Any]) -> Response:
    return Response(PAGE, media_type="text/html", headers=HEADERS)


async def _send_file(name: str, _: Call[Any]) -> Response:
    return Response(_read_once(name), media_type=MEDIA_TYPES[name], headers=HEADERS)


_read_once = cache(read_file)


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
