"""`/openapi.json`, written when it changes, and `/docs`, the page over it."""

from functools import cache, partial

import msgspec
from fastapi import APIRouter, Request, Response

from server.bodies.body_reader import FIELDS, refuses_unknown
from server.routes.docs.body_schemas import BodyLimits
from server.routes.docs.docs_page import HEADERS, MEDIA_TYPES, PAGE, read_file
from server.routes.docs.openapi import build_document
from server.service.service import Service, service_of

router = APIRouter()


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    return Response(_describe(service_of(request)), media_type="application/json")


@router.get("/docs")
async def docs() -> Response:
    return Response(PAGE, media_type="text/html", headers=HEADERS)


async def _send_file(name: str) -> Response:
    return Response(_read_once(name), media_type=MEDIA_TYPES[name], headers=HEADERS)


for _name in MEDIA_TYPES:
    router.add_api_route(f"/docs/{_name}", partial(_send_file, _name))

_read_once = cache(read_file)


def _describe(service: Service) -> bytes:
    settings, ready = service.settings, service.supervisor.limits
    limits = BodyLimits(
        model_ids=tuple(service.model_ids),
        refusing=frozenset(body for body in FIELDS if refuses_unknown(settings, body)),
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
    return _written(limits, bool(service.key_digests))


@cache
def _written(limits: BodyLimits, has_keys: bool) -> bytes:
    return msgspec.json.encode(build_document(limits, has_keys))
