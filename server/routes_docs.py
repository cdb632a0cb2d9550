"""`/openapi.json` and `/docs`, written when they change."""

from functools import cache

import msgspec
from fastapi import APIRouter, Request, Response

from server.body_reader import FIELDS, refuses_unknown
from server.body_schemas import BodyLimits
from server.openapi import build_document
from server.openapi_page import write_page
from server.service import Service, service_of

router = APIRouter()


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    return Response(_of(service_of(request))[0], media_type="application/json")


@router.get("/docs")
async def docs(request: Request) -> Response:
    return Response(_of(service_of(request))[1], media_type="text/html")


def _of(service: Service) -> tuple[bytes, str]:
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
def _written(limits: BodyLimits, has_keys: bool) -> tuple[bytes, str]:
    document = build_document(limits, has_keys)
    return msgspec.json.encode(document), write_page(document)
